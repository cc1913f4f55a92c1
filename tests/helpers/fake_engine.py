"""An engine of the same shape as the real one that answers with scripted text: one character a step, no model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from octavo.config import EngineConfig
from octavo.errors import CapacityError, PromptError
from octavo.outputs import BeamSearchOutput, BeamSequence, CompletionOutput, RequestOutput
from octavo.sampling_params import BeamSearchParams


class FakeTokenizer:
    """One token per character: its code point."""

    def __init__(self, chat_template: bool = True) -> None:
        self.has_chat_template = chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [2] * add_special_tokens + [ord(c) for c in text]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(i) for i in ids if i != 2 or not skip_special_tokens)

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        self.options = options
        return "\x02" + "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


class FakeEngine:
    """Answers a prompt with its own text reversed (sample i repeats each character i + 1 times)."""

    def __init__(self, tokenizer: FakeTokenizer | None = None, max_requests: int = 1000) -> None:
        self.config = EngineConfig(max_model_len=64)
        self.spec = SimpleNamespace(vocab_size=0x110000)
        self.tokenizer = tokenizer
        self.live: dict[str, Any] = {}
        self.beams: dict[str, BeamSearchOutput] = {}
        self.aborted: list[str] = []
        self.closed = 0
        self.steps = 0
        self.max_requests = max_requests
        self.before_step: Any = None
        self.before_update: Any = None

    def add_request(self, request_id: str, prompt_token_ids: list[int], params: Any, **options: Any) -> None:
        if not prompt_token_ids:
            raise PromptError("empty prompt")
        if len(self.live) >= self.max_requests:
            raise CapacityError(f"the queue is full ({self.max_requests} requests)")
        assert request_id not in self.live
        text = "".join(chr(i) for i in reversed(prompt_token_ids) if i != 2)
        self.live[request_id] = SimpleNamespace(ids=prompt_token_ids, params=params, text=text, done=0, **options)

    def step(self) -> list[RequestOutput]:
        self.steps += 1
        if self.before_step:
            self.before_step(self)
        if self.before_update:
            self.before_update()
        news = []
        for request_id, request in list(self.live.items()):
            request.done += 1
            beams = isinstance(request.params, BeamSearchParams)
            limit = min(len(request.text), request.params.max_tokens or 1 << 30)
            finished = request.done >= limit
            reason = None if not finished else ("stop" if limit == len(request.text) else "length")
            outputs = []
            for index in range(0 if beams else request.params.n):
                text = "".join(c * (index + 1) for c in request.text[: request.done])
                outputs.append(CompletionOutput(index, text, [ord(c) for c in text], finish_reason=reason))
            if finished:
                del self.live[request_id]
                if beams:
                    beam = BeamSequence([1], request.text, -1.0, -1.0, "length")
                    self.beams[request_id] = BeamSearchOutput(request_id, request.prompt, request.ids, [beam])
            news.append(RequestOutput(request_id, request.prompt, request.ids, outputs, finished))
        return news

    def take_beams(self, request_id: str) -> BeamSearchOutput:
        return self.beams.pop(request_id)

    def abort(self, request_id: str, index: int | None = None) -> bool:
        self.aborted.append(request_id)
        return self.live.pop(request_id, None) is not None

    def has_unfinished(self) -> bool:
        return bool(self.live)

    def reset_prefix_cache(self) -> bool:
        return not self.live

    def settings(self) -> dict[str, Any]:
        return {"max_model_len": {"asked": 64, "chosen": 64, "why": "as asked"}}

    def close(self) -> None:
        self.closed += 1
