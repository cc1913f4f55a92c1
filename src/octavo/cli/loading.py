"""An `LLM` from command-line options, with bars while it loads."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from octavo.cli.options import engine_settings
from octavo.progress import LoadProgress

if TYPE_CHECKING:
    from octavo.llm import LLM


def only_adapter(llm: LLM) -> str | None:
    """The adapter that every request of this command runs with: the one given with --lora, if it is one."""
    given = llm.config.lora or {}
    return next(iter(given)) if len(given) == 1 else None


def load(args: argparse.Namespace) -> LLM:
    """The engine that the options ask for."""
    from octavo.llm import LLM

    progress = LoadProgress()
    try:
        return LLM(**engine_settings(args), on_progress=progress)
    finally:
        progress.close()
