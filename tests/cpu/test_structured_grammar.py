"""Compiling grammars: what is refused and with which words, hostile input, token bytes of tokenizers, the cache."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from helpers.grammars import SCHEMAS
from helpers.serving import byte_tokenizer
from octavo.errors import SamplingError
from octavo.grammar import compiler as compiling
from octavo.grammar import limits
from octavo.grammar import probe as probing
from octavo.grammar.compiler import GrammarCompiler
from octavo.grammar.probe import Probe
from octavo.grammar.vocabulary import Vocabulary
from octavo.models.tokenizer import Tokenizer
from octavo.sampling_params import StructuredOutputs

END = 257


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_tokenizer(), 260, (END,))


def refs(count: int) -> dict[str, Any]:
    links = {f"r{i}": {"$ref": f"#/$defs/r{i + 1}"} for i in range(count)}
    return {"$ref": "#/$defs/r0", "$defs": {**links, f"r{count}": {"type": "integer"}}}


def nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


def doubled(depth: int) -> dict[str, Any]:
    """Each definition uses the next one four times."""
    each = {
        f"r{i}": {
            "allOf": [{"anyOf": [{"$ref": f"#/$defs/r{i + 1}"}] * 2}, {"anyOf": [{"$ref": f"#/$defs/r{i + 1}"}] * 2}]
        }
        for i in range(depth)
    }
    return {"$ref": "#/$defs/r0", "$defs": {**each, f"r{depth}": {"type": "integer"}}}


UNSUPPORTED = {
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "not": {"not": {"type": "string"}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "if": {"if": {"type": "integer"}, "then": {"minimum": 3}},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "b"}},
    "Unknown format: nope": {"type": "string", "format": "nope"},
    "Invalid type: foo": {"type": "foo"},
    "look-around": {"type": "string", "pattern": "(?=a)b"},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "not present in a registry": {"$ref": "http://example.org/schema.json"},
    "'/nope' does not exist": {"$ref": "#/nope"},
}


@pytest.mark.parametrize("word", UNSUPPORTED)
def test_an_unsupported_keyword_is_refused_by_name(compiler: GrammarCompiler, word: str) -> None:
    with pytest.raises(SamplingError, match=r"^json: ") as refused:
        compiler.compile(StructuredOutputs(json=UNSUPPORTED[word]))
    assert word in str(refused.value)


def test_a_schema_cannot_switch_the_checks_off(compiler: GrammarCompiler) -> None:
    with pytest.raises(SamplingError, match="not"):
        compiler.compile(StructuredOutputs(json={"x-guidance": {"lenient": True}, "not": {"type": "string"}}))


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "huge schema": ({"json": json.dumps({"enum": ["x" * 80_000]})}, r"bytes; at most 65536"),
    "huge regex": ({"regex": "a" * 70_000}, "70000 bytes"),
    "huge grammar": ({"grammar": 'start: "a"' + " " * 70_000}, "bytes; at most 65536"),
    "many choices": ({"choice": [str(i) for i in range(2001)]}, "2001 strings; at most 2000"),
    "deep schema": ({"json": nested(70)}, "deeper than 60"),
    "very deep schema": ({"json": nested(2500)}, "the schema is not JSON|deeper than 60"),
    "deep regex": ({"regex": "(" * 5000 + "a" + ")" * 5000}, "5000 nested brackets; at most 60"),
    "deep grammar": ({"grammar": "start: " + "(" * 100 + '"a"' + ")" * 100}, "100 nested brackets"),
    "reference to itself": ({"json": {"$ref": "#"}}, "no text matches it"),
    "chain of references": ({"json": refs(600)}, "601 references .* at most 500"),
    "doubling references": ({"json": doubled(15)}, "too large|too big"),
    "slow arithmetic": ({"json": {"type": "integer", "multipleOf": 7919999}}, "multipleOf=7919999"),
    "slow arithmetic in a grammar": (
        {"grammar": 'start: %json {"type": "integer", "multipleOf": 7919999}'},
        "multipleOf=7919999",
    ),
    "slow arithmetic of two": (
        {"json": {"type": "integer", "allOf": [{"multipleOf": 4095}, {"multipleOf": 4093}]}},
        "multipleOf=409.*for all multipleOf of the schema together",
    ),
    "tiny fraction": ({"json": {"type": "number", "multipleOf": 1e-300}}, "multipleOf=1e-300"),
    "repeated repetition": ({"regex": "((a{1000}){1000}){1000}"}, "cannot be followed"),
    "doubling terminals": (
        {"grammar": "start: R0\n" + "\n".join(f'R{i}: R{i + 1} "x" R{i + 1}' for i in range(30)) + '\nR30: "a"'},
        "too big",
    ),
    "doubling rules": (
        {"grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(30)) + '\nr30: "a"'},
        "Too many items",
    ),
    "endless rule": ({"grammar": "start: start"}, "no text matches it"),
    "thousands of optional properties": (
        {"json": {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(2000)}}},
        "cannot be followed",
    ),
    "no text": ({"json": {"allOf": [{"type": "integer"}, {"type": "string"}]}}, "Unsatisfiable"),
    "not JSON": ({"json": "{'type': 'integer'}"}, "is not JSON"),
    "not a number": ({"json": '{"minimum": NaN}'}, "NaN is not JSON"),
    "not a schema": ({"json": "[1, 2]"}, "a schema is an object, not list"),
    "broken regex": ({"regex": "(a"}, "unclosed group"),
    "back-reference": ({"regex": r"(a)\1"}, "backreferences are not supported"),
    "broken grammar": ({"grammar": "start: foo"}, "grammar: "),
    "grammar without start": ({"grammar": 'foo: "a"'}, "no start rule"),
    "embedded broken schema": ({"grammar": "start: %json [1"}, "%json is followed by no JSON object"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused(compiler: GrammarCompiler, name: str) -> None:
    fields, words = HOSTILE[name]
    with pytest.raises(SamplingError, match=words) as refused:
        compiler.compile(StructuredOutputs(**fields))
    assert len(str(refused.value)) < 600  # a message, not the grammar sent back


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "(x+x+)+y"}, {"regex": "(a|b)*a(a|b){30}"},
        {"json": {"type": "string", "pattern": "^(a+)+b"}}, {"json": {"type": "array", "minItems": 10**9}},
        {"json": {"enum": [f"value {i}" for i in range(3000)]}}, {"json": refs(400)}, {"json": True},
        {"json": {"type": "object", "properties": {"a": {"$ref": "#"}}}},
        {"grammar": 'start: s\ns: s s s | s s | "a" |'},
    ],
    ids=lambda f: str(f)[:40],
)  # fmt: skip
def test_what_would_be_slow_elsewhere_is_not_here(compiler: GrammarCompiler, fields: dict[str, Any]) -> None:
    """No backtracking, no expansion: these compile, and a walk through them stays within the limits."""
    matcher = compiler.compile(StructuredOutputs(**fields)).start((), (END,))
    for step in range(60):
        going = [i for i in np.flatnonzero(matcher.allowed()).tolist() if i != END]
        if not going:
            break
        matcher.push(going[(step * 31) % len(going)])
    assert matcher.error is None


def test_what_is_slow_for_every_token_is_refused(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.compile(StructuredOutputs(regex="[a-z]+ quick"))
    monkeypatch.setattr(compiling, "MASK_SECONDS", 0.0)  # the measure is processor time: any token takes some
    with pytest.raises(SamplingError, match=r"ms for each token, at most 0 are allowed"):
        compiler.compile(StructuredOutputs(regex="[a-z]+ slow"))


def test_brackets_in_the_words_of_a_schema_are_no_nesting(compiler: GrammarCompiler) -> None:
    sad = json.dumps({"type": "null", "description": ":(" * 100})
    compiler.compile(StructuredOutputs(json=sad))
    compiler.compile(StructuredOutputs(grammar=f"start: %json {sad}"))


def test_what_outgrows_the_limits_on_its_way_closes(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(StructuredOutputs(regex="(.{0,1000}){0,1000}x")).start((), (END,))
    letter = byte_tokenizer().encode("a", add_special_tokens=False)[0]
    for _ in range(1000):
        if not matcher.allowed().any():
            break
        matcher.push(letter)
    assert "too many expressions" in (matcher.error or "") and not matcher.may_end()


def test_a_grammar_that_takes_too_long_is_given_up(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def slow(*_: Any) -> Any:
        release.wait(30)
        raise SamplingError("json: late")

    monkeypatch.setattr(compiling, "SECONDS", 0.01)
    monkeypatch.setattr(compiling, "compile_for", slow)
    fresh = GrammarCompiler(byte_tokenizer(), 260, (END,))
    fresh._vocabulary = compiler.vocabulary
    try:
        for number in range(compiling.STUCK):
            with pytest.raises(SamplingError, match=r"not compiled within 0\.01 s"):
                fresh.compile(StructuredOutputs(regex=f"a{number}"))
        with pytest.raises(SamplingError, match="4 grammars before it are still compiling"):
            fresh.compile(StructuredOutputs(regex="b"))
    finally:
        release.set()
        for thread in fresh._stuck:
            thread.join(10)
    monkeypatch.undo()
    fresh.compile(StructuredOutputs(regex="b"))


def test_a_process_tries_strange_grammars_and_can_be_ended(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs for ever is ended with its process, what brings the process down is refused, and both do no harm."""
    probe = compiler.probe
    compiler.compile(StructuredOutputs(regex="tried first"), isolated=True)
    first = probe._process
    assert first is not None and first.poll() is None
    with pytest.raises(SamplingError, match="unclosed group"):
        compiler.compile(StructuredOutputs(regex="(b"), isolated=True)
    assert probe._process is first
    endless = 'start: %json {"type": "integer", "multipleOf": 7919999}'
    monkeypatch.setattr(probing, "SECONDS", 0.3)
    with pytest.raises(SamplingError, match=r"cannot be compiled within 0\.3 s"):
        probe.check(StructuredOutputs(grammar=endless))  # not stopped by the limits, which `compile` asks first
    assert probe.ended == 1 and first.poll() is not None
    monkeypatch.undo()
    compiler.compile(StructuredOutputs(regex="tried after"), isolated=True)
    assert probe._process is not None and probe._process is not first
    probe._process.kill()
    probe._process.wait()
    probe.check(StructuredOutputs(regex="started again"))
    monkeypatch.setattr(probing, "SECONDS", 0.5)
    links = "".join(f"r{i}: r{i + 1}\n" for i in range(100_000))
    with pytest.raises(SamplingError, match=r"cannot be compiled|too big"):
        probe.check(StructuredOutputs(grammar=f'start: r0\n{links}r100000: "a"'))
    probe.check(StructuredOutputs(regex="and again"))
    probe.close()
    assert probe._process is None


