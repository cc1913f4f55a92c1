"""Record a run and replay it: every arrival, decision and result, one JSON line each.

The scheduler has no hidden input: given the same arrivals, times and drawn tokens it decides the same. So a recording
needs no model to be replayed: `replay` feeds the recorded results to a fresh scheduler, compares every plan, and
names the first step that differs. Hashes do not appear (their key is a secret of each process), block ids do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any, Protocol

from octavo.core.kv_layout import KVGroup, KVLayout
from octavo.core.scheduler import Scheduler
from octavo.core.sequence import Request
from octavo.core.settings import SchedulerSettings, SpeculationSettings
from octavo.core.step import Drawn, StepPlan, StepResult, TokenLogprobs
from octavo.errors import ConfigError, OctavoError
from octavo.sampling_params import BeamSearchParams, PoolingParams, SamplingParams, StructuredOutputs

VERSION = 1


class Recorder:
    """Writes one run. Every line is flushed, so a killed run leaves a readable recording."""

    def __init__(self, path: str, settings: SchedulerSettings, layout: KVLayout, about: dict[str, Any]) -> None:
        try:
            self._file: IO[str] = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - open for the whole run
        except OSError as error:
            raise ConfigError(f"record={path!r}: cannot be written ({error.strerror}); name a writable file") from error
        groups = [{"layers": g.layers, "window": g.window} for g in layout.groups]
        self._write(
            "header",
            version=VERSION,
            about=about,
            settings=asdict(settings),
            layout={**asdict(layout), "groups": groups},
        )

    def arrival(self, request: Request) -> None:
        params = {f.name: getattr(request.params, f.name) for f in fields(request.params)}
        self._write(
            "arrival",
            id=request.request_id,
            tokens=request.prompt_token_ids,
            kind="beam" if request.beam else "pool" if request.pooling else "sample",
            params={k: _plain(v) for k, v in params.items()},
            arrival=request.arrival,
            number=request.number,
            seed=request.seed,
            priority=request.priority,
            salt=request.cache_salt,
            adapter=request.adapter,
            end_ids=request.end_ids,
            bad_words=request.bad_word_ids,
            max_len=request.max_len,
        )

    def abort(self, request_id: str, index: int | None) -> None:
        self._write("abort", id=request_id, index=index)

    def finish(self, seq_id: int, reason: str, stop_reason: int | str | None) -> None:
        """The engine ended a sequence itself (a stop string)."""
        self._write("finish", seq=seq_id, reason=reason, stop_reason=stop_reason)

    def reset_cache(self) -> None:
        self._write("reset")

    def step(self, now: float, plan: StepPlan, result: StepResult) -> None:
        self._write("step", now=now, plan=digest(plan), drawn=_drawn(result))

    def plan(self, now: float, plan: StepPlan) -> None:
        """A step that was planned while another is in flight; its `result` follows later."""
        self._write("plan", now=now, plan=digest(plan))

    def result(self, now: float, result: StepResult) -> None:
        self._write("result", now=now, step=result.step_id, drawn=_drawn(result))

    def close(self) -> None:
        self._file.close()

    def _write(self, event: str, **values: Any) -> None:
        self._file.write(json.dumps({"event": event, **values}, separators=(",", ":")) + "\n")
        self._file.flush()


def digest(plan: StepPlan) -> dict[str, Any]:
    """A plan as plain JSON: what is computed for whom, into which blocks, after which transfers."""
    return {
        "step": plan.step_id,
        "scheduled": [
            [s.seq_id, s.start, s.num_tokens, [[u.group, u.first, *u.block_ids] for u in s.tables], list(s.sample_ids)]
            for s in plan.scheduled
        ],
        "transfers": [[t.kind.value, t.source, t.destination] for t in plan.transfers],
        "starts": [[s.seq_id, len(s.token_ids)] for s in plan.starts],
        "ends": list(plan.ends),
    }


def _plain(value: Any) -> Any:
    """A parameter as JSON: a grammar by its fields, which are enough to make it again."""
    if isinstance(value, StructuredOutputs):
        return {k: v for k, v in asdict(value).items() if v not in (None, False)}
    return list(value) if isinstance(value, tuple) else value


def _drawn(result: StepResult) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for seq_id, d in result.drawn.items():
        if d.error is not None:
            out[str(seq_id)] = {"error": d.error}
        elif d.embedding is not None:
            out[str(seq_id)] = {"pooled": True}  # the vector decides nothing
        elif d.token_ids:
            out[str(seq_id)] = list(d.token_ids)
        else:
            out[str(seq_id)] = {"ids": d.logprobs[0].token_ids, "logprobs": d.logprobs[0].logprobs}
    return out


def _result(step: int, drawn: dict[str, Any]) -> StepResult:
    entries: dict[int, Drawn] = {}
    for key, value in drawn.items():
        if isinstance(value, list):
            entries[int(key)] = Drawn(tuple(value))
        elif "error" in value:
            entries[int(key)] = Drawn((), error=value["error"])
        elif "pooled" in value:
            entries[int(key)] = Drawn((), embedding=[])
        else:
            best = TokenLogprobs(tuple(value["ids"]), tuple(value["logprobs"]), 0)
            entries[int(key)] = Drawn((), (best,))
    return StepResult(step, entries)


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """`same`: every plan was equal. Otherwise `step`, and what was recorded and planned there."""

    same: bool
    steps: int
    requests: int
    step: int | None = None
    what: str = ""

    def __str__(self) -> str:
        if self.same:
            return f"same: {self.steps} steps, {self.requests} requests, every decision equal"
        return f"differs at step {self.step} (after {self.steps} equal steps): {self.what}"


class Watcher(Protocol):
    """Looks on while a run is repeated. step: after each one, with the number of tokens drawn in it."""

    def begin(self, scheduler: Scheduler, about: dict[str, Any]) -> None: ...
    def step(self, scheduler: Scheduler, drawn: int, now: float) -> None: ...


def replay(path: str | Path, *, watcher: Watcher | None = None) -> ReplayReport:
    """Run a recording again on a fresh scheduler. Raises ConfigError for a file that is no recording."""
    events = _read(path)
    header = next(events, None)
    if header is None:
        raise ConfigError(f"{path}: not a recording (the file is empty)")
    if not isinstance(header, dict) or header.get("event") != "header" or header.get("version") != VERSION:
        raise ConfigError(f"{path}: not a recording of version {VERSION}")
    layout = header["layout"]
    groups = tuple(KVGroup(tuple(g["layers"]), g["window"]) for g in layout.pop("groups"))
    settings = header["settings"]
    if (guessing := settings.get("speculation")) is not None:
        for name in ("row_costs", "draft_costs"):
            guessing[name] = tuple((rows, time) for rows, time in guessing[name])
        settings["speculation"] = SpeculationSettings(**guessing)
    scheduler = Scheduler(SchedulerSettings(**settings), KVLayout(groups=groups, **layout))
    if watcher is not None:
        watcher.begin(scheduler, header["about"])
    steps = requests = 0
    for event in events:
        match event["event"]:
            case "arrival":
                scheduler.add(_request(event))
                requests += 1
            case "abort":
                scheduler.abort(event["id"], event["index"])
            case "reset":
                if scheduler.memory.cache is not None:
                    scheduler.memory.cache.reset()
            case "finish":
                seq = scheduler.sequence(event["seq"])
                if seq is not None:
                    scheduler.finish(seq, event["reason"], event["stop_reason"])
            case "step" | "plan":
                difference = _replay_plan(scheduler, event)
                if difference:
                    return ReplayReport(False, steps, requests, event["plan"]["step"], difference)
                steps += 1
        if event["event"] in ("step", "result"):
            step = event["step"] if event["event"] == "result" else event["plan"]["step"]
            news = scheduler.update(_result(step, event["drawn"]), event["now"])
            if watcher is not None:
                watcher.step(scheduler, sum(len(n.token_ids) for n in news), event["now"])
    return ReplayReport(True, steps, requests)


def _replay_plan(scheduler: Scheduler, event: dict[str, Any]) -> str:
    """Plan once; what differs, or ""."""
    try:
        plan = scheduler.schedule(event["now"])
    except OctavoError as error:
        return f"planning failed: {error}"
    # Through JSON and back, so that tuples and lists compare equal.
    ours, theirs = json.loads(json.dumps(digest(plan))), event["plan"]
    for part in theirs:
        if ours[part] != theirs[part]:
            return f"{part}: recorded {_short(theirs[part])}, planned {_short(ours[part])}"
    return ""


def _request(event: dict[str, Any]) -> Request:
    params: SamplingParams | BeamSearchParams | PoolingParams
    given = {k: v for k, v in event["params"].items() if v is not None}
    match event["kind"]:
        case "beam":
            params = BeamSearchParams(**given)
        case "pool":
            params = PoolingParams(**given)
        case _:
            params = SamplingParams(**_known(event["params"]))
    return Request(
        event["id"],
        event["tokens"],
        params,
        arrival=event["arrival"],
        number=event["number"],
        seed=event["seed"],
        priority=event["priority"],
        cache_salt=event["salt"],
        adapter=event["adapter"],
        end_ids=tuple(event["end_ids"]),
        bad_word_ids=tuple(tuple(w) for w in event["bad_words"]),
        max_len=event["max_len"],
    )


def _known(params: dict[str, Any]) -> dict[str, Any]:
    """Recorded values as arguments: empty lists mean "not given"."""
    return {k: v for k, v in params.items() if v not in ([], ()) and not (v is None and k != "max_tokens")}


def _read(path: str | Path) -> Iterator[dict[str, Any]]:
    try:
        lines = Path(path).open(encoding="utf-8", errors="replace")  # noqa: SIM115 - closed below
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    with lines:
        for number, line in enumerate(lines, 1):
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                if number == 1:
                    raise ConfigError(f"{path}: not a recording (line 1 is no JSON)") from None
                if next(lines, None) is not None:
                    raise ConfigError(f"{path}: line {number} is no JSON, and it is not the last") from None
                return  # the last line of a killed run may be cut


def _short(value: Any, limit: int = 400) -> str:
    text = json.dumps(value)
    return text if len(text) <= limit else text[:limit] + "…"
