"""The engine: one scheduler, one runner, and the text of every sequence between them.

A step is `schedule -> execute -> update -> text` (or, overlapped, the next `schedule` comes before the result of the
one before: `core/overlap.py`). The engine checks at the door what needs the model (vocabulary,
limits), turns drawn tokens into text, ends sequences at stop strings in the very step that completes them, and hands
out `RequestOutput`s. It knows no tensors and no block ids. One thread at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from octavo.config import EngineConfig, Resolved
from octavo.core.journal import FinishedRequest, Journal
from octavo.core.overlap import OverlappedSteps
from octavo.core.record import Recorder
from octavo.core.scheduler import Scheduler, SequenceNews
from octavo.core.sequence import Request
from octavo.core.step import Runner, StepPlan, StepResult
from octavo.core.view import PoolView, counters_of, pool_view
from octavo.door import Door
from octavo.engine_stats import EngineStats as EngineStats
from octavo.errors import InternalError, RequestError
from octavo.logs import logger
from octavo.lora import Adapters, LoadedAdapter
from octavo.outputs import BeamSearchOutput, RequestOutput
from octavo.request_text import RequestText
from octavo.sampling_params import BeamSearchParams, PoolingParams, SamplingParams
from octavo.starting import room_for, without_collecting

if TYPE_CHECKING:
    from octavo.models.lora_reader import AdapterFiles
    from octavo.models.spec import ModelSpec
    from octavo.models.tokenizer import Tokenizer


class Engine:
    """Requests in, outputs out. Build one with `Engine.build(config)`, or from parts for tests."""

    def __init__(
        self,
        resolved: Resolved,
        scheduler: Scheduler,
        runner: Runner,
        *,
        spec: ModelSpec | None = None,
        tokenizer: Tokenizer | None = None,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        clock: Callable[[], float] = time.monotonic,
        hardware: dict[str, Any] | None = None,
        overlap: OverlappedSteps | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.config: EngineConfig = resolved.config
        self.spec = spec
        self.tokenizer = tokenizer
        self.scheduler = scheduler
        self.runner = runner
        self._resolved = resolved
        self._overlap = overlap
        self.adapters = adapters or Adapters(None, self.config.max_loras)
        self._clock = clock
        self._door = Door(vocab_size, eos_token_ids, scheduler.settings.max_model_len, tokenizer, seed=self.config.seed)
        self._texts: dict[str, RequestText] = {}
        self._aborted: list[RequestOutput] = []  # last outputs of requests that ended between two steps
        self._beams: dict[str, BeamSearchOutput] = {}
        self.hardware: dict[str, Any] = hardware or {}  # device, memory and what it went to; empty without a model
        self.journal = Journal()
        self._leaks = 0
        self._failure: BaseException | None = None
        self.before_update: Callable[[], None] | None = None  # see `LLM.watch`
        self._recorder: Recorder | None = None
        if self.config.record is not None:
            about = {**self.about(), "vocab_size": vocab_size}
            self._recorder = Recorder(self.config.record, scheduler.settings, scheduler.memory.layout, about)

    @classmethod
    def build(
        cls,
        config: EngineConfig,
        *,
        on_progress: Callable[[str, int, int], None] | None = None,
        texts: bool = False,
    ) -> Engine:
        """Load the model, size the pool, make an engine. on_progress(stage, done, total) while loading.

        texts: prompts will be texts, so load now what encoding needs, beside the weights; else with the first text.
        """
        with without_collecting(), room_for(config) as room:
            from octavo.builder import build_engine  # torch is loaded there

            return build_engine(config, on_progress, texts=texts, room=room)

    # -- requests --------------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams | BeamSearchParams | PoolingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        lora: str | None = None,
    ) -> None:
        """Queue a request. Raises `RequestError` for what can never be served; the engine is unchanged then.

        lora: name of a loaded adapter that it runs with.
        """
        self._check_alive()
        if request_id in self._texts:
            raise RequestError(f"request_id {request_id!r} is in use; give every request its own")
        adapter = self.adapters.key_of(lora)
        request = self._door.admit(
            request_id, prompt_token_ids, params, arrival=self._clock(), priority=priority, cache_salt=cache_salt,
            adapter=adapter,
        )  # fmt: skip
        self.scheduler.add(request)
        self._texts[request_id] = RequestText(request, prompt, self.tokenizer)
        if self._recorder is not None:
            self._recorder.arrival(request)

    def prepare(self, params: SamplingParams | BeamSearchParams | PoolingParams, isolated: bool = False) -> None:
        """Compile what `add_request` would have to compile (a grammar), or refuse it. For any thread, at any time.

        isolated: try it in another process first, as a server does with the grammars of strangers.
        """
        self._door.prepare(params, isolated)

    def load_lora(self, name: str, adapter: str | AdapterFiles) -> LoadedAdapter:
        """Load an adapter, a directory or what `read_adapter` made of one. Raises `ModelError` or `RequestError`."""
        from octavo.models.lora_reader import read_adapter

        self._check_alive()
        return self.adapters.load(name, read_adapter(adapter) if isinstance(adapter, str) else adapter)

    def drop_lora(self, name: str) -> None:
        """Take an adapter's name away; requests that run with it finish with it. Raises `RequestError`."""
        self._check_alive()
        self.adapters.drop(name)
        if not self.scheduler.in_flight:
            self.adapters.sweep(self._uses)

    def _uses(self, adapter: str) -> bool:
        return any(request.adapter == adapter for request in self.scheduler.requests.values())

    def warm_grammars(self) -> str | None:
        """Do what the first grammar would wait for: seconds for a large vocabulary, in which no other thread runs.

        Returns why grammars cannot be used here, or None.
        """
        try:
            _ = self._door.grammars.vocabulary
        except RequestError as error:
            return str(error)
        return None

    def abort(self, request_id: str, index: int | None = None) -> bool:
        """End a request (or one sample of it) in any state; harmless when there is nothing to end.

        Its blocks are free at once. An aborted request gives a last output at the next step.
        """
        ended = self.scheduler.abort(request_id, index)
        if ended and self._recorder is not None:
            self._recorder.abort(request_id, index)
        for request in self.scheduler.take_ended():
            self._aborted += self._end(request)
            self._beams.pop(request.request_id, None)  # nobody waits for it; what ran is in the last output
        if ended and self._failure is None:
            self._settle(self._clock())
        return ended

    @property
    def overlaps(self) -> bool:
        """Is a step planned while the one before runs?"""
        return self._overlap is not None

    def has_unfinished(self) -> bool:
        """Is there anything a step would bring: requests that run or wait, or the last output of an aborted one?"""
        return self.scheduler.has_unfinished or bool(self._aborted)

    # -- a step ----------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one step; outputs of the requests that gained something or ended.

        Outputs are live: the same object grows from step to step until its request is finished.
        """
        self._check_alive()
        now = self._clock()
        try:
            news = self._advance(now)
        except BaseException as error:
            self._failure = error
            raise
        outputs = self._collect(news)
        self._settle(now)
        self.journal.stepped(self.scheduler, now)
        self._look_after()
        return outputs

    def _advance(self, now: float) -> list[SequenceNews]:
        """Plan a step, and take the result of it, or with overlapped steps of the one before."""
        overlap = self._overlap
        if overlap is None:
            plan = self.scheduler.schedule(now)
            news = self._take(plan, self.runner.execute(plan), now)
            self._log(plan)
            return news
        news = self._take(*overlap.take(), now) if overlap.must_wait() else []
        if self.scheduler.has_unfinished:
            plan = overlap.submit(now)
            if self._recorder is not None:
                self._recorder.plan(now, plan)
            self._log(plan)
        while overlap.due():
            news += self._take(*overlap.take(), now)
        return news

    def _take(self, plan: StepPlan, result: StepResult, now: float) -> list[SequenceNews]:
        """Tell the scheduler what came of a plan."""
        if self.before_update is not None:
            self.before_update()
        news = self.scheduler.update(result, now)
        if self._recorder is not None and self._overlap is None:
            self._recorder.step(now, plan, result)
        elif self._recorder is not None:
            self._recorder.result(now, result)
        return news

    def _settle(self, now: float) -> None:
        """When the last request has ended, the step that still runs for nobody reports too, and the pool is at rest."""
        try:
            while self._overlap is not None and self._overlap.due() and not self.scheduler.has_unfinished:
                self._take(*self._overlap.take(), now)
        except BaseException as error:
            self._failure = error
            raise

    def _log(self, plan: StepPlan) -> None:
        if logger.isEnabledFor(10):
            pool = self.scheduler.memory.pool
            logger.debug(
                "step %d: running=%d waiting=%d tokens=%d num_free_gpu_blocks=%d gpu_cache_usage=%.4f",
                plan.step_id,
                len(self.scheduler.running),
                len(self.scheduler.waiting),
                plan.num_tokens,
                pool.num_available,
                pool.num_used / pool.num_blocks,
            )

    def _collect(self, news: list[SequenceNews]) -> list[RequestOutput]:
        changed: dict[str, RequestText] = {}
        outputs, self._aborted = self._aborted, []
        for item in news:
            seq = item.sequence
            text = self._texts.get(seq.request.request_id)
            if text is None:
                continue
            self.journal.generated += len(item.token_ids)
            changed[seq.request.request_id] = text
            stop = text.push(item)
            if stop is not None:
                self.journal.generated -= text.drop_behind_stop(seq)
                if not seq.finished:
                    self.scheduler.finish(seq, "stop", stop)
                    if self._recorder is not None:
                        self._recorder.finish(seq.seq_id, "stop", stop)
                else:
                    seq.finish_reason, seq.stop_reason = "stop", stop
                text.close(seq)
        for request in self.scheduler.take_ended():
            changed.pop(request.request_id, None)
            outputs += self._end(request)
        return outputs + [text.output for text in changed.values()]

    def _end(self, request: Request) -> list[RequestOutput]:
        """The last output of a request that has ended, if the engine knows it."""
        self.journal.ended(request)
        text = self._texts.pop(request.request_id, None)
        if text is None:
            return []
        text.end()
        if request.beam is not None:
            self._beams[request.request_id] = text.beams()
        return [text.output]

    def _look_after(self) -> None:
        """Audit under debug; when idle, a leaked block is reported and taken back instead of stopping the engine."""
        scheduler = self.scheduler
        if self.config.debug:
            scheduler.audit()
        if self.adapters.dropped and not scheduler.in_flight:
            self.adapters.sweep(self._uses)
        pool = scheduler.memory.pool
        idle = not scheduler.has_unfinished and not scheduler.in_flight
        if idle and (pool.num_used or pool.num_pending) and (leaked := pool.repair({})):
            self._leaks += len(leaked)
            logger.error("%d blocks leaked and were taken back, the first is block %d", len(leaked), leaked[0])

    def take_beams(self, request_id: str) -> BeamSearchOutput:
        """The result of a finished beam search; can be taken once."""
        if request_id not in self._beams:
            raise RequestError(f"request {request_id!r} is no finished beam search")
        return self._beams.pop(request_id)

    # -- looking in ------------------------------------------------------------------------------------------------

    def pool_view(self) -> PoolView:
        return pool_view(self.scheduler)

    def audit(self) -> None:
        self.scheduler.audit()

    def settings(self) -> dict[str, dict[str, Any]]:
        """setting -> {asked, chosen, why}."""
        return self._resolved.report()

    def about(self) -> dict[str, Any]:
        """What does not change while the engine runs: model, settings and hardware, as plain values."""
        model: dict[str, Any] = {"name": self.config.model}
        if self.spec is not None:
            windows = [w for w in self.spec.windows if w is not None]
            model |= {
                "layers": self.spec.num_layers,
                "windowed_layers": len(windows),
                "window": max(windows, default=None),
                "max_position_embeddings": self.spec.max_position_embeddings,
            }
        return {"model": model, "config": self.settings(), "hardware": self.hardware}

    def stats(self) -> EngineStats:
        values = counters_of(self.scheduler)
        if self._overlap is not None:
            values |= {"overlapped_steps": self._overlap.steps, "overlap_waits": dict(self._overlap.waits)}
        return EngineStats(**values, generated_tokens=self.journal.generated, leaks_repaired=self._leaks)

    def explain(self, request_id: str) -> FinishedRequest:
        """What is remembered of a request that has ended: lengths, times, and what the prefix cache had of its prompt.

        The latest few hundred are kept. Raises `RequestError` for any other. `octavo.inspect.explain` words it.
        """
        record = self.journal.find(request_id)
        if record is None:
            state = "is still running" if request_id in self._texts else "is not known (any more)"
            raise RequestError(f"request {request_id!r} {state}; the latest finished requests can be explained")
        return record

    def now(self) -> float:
        """The engine's clock, in seconds; its samples and reports are dated by it."""
        return self._clock()

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False, and nothing done, while requests are running."""
        cache = self.scheduler.memory.cache
        if cache is None or self.scheduler.has_unfinished:
            return False
        cache.reset()
        if self._recorder is not None:
            self._recorder.reset_cache()
        return True

    def close(self) -> None:
        """Drop everything; the KV tensor is freed with the runner."""
        for request_id in list(self.scheduler.requests):
            self.scheduler.abort(request_id)
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
        self._texts.clear()
        self._aborted.clear()
        close = getattr(self.runner, "close", None)
        if close is not None:
            close()
        self._overlap = None
        self.runner = _ClosedRunner()
        self._failure = self._failure or InternalError("the engine is closed")

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise InternalError(f"the engine has stopped: {self._failure}; make a new one") from self._failure


class _ClosedRunner:
    """Stands where the runner was, so that its tensors can be freed."""

    def execute(self, plan: Any) -> Any:
        raise InternalError("the engine is closed")
