"""The tokenizer against the transformers library on the same files, chat templates, and what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from helpers.tiny_models import CHAT_TEMPLATE, byte_tokenizer, write_tokenizer
from octavo.errors import ModelError, PromptError
from octavo.models.gguf_file import GGUFFile
from octavo.models.tokenizer import Tokenizer
from octavo.models.tokenizer_files import load_tokenizer_directory, load_tokenizer_gguf

CORPUS = (
    "", " ", "  ", "   leading and trailing   ", "Hello, world!", "naïve café — “quoted” … ½",
    "你好,世界。日本語テキスト",
    "안녕하세요 세계", "مرحبا بالعالم", "שלום", "Привет, мир", "🙂🙃👩‍👩‍👧‍👦🏳️‍🌈", "e\u0301 vs é",
    "\t\ttabs\n\n\nnewlines\r\n",
    "def f(x):\n    return {'a': [1, 2, 3]}  # comment\n", "1234567890 3.14159 1e-9 0xFF", "<bos><eos><s></s><unk>",
    "a<s>b</s> c", "don't WON'T I'll we've", "▁▁ metaspace ▁", "\u200b\u00a0\ufeff",
    "x" * 300, "ab " * 50, "\x00\x01\x7f",
    "<start_of_turn>user\nhi<end_of_turn>\n", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𓀀", "\n", "\n\n  \n", "a  b   c    d     e",
)  # fmt: skip


def random_texts(count: int) -> list[str]:
    draw = random.Random(11)
    ranges = [(0x20, 0x7E), (0xA0, 0x24F), (0x400, 0x4FF), (0x4E00, 0x4FFF), (0x1F300, 0x1F6FF), (0x20, 0x22)]
    return ["".join(chr(draw.randint(*draw.choice(ranges))) for _ in range(draw.randrange(60))) for _ in range(count)]


def assert_equal(ours: Tokenizer, theirs: Any) -> None:
    for text in (*CORPUS, *random_texts(200)):
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids, repr(text)
            for skip in (True, False):
                plain = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert ours.decode(ids, skip_special_tokens=skip) == plain, repr(text)


# Directories


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}])
def test_directory_equals_the_library(flags: dict[str, bool], tmp_path: Path) -> None:
    write_tokenizer(tmp_path, **flags)
    assert_equal(load_tokenizer_directory(tmp_path), AutoTokenizer.from_pretrained(tmp_path))


def test_facts(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer_directory(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.vocab_size) == (256, (257,), 259)
    assert tokenizer.special_ids == {256, 257, 258}
    assert (tokenizer.token_text(257), tokenizer.token_text(10_000), tokenizer.token_text(-1)) == ("</s>", None, None)
    assert tokenizer.token_id("</s>") == 257
    assert tokenizer.decode([10_000]) == ""


def test_end_ids_of_generation_config(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [258, 257]}')
    assert load_tokenizer_directory(tmp_path).eos_token_ids == (258, 257)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ModelError, match="generation_config"):
        load_tokenizer_directory(tmp_path)


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    backend = byte_tokenizer()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer_directory(tmp_path).encode("a" * 20)) == 21


def test_special_tokens_map_and_objects(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "unk_token": None})
    )
    tokenizer = load_tokenizer_directory(tmp_path, fallback_eos=(7,))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (256, (257,))
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert not tokenizer.has_chat_template
    (tmp_path / "special_tokens_map.json").unlink()
    assert load_tokenizer_directory(tmp_path, fallback_eos=(7,), bos=3).eos_token_ids == (7,)


def test_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"broken tokenizer file"):
        load_tokenizer_directory(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        load_tokenizer_directory(tmp_path)


def test_text_that_is_not_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer_directory(tmp_path)
    with pytest.raises(PromptError, match="Unicode"):
        tokenizer.encode("\ud800")
    with pytest.raises(PromptError, match="string"):
        tokenizer.encode(3)  # type: ignore[arg-type]


# Chat templates


MESSAGES = [
    {"role": "system", "content": "Be <b>brief</b>."},
    {"role": "user", "content": "Grüße 🙂"},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"x": "é<"}}]},
]
TEMPLATES = {
    "plain": CHAT_TEMPLATE,
    "helpers": (
        "{%- for m in messages %}{%- if loop.index0 == 7 %}{%- break %}{%- endif %}\n"
        "  {%- if m.tool_calls %}{{ m.tool_calls | tojson(indent=2) }}{% generation %}x{% endgeneration %}\n"
        "  {%- elif 'content' in m %}{{ m['content'] | trim | upper }}{%- endif %}\n{%- endfor %}"
        "{%- set ns = namespace(n=0) %}{%- for m in messages %}{%- set ns.n = ns.n + 1 %}{%- endfor %}{{ ns.n }}"
        "{{ strftime_now('%Y') }}{{ custom | default('none') }}{% if tools %}{{ tools | tojson }}{% endif %}"
    ),
}


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("generation", [True, False])
def test_templates_render_as_the_library_does(name: str, generation: bool, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat_template=TEMPLATES[name])
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for given in (None, tools):
        for extra in ({}, {"custom": "yes"}):
            ours = load_tokenizer_directory(tmp_path).apply_chat_template(MESSAGES, generation, given, **extra)
            theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
                MESSAGES, tools=given, tokenize=False, add_generation_prompt=generation, **extra
            )
            assert ours == theirs


def test_template_file_wins_and_named_templates(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("file {{ messages|length }}")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools {{ tools|length }}")
    tokenizer = load_tokenizer_directory(tmp_path)
    assert tokenizer.apply_chat_template(MESSAGES) == "file 3"
    assert tokenizer.apply_chat_template(MESSAGES, tools=[{}, {}]) == "tools 2"
    assert tokenizer.apply_chat_template(MESSAGES, template="tool_use", tools=[{}]) == "tools 1"
    assert tokenizer.apply_chat_template(MESSAGES, template="own {{ messages[0].role }}") == "own system"
    (tmp_path / "chat_template.jinja").unlink()
    write_tokenizer(tmp_path, chat_template=[{"name": "a", "template": "A"}, {"name": "b", "template": "B"}])
    tokenizer = load_tokenizer_directory(tmp_path)
    assert tokenizer.apply_chat_template(MESSAGES, template="b") == "B"
    with pytest.raises(PromptError, match="a, b"):
        tokenizer.apply_chat_template(MESSAGES)


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", MESSAGES, "roles must alternate"),
        ("{% if %}", MESSAGES, "broken at line 1"),
        ("{{ ''.__class__.__mro__ }}", MESSAGES, "unsafe"),
        ("{{ messages.append(1) }}", MESSAGES, "refuses"),
        ("{{ messages[0].content + 1 }}", MESSAGES, "refuses"),
        ("x", [], "non-empty"),
        ("x", "hi", "non-empty"),
        ("x", [{"content": "no role"}], "message 0"),
        ("x", [MESSAGES[0], "hi"], "message 1"),
    ],
)
def test_templates_and_messages_that_are_refused(template: str, messages: Any, message: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat_template=template)
    with pytest.raises(PromptError, match=message):
        load_tokenizer_directory(tmp_path).apply_chat_template(messages)


def test_no_template_says_what_to_do(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat_template=None)
    with pytest.raises(PromptError, match=r"no chat template.*chat_template"):
        load_tokenizer_directory(tmp_path).apply_chat_template(MESSAGES)


# GGUF vocabularies


def trained_byte_level() -> Any:
    """A byte-level BPE with a few hundred real merges."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<|end|>", "<|begin|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator(list(CORPUS) * 3, trainer)
    return backend


