"""A recorded run as frames: the recording is replayed through the scheduler, and every so often a frame is taken.

The result is what the block map shows for a run that is over, as plain JSON:

    title     what ran
    frames    the first one full, the others deltas, see `octavo.inspect.feed`
    tokens    seq_id -> text of each of its tokens, or null when texts are not to be shown
    report    the report at the end, see `octavo.inspect.report`
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.block_view import BlockView, block_view
from octavo.core.record import replay
from octavo.errors import ConfigError
from octavo.inspect.feed import Frame, delta_frame, full_frame
from octavo.inspect.report import recording_report

if TYPE_CHECKING:
    from octavo.core.scheduler import Scheduler
    from octavo.inspect.block_details import TextOf

MOST_FRAMES = 1500


def recorded_run(path: str | Path, *, text_of: TextOf | None = None, max_frames: int = MOST_FRAMES) -> dict[str, Any]:
    """Replay a recording into frames, at most `max_frames` of them, evenly spread over its steps.

    text_of: text of a token, to show what blocks hold; without it no token leaves the recording. Raises ConfigError
    for a file that is no recording, or one that this version would not decide in the same way.
    """
    steps = _count_steps(path)
    if not steps:
        replay(path)  # says so of a file that is no recording
        raise ConfigError(f"{path}: the recording holds no step")
    watcher = _Frames(every=-(-steps // max_frames), last=steps, text_of=text_of)
    report = recording_report(path, also=watcher)
    return {
        "title": watcher.title,
        "frames": watcher.frames,
        "tokens": watcher.texts if text_of is not None else None,
        "report": report,
    }


def _count_steps(path: str | Path) -> int:
    try:
        with Path(path).open(encoding="utf-8", errors="replace") as lines:
            return sum(line.startswith('{"event":"step"') and line.endswith("}\n") for line in lines)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error


class _Frames:
    """Takes a frame after every `every`-th step and after the last."""

    def __init__(self, *, every: int, last: int, text_of: TextOf | None) -> None:
        self.frames: list[Frame] = []
        self.texts: dict[int, list[str]] = {}
        self.title = ""
        self._every, self._last, self._text_of = every, last, text_of
        self._view: BlockView | None = None
        self._steps = self._drawn = 0
        self._begun = 0.0

    def begin(self, scheduler: Scheduler, about: dict[str, Any]) -> None:
        model = about.get("model") or "a recorded run"
        self.title = str(model.get("name") if isinstance(model, dict) else model).rstrip("/").rsplit("/", 1)[-1]

    def step(self, scheduler: Scheduler, drawn: int, now: float) -> None:
        self._begun = self._begun or now
        self._drawn += drawn
        self._steps += 1
        if self._steps % self._every and self._steps != self._last:
            return
        view = block_view(scheduler, now=now - self._begun, generated_tokens=self._drawn)
        number = len(self.frames)
        self.frames.append(full_frame(view) if self._view is None else delta_frame(self._view, view, number))
        self._view = view
        if self._text_of is not None:
            for seq_id in view.sequences:
                self._read(scheduler, seq_id, self._text_of)

    def _read(self, scheduler: Scheduler, seq_id: int, text_of: TextOf) -> None:
        seq = scheduler.sequence(seq_id)
        if seq is None:
            return
        texts = self.texts.setdefault(seq_id, [])
        texts += [text_of(token) for token in seq.token_ids[len(texts) :]]