def test_the_process_ends_with_its_owner() -> None:
    probe = Probe()
    probe.check(StructuredOutputs(regex="a"))
    process = probe._process
    assert process is not None
    del probe
    assert process.poll() is not None


def test_grammars_are_kept_by_content_and_the_oldest_forgotten(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = GrammarCompiler(byte_tokenizer(), 260, (END,))
    fresh._vocabulary = compiler.vocabulary
    monkeypatch.setattr(compiling, "CACHED", 2)
    first = fresh.compile(StructuredOutputs(json={"type": "integer"}))
    assert fresh.compile(StructuredOutputs(json='{"type": "integer"}')) is first
    assert fresh.compile(StructuredOutputs(regex="integer")) is not first
    assert fresh.compiled == 2
    fresh.compile(StructuredOutputs(json={"type": "integer"}))  # used again: the other is now the oldest
    fresh.compile(StructuredOutputs(choice=["a"]))
    assert fresh.compile(StructuredOutputs(json={"type": "integer"})) is first
    assert len(fresh._cache) == 2


def test_many_threads_compile_and_walk_at_once(compiler: GrammarCompiler) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for schema in SCHEMAS.values():
                matcher = compiler.compile(StructuredOutputs(json={**schema, "title": f"t{number % 3}"})).start()
                for step in range(20):
                    ids = np.flatnonzero(matcher.allowed())
                    if not len(ids):
                        break
                    matcher.push(int(ids[(step + number) % len(ids)]))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


# -- token bytes -------------------------------------------------------------------------------------------------------

MARK = "\u2581"


def sentencepiece(*, strip: bool) -> Tokenizer:
    """Llama's kind: pieces with a visible space, and one token for each byte. strip: the head loses one space."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    words += [MARK, *"abcdefghijklmnopqrstuvwxyz", f"{MARK}the", "the", f"{MARK}a", f"{MARK}{MARK}", "é"]
    backend = Backend(
        models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    steps: list[Any] = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(content=" ", left=1)] * strip)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(MARK, "never", split=False)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    return Tokenizer(backend, 1, (2,))


@pytest.mark.parametrize("strip", [False, True])
def test_random_walks_give_texts_of_the_grammar(strip: bool) -> None:
    """Decoded by the tokenizer itself, whatever it does to the first token and to single bytes."""
    tokenizer = sentencepiece(strip=strip)
    maker = GrammarCompiler(tokenizer, tokenizer.vocab_size, (2,))
    random = np.random.default_rng(0)
    for pattern, words in (("(the| a|é|日){1,3}", {"the", " a", "é", "日"}), ("  ?the", {" the", "  the"})):
        seen = set()
        for _ in range(60):
            matcher, ids = maker.compile(StructuredOutputs(regex=pattern)).start((), (2,)), []
            while (token := int(random.choice(np.flatnonzero(matcher.allowed())))) != 2:
                ids.append(token)
                matcher.push(token)
            text = rest = tokenizer.decode(ids)
            for _ in range(3):
                rest = next((rest.removeprefix(w) for w in words if rest.startswith(w)), rest)
            assert rest == "", (pattern, text)
            seen.add(text)
        assert len(seen) >= len(words)


def test_the_first_tokens_spelling_is_the_readers() -> None:
    vocabulary = Vocabulary(sentencepiece(strip=True), 292, (2,))
    alias = vocabulary.first_alias
    assert alias is not None
    tokens = vocabulary.tokens
    the, spaced = tokens.index(b"the"), tokens.index(b" the")
    assert alias[spaced] == the and alias[the] == the
    assert alias[tokens.index(b" ")] == -1  # a space alone is nothing at the head of a text
    assert tokens[alias[tokens.index(b"  ")]] == b" "
    assert Vocabulary(sentencepiece(strip=False), 292, (2,)).first_alias is None


def test_bytes_equal_those_of_the_librarys_own_reading() -> None:
    import llguidance

    for tokenizer in (sentencepiece(strip=False), byte_tokenizer()):
        size = tokenizer.vocab_size
        ours = Vocabulary(tokenizer, size, tokenizer.eos_token_ids)
        theirs = llguidance.LLTokenizer(tokenizer.backend.to_str(), n_vocab=size, eos_token=list(ours.ends))
        assert [ours.backend.decode_bytes([i]) for i in range(size)] == [theirs.decode_bytes([i]) for i in range(size)]


def test_ids_without_text_are_never_allowed() -> None:
    maker = GrammarCompiler(byte_tokenizer(), 300, (END,))  # an embedding larger than the vocabulary
    matcher = maker.compile(StructuredOutputs(regex="(?s:.*)")).start((), (END,))
    allowed = np.flatnonzero(matcher.allowed())
    assert len(allowed) > 100 and set(allowed[allowed > 255].tolist()) == {END}


def test_a_tokenizer_without_fixed_bytes_is_refused() -> None:
    backend = Backend(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    with pytest.raises(SamplingError, match="tokens no text of their own"):
        GrammarCompiler(Tokenizer(backend, None, (1,)), 2, (1,)).compile(StructuredOutputs(regex="a"))


def test_the_limits_are_where_the_documentation_says() -> None:
    assert (limits.MAX_BYTES, limits.MAX_DEPTH, limits.MAX_REFERENCES, limits.MAX_CHOICES) == (65536, 60, 500, 2000)
