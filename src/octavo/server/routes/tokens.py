"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from octavo.async_engine import AsyncEngine
from octavo.server.errors import ApiError
from octavo.server.logprobs import TokenSpeller
from octavo.server.prompts import as_template_message, blaming, conversation
from octavo.server.protocol.tokens import DetokenizeBody, TokenizeBody
from octavo.server.sampling import check_model
from octavo.server.security import KeyedCaller
from octavo.server.state import ReadyEngine, State
from octavo.server.wire import dumps

router = APIRouter(tags=["tokens"])


@router.post("/tokenize", summary="Token ids of a text or a conversation")
async def tokenize(body: TokenizeBody, caller: KeyedCaller, state: State, engine: ReadyEngine) -> Response:
    check_model(body.model, state)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give exactly one of prompt and messages", param="prompt")
    if body.messages is not None:
        if body.add_special_tokens:
            message = "add_special_tokens has no effect on messages: the chat template writes its own"
            raise ApiError(400, message, param="add_special_tokens")
        with blaming("messages"):
            prompt = await conversation(
                engine,
                [as_template_message(message) for message in body.messages],
                template=state.chat_template,
                add_generation_prompt=body.add_generation_prompt,
                variables=body.chat_template_kwargs,
            )
        ids = list(prompt.token_ids or ())
    else:
        text, special = body.prompt or "", body.add_special_tokens is not False
        tokenizer = _tokenizer(engine)
        with blaming("prompt"):
            ids = await engine.off_loop(lambda: tokenizer.encode(text, add_special_tokens=special), len(text))
    limit = engine.engine.config.max_model_len
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": limit, "tokens": ids}
    if body.return_token_strs:
        speller = TokenSpeller(engine.engine.tokenizer)
        answer["token_strs"] = [speller.text(i) for i in ids]
    return Response(dumps(answer), media_type="application/json")


@router.post("/detokenize", summary="Text of token ids")
async def detokenize(body: DetokenizeBody, caller: KeyedCaller, state: State, engine: ReadyEngine) -> Response:
    check_model(body.model, state)
    tokenizer, skip = _tokenizer(engine), body.skip_special_tokens
    spec = engine.engine.spec
    size = max(tokenizer.vocab_size, 0 if spec is None else spec.vocab_size)
    for place, token in enumerate(body.tokens):
        if token >= size:
            message = f"tokens: id {token} (position {place}) is outside the vocabulary: ids run from 0 to {size - 1}"
            raise ApiError(400, message, param="tokens")
    text = await engine.off_loop(lambda: tokenizer.decode(body.tokens, skip_special_tokens=skip), len(body.tokens))
    return Response(dumps({"prompt": text}), media_type="application/json")


def _tokenizer(engine: AsyncEngine) -> Any:
    if engine.engine.tokenizer is None:
        raise ApiError(400, "the engine has no tokenizer", code="no_tokenizer")
    return engine.engine.tokenizer
