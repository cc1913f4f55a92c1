"""The parity table of docs/models.md: every family as a tiny random model, against the transformers library.

    python tools/parity.py                        print the table
    python tools/parity.py --write docs/models.md put it between the markers of that page
    python tools/parity.py mixtral phi3           only these

For each family: a model of a few layers with random weights in float32, one prompt of 60 tokens. The error is the
largest difference of any logit at any position, prompt whole, in chunks of 7 and token by token; the text is 24 greedy
tokens after three prompts. The tests hold the same models to 1e-4; this tool only writes down what they came to.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import torch  # noqa: E402

from helpers import oracle as reference  # noqa: E402
from helpers.dense_attention import greedy, run_chunks  # noqa: E402
from helpers.tiny_models import FAMILIES, oracle_logits, write_tiny  # noqa: E402
from octavo.config import EngineConfig  # noqa: E402
from octavo.kernels import cpu  # noqa: E402
from octavo.kernels.ops import Ops, TorchOps  # noqa: E402
from octavo.models.load import load_model  # noqa: E402

BEGIN, END = "<!-- parity: begin -->", "<!-- parity: end -->"
LENGTH, GREEDY = 60, 24


@dataclass(frozen=True)
class Row:
    """One family. largest: of its logits, to read the errors by."""

    family: str
    architecture: str
    largest: float
    torch_error: float
    native_error: float | None
    equal_texts: int
    texts: int


def measure(family: str) -> Row:
    """Write the model, load it twice, compare."""
    with tempfile.TemporaryDirectory() as directory:
        oracle = write_tiny(family, Path(directory))
        ids = reference.random_ids(LENGTH, 3)
        expected = oracle_logits(oracle, ids)
        prompts = [ids[:length] for length in (5, 25, 45)]
        wanted = [reference.greedy(oracle, prompt, GREEDY) for prompt in prompts]
        config = EngineConfig(model=directory, skip_tokenizer_init=True)
        errors: list[float | None] = []
        equal, architecture = 0, ""
        natives: list[Ops] = [] if cpu.why_unavailable() else [cpu.make_ops(torch.float32)]
        for ops in (TorchOps(), *natives):
            model = load_model(config, dtype=torch.float32, device="cpu", ops=ops)
            architecture = model.spec.architecture
            runs = [run_chunks(model.decoder, ids, chunk) for chunk in (LENGTH, 7, 1)]
            errors.append(max(float((run - expected).abs().max()) for run in runs))
            equal += sum(greedy(model.decoder, p, GREEDY) == w for p, w in zip(prompts, wanted, strict=True))
        texts = len(prompts) * len(errors)
        native = errors[1] if len(errors) > 1 else None
        return Row(family, architecture, float(expected.abs().max()), errors[0] or 0.0, native, equal, texts)


def table(rows: list[Row]) -> str:
    """Markdown, with the conditions below."""
    lines = [
        "| model | architecture | largest logit | error, torch | error, native | greedy texts equal |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        native = "-" if row.native_error is None else f"{row.native_error:.1e}"
        lines.append(
            f"| {row.family} | `{row.architecture}` | {row.largest:.1f} | {row.torch_error:.1e} | {native} | "
            f"{row.equal_texts} of {row.texts} |"
        )
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers"))
    kernels = cpu.instruction_set() or "not built"
    lines += ["", f"Written by `python tools/parity.py --write docs/models.md`; {versions}, native kernels: {kernels}."]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="of tests/helpers/tiny_models.py (all)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="a page with the two markers")
    args = parser.parse_args()
    unknown = [family for family in args.families if family not in FAMILIES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(FAMILIES)}")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    text = table([measure(family) for family in args.families or FAMILIES])
    if args.write is None:
        print(text)
        return 0
    page = args.write.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        parser.error(f"{args.write} has no {BEGIN} … {END}")
    args.write.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
