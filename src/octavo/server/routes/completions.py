"""/v1/completions: texts that go on from a prompt, whole or as they come."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from octavo.async_request import RequestDelta
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.server.answers import STREAMED, new_id, now, usage
from octavo.server.errors import ApiError
from octavo.server.exchange import Exchange
from octavo.server.logprobs import CompletionLogprobs, TokenSpeller
from octavo.server.prompts import blaming as blaming_prompt
from octavo.server.prompts import texts
from octavo.server.protocol.completions import CompletionBody
from octavo.server.sampling import Settled, check_model, check_stream, settle
from octavo.server.security import KeyedCaller
from octavo.server.state import ReadyEngine, State
from octavo.server.wire import DONE, dumps, event
from octavo.text.prompts import Prompt

router = APIRouter(tags=["generation"])


@router.post("/v1/completions", summary="Continue a prompt", responses=STREAMED)
async def completions(
    body: CompletionBody, http: Request, caller: KeyedCaller, state: State, engine: ReadyEngine
) -> Response:
    """Texts that continue `prompt`; with `stream`, as server-sent events."""
    check(body)
    # OpenAI's default of 16; 0 (with echo) still draws one token, which is not shown.
    settled = settle(
        body,
        state,
        max_tokens=16 if body.max_tokens is None else max(1, body.max_tokens),
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo and body.logprobs is not None else body.prompt_logprobs,
    )
    with blaming_prompt("prompt" if body.prompt_token_ids is None else "prompt_token_ids"):
        if body.prompt_token_ids is not None:
            prompts = [Prompt(token_ids=tuple(body.prompt_token_ids))]
        else:
            prompts = await texts(engine, body.prompt, add_special_tokens=body.add_special_tokens is not False)
        settled.cut_to_context(engine, max(len(p.token_ids or ()) for p in prompts))
        exchange = Exchange(http, engine, caller, "/v1/completions")
        stream = bool(body.stream)
        await exchange.submit(
            prompts,
            settled.params,
            model=body.model,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            stream=stream,
        )
    answer = CompletionAnswer(body, settled, prompts, TokenSpeller(engine.engine.tokenizer), state)
    if stream:
        return exchange.stream(answer)
    return Response(dumps(answer.whole(await exchange.results())), media_type="application/json")


def check(body: CompletionBody) -> None:
    """Contradictions that `SamplingParams` cannot know of."""
    if (body.prompt is None) == (body.prompt_token_ids is None):
        message = "give exactly one of prompt and prompt_token_ids"
        raise ApiError(400, message, param="prompt", code="missing" if body.prompt is None else "contradiction")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens=0: nothing would be returned; use at least 1, or echo", param="max_tokens")
    check_stream(body)
    if body.stream and body.echo and body.logprobs is not None:
        message = "log-probabilities of a prompt cannot be streamed: leave out stream, echo or logprobs"
        raise ApiError(400, message, param="logprobs", code="contradiction")


class CompletionAnswer:
    """The answer to one request, in both forms; a `StreamFormat`."""

    def __init__(
        self, body: CompletionBody, settled: Settled, prompts: list[Prompt], speller: TokenSpeller, state: Any
    ) -> None:
        self._body = body
        self._settled = settled
        self._speller = speller
        self._prompts = prompts
        self._width = settled.params.n
        self._head = {
            "id": new_id("cmpl"),
            "object": "text_completion",
            "created": now(),
            "model": check_model(body.model, state),
        }
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._told = False

    def _prompt_text(self, place: int) -> str:
        """What `echo` shows: the prompt as it was sent, or its ids as text."""
        prompt = self._prompts[place]
        if prompt.text is not None:
            return prompt.text
        return self._speller.decode(prompt.token_ids or ())

    # -- whole -----------------------------------------------------------------------------------------------------

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        choices = [
            self._choice(place, output, sample)
            for place, output in enumerate(outputs)
            for sample in output.outputs[: self._width]
        ]
        if self._body.max_tokens == 0:
            for output in outputs:
                for sample in output.outputs:
                    sample.token_ids = []
        return {**self._head, "choices": choices, "usage": usage(outputs), "octavo": self._settled.report()}

    def _choice(self, place: int, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        nothing = self._body.max_tokens == 0
        text = "" if nothing else sample.text
        ids = [] if nothing else sample.token_ids
        entries = [] if nothing else list(sample.logprobs or [])
        if self._body.echo:
            text = self._prompt_text(place) + text
        choice: dict[str, Any] = {
            "index": place * self._width + sample.index,
            "text": text,
            "logprobs": None,
            "finish_reason": "length" if nothing else sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }
        if self._body.logprobs is not None:
            grown = CompletionLogprobs(self._speller)
            if self._body.echo:
                prompt = output.prompt_token_ids
                choice["logprobs"] = grown.take([*prompt, *ids], [*(output.prompt_logprobs or []), *entries])
            else:
                choice["logprobs"] = grown.take(ids, entries)
        if self._body.prompt_logprobs is not None:
            found = output.prompt_logprobs or []
            choice["prompt_logprobs"] = CompletionLogprobs(self._speller).take(output.prompt_token_ids, found)
        if self._body.return_token_ids:
            choice["token_ids"], choice["prompt_token_ids"] = ids, output.prompt_token_ids
        return choice

    # -- as it comes -----------------------------------------------------------------------------------------------

    def opening(self) -> bytes:
        """The prompt, if it is to be echoed. (A first event without choices would break clients that read [0].)"""
        if not self._body.echo:
            return b""
        choices = [
            {
                "index": place * self._width + index,
                "text": self._prompt_text(place),
                "logprobs": None,
                "finish_reason": None,
            }
            for place in range(len(self._prompts))
            for index in range(self._width)
        ]
        return self._event(choices)

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        """The first one says what was defaulted or changed."""
        if not self._told:
            self._told = True
            more["octavo"] = self._settled.report()
        return event({**self._head, "choices": choices, **more})

    def deltas(self, place: int, deltas: list[RequestDelta]) -> bytes:
        return b"".join(self._event([self._part(place, delta)]) for delta in deltas)

    def _part(self, place: int, delta: RequestDelta) -> dict[str, Any]:
        index = place * self._width + delta.index
        nothing = self._body.max_tokens == 0
        part: dict[str, Any] = {
            "index": index,
            "text": "" if nothing else delta.text,
            "logprobs": None,
            "finish_reason": "length" if nothing and delta.finish_reason else delta.finish_reason,
        }
        if delta.finish_reason is not None:
            part["stop_reason"] = delta.stop_reason
        if delta.logprobs is not None:
            grown = self._logprobs.setdefault(index, CompletionLogprobs(self._speller))
            part["logprobs"] = grown.take(delta.token_ids, delta.logprobs)
        if self._body.return_token_ids:
            part["token_ids"] = [] if nothing else delta.token_ids
        return part

    def closing(self, outputs: list[RequestOutput]) -> bytes:
        options = self._body.stream_options
        if options is None or not options.include_usage:
            return DONE
        if self._body.max_tokens == 0:
            for output in outputs:
                for sample in output.outputs:
                    sample.token_ids = []
        return self._event([], usage=usage(outputs)) + DONE

    def failure(self, error: ApiError) -> bytes:
        return event(error.body())
