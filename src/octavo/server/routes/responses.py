"""/v1/responses: OpenAI's newer form of a conversation, for text. Stateless: nothing is stored, nothing continued."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from octavo.async_engine import AsyncEngine
from octavo.async_request import RequestDelta
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.server.answers import STREAMED, new_id, now, usage
from octavo.server.errors import ApiError
from octavo.server.exchange import Exchange
from octavo.server.logprobs import TokenSpeller, chat_logprobs
from octavo.server.prompts import blaming as blaming_prompt
from octavo.server.prompts import conversation
from octavo.server.protocol.responses import ResponsesBody
from octavo.server.sampling import Settled, check_model, settle
from octavo.server.security import KeyedCaller
from octavo.server.state import ReadyEngine, State
from octavo.server.tooling import structure_of
from octavo.server.wire import dumps, event
from octavo.text.prompts import Prompt

router = APIRouter(tags=["generation"])


@router.post("/v1/responses", summary="Answer an input (text)", responses=STREAMED)
async def responses(
    body: ResponsesBody, http: Request, caller: KeyedCaller, state: State, engine: ReadyEngine
) -> Response:
    """A response object with one output message; with `stream`, its life as typed events."""
    if (body.input is None) == (body.prompt_token_ids is None) or body.input == []:
        raise ApiError(400, "give exactly one of input and prompt_token_ids", param="input", code="missing")
    if body.prompt_token_ids is not None and body.instructions is not None:
        message = "instructions have no effect on prompt_token_ids"
        raise ApiError(400, message, param="instructions", code="contradiction")
    settled = settle(
        body,
        state,
        max_tokens=body.max_output_tokens,
        logprobs=body.top_logprobs,
        structured_outputs=structure_of(body.text.format if body.text is not None else None, "text.format"),
    )
    with blaming_prompt("input" if body.prompt_token_ids is None else "prompt_token_ids"):
        prompt = await prompt_of(body, engine, state.chat_template)
        settled.cut_to_context(engine, len(prompt.token_ids or ()))
        exchange = Exchange(http, engine, caller, "/v1/responses")
        stream = bool(body.stream)
        await exchange.submit(
            [prompt],
            settled.params,
            model=body.model,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            stream=stream,
        )
    answer = ResponseAnswer(body, settled, TokenSpeller(engine.engine.tokenizer), check_model(body.model, state))
    if stream:
        return exchange.stream(answer)
    return Response(dumps(answer.whole(await exchange.results())), media_type="application/json")


async def prompt_of(body: ResponsesBody, engine: AsyncEngine, template: str | None) -> Prompt:
    if body.prompt_token_ids is not None:
        return Prompt(token_ids=tuple(body.prompt_token_ids))
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    for message in body.input if isinstance(body.input, list) else ():
        content = message.content
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        messages.append({"role": "system" if message.role == "developer" else message.role, "content": text})
    return await conversation(engine, messages, template=template)


class ResponseAnswer:
    """The response to one request, in both forms; a `StreamFormat`."""

    def __init__(self, body: ResponsesBody, settled: Settled, speller: TokenSpeller, model: str) -> None:
        self._body = body
        self._settled = settled
        self._speller = speller
        self._item = new_id("msg")
        self._sequence = 0
        self._text = ""
        self._tokens: list[dict[str, Any]] = []
        params = settled.params
        self._head: dict[str, Any] = {
            "id": new_id("resp"),
            "object": "response",
            "created_at": now(),
            "model": model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "text": {"format": (body.text.format if body.text is not None else None) or {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "truncation": "disabled",
            "user": body.user,
        }

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        sample = outputs[0].outputs[0]
        self._text = sample.text
        self._tokens = self._logprobs(sample.token_ids, sample.logprobs)
        return {**self._finished(outputs, sample), "octavo": self._settled.report()}

    def _finished(self, outputs: list[RequestOutput], sample: CompletionOutput) -> dict[str, Any]:
        complete = sample.finish_reason == "stop"
        status = "completed" if complete else "incomplete"
        reason = {"length": "max_output_tokens"}.get(sample.finish_reason or "", sample.finish_reason)
        counts = usage(outputs)
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": None if complete else {"reason": reason},
            "output": [self._message(status)],
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"],
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counts["total_tokens"],
            },
        }

    def _unfinished(self) -> dict[str, Any]:
        blank: dict[str, Any] = {"error": None, "incomplete_details": None, "output": [], "usage": None}
        return {**self._head, "status": "in_progress", **blank}

    def _message(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self._part(self._text)]
        return {"id": self._item, "type": "message", "role": "assistant", "status": status, "content": content}

    def _part(self, text: str) -> dict[str, Any]:
        part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
        if self._body.top_logprobs is not None:
            part["logprobs"] = self._tokens
        return part

    def _logprobs(self, token_ids: list[int], entries: Any) -> list[dict[str, Any]]:
        if entries is None:
            return []
        return chat_logprobs(self._speller, token_ids, entries, self._body.top_logprobs or 0)

    # -- as it comes -----------------------------------------------------------------------------------------------

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item, "output_index": 0, "content_index": 0}

    def opening(self) -> bytes:
        begun = {**self._unfinished(), "octavo": self._settled.report()}
        return (
            self._event("response.created", response=begun)
            + self._event("response.in_progress", response=self._unfinished())
            + self._event("response.output_item.added", output_index=0, item=self._message("in_progress"))
            + self._event("response.content_part.added", **self._place(), part=self._part(""))
        )

    def deltas(self, place: int, deltas: list[RequestDelta]) -> bytes:
        data = b""
        for delta in deltas:
            tokens = self._logprobs(delta.token_ids, delta.logprobs)
            self._text += delta.text
            self._tokens += tokens
            if delta.text or tokens:
                data += self._event("response.output_text.delta", **self._place(), delta=delta.text, logprobs=tokens)
        return data

    def closing(self, outputs: list[RequestOutput]) -> bytes:
        response = self._finished(outputs, outputs[0].outputs[0])
        status = response["status"]
        return (
            self._event("response.output_text.done", **self._place(), text=self._text, logprobs=self._tokens)
            + self._event("response.content_part.done", **self._place(), part=self._part(self._text))
            + self._event("response.output_item.done", output_index=0, item=self._message(status))
            + self._event(f"response.{status}", response=response)
        )

    def failure(self, error: ApiError) -> bytes:
        said = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response={**self._unfinished(), "status": "failed", "error": said})
