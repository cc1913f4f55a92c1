"""`Driver`: callers' requests on one engine: admit all or none, step until they are done, hand each its outputs.

Several callers may be under way at once (a stream that is read between two `generate` calls, threads): every output
goes to the mail of its request. Threads take turns, a step at a time, so their requests run in one batch. Knows nothing
of text or blocks. The invariant: whatever way a call ends, none of its requests stays in the engine, and Ctrl-C never
interrupts the engine half-way through a step.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from octavo.errors import ConfigError, InternalError, OctavoError, RequestError
from octavo.interrupts import Uninterrupted
from octavo.outputs import RequestOutput
from octavo.progress import RequestProgress
from octavo.sampling_params import BeamSearchParams, PoolingParams, SamplingParams
from octavo.text.prompts import Prompt
from octavo.turns import Turns

if TYPE_CHECKING:
    from octavo.engine import Engine

Params = SamplingParams | BeamSearchParams | PoolingParams


class Driver:
    """Requests of one `LLM` on one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbers = itertools.count()
        self._mail: dict[str, RequestOutput | None] = {}  # request -> its newest output, until its caller reads it
        self._busy = False  # inside the engine: a garbage collection there must not abort a request
        self._abandoned: list[str] = []
        self._closed = False
        self._turns = Turns()
        self.watcher: Callable[[], None] | None = None

    def close(self) -> None:
        """Close the engine; what is abandoned later needs no abort."""
        with self.turn():
            self._closed = True
            self._mail.clear()
            self._engine.close()

    def admit(
        self, prompts: list[Prompt], params: Sequence[Params], priorities: Sequence[int | None], ids: list[str]
    ) -> list[str]:
        """Hand all requests to the engine, or none; their names are appended to `ids` as they enter."""
        for index, priority in enumerate(priorities):
            if priority is not None and (isinstance(priority, bool) or not isinstance(priority, int)):
                raise RequestError(f"priority={priority!r} (prompt {index}): must be an integer")
        with self.all_or_none(ids), self._inside() as engine:
            for index, (prompt, given) in enumerate(zip(prompts, params, strict=True)):
                request_id = str(next(self._numbers))
                try:
                    engine.add_request(
                        request_id,
                        list(prompt.token_ids or ()),
                        given,
                        prompt=prompt.text,
                        priority=priorities[index] or 0,
                        cache_salt=prompt.cache_salt,
                        lora=prompt.lora,
                    )
                except RequestError as error:
                    if len(prompts) == 1:
                        raise
                    raise type(error)(f"prompt {index}: {error}") from error
                ids.append(request_id)
                self._mail[request_id] = None
        return ids

    def run(self, ids: list[str], use_tqdm: bool) -> dict[str, RequestOutput]:
        """Step until all of `ids` are finished."""
        done: dict[str, RequestOutput] = {}
        with RequestProgress(len(ids), use_tqdm) as progress:
            waiting = dict.fromkeys(ids)
            while waiting:
                self._step(waiting)
                for output in self._take_mail(waiting):
                    if output.finished:
                        done[output.request_id] = output
                        del waiting[output.request_id]
                        progress.finished(sum(len(o.token_ids) for o in output.outputs))
        return done

    def next_output(self, request_id: str) -> RequestOutput | None:
        """The newest output of a stream's request; steps unless another caller's steps have brought it already."""
        self._step((request_id,))
        return next(iter(self._take_mail((request_id,))), None)

    def _take_mail(self, wanted: Collection[str]) -> list[RequestOutput]:
        """What has come for `wanted`, in one turn: a turn costs more than a token's other work."""
        with self.turn():
            found = [output for request_id in wanted if (output := self._mail.get(request_id)) is not None]
            for output in found:
                if output.finished:
                    del self._mail[output.request_id]
                else:
                    self._mail[output.request_id] = None
            return found

    def _step(self, wanted: Collection[str]) -> None:
        """One step of the engine, unless others' steps have brought something for `wanted`.

        Outputs go to the mail of their callers. Ctrl-C takes effect after the step.
        """
        with self.turn():
            if any(self._mail.get(request_id) is not None for request_id in wanted):
                return
            with self._inside() as engine:
                if not engine.has_unfinished():
                    raise InternalError("the engine is idle but requests have not finished: they were lost")
                for output in engine.step():
                    if output.request_id in self._mail:
                        self._mail[output.request_id] = output
            watcher = self.watcher
        if watcher is not None:
            watcher()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """For whoever reads or changes the engine: no other thread does meanwhile, and Ctrl-C waits."""
        with Uninterrupted(), self._turns:
            yield

    @contextlib.contextmanager
    def _inside(self) -> Iterator[Engine]:
        """A turn in which the engine is changed: streams dropped meanwhile are aborted afterwards."""
        with self.turn():
            if self._closed:
                raise ConfigError("this LLM is closed; make a new one")
            self._busy = True
            try:
                yield self._engine
            finally:
                self._busy = False
                while self._abandoned:
                    self.abandon(self._abandoned.pop())

    @contextlib.contextmanager
    def all_or_none(self, ids: list[str]) -> Iterator[None]:
        """If the body fails in any way, every request then in `ids` leaves the engine."""
        try:
            yield
        except BaseException:
            with Uninterrupted():
                for request_id in ids:
                    # A broken engine may refuse; what matters to the caller is the first error.
                    with contextlib.suppress(OctavoError):
                        self.abandon(request_id)
                ids.clear()
            raise

    def abandon(self, request_id: str) -> None:
        """Take a request out of the engine, whatever state it is in. Harmless when it has ended, or after close."""
        with self.turn():
            if self._busy:  # dropped by a garbage collection inside the engine
                self._abandoned.append(request_id)
                return
            self._mail.pop(request_id, None)
            if not self._closed:
                self._engine.abort(request_id)
