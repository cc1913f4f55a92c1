"""From `overlap=` to steps that are planned while the one before runs: whether, why, and on which runner.

Used by the builder only. What overlapping is, and what it never changes, is in `core/overlap.py`.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.config import Choice, Resolved
from octavo.core.overlap import IN_FLIGHT, AsyncRunner, OverlappedSteps
from octavo.core.scheduler import Scheduler
from octavo.core.settings import SchedulerSettings
from octavo.core.step import Runner
from octavo.devices import Device
from octavo.errors import ConfigError
from octavo.runner.threaded import ThreadedRunner


def settle_overlap(resolved: Resolved, device: Device) -> tuple[bool, Resolved]:
    """Whether steps overlap, and a resolved config that says so. Raises `ConfigError` where it would have no effect."""
    config = resolved.config
    if config.overlap is not False and config.speculative is not None:
        why = "with speculation the number of tokens a step brings is known only when it is done"
        if config.overlap is True:
            raise ConfigError(f"overlap=True has no effect with speculative={config.speculative!r}: {why}")
        chosen = False
    elif config.overlap != "auto":
        return bool(config.overlap), resolved
    else:
        chosen = device.is_asynchronous and device.kind != "npu"
        why = "the next step is planned while the device works"
        if not chosen:
            why = "on a CPU computing and planning share the cores" if device.kind == "cpu" else "on GPUs only"
    choice = Choice("overlap", "auto", chosen, why)
    return chosen, Resolved(replace(config, overlap=chosen), (*resolved.choices, choice))


def overlapping_settings(settings: SchedulerSettings, overlap: bool) -> SchedulerSettings:
    """The scheduler's settings with as many steps in flight as are needed."""
    return replace(settings, max_in_flight=IN_FLIGHT) if overlap else settings


def overlapped(scheduler: Scheduler, runner: Runner) -> tuple[OverlappedSteps, AsyncRunner]:
    """Steps of `scheduler` on `runner`, which gets a thread of its own unless its device works by itself."""
    asynchronous: AsyncRunner
    if hasattr(runner, "submit"):
        asynchronous = runner  # type: ignore[assignment]
    else:
        asynchronous = ThreadedRunner(runner)
    return OverlappedSteps(scheduler, asynchronous), asynchronous
