"""`GrammarCompiler`: from `StructuredOutputs` to a `CompiledGrammar`, checked, bounded in time and kept by content.

For any thread: the server compiles on a helper thread before a request reaches the engine, which then finds the result
here. What is handed out has been tried: its first masks were computed within the limits. Whatever cannot be compiled is
a `SamplingError` that says why.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.errors import SamplingError
from octavo.grammar.limits import FUEL, check, schema_of
from octavo.grammar.matcher import GrammarMatcher
from octavo.grammar.probe import Probe
from octavo.grammar.vocabulary import Vocabulary, import_llguidance
from octavo.sampling_params import StructuredOutputs

if TYPE_CHECKING:
    from octavo.models.tokenizer import Tokenizer

CACHED = 128  # grammars kept
SECONDS = 5.0  # most time for one grammar
STUCK = 4  # compilations that ran out of time and may still be running; more are refused
STACK_BYTES = 256 << 20  # the library follows chains of references by recursion; address space, not memory
TRIED_STEPS = 12
MASK_SECONDS = 0.02  # of this thread's time, for one token: every other request waits meanwhile
#: JSON allows endless white space between values, and a model can get lost in it: nothing, one space, or one line break
#: with an indentation.
WHITE_SPACE = r"( |\n {0,24}|\n\t{0,12})?"
_stack_lock = threading.Lock()


class CompiledGrammar:
    """A grammar for one vocabulary; immutable. `start` makes the state of one sequence."""

    __slots__ = ("_template", "_vocabulary")

    def __init__(self, template: Any, vocabulary: Vocabulary) -> None:
        self._template = template
        self._vocabulary = vocabulary

    def start(self, output: Sequence[int] = (), end_ids: Sequence[int] = ()) -> GrammarMatcher:
        """A matcher that has seen the tokens `output`. end_ids: see `GrammarMatcher`."""
        matcher = GrammarMatcher(self._template.deep_copy(), self._vocabulary, end_ids)
        for token in output:
            matcher.push(token)
        return matcher

    def can_end_with(self, end_ids: Sequence[int]) -> bool:
        """Is there an end among these ids that is not text?"""
        return bool(self._vocabulary.without_text(end_ids))


class GrammarCompiler:
    """One per engine. Vocabulary and grammars are made when first asked for."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> None:
        self._make_vocabulary = lambda: Vocabulary(tokenizer, vocab_size, ends)
        self._vocabulary: Vocabulary | None = None
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._cache: OrderedDict[tuple[str, str], CompiledGrammar] = OrderedDict()
        self._stuck: list[threading.Thread] = []
        self.probe = Probe()
        self.compiled = 0  # grammars compiled, found ones not counted

    @property
    def vocabulary(self) -> Vocabulary:
        """Seconds for a large vocabulary, the first time."""
        with self._making:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            return self._vocabulary

    def compile(self, asked: StructuredOutputs, *, isolated: bool = False) -> CompiledGrammar:
        """The grammar, from the cache or made now. Raises `SamplingError`, or `RequestError` without llguidance.

        isolated: a new one is first tried in another process, which can be ended; for grammars of strangers.
        """
        key = (asked.kind, _content(asked))
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        check(asked)
        vocabulary = self.vocabulary
        if isolated and asked.kind not in ("choice", "json_object"):
            self.probe.check(asked)
        made = self._in_time(asked.kind, lambda: compile_for(asked, vocabulary))
        with self._lock:
            self.compiled += 1
            self._cache[key] = made
            while len(self._cache) > CACHED:
                self._cache.popitem(last=False)
        return made

    def _in_time(self, kind: str, work: Callable[[], CompiledGrammar]) -> CompiledGrammar:
        """Run `work` on a thread with a deep stack, for at most SECONDS. What runs longer is left to end by itself."""
        with self._lock:
            self._stuck = [t for t in self._stuck if t.is_alive()]
            if len(self._stuck) >= STUCK:
                raise SamplingError(f"{kind}: {STUCK} grammars before it are still compiling; try again later")
        result: list[CompiledGrammar | BaseException] = []

        def run() -> None:
            try:
                result.append(work())
            except BaseException as error:
                result.append(error)

        with _stack_lock:
            before = threading.stack_size(STACK_BYTES)
            try:
                thread = threading.Thread(target=run, name="octavo-grammar", daemon=True)
                thread.start()
            finally:
                threading.stack_size(before)
        thread.join(SECONDS)
        if not result:
            with self._lock:
                self._stuck.append(thread)
            raise SamplingError(f"{kind}: not compiled within {SECONDS:g} s; make it simpler")
        if isinstance(result[0], BaseException):
            raise result[0]
        return result[0]


