"""A tokenizer from the user's cache is the one its files give, whatever state the cache is in."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from test_models_tokenizer import CORPUS, assert_equal, trained_byte_level, write_vocabulary
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from helpers.tiny_models import byte_tokenizer, write_tiny, write_tokenizer
from octavo import LLM, SamplingParams
from octavo.errors import ModelError
from octavo.models import kept_tokens, tokenizer_files
from octavo.models.gguf_file import GGUFFile
from octavo.models.kept_tokenizer import SWITCH, KeptTokenizer
from octavo.models.kept_tokens import read_kept, tokens_of, write_kept
from octavo.models.tokenizer import Tokenizer
from octavo.models.tokenizer_files import load_tokenizer_directory, load_tokenizer_gguf
from octavo.server.settings import FOREIGN
from octavo.text.detokenizer import Detokenizer

FACTS = ("bos_token_id", "eos_token_ids", "special_tokens", "chat_templates", "special_ids", "vocab_size")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its own cache, in which small vocabularies are kept, too."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(tokenizer_files, "WORTH_KEEPING", 0)
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with a tokenizer."""
    (tmp_path / "model").mkdir()
    write_tokenizer(tmp_path / "model")
    return tmp_path / "model"


def kept_files(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*.safetensors"))


def assert_the_same(kept: Tokenizer, made: Tokenizer) -> None:
    """Everything that can be asked without encoding, then everything else."""
    assert isinstance(kept, KeptTokenizer) and not isinstance(made, KeptTokenizer)
    for name in FACTS:
        assert getattr(kept, name) == getattr(made, name), name
    ids = [-1, *range(made.vocab_size + 3), 10**6]
    assert [kept.token_text(i) for i in ids] == [made.token_text(i) for i in ids]
    for skip in (True, False):
        ours, theirs = (Detokenizer(t, skip_special_tokens=skip) for t in (kept, made))
        some = [i for i in ids if i >= 0] * 2
        assert [ours.push([i]) for i in some] == [theirs.push([i]) for i in some]
        assert ours.flush() == theirs.flush()
    assert kept._backend is None  # type: ignore[attr-defined]  # all this without the library's own
    for text in CORPUS:
        ids = made.encode(text)
        assert kept.encode(text) == ids
        assert kept.encode(text, add_special_tokens=False) == made.encode(text, add_special_tokens=False)
        assert kept.decode(ids) == made.decode(ids)
    assert all(kept.token_id(token) == made.token_id(token) for token in ("</s>", "a", "no such token"))


def test_the_second_load_of_a_directory_is_from_the_cache(model: Path, cache: Path) -> None:
    made = load_tokenizer_directory(model)
    assert len(kept_files(cache)) == 1
    kept = load_tokenizer_directory(model)
    assert_the_same(kept, made)
    assert_equal(kept, AutoTokenizer.from_pretrained(model))


def test_a_gap_among_the_ids_and_a_token_of_two_kinds(model: Path) -> None:
    """A vocabulary with an id that nobody has; an added token that replaces one; text beyond ASCII."""
    content = json.loads(byte_tokenizer().to_str())
    content["model"]["vocab"]["é日"] = 300
    (model / "tokenizer.json").write_text(json.dumps(content))
    backend = Backend.from_file(str(model / "tokenizer.json"))
    backend.add_tokens([AddedToken("a", special=False), AddedToken("<new>", special=True)])
    backend.save(str(model / "tokenizer.json"))
    made = load_tokenizer_directory(model)
    kept = load_tokenizer_directory(model)
    assert (made.token_text(300), made.token_text(270)) == ("é日", None)
    assert_the_same(kept, made)


@pytest.mark.parametrize("decoder", [None, "unknown"])
def test_decoders_without_a_table(decoder: str | None, model: Path) -> None:
    """No decoder at all, and one that the detokenizer knows nothing of and asks the library for."""
    content = json.loads(byte_tokenizer().to_str())
    content["decoder"] = None if decoder is None else {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (model / "tokenizer.json").write_text(json.dumps(content))
    made, kept = load_tokenizer_directory(model), load_tokenizer_directory(model)
    ids = made.encode("some text, and more")
    assert Detokenizer(kept).push(ids) == Detokenizer(made).push(ids) != ""


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_gguf(kind: str, tmp_path: Path) -> None:
    content = json.loads(trained_byte_level().to_str())["model"]
    tokens = sorted(content["vocab"], key=content["vocab"].get)
    add = {"tokenizer_model": "gpt2", "token_merges": [" ".join(m) for m in content["merges"]]}
    if kind == "llama":
        tokens = ["<pad>", "</s>", "<s>", "<unk>", *(f"<0x{b:02X}>" for b in range(256)), *tokens]
        add = {"tokenizer_model": "llama", "token_scores": [0.0] * len(tokens)}
    add |= {"token_list": tokens, "token_types": [1] * len(tokens), "bos_token_id": 1, "eos_token_id": 2}
    path = write_vocabulary(tmp_path / "v.gguf", "llama", add | {"chat_template": "T"})
    made, kept = load_tokenizer_gguf(GGUFFile(path)), load_tokenizer_gguf(GGUFFile(path))
    assert_the_same(kept, made)
    changed = write_vocabulary(tmp_path / "v.gguf", "llama", add | {"chat_template": "U"})
    assert load_tokenizer_gguf(GGUFFile(changed)).chat_templates == {"default": "U"}


def new_token(path: Path) -> None:
    backend = Backend.from_file(str(path / "tokenizer.json"))
    backend.add_special_tokens(["<more>"])
    backend.save(str(path / "tokenizer.json"))


def new_role(path: Path) -> None:
    (path / "tokenizer_config.json").write_text('{"bos_token": "<pad>"}')


def new_end(path: Path) -> None:
    (path / "generation_config.json").write_text('{"eos_token_id": [5]}')


def new_map(path: Path) -> None:
    (path / "special_tokens_map.json").write_text('{"unk_token": "a"}')


def new_template(path: Path) -> None:
    (path / "chat_template.jinja").write_text("new")


def old_template(path: Path) -> None:
    (path / "chat_template.json").write_text('{"chat_template": "old"}')


def further_template(path: Path) -> None:
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "more.jinja").write_text("more")


@pytest.mark.parametrize(
    "change", [new_token, new_role, new_end, new_map, new_template, old_template, further_template]
)
def test_any_other_file_is_another_tokenizer(change: Callable[[Path], None], model: Path) -> None:
    before = load_tokenizer_directory(model)
    change(model)
    after = load_tokenizer_directory(model)
    assert not isinstance(after, KeptTokenizer)
    assert any(getattr(before, name) != getattr(after, name) for name in FACTS)
    assert_the_same(load_tokenizer_directory(model), after)


def test_ids_of_the_model_belong_to_it(model: Path) -> None:
    """What the model's config says where the files name nothing is no part of the files."""
    (model / "tokenizer_config.json").unlink()
    for ends, begin in (((7,), 1), ((8,), 1), ((7,), 2), ((7,), 1)):
        tokenizer = load_tokenizer_directory(model, ends, begin)
        assert (tokenizer.eos_token_ids, tokenizer.bos_token_id) == (ends, begin)
    assert isinstance(tokenizer, KeptTokenizer)


def test_a_new_version_of_the_library_or_of_the_code_starts_anew(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_tokenizer_directory(model)
    monkeypatch.setattr("tokenizers.__version__", "99")
    assert not isinstance(load_tokenizer_directory(model), KeptTokenizer)
    assert isinstance(load_tokenizer_directory(model), KeptTokenizer)
    monkeypatch.setattr("octavo.models.kept_tokenizer.CODE", ("load",))
    assert not isinstance(load_tokenizer_directory(model), KeptTokenizer)


def test_code_without_sources(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.models.kept_tokenizer.CODE", ("no such module",))
    assert load_tokenizer_directory(model).encode("a") and not kept_files(cache)


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def turned(content: bytes) -> bytes:
    """One bit of the texts."""
    return content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]


@pytest.mark.parametrize("damage", [cut, turned, lambda _: b"", lambda _: b"\xff" * 64])
def test_a_damaged_file_is_made_again(damage: Callable[[bytes], bytes], model: Path, cache: Path) -> None:
    made = load_tokenizer_directory(model)
    (file,) = kept_files(cache)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert not isinstance(load_tokenizer_directory(model), KeptTokenizer)
    assert file.read_bytes() == whole
    assert_the_same(load_tokenizer_directory(model), made)


def test_a_foreign_file_in_its_place(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    path = tmp_path / "x.safetensors"
    save_file({"text": np.zeros(1, np.uint8)}, path)
    assert read_kept(path) is None
    save_file({"text": np.zeros(1, np.uint8), "ends": np.ones(1, np.int64)}, path, {"about": "[]"})
    assert read_kept(path) is None


def test_a_cache_that_cannot_be_written(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "a file"))
    for _ in range(2):
        tokenizer = load_tokenizer_directory(model)
        assert not isinstance(tokenizer, KeptTokenizer) and tokenizer.decode(tokenizer.encode("ab")) == "ab"


def test_nobody_has_a_home(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("OCTAVO_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert load_tokenizer_directory(model).encode("a", add_special_tokens=False)


def test_switched_off(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    assert not isinstance(load_tokenizer_directory(model), KeptTokenizer) and not kept_files(cache)
    monkeypatch.setenv(SWITCH, "1")
    load_tokenizer_directory(model)
    monkeypatch.setenv(SWITCH, "0")
    assert not isinstance(load_tokenizer_directory(model), KeptTokenizer)


def test_the_switch_is_no_setting_of_the_server() -> None:
    """It refuses variables that look like its own and are not known."""
    assert SWITCH in FOREIGN


def test_small_files_are_not_worth_it(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_files, "WORTH_KEEPING", 1 << 30)
    load_tokenizer_directory(model)
    assert not kept_files(cache)


def test_files_that_change_under_a_kept_tokenizer(model: Path) -> None:
    load_tokenizer_directory(model)
    changed, gone = load_tokenizer_directory(model), load_tokenizer_directory(model)
    new_token(model)
    with pytest.raises(ModelError, match="have changed since the start"):
        changed.encode("a")
    (model / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        gone.encode("a")


def test_threads_load_the_library_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_tokenizer_directory(model)
    kept, loads = load_tokenizer_directory(model), []
    load = tokenizer_files._from_directory
    monkeypatch.setattr(tokenizer_files, "_from_directory", lambda *a: loads.append(1) or load(*a))
    found: list[list[int]] = []
    threads = [threading.Thread(target=lambda: found.append(kept.encode("ab"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(map(tuple, found))) == 1 and loads == [1]


def test_a_broken_tokenizer_is_never_kept(model: Path, cache: Path) -> None:
    (model / "tokenizer.json").write_text("{")
    for _ in range(2):
        with pytest.raises(ModelError, match="broken tokenizer file"):
            load_tokenizer_directory(model)
    assert not kept_files(cache)


def test_what_cannot_be_kept() -> None:
    """Two tokens with one id, and ids far apart."""
    assert tokens_of(Backend(models.WordLevel({"a": 0, "b": 1}, "a"))) == ["a", "b"]
    assert tokens_of(Backend(models.WordLevel({"a": 0, "b": 0}, "a"))) is None
    assert tokens_of(Backend(models.WordLevel({"a": 0, "b": 1000}, "a"))) is None
    assert tokens_of(Backend(models.BPE())) == []


def test_nothing_at_all_can_be_kept(tmp_path: Path) -> None:
    write_kept(tmp_path / "x", [], {"special_ids": [], "decoder": None})
    found = read_kept(tmp_path / "x")
    assert found is not None and found.id_to_token(0) is None and found.special_ids == frozenset()
    assert kept_tokens.read_kept(tmp_path / "y") is None


def test_prepare_loads_the_library_at_once(model: Path) -> None:
    load_tokenizer_directory(model).prepare()
    kept = load_tokenizer_directory(model)
    kept.prepare()
    assert kept._backend is not None  # type: ignore[attr-defined]


@pytest.mark.parametrize("texts", [True, False])
def test_an_engine_starts_without_the_library_unless_texts_will_come(
    texts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny("llama", tmp_path / "tiny")
    LLM(str(tmp_path / "tiny"), num_blocks=20).close()
    loads: list[object] = []
    load = tokenizer_files._from_directory
    monkeypatch.setattr(tokenizer_files, "_from_directory", lambda *a: loads.append(a) or load(*a))
    with LLM(str(tmp_path / "tiny"), num_blocks=20, texts=texts) as llm:
        assert len(loads) == texts
        params = SamplingParams(temperature=0, max_tokens=8, logprobs=2, ignore_eos=True)
        ids = llm.generate({"prompt_token_ids": byte_tokenizer().encode("AB").ids}, params)[0].outputs[0]
        assert len(loads) == texts and ids.text  # ids in, text out
        text = llm.generate("AB", params)[0].outputs[0]
        assert len(loads) == 1 and text.text == ids.text == llm.decode(ids.token_ids)
