"""One fuzz case: a random engine under a random load, and the same requests one by one on a plain engine.

Everything follows from the number of the case. The engine under test gets a random block size, chunk limit, pool,
memory policy and cache; the oracle has a large pool, no prefix cache, one block table for all layers, and sees one
request at a time.

What must agree: tokens, text, finish reason and stop reason of every sample; texts of every beam; log-probabilities to
1e-4; of samples cut from outside (abort, deadline) the tokens they have. What must hold: an audit after every step;
text and tokens, once shown, stay; the recording of the run replays with every decision equal; an empty pool at the end.

Rounding: the native operations are bit-equal whatever the batch, so there any difference fails. torch's products round
differently for other shapes of a step, so on that path a difference is looked into: the request runs alone again at
chunk limits 1, 3, 7 and 16, twice over in one batch, and in blocks of another size. If those runs disagree among
themselves, the answer hangs on rounding and the request is counted as `near_ties`; if they all agree, the case fails.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from octavo.config import make_config
from octavo.core.record import replay
from octavo.engine import Engine
from octavo.errors import CapacityError, ConfigError
from octavo.outputs import RequestOutput
from octavo.sampling_params import BeamSearchParams, SamplingParams

LONGEST = 96
EARLY: list[bool | str] = [False, True, "never"]
FILTERS: dict[str, list[Any]] = {"top_k": [0, 5, 40], "top_p": [1.0, 0.8], "min_p": [0.0, 0.05]}
GUESSING: list[Any] = ["ngram:3", {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 1}]
ROW_COSTS = ((1, 1.0), (4, 1.2), (64, 8.0))
FAMILIES = ("gemma3", "llama", "mistral")
Params = SamplingParams | BeamSearchParams


@dataclass
class Ask:
    """A request of the case and what came of it."""

    name: str
    prompt: list[int]
    params: Params
    priority: int
    salt: str | None
    output: RequestOutput | None = None
    shown: dict[int, tuple[str, list[int]]] = field(default_factory=dict)  # sample -> text and ids seen so far

    def watch(self, output: RequestOutput) -> None:
        """What was shown is never taken back."""
        if self.params.__class__ is BeamSearchParams or getattr(self.params, "best_of", None):
            return  # shown at the end only, or put in another order there
        for sample in output.outputs:
            text, ids = self.shown.get(sample.index, ("", []))
            if not sample.text.startswith(text) or sample.token_ids[: len(ids)] != ids:
                raise Mismatch(f"request {self.name}: {text!r} {ids} was shown, then {sample}")
            self.shown[sample.index] = sample.text, list(sample.token_ids)


@dataclass
class Case:
    """What the number of the case decides before anything runs."""

    number: int
    family: str
    settings: dict[str, Any]
    asks: list[Ask]
    arrival_rate: float
    abort_rate: float
    figures: Counter[str] = field(default_factory=Counter)


class Mismatch(AssertionError):
    """An answer differs from the one alone."""


def make_case(number: int, families: tuple[str, ...] = FAMILIES) -> Case:
    draw = random.Random(number)
    family, settings, asks = draw.choice(families), _settings(draw), _asks(draw)
    # Drawn apart, so that a case's number still means what it meant without it.
    guessing = random.Random(~number).choice([None, None, *GUESSING])
    if guessing is not None:  # beams are refused there
        settings["speculative"] = guessing
        asks = [ask for ask in asks if not isinstance(ask.params, BeamSearchParams)]
    else:
        settings["overlap"] = random.Random(~number * 3).random() < 0.4
    return Case(
        number,
        family,
        settings,
        asks,
        arrival_rate=draw.choice([0.2, 0.9, 0.97]),
        abort_rate=draw.choice([0.0, 0.05, 0.2]),
    )


def _settings(draw: random.Random) -> dict[str, Any]:
    static, sharing = draw.random() < 0.12, draw.random() < 0.9
    block_size = draw.choice([1, 2, 4, 8, 16, 32])
    swaps = draw.random() < 0.5 and not static
    return {
        "block_size": block_size,
        "num_blocks": int(draw.choice([1, 1, 1, 1.5, 3]) * -(-LONGEST // block_size)) + draw.randrange(4),
        "max_num_seqs": draw.choice([4, 6, 16]),
        "max_num_batched_tokens": draw.choice([1, 5, 15, 16, 17, 48, 512]),
        "enable_prefix_caching": draw.random() < 0.75 and not static,
        "allocation": "static" if static else "paged",
        "hybrid_kv": draw.random() < 0.8,
        "preemption": draw.choice(["auto", "swap"]) if swaps else "auto" if static else "recompute",
        "swap_bytes": draw.choice([1 << 18, 1 << 22]) if swaps else None,
        "max_preemptions": draw.choice([1, 2, 8]),
        "copy_on_write": sharing or static,
    }


def _asks(draw: random.Random) -> list[Ask]:
    shared = [[draw.randrange(256) for _ in range(60)] for _ in range(3)]
    crowded = draw.random() < 0.4  # short prompts and long answers: growth in a full pool
    asks: list[Ask] = []
    for i in range(draw.randrange(6, 17)):
        tokens = draw.choice(shared)[: draw.choice([0, 3, 16] if crowded else [0, 0, 7, 16, 32, 33, 60])]
        tokens = tokens + [draw.randrange(256) for _ in range(draw.randrange(1, 14))]
        if asks and draw.random() < 0.15:
            tokens = list(draw.choice(asks).prompt)
        params = _beam(draw) if draw.random() < 0.15 else _sampling(draw, i, crowded)
        salt = draw.choice([None, None, None, "a", "b"])
        asks.append(Ask(f"q{i}", tokens, params, draw.choice([0, 0, 0, -1, 3]), salt))
    return asks


def _beam(draw: random.Random) -> BeamSearchParams:
    return BeamSearchParams(
        beam_width=draw.choice([1, 2, 3, 4]),
        max_tokens=draw.randrange(1, 12),
        length_penalty=draw.choice([0.0, 1.0, 1.0, 2.0]),
        early_stopping=draw.choice(EARLY),
        stop_token_ids=draw.choice([None, [5, 80], [17]]),
        deadline_ms=draw.choice([None, None, None, None, 250.0]),
    )


def _sampling(draw: random.Random, index: int, crowded: bool) -> SamplingParams:
    lengths = [30, 45, 60] if crowded else [1, 2, 8, 16, 24]
    given: dict[str, Any] = {"max_tokens": draw.choice(lengths), "ignore_eos": crowded or draw.random() < 0.3}
    if draw.random() < 0.5:
        given["temperature"] = 0.0
    else:
        given |= {"temperature": draw.choice([0.5, 1.0, 1.3]), "seed": 1000 + index, "n": draw.choice([1, 1, 2, 3])}
        given["best_of"] = given["n"] + 1 if draw.random() < 0.15 else None
        for name, values in FILTERS.items():
            given[name] = draw.choice(values)
    if draw.random() < 0.35:
        given["presence_penalty"] = draw.choice([0.0, 0.7])
        given["frequency_penalty"] = draw.choice([0.0, 0.5])
        given["repetition_penalty"] = draw.choice([1.0, 1.3])
    if draw.random() < (0.1 if crowded else 0.3):
        given["stop"] = draw.choice([["e"], ["a", "th"], ["0", "1", "2"], ["Z", "q"]])
        given["include_stop_str_in_output"] = draw.random() < 0.5
    if draw.random() < 0.2:
        given["stop_token_ids"] = [draw.randrange(256) for _ in range(6)]
        given["min_tokens"] = draw.randrange(0, min(4, given["max_tokens"] + 1))
    if draw.random() < 0.15:
        given["logit_bias"] = {draw.randrange(256): 3.0, draw.randrange(256): -50.0}
    if draw.random() < 0.2:
        given["logprobs"] = draw.choice([0, 3])
    if draw.random() < 0.12:
        given["prompt_logprobs"] = draw.choice([0, 2])
    given["deadline_ms"] = draw.choice([None] * 8 + [150.0, 400.0])
    return SamplingParams(**given)


# -- running -----------------------------------------------------------------------------------------------------


def build(model: Path, backend: str, **settings: Any) -> Engine:
    """An engine in float32; the pool is doubled until one longest sequence fits."""
    blocks = settings.pop("num_blocks")
    while True:
        try:
            return Engine.build(
                make_config(
                    model=str(model), dtype="float32", device="cpu", attention_backend=backend, max_model_len=LONGEST,
                    num_blocks=blocks, **settings,
                )
            )  # fmt: skip
        except ConfigError as error:
            if "the KV pool is too small" not in str(error):
                raise
            blocks *= 2


def plain_engine(model: Path, backend: str, **settings: Any) -> Engine:
    """The oracle: nothing shared, nothing short."""
    return build(model, backend, **{"num_blocks": 4096, "enable_prefix_caching": False, "hybrid_kv": False, **settings})


def run_alone(engine: Engine, ask: Ask, copies: int = 1) -> RequestOutput:
    """The request by itself, without its deadline; `copies` of it in one batch (the last one is returned)."""
    for i in range(copies):
        engine.add_request(f"{ask.name}-{i}", ask.prompt, replace_deadline(ask.params))
    last: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        for output in engine.step():
            last[output.request_id] = output
    return last[f"{ask.name}-{copies - 1}"]


def replace_deadline(params: Params) -> Params:
    if isinstance(params, BeamSearchParams):
        return replace(params, deadline_ms=None)
    return SamplingParams(**{**{n: getattr(params, n) for n in params.__dataclass_fields__}, "deadline_ms": None})


def run_case(case: Case, model: Path, backend: str, oracle: Engine) -> Counter[str]:
    """Run and compare; raises `Mismatch`, or whatever the engine raised. Returns the figures."""
    with TemporaryDirectory() as folder:
        record = str(Path(folder) / "record")
        # Costs that were measured would make guesses, and so the steps of a case, another matter each time.
        with patch("octavo.speculation.measure_row_costs", lambda *runner, **limits: ROW_COSTS):
            engine = build(model, backend, **case.settings, debug=True, record=record)
        _run_recorded(case, engine)
        if not (report := replay(record)).same:
            raise Mismatch(f"case {case.number}: the replay {report}")
    for ask in case.asks:
        if ask.output is None:
            continue
        difference = compare(ask, ask.output, run_alone(oracle, ask))
        if difference and backend == "reference" and _hangs_on_rounding(ask, model, backend):
            case.figures["near_ties"] += 1
        elif difference:
            raise Mismatch(f"case {case.number}, request {ask.name}: {difference}\n{ask}\n{case.settings}")
        case.figures["compared"] += 1
    return case.figures


def _run_recorded(case: Case, engine: Engine) -> None:
    try:
        _drive(case, engine)
        _check_idle(engine)
        stats = engine.stats()
        for name in (
            "steps", "preemptions", "swaps", "copies", "forks", "deadlines", "prefix_hit_tokens", "evictions",
            "spec_draft_tokens", "spec_accepted_tokens", "overlapped_steps",
        ):  # fmt: skip
            case.figures[name] += getattr(stats, name)
    finally:
        engine.close()


def _drive(case: Case, engine: Engine) -> None:
    draw = random.Random(case.number + 1)
    now = [0.0]
    engine._clock = lambda: now[0]  # the case decides what time it is, so deadlines fall on the same step again
    coming = list(reversed(case.asks))
    live: dict[str, Ask] = {}
    names: list[str] = []
    for _ in range(20000):
        now[0] += 0.01
        while coming and draw.random() < case.arrival_rate:
            ask = coming.pop()
            try:
                engine.add_request(ask.name, ask.prompt, ask.params, priority=ask.priority, cache_salt=ask.salt)
            except CapacityError:
                case.figures["refused"] += 1
                continue
            live[ask.name] = ask
            names.append(ask.name)
            case.figures["requests"] += 1
        if names and draw.random() < case.abort_rate:
            case.figures["aborts"] += engine.abort(draw.choice(names), draw.choice([None, None, 0, 1]))
        if engine.has_unfinished():
            for output in engine.step():
                live[output.request_id].watch(output)
                if output.finished:
                    live.pop(output.request_id).output = output
        elif not coming:
            break
        elif draw.random() < 0.2:
            case.figures["resets"] += engine.reset_prefix_cache()
    if live or coming:
        raise Mismatch(f"case {case.number}: {sorted(live)} never finished")


def _check_idle(engine: Engine) -> None:
    engine.audit()
    view = engine.pool_view()
    if view.num_used or view.num_pending or view.swapped_blocks or view.num_free + view.num_cached != view.num_blocks:
        raise Mismatch(f"the pool is not empty at the end: {view}")
    if engine.stats().leaks_repaired:
        raise Mismatch("blocks leaked and were repaired")


# -- comparing ---------------------------------------------------------------------------------------------------


def compare(ask: Ask, got: RequestOutput, alone: RequestOutput) -> str:
    """The first difference in words, or ""."""
    cut = {"abort", "deadline"}
    if isinstance(ask.params, BeamSearchParams):
        if any(o.finish_reason in cut for o in got.outputs) or not got.outputs:
            return ""  # what had been found by then depends on when it was cut
        return _compare_beams(got, alone)
    if ask.params.best_of and any(o.finish_reason in cut for o in got.outputs):
        return ""  # samples are ranked by log-probability: cut ones rank elsewhere
    for mine, theirs in zip(got.outputs, alone.outputs, strict=True):
        where = f"sample {mine.index}: "
        if mine.finish_reason in cut:
            known = theirs.token_ids[: len(mine.token_ids)]
            if mine.token_ids != known and not (ask.params.stop and theirs.finish_reason == "stop"):
                return f"{where}{mine.token_ids} (cut) is no beginning of {theirs.token_ids}"
            continue
        for name in ("token_ids", "text", "finish_reason", "stop_reason"):
            if getattr(mine, name) != getattr(theirs, name):
                return f"{where}{name} is {getattr(mine, name)!r}, alone {getattr(theirs, name)!r}"
        if (problem := _compare_logprobs(mine.logprobs, theirs.logprobs)) is not None:
            return f"{where}logprobs {problem}"
    whole = not any(o.finish_reason in cut for o in got.outputs)
    if whole and (problem := _compare_logprobs(got.prompt_logprobs, alone.prompt_logprobs)) is not None:
        return f"prompt_logprobs {problem}"
    return ""


def _compare_beams(got: RequestOutput, alone: RequestOutput) -> str:
    mine, theirs = ([(o.token_ids, o.text, o.finish_reason) for o in x.outputs] for x in (got, alone))
    if mine != theirs:
        return f"beams {mine}, alone {theirs}"
    return ""


def _compare_logprobs(mine: list[Any] | None, theirs: list[Any] | None) -> str | None:
    if (mine is None) != (theirs is None):
        return f"{mine} against {theirs}"
    for place, (a, b) in enumerate(zip(mine or [], theirs or [], strict=True)):
        if (a is None) != (b is None) or (a is not None and a.keys() != b.keys()):
            return f"at {place}: {a} against {b}"
        for token in a or ():
            if abs(a[token].logprob - b[token].logprob) > 1e-4:
                return f"at {place}, token {token}: {a[token]} against {b[token]}"
    return None


def _hangs_on_rounding(ask: Ask, model: Path, backend: str) -> bool:
    """Do runs of the request alone, with steps of other shapes, disagree?"""
    answers: list[RequestOutput] = []
    shapes: list[tuple[dict[str, Any], int]] = [({"max_num_batched_tokens": limit}, 1) for limit in (1, 3, 7, 16)]
    shapes += [({}, 1), ({}, 2), ({"block_size": 4}, 1)]
    for settings, copies in shapes:
        engine = plain_engine(model, backend, **settings)
        answers.append(run_alone(engine, ask, copies))
        engine.close()
    return any(compare(ask, answer, answers[0]) for answer in answers[1:]) or _is_tied(ask, model, backend)


def _is_tied(ask: Ask, model: Path, backend: str, tie: float = 1e-5) -> bool:
    """Greedy, and where the two answers part, are the two tokens closer than float32 computes logits of this size?"""
    params = ask.params
    if isinstance(params, BeamSearchParams) or not params.greedy or params.needs_history or ask.output is None:
        return False
    engine = plain_engine(model, backend)
    alone = run_alone(engine, replace(ask, params=replace(params, logprobs=4, deadline_ms=None)))
    engine.close()
    ours, theirs = ask.output.outputs[0].token_ids, alone.outputs[0].token_ids
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), None)
    if at is None or alone.outputs[0].logprobs is None:
        return False
    likely = alone.outputs[0].logprobs[at]
    return ours[at] in likely and abs(likely[ours[at]].logprob - likely[theirs[at]].logprob) <= tie
