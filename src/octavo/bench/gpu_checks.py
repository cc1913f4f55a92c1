"""The checks of `octavo bench gpu`, before any figure: does the device compute what the CPU computes?

Tiny models with random weights (small tensors are drawn on the CPU, so they are the same on every device), text in
float32, token for token; the log-probabilities of a fixed text in the dtype that is measured, as an error that is
reported and not judged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.bench.drive import build
from octavo.bench.report import Column, Table
from octavo.bench.workloads import random_ids
from octavo.sampling_params import SamplingParams

CHECKS = "Checks"
PROMPTS = (3, 17, 40, 65, 130)
Once = Callable[[str, Callable[[], dict[str, Any]]], dict[str, Any]]
COLUMNS = [Column("check", "check"), Column("result", "result"), Column("detail", "detail")]


def check_rows(once: Once, settings: Callable[..., dict[str, Any]], *, small: bool) -> Table:
    """settings(model, **more) -> those of an engine on the device under test."""
    rows = []
    for model in ("qwen3-0.6b", "llama-3.1-8b"):
        rows.append(once(f"check/greedy/{model}", lambda m=model: _greedy_equals_cpu(settings, m)))  # type: ignore[misc]
        rows.append(once(f"check/sampled/{model}", lambda m=model: _sampled_equals_cpu(settings, m)))  # type: ignore[misc]
    rows.append(once("check/overlap", lambda: _overlap_changes_nothing(settings)))
    if not small:
        rows.append(once("check/bfloat16", lambda: _error(settings, "bfloat16")))
    return Table(CHECKS, COLUMNS, rows)


def _tiny(settings: Callable[..., dict[str, Any]], model: str, **more: Any) -> dict[str, Any]:
    """An engine for the tiny model of a family, wherever the full-size one would run."""
    from octavo.bench.gpu_work import model_config

    given = settings(model, **more)
    _overwrite(given["model"], model_config(model, tiny=True))
    return {**given, "max_model_len": 256, "num_blocks": 256, "max_num_seqs": 16}


def _overwrite(folder: str, config: dict[str, Any]) -> None:
    import json
    from pathlib import Path

    path = Path(folder + "-tiny")
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))


def _texts(settings: dict[str, Any], params: Callable[[int], SamplingParams]) -> list[Any]:
    engine = build({**settings, "model": settings["model"] + "-tiny"})
    for i, length in enumerate(PROMPTS):
        engine.add_request(f"check-{i}", list(random_ids(length, i, 256)), params(i))
    found: dict[str, Any] = {}
    while engine.has_unfinished():
        for output in engine.step():
            if output.finished:
                found[output.request_id] = output
    engine.close()
    return [found[f"check-{i}"] for i in range(len(PROMPTS))]


def _tokens(outputs: list[Any]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def _compare(name: str, ours: list[Any], theirs: list[Any]) -> dict[str, Any]:
    mine, other = _tokens(ours), _tokens(theirs)
    wrong = [i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b]
    count = sum(len(tokens) for request in mine for tokens in request)
    detail = f"{count} tokens of {len(mine)} requests" + (f", requests {wrong} differ" if wrong else "")
    return {"check": name, "result": "FAILED" if wrong else "equal", "detail": detail}


def _greedy_equals_cpu(settings: Callable[..., dict[str, Any]], model: str) -> dict[str, Any]:
    def params(i: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=24 + i, ignore_eos=True)

    here = _texts(_tiny(settings, model, dtype="float32"), params)
    plain = _texts(_tiny(settings, model, dtype="float32", device="cpu", attention_backend="reference"), params)
    return _compare(f"{model}, tiny: greedy text in float32, this device and the CPU's reference", here, plain)


def _sampled_equals_cpu(settings: Callable[..., dict[str, Any]], model: str) -> dict[str, Any]:
    def params(i: int) -> SamplingParams:
        return SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=i, n=1 + i % 2, max_tokens=16, ignore_eos=True)

    here = _texts(_tiny(settings, model, dtype="float32"), params)
    plain = _texts(_tiny(settings, model, dtype="float32", device="cpu", attention_backend="reference"), params)
    return _compare(f"{model}, tiny: seeded samples in float32, this device and the CPU's reference", here, plain)


def _overlap_changes_nothing(settings: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    def params(i: int) -> SamplingParams:
        return SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=30, ignore_eos=True)

    pair = [_texts(_tiny(settings, "qwen3-0.6b", dtype="float32", overlap=on), params) for on in (True, False)]
    return _compare("overlapped steps and steps one by one", *pair)


def _error(settings: Callable[..., dict[str, Any]], dtype: str) -> dict[str, Any]:
    """Log-probabilities of the prompts' own tokens, against float32 on the CPU."""

    def params(i: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)

    here = _texts(_tiny(settings, "llama-3.1-8b", dtype=dtype), params)
    plain = _texts(_tiny(settings, "llama-3.1-8b", dtype="float32", device="cpu"), params)
    errors = [
        abs(a[token].logprob - b[token].logprob)
        for mine, theirs in zip(here, plain, strict=True)
        for a, b in zip(mine.prompt_logprobs, theirs.prompt_logprobs, strict=True)
        if a is not None
        for token in b
        if token in a
    ]
    detail = f"largest {max(errors):.3g}, mean {sum(errors) / len(errors):.3g} over {len(errors)} tokens"
    return {"check": f"error of log-probabilities in {dtype}", "result": "reported", "detail": detail}
