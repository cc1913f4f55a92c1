"""`octavo generate`: prompts in, texts out; as plain text, as they come, or as JSON; with the block tables if asked."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.cli.loading import adapted
from octavo.cli.options import (
    add_engine_options,
    add_sampling_options,
    engine_settings,
    given_shapes,
    refuse,
    sampling_settings,
)
from octavo.cli.terminal import bold, dim, notice
from octavo.core.reasons import report_text
from octavo.errors import PromptError
from octavo.inspect.explain import cache_report_as_json
from octavo.outputs import BeamSearchOutput, CompletionOutput, Logprob, RequestOutput, StreamDelta
from octavo.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from octavo.llm import LLM

DEFAULTS = {"temperature": 0.7, "max_tokens": 128}
EPILOG = """\
examples:
  octavo generate "The capital of France is" --temperature 0 --max-tokens 32
  octavo generate "Once upon a time" --n 4 --seed 7 --show-blocks
  octavo generate --prompts-file prompts.txt --json > answers.jsonl
  git log -1 | octavo generate --stream
  octavo generate "Roses are" --beam-width 4
  octavo generate "Is the sky blue?" --choice yes --choice no
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="continue one or more prompts",
        description="Continue prompts. Without any, the whole of standard input is one prompt.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT")
    parser.add_argument(
        "--prompts-file",
        metavar="FILE",
        help="one prompt a line (- is standard input); a line that is a JSON object is a prompt with its keys "
        "prompt or prompt_token_ids, cache_salt",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--stream", action="store_true", help="show the text as it comes (one prompt, one sample)")
    output.add_argument(
        "--json", action="store_true", help="one JSON object for each prompt (with --stream: each delta)"
    )
    output.add_argument("--show-blocks", action="store_true", help="block tables, usage, and what paging saved")
    output.add_argument(
        "--explain-cache", action="store_true", help="how much of each prompt was cached, and why not more"
    )
    output.add_argument(
        "--view", metavar="OUT", help="write the block map of the run as one HTML file (see octavo view)"
    )
    output.add_argument("--show-tokens", action="store_true", help="with --view: the text of the tokens in it")
    beams = parser.add_argument_group("beam search")
    beams.add_argument("--beam-width", type=int, metavar="W", help="beam search instead of sampling")
    beams.add_argument("--length-penalty", type=float, metavar="X", help="above 0 favours longer texts (1.0)")
    beams.add_argument(
        "--early-stopping",
        choices=("true", "false", "never"),
        help="end when W texts are finished (true), or when no running beam is likely to (false), or can (never), win",
    )
    add_sampling_options(parser)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check everything that can be checked, then load, then answer."""
    from octavo.vllm_names import config_from

    params = _params(args)
    config_from(**engine_settings(args))  # a bad setting must not cost the time to read prompts or load a model
    prompts = read_prompts(args)
    if len(args.lora or ()) > 1 and not any(isinstance(prompt, dict) and "lora" in prompt for prompt in prompts):
        raise PromptError(
            f"--lora: {len(args.lora)} adapters, and no prompt says which: give one, or a --prompts-file with lines "
            'like {"prompt": "…", "lora": "NAME"}'
        )
    prompts = adapted(prompts, args)
    if args.stream and (len(prompts) > 1 or (isinstance(params, SamplingParams) and params.n > 1 and not args.json)):
        raise PromptError(
            f"--stream shows one text as it comes, not {len(prompts)} prompts with n={args.n or 1}; "
            "leave --stream out, or stream one prompt with --json"
        )
    from octavo.cli.loading import load
    from octavo.cli.view import RunPage

    with RunPage(args) as page, load(args) as llm:
        page.read_with(llm)
        return answer(llm, args, prompts, params)


def answer(llm: LLM, args: argparse.Namespace, prompts: list[Any], params: SamplingParams | BeamSearchParams) -> int:
    """Answer all prompts on a loaded engine and print."""
    from octavo.cli.blocks import BlockWatch

    failures: list[str] = []
    begin = time.perf_counter()
    if not args.show_blocks:
        tokens, show = _answer(llm, args, prompts, params, failures)
        show()
    else:
        # A live display owns the terminal: nothing else may be printed before it has gone.
        with BlockWatch(llm, live=not args.stream) as watch:
            tokens, show = _answer(llm, args, prompts, params, failures)
        show()
        if args.json:
            print(json.dumps({"blocks": watch.lines()}, ensure_ascii=False))
        else:
            print("\n" + "\n".join(watch.lines()))
    seconds = time.perf_counter() - begin
    if sys.stderr.isatty():
        notice(f"{tokens} tokens in {seconds:.2f} s ({tokens / max(seconds, 1e-9):.1f} tok/s)")
    for failure in failures:
        print(f"octavo: {failure}", file=sys.stderr)
    return 1 if failures else 0


def read_prompts(args: argparse.Namespace) -> list[Any]:
    """Arguments, then the file; standard input when there is neither."""
    prompts: list[Any] = list(args.prompts)
    if args.prompts_file is not None:
        try:
            if args.prompts_file == "-":
                lines = sys.stdin.read().splitlines()
            else:
                with open(args.prompts_file, encoding="utf-8") as file:
                    lines = file.read().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise PromptError(f"--prompts-file {args.prompts_file}: {error}") from error
        prompts += [_read_line(line, number) for number, line in enumerate(lines, 1) if line.strip()]
    elif not prompts:
        if sys.stdin.isatty():
            raise PromptError('no prompt: write octavo generate "PROMPT", or --prompts-file FILE, or pipe text in')
        prompts = [sys.stdin.read().rstrip("\n")]
    if not prompts or prompts == [""]:
        raise PromptError("no prompt: the input is empty")
    return prompts


def _read_line(line: str, number: int) -> Any:
    if not line.lstrip().startswith("{"):
        return line
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        if '":' in line or '": ' in line:  # meant as an object; other text may begin with a brace
            raise PromptError(
                f"line {number}: not a JSON object ({error}): {line[:60]!r}; mend it, or write the prompt as plain text"
            ) from None
        return line


def _params(args: argparse.Namespace) -> SamplingParams | BeamSearchParams:
    given = sampling_settings(args)
    if args.beam_width is None:
        beam_only = ("length_penalty", "early_stopping")
        refuse({k: 1 for k in beam_only if getattr(args, k) is not None}, "without --beam-width")
        refuse({k: 1 for k in ("logprobs", "prompt_logprobs") if k in given and not args.json}, "without --json")
        return SamplingParams(**(DEFAULTS | given))
    allowed = ("max_tokens", "stop_token_ids", "ignore_eos", "skip_special_tokens", "deadline_ms")
    given |= given_shapes(args)  # under the names of the options
    given.pop("structured_outputs", None)
    refuse({k: v for k, v in given.items() if k not in allowed}, "with --beam-width")
    refuse({name: 1 for name in ("stream", "explain_cache") if getattr(args, name)}, "with --beam-width")
    options = {"max_tokens": DEFAULTS["max_tokens"]} | given
    if args.length_penalty is not None:
        options["length_penalty"] = args.length_penalty
    if args.early_stopping is not None:
        options["early_stopping"] = {"true": True, "false": False}.get(args.early_stopping, args.early_stopping)
    return BeamSearchParams(beam_width=args.beam_width, **options)


def _failure(prompt: int, sample: CompletionOutput | StreamDelta) -> list[str]:
    """What to say of a sample that an error ended; nothing of any other."""
    if sample.finish_reason != "error":
        return []
    return [f"prompt {prompt}, sample {sample.index} failed: {sample.stop_reason or 'no reason was given'}"]


def _answer(
    llm: LLM, args: argparse.Namespace, prompts: list[Any], params: Any, failures: list[str]
) -> tuple[int, Callable[[], None]]:
    """The number of tokens drawn, and what prints the answers (a stream has printed its own by then).

    failures receives a line for each sample that an error ended.
    """
    if isinstance(params, BeamSearchParams):
        found = llm.beam_search(prompts, params, use_tqdm=not args.show_blocks)
        failures += [
            f"prompt {number}: the beam search failed; sampling it (without --beam-width) gives the reason"
            for number, b in enumerate(found)
            if any(s.finish_reason == "error" for s in b.sequences)
        ]
        return sum(len(s.token_ids) for b in found for s in b.sequences), partial(_print_all, found, args)
    if args.stream:
        return _stream(llm, prompts[0], params, args, failures), lambda: None
    # The block display and the progress bar would draw over each other.
    outputs = llm.generate(prompts, params, use_tqdm=not args.show_blocks)
    failures += [line for number, o in enumerate(outputs) for s in o.outputs for line in _failure(number, s)]
    return sum(len(s.token_ids) for o in outputs for s in o.outputs), partial(_print_all, outputs, args)


def _print_all(outputs: Sequence[RequestOutput | BeamSearchOutput], args: argparse.Namespace) -> None:
    for number, output in enumerate(outputs):
        shown_number = number if len(outputs) > 1 else None
        if isinstance(output, BeamSearchOutput):
            _print_beams(output, shown_number, args.json)
        else:
            _print_output(output, shown_number, args.json, args.explain_cache)


def _stream(llm: LLM, prompt: Any, params: SamplingParams, args: argparse.Namespace, failures: list[str]) -> int:
    tokens, request_id = 0, ""
    with llm.stream(prompt, params) as deltas:
        for delta in deltas:
            tokens += len(delta.token_ids)
            request_id = delta.request_id
            failures += _failure(0, delta)
            if args.json:
                print(json.dumps(asdict(delta), ensure_ascii=False), flush=True)
            else:
                print(delta.text, end="", flush=True)
    if not args.json:
        print()
    if args.explain_cache and request_id:
        record = llm.explain(request_id)
        if args.json:
            print(json.dumps({"cache_report": cache_report_as_json(record.cache_report, record.prompt_tokens)}))
        else:
            print(dim(f"cache: {record}"))
    return tokens


def _print_output(output: RequestOutput, number: int | None, as_json: bool, explain: bool) -> None:
    prompt_tokens = len(output.prompt_token_ids)
    if as_json:
        found = {"cache_report": cache_report_as_json(output.cache_report, prompt_tokens)} if explain else {}
        print(json.dumps(output_as_json(output) | found, ensure_ascii=False))
        return
    if number is not None:
        print(bold(_heading(number, output.prompt)))
    for sample in output.outputs:
        several = len(output.outputs) > 1
        print((dim(f"[{sample.index}] ") if several else "") + sample.text)
        if sample.finish_reason not in ("stop", "length", "error"):  # errors are listed at the end
            notice(f"sample {sample.index} ended early: {sample.finish_reason}")
    if explain:
        print(dim(f"cache: {report_text(output.cache_report, prompt_tokens)}"))


def _print_beams(beams: BeamSearchOutput, number: int | None, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(beams), ensure_ascii=False))
        return
    if number is not None:
        print(bold(_heading(number, beams.prompt)))
    for beam in beams.sequences:
        print(dim(f"[{beam.score:.3f}] ") + beam.text)


def _heading(number: int, prompt: str | None) -> str:
    text = " ".join((prompt or "(token ids)").split())
    return f"── {number}: {text if len(text) <= 60 else text[:59] + '…'}"


def output_as_json(output: RequestOutput) -> dict[str, Any]:
    """A request's output as plain values, with names as in `RequestOutput`."""
    result: dict[str, Any] = {
        "request_id": output.request_id,
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "num_cached_tokens": output.num_cached_tokens,
        "outputs": [_sample_as_json(sample) for sample in output.outputs],
        "metrics": output.metrics,
    }
    if output.prompt_logprobs is not None:
        result["prompt_logprobs"] = [None if p is None else _logprobs_as_json(p) for p in output.prompt_logprobs]
    return result


def _sample_as_json(sample: CompletionOutput) -> dict[str, Any]:
    result: dict[str, Any] = {
        "index": sample.index,
        "text": sample.text,
        "token_ids": sample.token_ids,
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
        "cumulative_logprob": sample.cumulative_logprob,
    }
    if sample.logprobs is not None:
        result["logprobs"] = [_logprobs_as_json(position) for position in sample.logprobs]
    return result


def _logprobs_as_json(position: dict[int, Logprob]) -> dict[str, Any]:
    return {str(token): asdict(logprob) for token, logprob in position.items()}
