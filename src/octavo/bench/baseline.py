"""transformers' `generate`, one request after the other: what people have before they have an engine.

The same files, dtype, threads and requests as Octavo in the same process. Knows nothing of Octavo's engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from octavo.bench.workloads import Item
from octavo.errors import ConfigError
from octavo.models.load import DTYPES
from octavo.models.resolve import resolve_model


def transformers_loop(
    model: str, dtype: str, load_format: str, items: Sequence[Item], tick: Callable[[str], None] = lambda text: None
) -> float:
    """Seconds for `items`, each with exactly its output tokens, greedy; loading and one short warm-up not counted."""
    oracle = load_transformers(model, dtype, load_format)
    _generate(oracle, Item(items[0].token_ids[:16], 2))
    total = 0.0
    for item in items:
        begin = time.perf_counter()
        produced = _generate(oracle, item)
        total += time.perf_counter() - begin
        if produced != item.output:
            raise RuntimeError(f"transformers produced {produced} tokens where {item.output} were asked for")
        tick("")
    return total


def load_transformers(model: str, dtype: str, load_format: str) -> Any:
    """The transformers model of the same files; with load_format="dummy" its own random weights."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError:
        raise ConfigError("--baseline transformers needs that library: pip install transformers") from None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    files = resolve_model(model, load_format)
    wanted = DTYPES[dtype]
    if load_format == "dummy":
        config = AutoConfig.from_pretrained(files.path)
        return AutoModelForCausalLM.from_config(config, dtype=wanted).eval()
    if files.kind == "gguf":
        return _from_gguf(files.path, wanted)
    return AutoModelForCausalLM.from_pretrained(files.path, dtype=wanted).eval()


def _from_gguf(path: Path, dtype: torch.dtype) -> Any:
    """The library's own reading of a GGUF file, put together here: its one-call way needs a further package."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=shapes)["tensors"]
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    # Buffers (rotary frequencies, embedding scale) are computed at construction, so not on the meta device.
    built = AutoModelForCausalLM.from_config(config, dtype=dtype)
    built.load_state_dict(tensors, strict=True, assign=True)
    return built.eval()


@torch.inference_mode()
def _generate(oracle: Any, item: Item) -> int:
    """Tokens produced."""
    ids = torch.tensor([item.token_ids])
    out = oracle.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=item.output,
        min_new_tokens=item.output,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return int(out.shape[1]) - len(item.token_ids)
