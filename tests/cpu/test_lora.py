"""LoRA adapters against peft on transformers: alone, mixed in one batch, live, and apart in the prefix cache."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.dense_attention import run_chunks
from helpers.oracle import Model, assert_greedy, beams, random_ids, tiny
from helpers.queue_device import QueueDevice, standing_in
from octavo import LLM, BeamSearchParams, ConfigError, ModelError, RequestError, SamplingParams
from octavo.cli.main import main
from octavo.config import EngineConfig
from octavo.core.speculation import Speculator
from octavo.kernels.cpu import make_ops
from octavo.lora import LoRARequest
from octavo.models.load import load_model
from octavo.models.lora_reader import read_adapter
from octavo.runner.lora import LoraBank

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPTS = [random_ids(length, 11) for length in (4, 17, 40, 33, 70, 5)]


def adapter(model: Model, path: Path, seed: int, **settings: Any) -> Any:
    """A random adapter written to `path`; returns the oracle with it."""
    torch.manual_seed(seed)
    given = {"r": 4, "lora_alpha": 8, "target_modules": LINEARS, "init_lora_weights": False, **settings}
    adapted = peft.get_peft_model(copy.deepcopy(model.oracle), peft.LoraConfig(**given))
    adapted.save_pretrained(str(path))
    return adapted.eval()


class Set:
    """A model with two adapters; `oracles[None]` is the model itself."""

    def __init__(self, family: str, root: Path) -> None:
        self.model = tiny(family, root)
        self.paths = {name: str(root / f"{family}-{name}") for name in ("a", "b")}
        self.oracles: dict[str | None, Any] = {None: self.model.oracle}
        self.oracles["a"] = adapter(self.model, Path(self.paths["a"]), 1)
        self.oracles["b"] = adapter(
            self.model, Path(self.paths["b"]), 2, use_rslora=True, target_modules=["q_proj", "v_proj", "down_proj"],
            rank_pattern={"v_proj": 2, "layers.1.self_attn.q_proj": 6}, alpha_pattern={"down_proj": 3},
            layers_to_transform=[0, 1],
        )  # fmt: skip


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root, made = tmp_path_factory.mktemp("lora"), {}

    def get(family: str) -> Set:
        if family not in made:
            made[family] = Set(family, root)
        return made[family]

    return get


@pytest.fixture
def llama(sets: Any) -> Iterator[tuple[Set, LLM]]:
    found = sets("llama")
    with found.model.engine(lora=found.paths) as llm:
        yield found, llm


def answers(llm: LLM, prompts: list[list[int]], lora: Any = None, params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate([list(p) for p in prompts], params, use_tqdm=False, lora=lora)
    assert llm.pool_view().num_used == 0
    return [list(o.outputs[0].token_ids) for o in outputs]


@pytest.mark.parametrize(("family", "impl"), [("llama", "octavo"), ("gemma3", "octavo"), ("qwen2", "octavo"),
                                              ("llama", "transformers")])  # fmt: skip
def test_mixed_in_one_batch_equal_to_peft_and_to_alone(family: str, impl: str, sets: Any) -> None:
    found = sets(family)
    names = [None, "a", "b", "a", None, "b"]
    with found.model.engine(model_impl=impl, lora={"a": found.paths["a"]}, max_num_batched_tokens=48) as llm:
        llm.load_lora("b", found.paths["b"])
        assert [a.name for a in llm.loras()] == ["a", "b"]
        mixed = answers(llm, PROMPTS, names)
        for prompt, answer, name in zip(PROMPTS, mixed, names, strict=True):
            assert_greedy(found.oracles[name], prompt, answer)
        for index in (0, 1, 2):
            assert answers(llm, [PROMPTS[index]], names[index]) == [mixed[index]]
        assert answers(llm, [PROMPTS[2]] * 2, ["a", None]) != [mixed[2]] * 2  # the adapters do change the text


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_beside_quantised_weights(family: str, sets: Any) -> None:
    """Queries, keys and values of a base in int4 are products of different formats; an adapter adds to all of them."""
    found = sets(family)
    names = [None, "a", "b", "a", None, "b"]
    with found.model.engine(quantization="int4", lora=found.paths) as llm:
        mixed = answers(llm, PROMPTS, names)
        for index in (0, 1, 2):
            assert answers(llm, [PROMPTS[index]], names[index]) == [mixed[index]]
        assert len({tuple(a) for name in (None, "a", "b") for a in answers(llm, [PROMPTS[2]], name)}) == 3


def test_logits_equal_to_peft(sets: Any) -> None:
    found = sets("llama")
    loaded = load_model(
        EngineConfig(model=str(found.model.path)), dtype=torch.float32, device="cpu", ops=make_ops(torch.float32)
    )
    bank = LoraBank(loaded.decoder, make_ops(torch.float32), torch.float32)
    ids = random_ids(50, 4)
    for name in ("a", "b"):
        files = read_adapter(found.paths[name])
        bank.add(files)
        row = type("Row", (), {"adapter": files.key, "seq_id": 0})()
        with torch.no_grad():
            expected = found.oracles[name](torch.tensor([ids]), use_cache=False).logits[0]
        bank.select([row], torch.tensor([0, 50]).numpy())
        torch.testing.assert_close(run_chunks(loaded.decoder, ids, 50), expected, atol=1e-4, rtol=1e-4)
        bank.select([], torch.tensor([0]).numpy())
        with torch.no_grad():
            plain = found.model.oracle(torch.tensor([ids]), use_cache=False).logits[0]
        torch.testing.assert_close(run_chunks(loaded.decoder, ids, 50), plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["phi3", "gpt2", "gpt_neox"])
def test_modules_that_hold_several_weights(family: str, tmp_path: Path) -> None:
    """Fused and interleaved projections: the adapter is cut as the loader cuts the weight."""
    from helpers.tiny_models import FAMILIES

    known = next((name for name in FAMILIES if name.replace("-", "_").startswith(family)), None)
    if known is None:
        pytest.fail(f"no tiny model of {family}")
    model = tiny(known, tmp_path)
    targets = {"phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
               "gpt2": ["c_attn", "c_proj", "c_fc"],
               "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]}[family]  # fmt: skip
    oracle = adapter(model, tmp_path / "fused", 3, target_modules=targets, fan_in_fan_out=family == "gpt2")
    with model.engine(lora={"x": str(tmp_path / "fused")}) as llm:
        for prompt, answer in zip(PROMPTS[:3], answers(llm, PROMPTS[:3], "x"), strict=True):
            assert_greedy(oracle, prompt, answer)


def test_cached_prefixes_belong_to_one_adapter_by_content(llama: Any, tmp_path: Path) -> None:
    found, llm = llama
    prompt = random_ids(64, 21)

    def cached(lora: str | None) -> int:
        return int(llm.generate([prompt], GREEDY, use_tqdm=False, lora=lora)[0].num_cached_tokens)

    assert [cached(None), cached("a"), cached("b")] == [0, 0, 0]
    assert [cached(None), cached("a"), cached("b")] == [63, 63, 63] or min(cached(None), cached("a"), cached("b")) >= 48
    llm.load_lora("same as a", found.paths["a"])
    assert cached("same as a") >= 48  # one content, two names
    llm.drop_lora("a")
    llm.drop_lora("same as a")
    adapter(found.model, tmp_path / "other", 9)
    llm.load_lora("a", str(tmp_path / "other"))
    assert cached("a") == 0  # another content under the old name
    output = llm.generate([random_ids(64, 22)], GREEDY, use_tqdm=False)[0]
    assert output.num_cached_tokens == 0
    report = llm.generate([random_ids(64, 22)], GREEDY, use_tqdm=False, lora="b")[0].cache_report
    assert report.miss.kind == "adapter"


def test_preemption_samples_beams_embeddings_and_speculation(sets: Any) -> None:
    found = sets("llama")
    names = ["a", "b", None, "a", "b", None]
    with found.model.engine(lora=found.paths) as llm:
        expected = answers(llm, PROMPTS, names)
        plain = SamplingParams(n=2, temperature=0.8, seed=3, max_tokens=8)
        two = llm.generate([PROMPTS[1]], plain, use_tqdm=False, lora="a")[0].outputs
        again = llm.generate([PROMPTS[1], PROMPTS[1]], plain, use_tqdm=False, lora=["a", "b"])
        assert [o.token_ids for o in two] == [o.token_ids for o in again[0].outputs]
        assert [o.token_ids for o in two] != [o.token_ids for o in again[1].outputs]
        beam = llm.beam_search([PROMPTS[1]], BeamSearchParams(beam_width=3, max_tokens=6), lora="b")[0]
        best = beams(found.oracles["b"], PROMPTS[1], 3, max_tokens=6, end_ids=[257])
        assert [s.token_ids for s in beam.sequences] == [b.token_ids for b in best]
        vector = llm.embed([PROMPTS[2]], lora="a", pooling="last", normalize=False)[0].embedding
        with torch.no_grad():
            hidden = found.oracles["a"].base_model.model.model(torch.tensor([PROMPTS[2]])).last_hidden_state[0, -1]
        torch.testing.assert_close(torch.tensor(vector), hidden, atol=1e-4, rtol=1e-4)
    with found.model.engine(lora=found.paths, num_blocks=14, max_model_len=100) as llm:
        assert answers(llm, PROMPTS, names) == expected
        assert llm.stats().preemptions > 0
    lookup = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    for how in (lookup, f"draft:{found.model.path}:2"):  # the draft runs without the adapter: worse guesses
        with found.model.engine(lora=found.paths, speculative=how) as llm:
            scheduler = llm._live().scheduler
            free = replace(scheduler.speculator.settings, row_costs=(), draft_costs=())  # as many as may be
            scheduler.speculator = Speculator(free, scheduler.memory)
            assert answers(llm, PROMPTS, names) == expected
            assert llm.stats().spec_draft_tokens > 0


def test_dropped_while_in_use_it_finishes_first(llama: Any) -> None:
    found, llm = llama
    expected = answers(llm, [PROMPTS[3]], "a")[0]
    stream = llm.stream(PROMPTS[3], GREEDY, lora="a")
    got = list(next(stream).token_ids)
    llm.drop_lora("a")
    bank = llm._live().adapters._bank
    assert len(bank) == 2  # its weights stay while it runs
    with pytest.raises(RequestError, match="no adapter of this name is loaded; loaded: 'b'"):
        llm.generate([PROMPTS[0]], GREEDY, lora="a")
    for delta in stream:
        got += delta.token_ids
    assert got == expected
    answers(llm, [PROMPTS[0]])
    assert len(bank) == 1 and not llm._live().adapters.dropped
    llm.drop_lora("b")
    assert len(bank) == 0 == llm._live().adapters.nbytes
    with pytest.raises(RequestError, match="loaded: none"):
        llm.drop_lora("b")
    llm.load_lora("b", found.paths["b"])
    assert_greedy(found.oracles["b"], PROMPTS[1], answers(llm, [PROMPTS[1]], "b")[0])


def test_limits_names_and_the_way_vllm_says_it(sets: Any) -> None:
    found = sets("llama")
    with found.model.engine(max_loras=1) as llm:
        request = LoRARequest("mine", 1, found.paths["a"])
        output = llm.generate([PROMPTS[1]], GREEDY, use_tqdm=False, lora_request=request)[0]
        assert_greedy(found.oracles["a"], PROMPTS[1], list(output.outputs[0].token_ids))
        llm.load_lora("second name", found.paths["a"])  # shares the memory
        with pytest.raises(RequestError, match="max_loras=1"):
            llm.load_lora("b", found.paths["b"])
        with pytest.raises(RequestError, match="is loaded already with the same content"):
            llm.load_lora("mine", found.paths["a"])
        with pytest.raises(RequestError, match="drop it first"):
            llm.generate([PROMPTS[1]], GREEDY, lora_request=LoRARequest("mine", 1, found.paths["b"]))
        with pytest.raises(RequestError, match="one of them"):
            llm.generate([PROMPTS[1]], GREEDY, lora="mine", lora_request=request)
        with pytest.raises(RequestError, match="2 lora names for 1 prompts"):
            llm.generate([PROMPTS[1]], GREEDY, lora=["mine", "mine"])
    with pytest.raises(ConfigError, match="2 adapters, max_loras=1"):
        EngineConfig(lora=found.paths, max_loras=1)
    with pytest.raises(ConfigError, match="lora="):
        EngineConfig(lora={"a": 3})  # type: ignore[dict-item]
    assert EngineConfig(lora="x=/p, y=/q").lora == {"x": "/p", "y": "/q"}


def test_a_prompts_own_adapter_and_the_callers_may_not_differ(llama: Any) -> None:
    found, llm = llama
    own = [{"prompt_token_ids": PROMPTS[1], "lora": name} for name in ("a", "b")]
    expected = [answers(llm, [PROMPTS[1]], name)[0] for name in ("a", "b")]
    assert [list(o.outputs[0].token_ids) for o in llm.generate(own, GREEDY, use_tqdm=False)] == expected
    same = llm.generate(own, GREEDY, use_tqdm=False, lora=["a", None])  # None: nothing said beside the prompt's own
    assert [list(o.outputs[0].token_ids) for o in same] == expected
    for given in ({"lora": "b"}, {"lora_request": LoRARequest("b", 1, found.paths["b"])}):
        with pytest.raises(RequestError, match="prompt 0: its own lora='a' contradicts lora='b'"):
            llm.generate(own, GREEDY, use_tqdm=False, **given)
    with pytest.raises(RequestError, match="lora='zz': no adapter of this name is loaded; loaded: 'a', 'b'"):
        llm.generate([own[0], {"prompt_token_ids": PROMPTS[1], "lora": "zz"}], GREEDY, use_tqdm=False)
    assert llm.pool_view().num_used == 0


def test_the_command_line_gives_only_a_default(sets: Any, tmp_path: Path, capsys: Any) -> None:
    found = sets("llama")
    command = ["generate", "--model", str(found.model.path), "--dtype", "float32", "--num-blocks", "64",
               "--temperature", "0", "--max-tokens", "8", "--ignore-eos", "--json"]  # fmt: skip

    def run(prompts: list[dict[str, Any]], *options: str) -> tuple[int, list[list[int]], str]:
        file = tmp_path / "prompts"
        file.write_text("".join(json.dumps({"prompt_token_ids": PROMPTS[1], **p}) + "\n" for p in prompts))
        code = main([*command, "--prompts-file", str(file), *options])
        said = capsys.readouterr()
        texts = [json.loads(line)["outputs"][0]["token_ids"] for line in said.out.splitlines()]
        return code, texts, said.err

    a = f"a={found.paths['a']}"
    code, texts, _ = run([{}, {"lora": "a"}, {"lora": None}], "--lora", a)
    assert code == 0 and texts[0] == texts[1] != texts[2]
    assert_greedy(found.oracles["a"], PROMPTS[1], texts[0])
    assert_greedy(found.oracles[None], PROMPTS[1], texts[2])
    refused: list[tuple[list[str], list[dict[str, Any]], str]] = [
        (["--lora", a], [{"lora": "a"}, {"lora": "zz"}], "prompt 1: lora='zz': no adapter of this name; given: 'a'"),
        ([], [{"lora": "zz"}], "given: none"),
        (["--max-loras", "2"], [{}], "--max-loras: no effect without --lora"),
        (["--lora", found.paths["a"]], [{}], "write NAME=DIR"),
        (["--lora", "=x"], [{}], "--lora =x: write NAME=DIR"),
    ]
    for options, prompts, reason in refused:
        code, texts, said = run(prompts, *options)
        assert code == 2 and not texts and reason in said, said


def test_recorded_and_overlapped_steps(sets: Any) -> None:
    """On a device that records decode steps: steps with an adapter run kernel by kernel, others from their records."""
    found = sets("llama")
    names = ["a", "b", None, "a", None, "b"]
    with found.model.engine(lora=found.paths) as plain:
        expected, base = answers(plain, PROMPTS, names), answers(plain, PROMPTS)
        alone = answers(plain, [PROMPTS[1]], "a")[0]
    with standing_in(QueueDevice()):
        llm = found.model.engine(lora=found.paths)
    with llm:
        counters = llm._live().runner.graphs.counters
        assert llm.config.overlap and answers(llm, PROMPTS) == base
        replayed = sum(counters.by_bucket.values())
        assert replayed > 0
        assert answers(llm, PROMPTS, names) == expected
        assert sum(counters.by_bucket.values()) == replayed
        stream = llm.stream(PROMPTS[1], GREEDY, lora="a")
        got = list(next(stream).token_ids)
        llm.drop_lora("a")
        got += [token for delta in stream for token in delta.token_ids]
        assert got == alone
        assert answers(llm, PROMPTS) == base
        assert len(llm._live().adapters._bank) == 1


# ---- strict reading -----------------------------------------------------------------------------------------------


def changed(source: str, path: Path, tensors: Any = None, **config: Any) -> str:
    """A copy of an adapter with other keys, and tensors changed in place."""
    from safetensors.torch import load_file, save_file

    path.mkdir(exist_ok=True)
    old = json.loads((Path(source) / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**old, **config}))
    weights = load_file(Path(source) / "adapter_model.safetensors")
    if tensors is not None:
        tensors(weights)
    save_file({k: v.contiguous() for k, v in weights.items()}, path / "adapter_model.safetensors")
    return str(path)


KEY = "base_model.model.model.layers.1.self_attn.q_proj.lora_{}.weight"
CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "use_dora=True is not supported"), ({"bias": "all"}, "bias='all'"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"), ({"peft_type": "IA3"}, "peft_type='IA3'"),
    ({"lora_bias": True}, "lora_bias"), ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
    ({"target_parameters": ["x"]}, "target_parameters"), ({"something_new": 3}, "something_new=3"),
    ({"r": 5}, "rank is 5"), ({"lora_alpha": -1}, "lora_alpha=-1: must be a positive number"),
    ({"r": "four"}, ": r='four': must be"),
    ({"rank_pattern": {"q_proj(": 3}}, "regular expr"),
    ({"alpha_pattern": {"up_proj": "x"}}, r"alpha_pattern\['up_proj'\]='x'"),
    ({"rank_pattern": {"c_attn": 3}}, "rank_pattern: 'c_attn' matches none of the adapter's modules"),
    ({"alpha_pattern": {"layers.7.q_proj": 3}}, "alpha_pattern: 'layers.7.q_proj' matches none"),
    ({"target_modules": ["q_proj"]}, r"target_modules=\['q_proj'\] does not name .*layers.0.mlp.down_proj"),
    ({"target_modules": r".*\.self_attn\.\w+"}, "does not name .*mlp.down_proj"),
    ({"target_modules": 3}, "target_modules=3: must be"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "reason"), CONFIGS, ids=[f"{next(iter(c))}-{i}" for i, (c, _) in enumerate(CONFIGS)]
)
def test_keys_that_would_change_the_mathematics(config: Any, reason: str, sets: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=reason):
        read_adapter(changed(sets("llama").paths["a"], tmp_path / "x", **config))


def test_tensors_that_do_not_fit(llama: Any, tmp_path: Path) -> None:
    found, llm = llama
    q_a, q_b = KEY.format("A"), KEY.format("B")

    def refused(change: Any, reason: str, **config: Any) -> None:
        with pytest.raises(ModelError, match=reason):
            llm.load_lora("x", changed(found.paths["a"], tmp_path / "x", change, **config))
        assert [a.name for a in llm.loras()] == ["a", "b"]

    for number in (float("nan"), float("-inf")):
        refused(lambda w, number=number: w[q_b].view(-1)[3:4].fill_(number), f"{q_b} holds NaN or infinity")
    refused(lambda w: w.pop(q_b), "has lora_A but not the other half")
    refused(lambda w: w.update({q_a: torch.zeros(4, 63)}), "lora_A reads 63 numbers, the layer 64")
    refused(lambda w: w.update({q_b: torch.zeros(62, 4)}), "belongs to another model")
    refused(lambda w: w.update({"base_model.model.lm_head.lora_magnitude_vector": torch.zeros(3)}), "no DoRA")
    head = "base_model.model.lm_head.lora_{}.weight"
    refused(lambda w: w.update({head.format("A"): torch.zeros(4, 64), head.format("B"): torch.zeros(320, 4)}),
            "module lm_head is no product of this model", target_modules=[*LINEARS, "lm_head"])  # fmt: skip
    deep = "base_model.model.model.layers.9.mlp.up_proj.lora_{}.weight"
    refused(lambda w: w.update({deep.format("A"): torch.zeros(4, 64), deep.format("B"): torch.zeros(112, 4)}),
            "layers.9.mlp.up_proj is no product")  # fmt: skip
    with pytest.raises(ModelError, match="no such directory"):
        llm.load_lora("x", str(tmp_path / "nowhere"))
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "adapter_model.bin").write_bytes(b"no")
    with pytest.raises(ModelError, match="never read"):
        llm.load_lora("x", str(tmp_path / "pickled"))


def test_the_key_is_the_content(sets: Any, tmp_path: Path) -> None:
    source = sets("llama").paths["a"]
    key = read_adapter(source).key
    assert read_adapter(changed(source, tmp_path / "same", base_model_name_or_path="elsewhere")).key == key
    assert read_adapter(changed(source, tmp_path / "scaled", lora_alpha=9)).key != key
    other = changed(source, tmp_path / "bit", lambda w: w[KEY.format("A")].view(-1)[:1].add_(1e-3))
    assert read_adapter(other).key != key
