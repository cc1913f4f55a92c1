"""Engine settings: limits, contradictions, and how open ones are settled, with the numbers and the reasons."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

from octavo.config import EngineConfig, Facts, make_config, resolve
from octavo.errors import ConfigError
from octavo.vllm_names import config_from

FACTS = Facts(
    model_max_len=1024,
    bytes_per_block=1 << 20,
    num_groups=1,
    blocks_for_longest=lambda length: -(-length // 16),
    longest_for_blocks=lambda blocks: blocks * 16,
    device="cpu",
    dtype="bfloat16",
    kv_budget_bytes=40 << 20,
    budget_reason="a part of the memory",
)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"block_size": 12}, "block_size=12: must be one of 1, 2, 4, 8, 16"),
        ({"block_size": True}, "block_size=True: must be one of 1, 2"),
        ({"block_size": 16.0}, "block_size=16.0: must be one of 1, 2"),
        ({"num_blocks": 0}, "num_blocks=0: must be an integer of at least 1"),
        ({"max_model_len": -5}, "max_model_len=-5"),
        ({"max_num_seqs": None}, "max_num_seqs=None"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0"),
        ({"max_num_seqs": True}, "max_num_seqs=True"),
        ({"max_num_seqs": 2.0}, r"max_num_seqs=2\.0"),
        ({"cpu_kv_bytes": 0}, "cpu_kv_bytes=0"),
        ({"max_queue": 0}, "max_queue=0"),
        ({"swap_bytes": -1}, "swap_bytes=-1: must be an integer of at least 0"),
        ({"max_preemptions": -1}, "max_preemptions=-1"),
        ({"gpu_memory_utilization": 0}, r"gpu_memory_utilization=0: must be a number in \(0, 1\]"),
        ({"gpu_memory_utilization": "a"}, r"gpu_memory_utilization='a': must be a number in \(0, 1\]"),
        ({"debug": "yes"}, "debug='yes': must be True or False"),
        ({"skip_tokenizer_init": 1}, "skip_tokenizer_init=1: must be True or False"),
        ({"enable_prefix_caching": 0}, "enable_prefix_caching=0: must be True or False"),
        ({"seed": "a"}, "seed='a': must be a whole number of 64 bits"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"seed": 10**40}, "must be a whole number of 64 bits"),
        ({"record": 5}, "record=5: must be the path of a file to write"),
        ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization"),
        ({"dtype": "int8"}, "dtype='int8': must be one of auto, float32"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"allocation": "lazy"}, "allocation='lazy': must be one of paged, static"),
        ({"load_format": "pt"}, "load_format='pt'"),
        ({"attention_backend": "flash"}, "attention_backend='flash'"),
        ({"preemption": "none"}, "preemption='none'"),
        ({"allocation": "static", "enable_prefix_caching": True}, "enable_prefix_caching=True has no effect"),
        ({"allocation": "static", "preemption": "swap"}, "preemption='swap' has no effect"),
    ],
)
def test_settings_that_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**given)


def test_unknown_settings_are_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown settings blocksize, maxlen; known: allocation, attention_backend"):
        make_config(blocksize=16, maxlen=3)


def test_settings_of_vllm_without_a_counterpart_may_only_ask_for_nothing() -> None:
    assert config_from(tensor_parallel_size=1, trust_remote_code=False, block_size=8).block_size == 8
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 would have no effect here"):
        config_from(tensor_parallel_size=2)
    for given in ({"enable_lora": True}, {"max_lora_rank": 16}):
        with pytest.raises(ConfigError, match=r"leave it out \(adapters of any rank may be loaded .* load_lora\(\)"):
            config_from(**given)
    assert config_from(enable_lora=False, max_lora_rank=None) == EngineConfig()


def test_a_config_is_frozen_and_every_field_has_a_default() -> None:
    with pytest.raises(FrozenInstanceError):
        EngineConfig().block_size = 8  # type: ignore[misc]
    assert {f.name for f in fields(EngineConfig)} == set(vars(EngineConfig()))


def test_open_settings_are_settled_and_reported() -> None:
    config = EngineConfig()
    resolved = resolve(config, FACTS)
    chosen = resolved.config
    assert config.num_blocks is None, "the callers own copy is as it was"
    assert (chosen.num_blocks, chosen.max_model_len, chosen.enable_prefix_caching) == (40, 640, True)
    assert (chosen.dtype, chosen.device) == ("bfloat16", "cpu")
    report = resolved.report()
    assert set(report) == {f.name for f in fields(EngineConfig)}
    assert report["num_blocks"] == {"asked": None, "chosen": 40, "why": "a part of the memory"}
    assert report["max_model_len"]["why"] == "the pool holds 640 of the model's 1024 positions"
    assert report["block_size"] == {"asked": None, "chosen": 16, "why": "the default"}
    quiet = resolve(EngineConfig(enforce_eager=True, hybrid_kv=False), replace(FACTS, has_windows=False, device="cpu"))
    lines = quiet.report()
    assert "no effect on a CPU" in lines["enforce_eager"]["why"] and "no effect" in lines["hybrid_kv"]["why"]
    there = resolve(EngineConfig(enforce_eager=True, hybrid_kv=False), replace(FACTS, device="cuda")).report()
    assert there["enforce_eager"]["why"] == there["hybrid_kv"]["why"] == "as asked"
    assert resolve(EngineConfig(block_size=8), FACTS).report()["block_size"]["why"] == "as asked"


def test_static_allocation_has_no_prefix_cache() -> None:
    report = resolve(EngineConfig(allocation="static"), FACTS).report()["enable_prefix_caching"]
    assert report == {"asked": None, "chosen": False, "why": "static allocation shares nothing"}


def test_the_models_own_limit_is_used_where_the_pool_allows() -> None:
    resolved = resolve(EngineConfig(num_blocks=64), FACTS)
    assert (resolved.config.max_model_len, resolved.report()["max_model_len"]["why"]) == (1024, "the model's own limit")


def test_lengths_beyond_the_model_or_the_pool_are_refused_with_what_would_fit() -> None:
    with pytest.raises(ConfigError, match="max_model_len=1025 exceeds the model's 1024 positions; use at most 1024"):
        resolve(EngineConfig(max_model_len=1025), FACTS)
    message = (
        r"max_model_len=700 tokens needs 44 blocks \(44\.0 MiB\), the pool has 40 \(40\.0 MiB\)\. "
        r"Longest length that fits: 640\. Lower max_model_len, or raise num_blocks or cpu_kv_bytes"
    )
    with pytest.raises(ConfigError, match=message):
        resolve(EngineConfig(max_model_len=700), FACTS)
    assert resolve(EngineConfig(max_model_len=640), FACTS).config.max_model_len == 640


def test_a_pool_for_not_even_one_token_is_refused() -> None:
    empty = Facts(**{**vars(FACTS), "kv_budget_bytes": 100})
    with pytest.raises(ConfigError, match=r"the pool has 0 .*Longest length that fits: 0"):
        resolve(EngineConfig(), empty)


def test_settings_that_would_have_no_effect_are_refused() -> None:
    with pytest.raises(ConfigError, match="copy_on_write=False has no effect with allocation='static'"):
        EngineConfig(allocation="static", copy_on_write=False)
    with pytest.raises(ConfigError, match="cpu_kv_bytes=1048576 and num_blocks=64 both size the pool"):
        resolve(EngineConfig(num_blocks=64, cpu_kv_bytes=1 << 20), FACTS)


@pytest.mark.parametrize("model", [None, 5, ""])
def test_a_model_is_named_by_a_string(model: object) -> None:
    with pytest.raises(ConfigError, match=r"model=.*must be a name or a path"):
        EngineConfig(model=model)  # type: ignore[arg-type]


def test_a_pool_too_small_for_anything_says_how_many_blocks_are_needed() -> None:
    with pytest.raises(ConfigError, match=r"Longest length that fits: 0\. Even the shortest sequence needs \d+ blocks"):
        resolve(
            EngineConfig(num_blocks=1), replace(FACTS, blocks_for_longest=lambda n: 6, longest_for_blocks=lambda n: 0)
        )