def write_vocabulary(path: Path, architecture: str, add: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in add.items():
        getattr(writer, f"add_{key}")(value)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def library_tokenizer(path: Path) -> Any:
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, vocabulary, config = get_gguf_tokenizer(str(path))
    backend, _ = convert_gguf_tokenizer(architecture, vocabulary)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **config)


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", None])
@pytest.mark.parametrize("begin", [True, False])
def test_byte_level_vocabulary(pre: str | None, begin: bool, tmp_path: Path) -> None:
    content = json.loads(trained_byte_level().to_str())
    tokens = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    types = [3 if t.startswith("<|") else 1 for t in tokens]
    types[tokens.index("a")] = 4  # a user-defined token is kept whole, but is not special
    path = write_vocabulary(
        tmp_path / "v.gguf",
        "qwen2",
        {
            "tokenizer_model": "gpt2", "token_list": tokens, "token_types": types,
            "token_merges": [" ".join(m) for m in content["model"]["merges"]],
            "eos_token_id": 0, "bos_token_id": 1, "add_bos_token": begin, **({"tokenizer_pre": pre} if pre else {}),
        },
    )  # fmt: skip
    ours = load_tokenizer_gguf(GGUFFile(path))
    assert_equal(ours, library_tokenizer(path))
    assert ours.encode("x")[0] == 1 if begin else 1 not in ours.encode("x")
    assert ours.special_ids == {0, 1}
    assert ours.eos_token_ids == (0,)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("flags", [{}, {"add_bos_token": False}, {"add_eos_token": True}])
