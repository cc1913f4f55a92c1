"""/v1/chat/completions: the next message of a conversation, whole or as it comes.

Tool calls are read out of the text by `octavo.server.tools`; without tools in the request the text is the message.
"""

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
from octavo.server.logprobs import CompletionLogprobs, TokenSpeller, chat_logprobs
from octavo.server.prompts import as_template_message, conversation
from octavo.server.prompts import blaming as blaming_prompt
from octavo.server.protocol.chat import ChatBody
from octavo.server.sampling import Settled, check_model, check_stream, settle
from octavo.server.security import KeyedCaller
from octavo.server.state import ReadyEngine, State
from octavo.server.tooling import ToolPlan, ToolReader, blaming, plan_for, structure_of
from octavo.server.tools import adapt_history
from octavo.server.wire import DONE, dumps, event
from octavo.text.prompts import Prompt

router = APIRouter(tags=["generation"])


@router.post("/v1/chat/completions", summary="Answer a conversation", responses=STREAMED)
async def chat_completions(
    body: ChatBody, http: Request, caller: KeyedCaller, state: State, engine: ReadyEngine
) -> Response:
    """The assistant's next message; with `stream`, as server-sent events."""
    check(body)
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    plan = plan_for(body, engine, state.chat_template)
    settled = settle(
        body,
        state,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structured_outputs=one_structure(body, plan),
        skip_special_tokens=False if plan is not None and plan.keeps_special else body.skip_special_tokens,
    )
    with blaming_prompt("messages" if body.prompt_token_ids is None else "prompt_token_ids"):
        prompt = await prompt_of(body, engine, state.chat_template, plan)
        settled.cut_to_context(engine, len(prompt.token_ids or ()))
        exchange = Exchange(http, engine, caller, "/v1/chat/completions")
        stream = bool(body.stream)
        with blaming(body, plan):
            await exchange.submit(
                [prompt],
                settled.params,
                model=body.model,
                priority=body.priority or 0,
                cache_salt=body.cache_salt,
                stream=stream,
            )
    answer = ChatAnswer(body, settled, TokenSpeller(engine.engine.tokenizer), check_model(body.model, state), plan)
    if stream:
        return exchange.stream(answer)
    return Response(dumps(answer.whole(await exchange.results())), media_type="application/json")


def check(body: ChatBody) -> None:
    """Contradictions that `SamplingParams` cannot know of."""
    if bool(body.messages) == (body.prompt_token_ids is not None):
        code = "contradiction" if body.messages else "missing"
        raise ApiError(400, "give exactly one of messages and prompt_token_ids", param="messages", code=code)
    both = body.max_tokens is not None and body.max_completion_tokens is not None
    if both and body.max_tokens != body.max_completion_tokens:
        message = f"max_tokens={body.max_tokens} and max_completion_tokens={body.max_completion_tokens} differ"
        raise ApiError(400, message, param="max_tokens", code="contradiction")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs has no effect without logprobs: true", param="top_logprobs")
    check_stream(body)


def one_structure(body: ChatBody, plan: ToolPlan | None) -> dict[str, Any] | None:
    """What the text must look like; it can be asked for in one place only."""
    asked = {
        "response_format": structure_of(body.response_format, "response_format"),
        "structured_outputs": body.structured_outputs,
        "tool_choice": plan.structured_outputs if plan is not None else None,
    }
    given = {name: value for name, value in asked.items() if value is not None}
    if len(given) > 1:
        message = f"{' and '.join(given)}: only one of them can say what the text must look like"
        raise ApiError(400, message, param=next(iter(given)), code="contradiction")
    return next(iter(given.values()), None)


async def prompt_of(body: ChatBody, engine: AsyncEngine, template: str | None, plan: ToolPlan | None) -> Prompt:
    if body.prompt_token_ids is not None:
        return Prompt(token_ids=tuple(body.prompt_token_ids))
    messages = [as_template_message(message) for message in body.messages]
    tokenizer = engine.engine.tokenizer
    return await conversation(
        engine,
        plan.adapt(messages) if plan is not None else adapt_history(messages, tokenizer, template),
        template=template,
        add_generation_prompt=body.add_generation_prompt is not False,
        tools=plan.template_tools if plan is not None else None,
        variables=body.chat_template_kwargs,
    )


