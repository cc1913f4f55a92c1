"""`octavo chat`: a conversation in the terminal. Earlier turns stay in the prefix cache, so each turn only computes
what is new.

A base model has no chat template; then the conversation is written as a plain transcript, with a notice.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from octavo.cli.loading import only_adapter
from octavo.cli.options import add_engine_options, add_sampling_options, refuse, sampling_settings
from octavo.cli.terminal import notice
from octavo.errors import PromptError, RequestError
from octavo.sampling_params import SamplingParams
from octavo.text.prompts import Prompt

if TYPE_CHECKING:
    from octavo.llm import LLM

HELP = "/reset forgets the conversation, /exit (or Ctrl-D) ends, Ctrl-C stops an answer"
DEFAULTS = {"temperature": 0.7, "max_tokens": 512}
Messages = list[dict[str, str]]


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description=f"An interactive conversation. {HELP}.",
        epilog="example:\n  octavo chat --model path/to/model --system 'Answer in one sentence.' --temperature 0.3",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    add_sampling_options(parser)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load, then talk."""
    given = sampling_settings(args)
    refuse({k: given[k] for k in ("n", "best_of", "logprobs") if k in given}, "in a conversation: there is one answer")
    params = SamplingParams(**(DEFAULTS | given))
    refuse({"lora": 1} if len(args.lora or ()) > 1 else {}, "when given twice: a conversation has one adapter")
    from octavo.cli.loading import load

    with load(args) as llm:
        return converse(llm, args.system, params)


class Conversation:
    """The turns so far, as a prompt that fits the context."""

    def __init__(self, llm: LLM, system: str | None) -> None:
        self._llm = llm
        self._start: Messages = [{"role": "system", "content": system}] if system else []
        self.has_template: bool = llm.get_tokenizer().has_chat_template
        self.messages: Messages = list(self._start)

    def reset(self) -> None:
        """Forget all turns."""
        self.messages = list(self._start)

    def prompt(self, room: int) -> tuple[Prompt, int]:
        """The prompt, and how many of the oldest messages were left out to keep `room` tokens free for the answer.

        At most half of the context is kept free.
        Raises PromptError when not even the last turn fits.
        """
        limit = self._llm.config.max_model_len or sys.maxsize
        room = min(room, limit // 2)
        turns = self.messages[len(self._start) :]
        for dropped in range(0, len(turns), 2):
            prompt = self._encode([*self._start, *turns[dropped:]])
            if len(prompt.token_ids or ()) + room <= limit:
                self.messages = [*self._start, *turns[dropped:]]
                return prompt, dropped
        raise PromptError(
            f"the message has {len(prompt.token_ids or ())} tokens and the answer needs room for {room}, but "
            f"max_model_len is {limit}; write less, lower --max-tokens or raise --max-model-len"
        )

    def _encode(self, messages: Messages) -> Prompt:
        if self.has_template:
            return self._llm.chat_prompt(messages)
        text = transcript(messages)
        return Prompt(text, tuple(self._llm.encode(text)))


def transcript(messages: Messages) -> str:
    """A conversation for a model that only continues text: `User: …`, `Assistant: …`, ready for the next answer."""
    names = {"user": "User: ", "assistant": "Assistant: ", "system": ""}
    return "\n".join([*(names[m["role"]] + m["content"] for m in messages), "Assistant:"])


def converse(llm: LLM, system: str | None, params: SamplingParams) -> int:
    """Read, answer, repeat, until the input ends."""
    conversation = Conversation(llm, system)
    if sys.stdin.isatty():
        import readline  # noqa: F401 (gives input() history and editing)

        notice(HELP)
    if not conversation.has_template:
        notice("this model has no chat template (a base model): writing the conversation as a plain transcript")
        params = with_stop(params, "\nUser:")
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return 0
        if line in ("/exit", "/quit"):
            return 0
        if line == "/reset":
            conversation.reset()
            notice("forgotten")
        elif line.startswith("/"):
            notice(HELP)
        elif line:
            _turn(llm, conversation, line, params)


def _turn(llm: LLM, conversation: Conversation, line: str, params: SamplingParams) -> None:
    """One question and its answer; a refused or interrupted turn leaves a conversation that can go on."""
    conversation.messages.append({"role": "user", "content": line})
    try:
        prompt, dropped = conversation.prompt(room=params.max_tokens or 1)
        if dropped:
            notice(f"the context is full: the oldest {dropped} messages are forgotten")
        stream = llm.stream(prompt, params, lora=only_adapter(llm))
    except RequestError as error:
        conversation.messages.pop()
        notice(f"refused: {error}")
        return
    parts: list[str] = []
    try:
        with stream:
            for delta in stream:
                parts.append(delta.text)
                print(delta.text, end="", flush=True)
    except KeyboardInterrupt:
        notice("\n(stopped)")
    print()
    conversation.messages.append({"role": "assistant", "content": "".join(parts).strip()})


def with_stop(params: SamplingParams, stop: str) -> SamplingParams:
    """The same parameters with one more stop string."""
    from dataclasses import fields

    values = {f.name: getattr(params, f.name) for f in fields(params)}
    return SamplingParams(**{**values, "stop": (*(params.stop or ()), stop)})
