"""Quantised checkpoints: each format equals the float model its integers stand for; what cannot be read is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import quantized_files as qf
from helpers.dense_attention import greedy, run_chunks
from helpers.rounded_inputs import RoundedOps
from helpers.tiny_models import oracle_greedy, oracle_logits, write_tiny
from octavo import LLM, SamplingParams
from octavo.config import EngineConfig
from octavo.errors import ModelError
from octavo.kernels import cpu
from octavo.kernels.ops import Ops, TorchOps
from octavo.models.load import LoadedModel, load_model
from octavo.models.quantized_files import find_packed, read_scheme
from octavo.models.safetensors_loader import SafetensorsFiles

IDS = [3, 1, 4, 1, 5, 9, 2, 6]
round_int4 = partial(qf.round_to_codes, bits=4, size=32, symmetric=False)
round_sym4 = partial(qf.round_to_codes, bits=4, size=32, symmetric=True)
round_int8 = partial(qf.round_to_codes, bits=8, size=1 << 20, symmetric=True)
pack_sym, pack_asym = (partial(qf.pack_quantized, symmetric=s) for s in (True, False))
LAYER0 = "model.layers.0."


def load(path: Path, ops: Ops | None = None, **settings: Any) -> LoadedModel:
    config = EngineConfig(model=str(path), skip_tokenizer_init=True, **settings)
    return load_model(config, dtype=torch.float32, device="cpu", ops=ops or TorchOps())


def assert_equal(path: Path, oracle: Any) -> None:
    """The same logits and the same greedy text as the float model."""
    decoder = load(path).decoder
    torch.testing.assert_close(run_chunks(decoder, IDS, len(IDS)), oracle_logits(oracle, IDS), atol=1e-4, rtol=1e-4)
    assert greedy(decoder, IDS, 12) == oracle_greedy(oracle, IDS, 12)


# AWQ


@pytest.mark.parametrize("group_size", [32, 64, -1])
def test_awq(group_size: int, tmp_path: Path) -> None:
    quantise = partial(round_int4, size=group_size if group_size > 0 else 1 << 20)
    oracle = qf.write_quantized("llama", tmp_path, qf.awq_config(group_size), quantise, qf.awq, intermediate_size=128)
    assert_equal(tmp_path, oracle)


def test_awq_with_biases_a_plain_module_and_a_file_of_settings(tmp_path: Path) -> None:
    config = qf.awq_config(modules_to_not_convert=["self_attn.o_proj"])
    chosen = lambda m: m.rpartition(".")[2] in qf.LINEARS and "o_proj" not in m  # noqa: E731
    oracle = qf.write_quantized("qwen2", tmp_path, config, round_int4, qf.awq, chosen=chosen, intermediate_size=128)
    assert_equal(tmp_path, oracle)
    given = json.loads((tmp_path / "config.json").read_text())
    del given["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(given))
    old = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
    (tmp_path / "quant_config.json").write_text(json.dumps(old))
    assert_equal(tmp_path, oracle)


def test_awq_without_zeros(tmp_path: Path) -> None:
    def pack(rounded: qf.Rounded) -> qf.Tensors:
        return {end: t for end, t in qf.awq(rounded).items() if end != "qzeros"}

    oracle = qf.write_quantized(
        "llama", tmp_path, qf.awq_config(zero_point=False), round_sym4, pack, intermediate_size=128
    )
    assert_equal(tmp_path, oracle)


# GPTQ


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True), (8, False)])
def test_gptq(bits: int, symmetric: bool, v2: bool, tmp_path: Path) -> None:
    config = qf.gptq_config(bits, sym=symmetric, checkpoint_format="gptq_v2" if v2 else "gptq")
    quantise = partial(qf.round_to_codes, bits=bits, size=32, symmetric=symmetric)
    # The inputs of `down` (112) do not fill its last group.
    oracle = qf.write_quantized("llama", tmp_path, config, quantise, partial(qf.gptq, v2=v2, g_idx=v2))
    assert_equal(tmp_path, oracle)


@pytest.mark.parametrize("group_size", [32, -1])
def test_gptq_act_order(group_size: int, tmp_path: Path) -> None:
    config = qf.gptq_config(group_size=group_size, desc_act=True)
    quantise = partial(round_int4, size=group_size if group_size > 0 else 1 << 20, shuffled=True)
    oracle = qf.write_quantized("qwen3-tied", tmp_path, config, quantise, qf.gptq, intermediate_size=128)
    assert_equal(tmp_path, oracle)
    files = SafetensorsFiles(tmp_path)
    weight = find_packed(files, read_scheme(config))[LAYER0 + "mlp.down_proj"].read()  # type: ignore[arg-type]
    assert (weight.input_order is not None) == (group_size > 0)


def test_gptq_with_a_head_and_biases_of_zeros(tmp_path: Path) -> None:
    """The head is packed too, and each module has a bias that the model does not."""
    config = qf.gptq_config(lm_head=True)
    chosen = lambda m: m.rpartition(".")[2] in (*qf.LINEARS, "lm_head")  # noqa: E731

    def pack(rounded: qf.Rounded) -> qf.Tensors:
        return qf.gptq(rounded) | {"bias": torch.zeros(len(rounded.codes))}

    oracle = qf.write_quantized("llama", tmp_path, config, round_sym4, pack, chosen=chosen)
    assert_equal(tmp_path, oracle)
    rewrite(tmp_path, {LAYER0 + "mlp.up_proj.bias": torch.ones(112)})
    with pytest.raises(ModelError, match=r"1 tensor not used by this model: model\.layers\.0\.mlp\.up_proj\.bias"):
        load(tmp_path)


@pytest.mark.parametrize("act_order", [False, True])
def test_fused_matrices_are_cut_by_rows(act_order: bool, tmp_path: Path) -> None:
    """Phi-3 keeps q, k and v in one module, and gate and up."""
    chosen = lambda m: m.endswith("_proj")  # noqa: E731
    quantise = partial(round_int4, shuffled=act_order)
    config = qf.gptq_config(desc_act=act_order)
    oracle = qf.write_quantized("phi3", tmp_path, config, quantise, qf.gptq, chosen=chosen, intermediate_size=128)
    assert_equal(tmp_path, oracle)


def test_experts_are_quantised_and_their_router_is_not(tmp_path: Path) -> None:
    config = qf.awq_config(modules_to_not_convert=["gate"])
    chosen = lambda m: m.rpartition(".")[2] in (*qf.LINEARS, "w1", "w2", "w3")  # noqa: E731
    oracle = qf.write_quantized("mixtral", tmp_path, config, round_int4, qf.awq, chosen=chosen)
    assert_equal(tmp_path, oracle)


# compressed-tensors


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "size"), [(4, 32), (4, None), (8, None), (8, 16)])
def test_pack_quantized(bits: int, size: int | None, symmetric: bool, tmp_path: Path) -> None:
    quantise = partial(qf.round_to_codes, bits=bits, size=size or 1 << 20, symmetric=symmetric)
    config = qf.ct_config(qf.ct_weights(bits, size, symmetric))
    # 100 inputs fill neither the last word nor the last group; 20 outputs of k and v not the last word of zeros.
    shape = {"intermediate_size": 100, "head_dim": 10}
    pack = partial(qf.pack_quantized, symmetric=symmetric)
    oracle = qf.write_quantized("llama", tmp_path, config, quantise, pack, **shape)
    assert_equal(tmp_path, oracle)


@pytest.mark.parametrize("form", ["naive-quantized", "int-quantized"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_naive_quantized(form: str, symmetric: bool, tmp_path: Path) -> None:
    """Activations that are rounded at run time are left as they are."""
    config = qf.ct_config(qf.ct_weights(8, None, symmetric), form)
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": True, "strategy": "token"}
    quantise = partial(round_int8, symmetric=symmetric)
    pack = partial(qf.naive_quantized, symmetric=symmetric)
    oracle = qf.write_quantized("gemma3", tmp_path, config, quantise, pack)
    assert_equal(tmp_path, oracle)


def test_one_scale_for_a_weight(tmp_path: Path) -> None:
    def quantise(weight: torch.Tensor) -> qf.Rounded:
        whole = round_int8(weight.reshape(1, -1))
        rows, columns = weight.shape
        scales = whole.scales.repeat(rows, 0)
        return qf.Rounded(whole.codes.reshape(rows, columns), scales, scales * 0 + 128, whole.group[:columns], 8)

    def pack(rounded: qf.Rounded) -> qf.Tensors:
        return qf.naive_quantized(rounded, symmetric=True) | {"weight_scale": qf.half(rounded.scales[0])}

    config = qf.ct_config(qf.ct_weights(8, None, strategy="tensor"), "naive-quantized")
    assert_equal(tmp_path, qf.write_quantized("llama", tmp_path, config, quantise, pack))


def test_compressed_tensors_act_order(tmp_path: Path) -> None:
    config = qf.ct_config(qf.ct_weights(symmetric=False, actorder="group"))
    quantise = partial(round_int4, shuffled=True)
    oracle = qf.write_quantized("llama", tmp_path, config, quantise, pack_asym, intermediate_size=128)
    assert_equal(tmp_path, oracle)


def test_groups_of_their_own_ignored_modules_and_a_quantised_embedding(tmp_path: Path) -> None:
    """The first group that targets a module decides; the embedding, tied to the head, is quantised as well."""
    eight = {"targets": ["re:.*down_proj$", "Embedding"], "weights": qf.ct_weights(8, None)}
    four = {"targets": ["Linear"], "weights": qf.ct_weights()}
    config = qf.ct_config({}, ignore=["re:.*layers.1.*", "model.layers.2.self_attn.o_proj"])
    config["config_groups"] = {"group_0": eight, "group_1": four}

    def chosen(module: str) -> bool:
        return "layers.1." not in module and module != "model.layers.2.self_attn.o_proj"

    sizes = {320: "embedding", 112: "up"}

    def quantise(weight: torch.Tensor) -> qf.Rounded:
        down = weight.shape == (64, 112)
        return round_int8(weight) if down or sizes.get(weight.shape[0]) == "embedding" else round_sym4(weight)

    oracle = qf.write_quantized("llama-tied", tmp_path, config, quantise, pack_sym, chosen=chosen)
    assert_equal(tmp_path, oracle)
    packed = find_packed(SafetensorsFiles(tmp_path), read_scheme(config))  # type: ignore[arg-type]
    assert packed["model.embed_tokens"].read().kind == packed[LAYER0 + "mlp.down_proj"].read().kind == "int8"
    assert packed[LAYER0 + "mlp.up_proj"].read().kind == "int4"


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "size"), [(4, 32), (8, None)])
def test_the_library_unpacks_the_same(bits: int, size: int | None, symmetric: bool) -> None:
    """compressed-tensors finds in the tensors that the helper packed the numbers that the helper meant."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weight = torch.randn(20, 96, generator=torch.Generator().manual_seed(bits))
    rounded = qf.round_to_codes(weight, bits, size or 96, symmetric=symmetric)
    weights = QuantizationArgs(**qf.ct_weights(bits, size, symmetric))
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    for form, pack in (("pack-quantized", qf.pack_quantized), ("naive-quantized", qf.naive_quantized)):
        if bits == 4 and form == "naive-quantized":
            continue
        packed = pack(rounded, symmetric=symmetric)
        packed["weight_scale"] = packed["weight_scale"].float()
        found = BaseCompressor.get_value_from_registry(form).decompress(packed, scheme)["weight"]
        torch.testing.assert_close(found, rounded.values(), atol=1e-6, rtol=1e-6)


