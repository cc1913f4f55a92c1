"""An `LLM` from command-line options, with bars while it loads."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from octavo.cli.options import engine_settings, refuse
from octavo.errors import PromptError
from octavo.progress import LoadProgress

if TYPE_CHECKING:
    from octavo.llm import LLM


def only_adapter(llm: LLM) -> str | None:
    """The adapter that every request of this command runs with: the one given with --lora, if it is one."""
    given = llm.config.lora or {}
    return next(iter(given)) if len(given) == 1 else None


def adapted(prompts: list[Any], args: argparse.Namespace) -> list[Any]:
    """The prompts with the adapter each runs with: its own "lora", else the only one given with --lora.

    Raises `PromptError` for a name that --lora does not give, before a model is loaded.
    """
    names = list(engine_settings(args).get("lora") or ())
    for index, prompt in enumerate(prompts):
        wanted = prompt.get("lora") if isinstance(prompt, dict) else None
        if wanted is not None and wanted not in names:
            given = ", ".join(map(repr, names)) or "none"
            raise PromptError(
                f"prompt {index}: lora={wanted!r}: no adapter of this name; given: {given}; add --lora NAME=DIR"
            )
    if len(names) != 1:
        return prompts
    default = {"lora": names[0]}
    return [default | prompt if isinstance(prompt, dict) else default | {"prompt": prompt} for prompt in prompts]


def load(args: argparse.Namespace) -> LLM:
    """The engine that the options ask for. Raises `SamplingError` for one without effect: no adapter comes later."""
    from octavo.llm import LLM

    refuse({"max_loras": 1} if args.max_loras is not None and not args.lora else {}, "without --lora")
    progress = LoadProgress()
    try:
        return LLM(**engine_settings(args), on_progress=progress, texts=True)
    finally:
        progress.close()