def _content(asked: StructuredOutputs) -> str:
    value = getattr(asked, asked.kind)
    return value if isinstance(value, str) else json.dumps(value)


def compile_for(asked: StructuredOutputs, vocabulary: Vocabulary) -> CompiledGrammar:
    """Compile and try, on this thread, for as long as it takes. Raises `SamplingError`."""
    library = import_llguidance()
    limits = library.LLParserLimits(**FUEL)
    matcher = library.LLMatcher(vocabulary.backend, _grammar(asked, library), log_level=0, limits=limits)
    if matcher.is_error():
        raise SamplingError(f"{asked.kind}: {_message(matcher)}")
    grammar = CompiledGrammar(matcher, vocabulary)
    _try(asked.kind, grammar)
    return grammar


def _grammar(asked: StructuredOutputs, library: Any) -> str:
    make = library.LLMatcher
    kind = asked.kind
    if kind in ("json", "json_object"):
        schema = schema_of(asked) if kind == "json" else {"type": "object"}
        # Options inside the schema could switch the strict checks off again: ours are laid over them.
        options = {"whitespace_pattern": WHITE_SPACE, "lenient": False, "coerce_one_of": False}
        try:
            text: str = make.grammar_from_json_schema(json.dumps(schema), overrides=options)
        except ValueError as error:
            raise SamplingError(f"json: {error}") from None
        return text
    if kind == "regex":
        # A digit is one of 0 to 9: nobody who writes \d{4} for a year means the other six hundred of Unicode.
        return str(make.grammar_from_lark(f"start: /{library.regex_to_lark(asked.regex, 'd')}/"))
    if kind == "choice":
        words = " | ".join(json.dumps(word, ensure_ascii=False) for word in asked.choice or ())
        return str(make.grammar_from_lark(f"start: {words}"))
    return str(make.grammar_from_lark(asked.grammar))


def _try(kind: str, grammar: CompiledGrammar) -> None:
    """Walk a few tokens: a grammar that cannot begin, or outgrows the limits at once, is refused here."""
    matcher, times = grammar.start(), []
    for step in range(TRIED_STEPS):
        complete = matcher.may_end()
        begin = time.thread_time()
        allowed = matcher.allowed()
        times.append(time.thread_time() - begin)
        if matcher.error is not None:
            if complete:
                return
            what = "no text matches it" if step == 0 else f"it cannot be followed beyond token {step}"
            raise SamplingError(f"{kind}: {what}: {matcher.error}")
        ids = np.flatnonzero(allowed)
        matcher.push(int(ids[(step * 7919) % len(ids)]))
    if (usual := sorted(times)[len(times) // 2]) > MASK_SECONDS:
        limit = f"at most {MASK_SECONDS * 1000:g} are allowed"
        raise SamplingError(f"{kind}: it takes {usual * 1000:.0f} ms for each token, {limit}; make it simpler")


def _message(matcher: Any) -> str:
    """The library's message, in one line and without the grammar's text."""
    lines = [line.strip() for line in str(matcher.get_error()).split("\n<non-verbose/>")[0].splitlines()]
    text = " ".join(line for line in lines if line)
    return text if len(text) <= 400 else text[:399] + "…"