# Through the engine


@pytest.mark.parametrize("family", ["qwen3-tied", "gemma3"])
@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors"])
def test_through_the_engine(method: str, family: str, tmp_path: Path) -> None:
    """Blocks and batches write the float model's greedy text, and so do the fastest kernels there are, but that those
    round the inputs of four-bit weights.
    """
    if method == "awq":
        oracle = qf.write_quantized(family, tmp_path, qf.awq_config(), round_int4, qf.awq, intermediate_size=128)
    elif method == "gptq":
        config, quantise = qf.gptq_config(desc_act=True), partial(round_int4, shuffled=True)
        oracle = qf.write_quantized(family, tmp_path, config, quantise, qf.gptq, intermediate_size=128)
    else:
        config = qf.ct_config(qf.ct_weights(8, None), targets=("Linear", "Embedding"))
        oracle = qf.write_quantized(family, tmp_path, config, round_int8, pack_sym, chosen=lambda m: True)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [IDS, IDS[::-1] * 2]
    texts = {}
    for backend in ("reference", "auto"):
        llm = LLM(str(tmp_path), dtype="float32", num_blocks=64, max_model_len=64, attention_backend=backend)
        texts[backend] = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params)]
    exact = [oracle_greedy(oracle, prompt, 12) for prompt in prompts]
    assert texts["reference"] == exact
    if method == "compressed-tensors" or cpu.why_unavailable():
        assert texts["auto"] == exact
    else:
        rounded = load(tmp_path, RoundedOps()).decoder
        assert texts["auto"] == [greedy(rounded, prompt, 12) for prompt in prompts]
    held = llm._live().hardware["weight_bytes"]
    assert held < 0.5 * sum(4 * p.numel() for p in oracle.parameters())


