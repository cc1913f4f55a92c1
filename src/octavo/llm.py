"""`LLM`: the engine for programs that have their prompts at hand. Names are vLLM's.

    llm = LLM(model="gemma-3-270m")
    for output in llm.generate(["One", "Two"], SamplingParams(max_tokens=32)):
        print(output.outputs[0].text)

Drives the engine's steps and gives each caller its own outputs; knows nothing of blocks or tensors. Threads may share
one: they take turns, a step at a time, and what they ask for runs in one batch. The invariant: whatever way a call ends
(an error at the door, Ctrl-C, a closed stream), none of its requests is left in the engine, and the engine can go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from octavo import logs
from octavo.config import EngineConfig
from octavo.driver import Driver, Params
from octavo.errors import ConfigError, PromptError, RequestError, SamplingError
from octavo.lora import Lora, with_adapters
from octavo.outputs import BeamSearchOutput, EmbeddingOutput, RequestOutput
from octavo.sampling_params import BeamSearchParams, PoolingParams, SamplingParams
from octavo.streaming import Stream
from octavo.text.prompts import Prompt, one_each, read_prompt, read_prompts
from octavo.vllm_names import config_from

if TYPE_CHECKING:
    from octavo.engine import Engine
    from octavo.lora import LoadedAdapter


class LLM:
    """A loaded model and its engine.

    Settings are those of `EngineConfig` (see there); every one can be given by name. Raises ConfigError for an unknown
    setting or a value that cannot be honoured, ModelError for model files that cannot be used. Usable from several
    threads, and as a context manager: `close` gives the memory back. on_progress(stage, done, total): while loading.
    texts: prompts will be texts, so a large tokenizer loads at once, beside the weights; else with the first text.
    """

    def __init__(
        self,
        model: str = "gemma-3-270m",
        *,
        tokenizer: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        block_size: int | None = None,
        num_blocks: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        gpu_memory_utilization: float = 0.9,
        cpu_kv_bytes: int | None = None,
        enable_prefix_caching: bool | None = None,
        allocation: str = "paged",
        load_format: str = "auto",
        skip_tokenizer_init: bool = False,
        seed: int | None = None,
        enforce_eager: bool = False,
        debug: bool = False,
        on_progress: Callable[[str, int, int], None] | None = None,
        texts: bool = False,
        **settings: Any,
    ) -> None:
        given = {k: v for k, v in locals().items() if k in EngineConfig.__dataclass_fields__}
        config = config_from(**given, **settings)
        logs.setup()
        from octavo.engine import Engine  # torch is loaded here, not at import

        self._attach(Engine.build(config, on_progress=on_progress, texts=texts))

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """An LLM over an engine that is there already; closing it closes the engine."""
        llm = cls.__new__(cls)
        llm._attach(engine)
        return llm

    def _attach(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self._driver = Driver(engine)

    # ---- answers -------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        lora: Lora = None,
        lora_request: Any = None,
    ) -> list[RequestOutput]:
        """Answers to `prompts`, in their order.

        prompts: a string, a list of token ids, {"prompt": …} or {"prompt_token_ids": …} with an optional "cache_salt",
        or a list of those. sampling_params: one for all or one each (None: `SamplingParams()`). priority: smaller runs
        earlier; one for all or one each. use_tqdm: a progress bar, if stderr is a terminal. lora: name of a loaded
        adapter, for all or one each (None: the model itself). lora_request: the same as vLLM says it, see
        `octavo.lora.LoRARequest`; loaded when it is not.
        All or nothing: if one prompt is refused, RequestError names its index and nothing has been started.
        """
        encoded = self._adapted(self._encode_all(read_prompts(prompts)), lora, lora_request)
        return self._answer(encoded, sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora: Lora = None,
        lora_request: Any = None,
    ) -> list[RequestOutput]:
        """Answers to one conversation, a list of {"role": …, "content": …}, or to a list of conversations.

        The text comes from the model's own template, or from `chat_template` (Jinja). The other arguments are those
        of `generate`. Raises RequestError when the model has no template and none is given.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        prompts = [
            self.chat_prompt(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self._answer(self._adapted(prompts, lora, lora_request), sampling_params, use_tqdm, priority)

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """A conversation as a prompt: templated and encoded (the template writes the begin token itself)."""
        tokenizer = self._tokenizer("chat needs one: it applies the model's chat template")
        if not messages or not all(isinstance(m, Mapping) and "role" in m for m in messages):
            raise PromptError('a conversation is a non-empty list of {"role": …, "content": …}')
        if chat_template is None and not tokenizer.has_chat_template:
            raise RequestError(
                "this model has no chat template (a base model continues text rather than answering); "
                "use generate(), or pass chat_template='…' (Jinja)"
            )
        text = tokenizer.apply_chat_template(
            [dict(m) for m in messages],
            add_generation_prompt=add_generation_prompt,
            tools=None if tools is None else [dict(t) for t in tools],
            template=chat_template,
            **(chat_template_kwargs or {}),
        )
        return Prompt(text, tuple(tokenizer.encode(text, add_special_tokens=False)))

    def stream(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int | None = None,
        lora: str | None = None,
    ) -> Stream:
        """The answer to one prompt as it comes: an iterator of `StreamDelta`.

        Refusals are raised here, before the first delta. Closing the iterator (or dropping it, or leaving its `with`)
        aborts the request and frees its blocks. Other requests may run between two deltas.
        """
        params = self._check_params(sampling_params)
        if params.best_of is not None and params.best_of > params.n:
            raise SamplingError(
                f"best_of={params.best_of} cannot be streamed: which {params.n} of them are kept is known only at the "
                "end; use generate(), or leave best_of out"
            )
        encoded = self._encode(prompt if isinstance(prompt, Prompt) else read_prompt(prompt))
        encoded = self._adapted([encoded], lora)[0]
        driver = self._driver
        request_id = driver.admit([encoded], [params], [priority], [])[0]
        return Stream(request_id, lambda: driver.next_output(request_id), lambda: driver.abandon(request_id))

    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams | Sequence[BeamSearchParams],
        *,
        use_tqdm: bool = False,
        priority: int | Sequence[int] | None = None,
        lora: Lora = None,
    ) -> list[BeamSearchOutput]:
        """Beams of each prompt, best first. Forms of `prompts`, and all or nothing, as in `generate`."""
        encoded = self._adapted(self._encode_all(read_prompts(prompts)), lora)
        each = one_each(params, len(encoded), "beam search parameters")
        for given in each:
            if not isinstance(given, BeamSearchParams):
                raise SamplingError(f"beam_search takes BeamSearchParams, got {type(given).__name__}")
        ids: list[str] = []
        with self._driver.all_or_none(ids):
            self._driver.admit(encoded, each, one_each(priority, len(encoded), "priorities"), ids)
            self._driver.run(ids, use_tqdm)
        return [self._live().take_beams(request_id) for request_id in ids]

    def embed(
        self,
        prompts: Any,
        *,
        pooling: str = "mean",
        normalize: bool = True,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        lora: Lora = None,
    ) -> list[EmbeddingOutput]:
        """One vector for each prompt, in their order: the model's final hidden states (after its last norm), pooled.

        pooling: "mean" over all tokens of the prompt, or "last": the state of the last one. normalize: scaled to
        length 1. Forms of `prompts`, and all or nothing, as in `generate`.
        """
        encoded = self._adapted(self._encode_all(read_prompts(prompts)), lora)
        params = PoolingParams(pooling=pooling, normalize=normalize)
        for index, output in enumerate(outputs := self._run(encoded, [params] * len(encoded), use_tqdm, priority)):
            if output.embedding is None:
                raise RequestError(f"prompt {index} has no embedding: {output.outputs[0].stop_reason}")
        return [
            EmbeddingOutput(o.request_id, o.prompt, o.prompt_token_ids, o.embedding or [], o.num_cached_tokens)
            for o in outputs
        ]

    # ---- adapters ------------------------------------------------------------------------------------------------

    def load_lora(self, name: str, path: str) -> LoadedAdapter:
        """Load an adapter (a directory in peft's format) under a name for `generate(…, lora=name)`.

        Requests may be under way. Raises ModelError for files that do not fit, RequestError for a name in use or one
        adapter more than `max_loras`.
        """
        with self._driver.turn():
            return self._live().load_lora(name, path)

    def drop_lora(self, name: str) -> None:
        """Take the name away at once; requests that run with the adapter finish with it, then its memory is free."""
        with self._driver.turn():
            self._live().drop_lora(name)

    def loras(self) -> list[LoadedAdapter]:
        """The adapters that requests can name."""
        return list(self._live().adapters)

    # ---- text ----------------------------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the model's begin token unless switched off."""
        return list(self._tokenizer("encode needs one").encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Raises PromptError for one outside the vocabulary."""
        tokenizer, ids = self._tokenizer("decode needs one"), list(token_ids)
        if wrong := [token for token in ids if not 0 <= token < self.spec.vocab_size]:
            raise PromptError(f"id {wrong[0]} is outside the vocabulary: ids run from 0 to {self.spec.vocab_size - 1}")
        return str(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def get_tokenizer(self) -> Any:
        """The tokenizer; raises RequestError when there is none."""
        return self._tokenizer("get_tokenizer was called")

    # ---- inspection ----------------------------------------------------------------------------------------------

    @property
    def config(self) -> EngineConfig:
        """The settings in use, complete."""
        return self._live().config

    @property
    def spec(self) -> Any:
        """The model's `ModelSpec`."""
        return self._live().spec

    def pool_view(self) -> Any:
        """The pool as it is now: counts, block tables, peaks (`PoolView`)."""
        with self._driver.turn():
            return self._live().pool_view()

    def watch(self, callback: Callable[[], None] | None, *, before_update: Callable[[], None] | None = None) -> None:
        """Call `callback()` after every step (None: no more); it may look at `pool_view()`, not start requests.

        before_update: called inside every step, when the model has run and nothing has ended or been freed for it yet,
        so the tables are those that the step used. What it raises stops the engine.
        """
        self._live().before_update = before_update
        self._driver.watcher = callback

    def audit(self) -> None:
        """Check the whole bookkeeping; raises AuditError that pinpoints the first inconsistent block."""
        with self._driver.turn():
            self._live().audit()

    def settings(self) -> dict[str, Any]:
        """setting -> {"asked", "chosen", "why"}."""
        return self._live().settings()

    def stats(self) -> Any:
        """Counters of the engine so far."""
        with self._driver.turn():
            return self._live().stats()

    def explain(self, request_id: str) -> Any:
        """How much of a finished request's prompt came from the prefix cache, and which block broke the chain and why.

        A `FinishedRequest`: `str()` of it is the sentence. The latest few hundred are kept. The same for an output at
        hand: `str(output.cache_report)`.
        """
        with self._driver.turn():
            return self._live().explain(request_id)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False (and nothing done) while requests are running."""
        with self._driver.turn():
            return self._live().reset_prefix_cache()

    def close(self) -> None:
        """Give everything back. A second close does nothing; any other call after it raises ConfigError."""
        engine, self._engine = self._engine, None
        if engine is not None:
            self._driver.close()

    def __enter__(self) -> LLM:
        self._live()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- helpers -------------------------------------------------------------------------------------------------

    def _live(self) -> Engine:
        if self._engine is None:
            raise ConfigError("this LLM is closed; make a new one")
        return self._engine

    def _tokenizer(self, why: str) -> Any:
        tokenizer = self._live().tokenizer
        if tokenizer is None:
            raise RequestError(
                f"there is no tokenizer, and {why}; pass token ids, or load the model without skip_tokenizer_init "
                "and with its tokenizer files"
            )
        return tokenizer

    def _check_params(self, params: Any) -> SamplingParams:
        if params is None:
            return SamplingParams()
        if isinstance(params, BeamSearchParams):
            raise SamplingError(
                "BeamSearchParams belong to beam_search(); generate, chat and stream take SamplingParams"
            )
        if not isinstance(params, SamplingParams):
            raise SamplingError(f"sampling parameters must be SamplingParams, got {type(params).__name__}")
        return params

    def _encode(self, prompt: Prompt) -> Prompt:
        """The prompt with ids."""
        if prompt.token_ids is not None:
            return prompt
        assert prompt.text is not None
        if not prompt.text:
            raise PromptError("the prompt is empty: give at least one character, or prompt_token_ids")
        ids = self._tokenizer("a text prompt needs one").encode(prompt.text)
        return replace(prompt, token_ids=tuple(ids))

    def _adapted(self, prompts: list[Prompt], lora: Lora, lora_request: Any = None) -> list[Prompt]:
        return with_adapters(self._live(), prompts, lora, lora_request)

    def _encode_all(self, prompts: list[Prompt]) -> list[Prompt]:
        return [self._encode(prompt) for prompt in prompts]

    def _answer(self, prompts: list[Prompt], params: Any, use_tqdm: bool, priority: Any) -> list[RequestOutput]:
        each = [self._check_params(p) for p in one_each(params, len(prompts), "sampling parameters")]
        return self._run(prompts, each, use_tqdm, priority)

    def _run(self, prompts: list[Prompt], each: Sequence[Params], use_tqdm: bool, priority: Any) -> list[RequestOutput]:
        ids: list[str] = []
        with self._driver.all_or_none(ids):
            self._driver.admit(prompts, each, one_each(priority, len(prompts), "priorities"), ids)
            outputs = self._driver.run(ids, use_tqdm)
        return [outputs[request_id] for request_id in ids]