class ChatAnswer:
    """The answer to one request, in both forms; a `StreamFormat`."""

    def __init__(
        self, body: ChatBody, settled: Settled, speller: TokenSpeller, model: str, plan: ToolPlan | None
    ) -> None:
        self._body = body
        self._settled = settled
        self._speller = speller
        self._plan = plan
        self._readers: dict[int, ToolReader] = {}
        self._head = {"id": new_id("chatcmpl"), "object": "chat.completion", "created": now(), "model": model}

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        output = outputs[0]
        choices = [self._choice(output, sample) for sample in output.outputs]
        return {**self._head, "choices": choices, "usage": usage(outputs), "octavo": self._settled.report()}

    def _choice(self, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": sample.text, "refusal": None}
        reason = sample.finish_reason
        if self._plan is not None:
            reader = self._plan.reader()
            reader.push(sample.text)
            reader.finish()
            message |= reader.message()
            reason = "tool_calls" if reader.called and reason == "stop" else reason
        choice: dict[str, Any] = {
            "index": sample.index,
            "message": message,
            "logprobs": self._logprobs(sample.token_ids, sample.logprobs),
            "finish_reason": reason,
            "stop_reason": sample.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"], choice["prompt_token_ids"] = sample.token_ids, output.prompt_token_ids
        if output.prompt_logprobs is not None:
            found = CompletionLogprobs(self._speller).take(output.prompt_token_ids, output.prompt_logprobs)
            choice["prompt_logprobs"] = found
        return choice

    def _logprobs(self, token_ids: list[int], entries: Any) -> dict[str, Any] | None:
        if entries is None:
            return None
        content = chat_logprobs(self._speller, token_ids, entries, self._body.top_logprobs or 0)
        return {"content": content, "refusal": None}

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return event({**self._head, "object": "chat.completion.chunk", "choices": choices, **more})

    def opening(self) -> bytes:
        """The role of each choice; what was defaulted or changed."""
        choices = [
            {"index": i, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            for i in range(self._settled.params.n)
        ]
        return self._chunk(choices, octavo=self._settled.report())

    def deltas(self, place: int, deltas: list[RequestDelta]) -> bytes:
        return b"".join(self._part(delta) for delta in deltas)

    def _part(self, delta: RequestDelta) -> bytes:
        pieces, reason = self._pieces(delta)
        data = b""
        for place, piece in enumerate(pieces):
            part: dict[str, Any] = {"index": delta.index, "delta": piece, "logprobs": None, "finish_reason": None}
            if place == 0:  # tokens and their log-probabilities go out once, with the first piece of their text
                part["logprobs"] = self._logprobs(delta.token_ids, delta.logprobs)
                if self._body.return_token_ids:
                    part["token_ids"] = delta.token_ids
            data += self._chunk([part])
        if delta.finish_reason is not None:
            end: dict[str, Any] = {"delta": {}, "logprobs": None, "finish_reason": reason}
            data += self._chunk([{"index": delta.index, **end, "stop_reason": delta.stop_reason}])
        return data

    def _pieces(self, delta: RequestDelta) -> tuple[list[dict[str, Any]], str | None]:
        """What the delta adds to the message, in order; and the finish reason."""
        if self._plan is None:
            return ([{"content": delta.text}] if delta.text or delta.token_ids else []), delta.finish_reason
        reader = self._readers.get(delta.index)
        if reader is None:
            reader = self._readers[delta.index] = self._plan.reader()
        pieces = reader.push(delta.text)
        if delta.finish_reason is not None:
            pieces = [*pieces, *reader.finish()]
        if not pieces and (delta.logprobs or self._body.return_token_ids) and delta.token_ids:
            pieces = [{"content": ""}]
        reason = "tool_calls" if reader.called and delta.finish_reason == "stop" else delta.finish_reason
        return pieces, reason

    def closing(self, outputs: list[RequestOutput]) -> bytes:
        options = self._body.stream_options
        if options is None or not options.include_usage:
            return DONE
        return self._chunk([], usage=usage(outputs)) + DONE

    def failure(self, error: ApiError) -> bytes:
        return event(error.body())