# Refusals: settings


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "fp8"}, "quant_method='fp8' is not supported; supported: awq, gptq, compressed-.*GGUF"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method='bitsandbytes'"),
        ({"bits": 4}, "quant_method=None"),
        (qf.awq_config(version="gemv"), "version='gemv': supported: gemm"),
        (qf.awq_config(backend="llm-awq"), "backend='llm-awq'"),
        (qf.awq_config(bits=8), "bits=8: AWQ has 4"),
        (qf.awq_config(group_size=0), "group_size=0"),
        (qf.awq_config(surprise=1), "surprise=1: not known"),
        (qf.gptq_config(3), "bits=3: supported: 4, 8"),
        (qf.gptq_config(checkpoint_format="marlin"), "checkpoint_format='marlin': supported: gptq, gptq_v2"),
        (qf.gptq_config(dynamic={"-:.*": {}}), "dynamic="),
        (qf.gptq_config(pack_dtype="int8"), "pack_dtype='int8'"),
        (qf.gptq_config(desc_act="yes"), "desc_act='yes': must be true or false"),
        (qf.gptq_config(surprise=[1]), r"surprise=\[1\]: not known"),
        (qf.ct_config(qf.ct_weights(), "float-quantized"), "format='float-quantized': supported: pack-quantized"),
        (qf.ct_config(qf.ct_weights(8, None, type="float")), "type='float': only integer"),
        (qf.ct_config(qf.ct_weights(2)), "num_bits=2"),
        (qf.ct_config(qf.ct_weights(4), "naive-quantized"), "num_bits=4: supported: 4 and 8 packed, 8 unpacked"),
        (qf.ct_config(qf.ct_weights(strategy="block", block_structure=[8, 8])), "block_structure"),
        (qf.ct_config(qf.ct_weights(strategy="tensor_group")), "strategy='tensor_group'"),
        (qf.ct_config(qf.ct_weights(), kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme="),
        (qf.ct_config(qf.ct_weights(), sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24-bitmask.*sparse"),
        (qf.ct_config(qf.ct_weights(), transform_config={"a": 1}), "transform_config="),
        (qf.ct_config(qf.ct_weights(), quantization_status="frozen"), "quantization_status='frozen'"),
        (qf.ct_config(qf.ct_weights(), config_groups={}), "config_groups="),
        (qf.ct_config(qf.ct_weights(), config_groups={"W8A8": ["Linear"]}), r"config_groups\.W8A8: must be a JSON"),
        (qf.ct_config(qf.ct_weights(), surprise="x"), "surprise='x': not known"),
        (qf.ct_config(qf.ct_weights(wonder=3)), r"config_groups\.group_0\.weights: wonder=3"),
    ],
)  # fmt: skip
def test_settings_that_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_scheme(config)


def test_fixed_activation_scales_are_refused() -> None:
    config = qf.ct_config(qf.ct_weights(8, None), "int-quantized")
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": False}
    with pytest.raises(ModelError, match=r"input_activations=.*only dynamic"):
        read_scheme(config)


# Refusals: files


def rewrite(path: Path, changes: dict[str, torch.Tensor | None]) -> None:
    tensors: dict[str, Any] = {**load_file(path / "model.safetensors"), **changes}
    save_file({k: t for k, t in tensors.items() if t is not None}, path / "model.safetensors")


@pytest.fixture(scope="module")
def gptq_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gptq")
    qf.write_quantized("llama", path, qf.gptq_config(desc_act=True), round_int4, qf.gptq, intermediate_size=128)
    return path


def damaged(path: Path, tmp_path: Path, changes: dict[str, torch.Tensor | None]) -> Path:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((path / name).read_bytes())
    rewrite(tmp_path, changes)
    return tmp_path


UP = LAYER0 + "mlp.up_proj"


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({f"{UP}.qzeros": None}, [r"1 weights do not fit.*GPTQ, 4 bits, groups of 32, act", f"{UP}.qzeros is missing"]),
        ({f"{UP}.g_idx": None}, [f"{UP}.g_idx is missing"]),
        ({f"{UP}.scales": torch.ones(4, 128).half()}, [f"{UP}.scales is \\[4, 128\\], expected \\[2, 128\\]"]),
        ({f"{UP}.scales": torch.ones(2, 128, dtype=torch.int32)}, [f"{UP}.scales is I32, expected F32 or F16 or BF16"]),
        (
            {f"{UP}.qweight": None, f"{LAYER0}mlp.gate_proj.qzeros": None},
            ["2 weights do not fit", f"{UP}.qweight is missing", "gate_proj.qzeros is missing"],
        ),
        (dict.fromkeys([f"{UP}.{end}" for end in ("qweight", "qzeros", "scales", "g_idx")]),
         [r"1 tensor missing: model\.layers\.0\.mlp\.up_proj\.weight"]),
        ({"model.vision.qweight": torch.ones(8, 8).int(), "model.vision.qzeros": torch.ones(2, 1).int(),
          "model.vision.scales": torch.ones(2, 8), "model.vision.g_idx": (torch.arange(64) // 32).int()},
         ["4 tensors not used by this model: model.vision.g_idx, model.vision.qweight"]),
        ({f"{UP}.g_idx": torch.zeros(64).int()}, [f"{UP}: its inputs are not in groups of 32"]),
    ],
)  # fmt: skip
def test_files_that_do_not_fit(
    gptq_model: Path, tmp_path: Path, changes: dict[str, torch.Tensor | None], messages: list[str]
) -> None:
    path = damaged(gptq_model, tmp_path, changes)
    with pytest.raises(ModelError) as caught:
        load(path)
    for message in messages:
        assert caught.match(message)


def packed_llama(path: Path, config: dict[str, Any], chosen: Callable[[str], bool]) -> Path:
    qf.write_quantized("llama", path, config, round_sym4, pack_sym, chosen=chosen)
    return path


def test_settings_and_files_that_disagree(tmp_path: Path) -> None:
    config = qf.ct_config(qf.ct_weights(), ignore=["lm_head", UP])
    path = packed_llama(tmp_path / "a", config, lambda m: m.rpartition(".")[2] in qf.LINEARS)
    with pytest.raises(ModelError, match=f"{UP} is stored quantised, but is ignored"):
        load(path)
    path = packed_llama(tmp_path / "b", qf.ct_config(qf.ct_weights()), lambda m: m.endswith("up_proj"))
    with pytest.raises(ModelError, match=r"18 weights do not fit.*q_proj\.weight is not quantised, but the settings"):
        load(path)
    path = tmp_path / "c"
    skipped = qf.awq_config(modules_to_not_convert=["up_proj"])
    qf.write_quantized("llama", path, skipped, round_int4, qf.awq, intermediate_size=128)
    with pytest.raises(ModelError, match=r"3 weights do not fit.*up_proj is quantised, but the settings leave it out"):
        load(path)


def test_packed_weights_without_settings_are_not_loaded(gptq_model: Path, tmp_path: Path) -> None:
    path = damaged(gptq_model, tmp_path, {})
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelError, match=r"84 tensors not used by this model.*Tensors that end in qweight are quantised"
    ):
        load(path)


def test_settings_without_packed_weights_are_not_loaded(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for given, words in (
        (qf.awq_config(), r"says AWQ, 4 bits.*no tensor of the files is packed .*qweight.*remove quantization_config"),
        ([1], r"quantization_config: must be a JSON object, got \[1\]"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": given}))
        with pytest.raises(ModelError, match=words):
            load(tmp_path)


def test_dummy_weights_are_not_quantised(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": qf.awq_config()}))
    with pytest.raises(ModelError, match="load_format='dummy' makes no AWQ, 4 bits, groups of 32 weights"):
        load(tmp_path, load_format="dummy")


def test_progress_counts_packed_bytes(gptq_model: Path) -> None:
    seen: list[tuple[int, int]] = []
    config = EngineConfig(model=str(gptq_model), skip_tokenizer_init=True)
    load_model(
        config,
        dtype=torch.float32,
        device="cpu",
        ops=TorchOps(),
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1][0] == seen[-1][1] and seen[-1][1] < (gptq_model / "model.safetensors").stat().st_size