def test_sentencepiece_vocabulary(architecture: str, flags: dict[str, bool], tmp_path: Path) -> None:
    draw = random.Random(2)
    pieces = {"▁", *"abcdefghijklmnopqrstuvwxyz.,!?'\n"}
    for text in CORPUS:
        for word in text.replace(" ", " ▁").split(" "):
            pieces.update(word[:end] for end in range(1, min(len(word), 7)))
    words = sorted({p for p in pieces if p and not p.startswith("<")}, key=lambda p: (len(p), p))
    gemma = architecture == "gemma3"
    tokens = [
        "<pad>",
        *(("<eos>", "<bos>") if gemma else ("</s>", "<s>")),
        "<unk>",
        *(f"<0x{b:02X}>" for b in range(256)),
        *words,
    ]
    types = [3, 3, 3, 2, *([6] * 256), *([1] * len(words))]
    if gemma:
        tokens += ["  ", "   ", "<start_of_turn>", "<end_of_turn>", "<mask>"]
        types += [1, 1, 3, 4, 3]
    scores = [0.0] * 260 + [-float(draw.randrange(40)) for _ in range(len(tokens) - 260)]  # with ties
    path = write_vocabulary(
        tmp_path / "v.gguf",
        architecture,
        {
            "tokenizer_model": "llama", "token_list": tokens, "token_types": types, "token_scores": scores,
            "eos_token_id": 1, "bos_token_id": 2, "unk_token_id": 3, **flags,
        },
    )  # fmt: skip
    ours = load_tokenizer_gguf(GGUFFile(path))
    assert_equal(ours, library_tokenizer(path))
    assert (ours.encode("a")[0] == 2) == flags.get("add_bos_token", True)
    assert (ours.encode("a")[-1] == 1) == flags.get("add_eos_token", False)


@pytest.mark.parametrize(
    ("add", "message"),
    [
        ({"tokenizer_model": "bert", "token_list": ["a"]}, "'bert'.*llama, gpt2"),
        ({"tokenizer_model": "gpt2"}, "no vocabulary"),
        ({"tokenizer_model": "gpt2", "token_list": ["a"]}, "merges"),
        ({"tokenizer_model": "llama", "token_list": ["a"]}, "scores"),
        (
            {
                "tokenizer_model": "gpt2",
                "token_list": ["a", "b", "ab"],
                "token_merges": ["a b"],
                "tokenizer_pre": "odd",
            },
            "odd",
        ),
    ],
)
def test_vocabularies_that_are_refused(add: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        load_tokenizer_gguf(GGUFFile(write_vocabulary(tmp_path / "v.gguf", "llama", add)))


def test_template_of_the_header(tmp_path: Path) -> None:
    tokens = ["a", "b", "ab"]
    add = {
        "tokenizer_model": "gpt2",
        "token_list": tokens,
        "token_merges": ["a b"],
        "chat_template": "T{{ messages|length }}",
    }
    tokenizer = load_tokenizer_gguf(GGUFFile(write_vocabulary(tmp_path / "v.gguf", "llama", add)))
    assert tokenizer.apply_chat_template(MESSAGES) == "T3"
