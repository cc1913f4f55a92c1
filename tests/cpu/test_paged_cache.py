"""`PagedCache` against transformers' `DynamicCache`: the same tokens, from blocks, whatever `generate` does."""

from __future__ import annotations

import copy
import gc
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache

from helpers.tiny_models import tiny_config, tiny_oracle
from octavo import CapacityError, ConfigError, RequestError
from octavo.cli.main import main
from octavo.integrations.transformers import ATTENTION, PagedCache

MODES = {
    "greedy": {"do_sample": False},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
}


@pytest.fixture(autouse=True)
def _one_name_of_an_argument() -> Iterator[None]:
    """transformers renames past_key_values to cache; both work."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*past_key_values.*")
        yield


@pytest.fixture(scope="module", params=["llama", "gemma3", "mistral"])
def model(request: pytest.FixtureRequest) -> Any:
    return endless(tiny_oracle(tiny_config(request.param)))


@pytest.fixture(scope="module")
def hybrid() -> Any:
    """Layers with and without a window."""
    return endless(tiny_oracle(tiny_config("gemma3", num_hidden_layers=2)))


@pytest.fixture(scope="module")
def llama() -> Any:
    return endless(tiny_oracle(tiny_config("llama", num_hidden_layers=2)))


def endless(model: Any) -> Any:
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompt(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 250, (batch, length), generator=torch.Generator().manual_seed(seed))


def generate(model: Any, ids: torch.Tensor, cache: Any, attention: str = "eager", **settings: Any) -> torch.Tensor:
    model.set_attn_implementation(attention)
    torch.manual_seed(0)
    settings.setdefault("max_new_tokens", 10)
    settings.setdefault("attention_mask", torch.ones_like(ids))
    try:
        out: torch.Tensor = model.generate(ids, past_key_values=cache, **settings)
    finally:
        model.set_attn_implementation("eager")
    return out


def paged(model: Any, **settings: Any) -> PagedCache:
    return PagedCache(model.config, block_size=4, **{"max_tokens": 1200, **settings})


@pytest.mark.parametrize("mode", MODES)
def test_the_same_tokens_as_dynamic_cache(model: Any, mode: str) -> None:
    # With seed 0, two beams of the llama are so near that torch's own instruction set decides which of them is kept.
    ids = prompt(2, 18, seed=1)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0  # padding on the left
    settings = {"attention_mask": mask, **MODES[mode]}
    expected = generate(model, ids, DynamicCache(config=model.config), **settings)
    for attention in ("eager", "sdpa", ATTENTION) if mode == "greedy" else ("eager", ATTENTION):
        cache = paged(model)
        assert torch.equal(generate(model, ids, cache, attention, **settings), expected)
        cache.pool.attention.audit()
        assert cache.get_seq_length() == 18 + 10 - 1
    cache.reset()
    assert cache.stats().used == 0 and cache.get_seq_length() == 0
    assert torch.equal(generate(model, ids, cache, ATTENTION, **settings), expected)  # and again


def test_padding_is_not_stored_when_attention_is_in_place(llama: Any) -> None:
    ids = prompt(2, 40)
    mask = torch.ones_like(ids)
    mask[0, :36] = 0
    caches = [paged(llama), paged(llama)]
    for cache, attention in zip(caches, ("eager", ATTENTION)):
        generate(llama, ids, cache, attention, attention_mask=mask, max_new_tokens=2)
    assert [c.stats().used for c in caches] == [22, 2 + 11]
    assert [c.stats().written_tokens for c in caches] == [82, 5 + 41]


@pytest.mark.parametrize("attention", ["eager", ATTENTION])
def test_samples_and_beams_keep_their_prompt_once(llama: Any, attention: str) -> None:
    ids = prompt(1, 200)
    for settings in ({"do_sample": True, "num_return_sequences": 8}, {"num_beams": 4, "do_sample": False}):
        cache = paged(llama)
        generate(llama, ids, cache, attention, max_new_tokens=5, **settings)
        # 50 blocks of prompt, one or two own blocks a row; rows that drew the same are even one.
        assert 50 < cache.stats().peak_used <= 50 + 2 * 8
        lone = paged(llama, share_rows=False, max_tokens=2000)
        generate(llama, ids, lone, attention, max_new_tokens=5, **settings)
        assert lone.stats().peak_used >= 4 * 50


def test_assisted_generation_takes_guesses_back(hybrid: Any) -> None:
    pattern = prompt(1, 6).repeat(1, 4)  # something to look up
    plain = generate(hybrid, pattern, DynamicCache(config=hybrid.config), do_sample=False)
    for attention in ("eager", ATTENTION):
        cache = paged(hybrid)
        out = generate(hybrid, pattern, cache, attention, do_sample=False, prompt_lookup_num_tokens=4)
        assert torch.equal(out, plain)
        cache.pool.attention.audit()


def test_an_assistant_model_has_a_cache_of_its_own(llama: Any) -> None:
    ids = prompt(1, 9)
    assistant = endless(tiny_oracle(tiny_config("llama", num_hidden_layers=1), seed=3))
    plain = generate(llama, ids, DynamicCache(config=llama.config), do_sample=False)
    assert torch.equal(generate(llama, ids, paged(llama), ATTENTION, do_sample=False, assistant_model=assistant), plain)


def test_a_prompt_in_chunks(hybrid: Any) -> None:
    ids = prompt(3, 23)
    mask = torch.ones_like(ids)
    mask[0, :9], mask[1, :2] = 0, 0  # a whole chunk of the first row is padding
    plain = generate(hybrid, ids, DynamicCache(config=hybrid.config), do_sample=False, attention_mask=mask)
    for attention in ("eager", ATTENTION):
        cache = paged(hybrid)
        out = generate(hybrid, ids, cache, attention, do_sample=False, attention_mask=mask, prefill_chunk_size=8)
        assert torch.equal(out, plain)
        cache.pool.attention.audit()


def test_a_copy_of_a_cache_is_a_fork(hybrid: Any) -> None:
    ids, more = prompt(1, 12), [prompt(1, 5, seed) for seed in (1, 2)]
    cache = paged(hybrid)
    hybrid.set_attn_implementation(ATTENTION)
    with torch.no_grad():
        hybrid(ids, past_key_values=cache)
    used = cache.stats().used
    copies = [copy.deepcopy(cache) for _ in more]
    assert cache.stats().used == used  # nothing moved
    for twin, tail in zip(copies, more, strict=True):
        whole = torch.cat([ids, tail], 1)
        plain = generate(hybrid, whole, DynamicCache(config=hybrid.config), do_sample=False)
        assert torch.equal(generate(hybrid, whole, twin, ATTENTION, do_sample=False), plain)
    cache.pool.attention.audit()
    del twin
    copies.clear()
    gc.collect()
    assert cache.stats().used == used and cache.get_seq_length() == 12  # what is garbage gave its blocks back


def test_caches_share_a_pool(llama: Any) -> None:
    first = paged(llama)
    generate(llama, prompt(1, 8), first, do_sample=False)
    second = PagedCache(llama.config, pool=first.pool)
    plain = generate(llama, prompt(1, 9, 5), DynamicCache(config=llama.config), do_sample=False)
    assert torch.equal(generate(llama, prompt(1, 9, 5), second, do_sample=False), plain)
    assert first.stats().requests == 2 and first.rows != second.rows
    with pytest.raises(ConfigError, match="has its size already"):
        PagedCache(llama.config, pool=first.pool, num_blocks=3)


@pytest.mark.parametrize("attention", ["eager", ATTENTION])
def test_rows_can_be_repeated_selected_and_cropped(model: Any, attention: str) -> None:
    ids = prompt(2, 10)
    tail = prompt(1, 3, 9)

    def run(cache: Any) -> torch.Tensor:
        with torch.no_grad():
            model(ids, past_key_values=cache)
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([3, 0, 0]))
            cache.reorder_cache(torch.tensor([1, 0, 2]))
            model(tail.repeat(3, 1) + torch.arange(3)[:, None], past_key_values=cache)
            cache.crop(-2)
            out: torch.Tensor = model(tail.repeat(3, 1), past_key_values=cache).logits
        return out

    expected = DynamicCache(config=model.config)
    expected.activate_past_recording()
    plain, cache = run(expected), paged(model)
    cache.activate_past_recording()
    model.set_attn_implementation(attention)
    torch.testing.assert_close(run(cache), plain, rtol=1e-4, atol=1e-4)
    model.set_attn_implementation("eager")
    assert cache.get_seq_length() == expected.get_seq_length() == 14 and len(cache.rows) == 3
    cache.pool.attention.audit()


def test_numbers_of_the_blocks_may_be_eight_bits(llama: Any) -> None:
    ids = prompt(1, 30)
    cache = PagedCache(llama.config, max_tokens=200, kv_cache_dtype="int8")
    for attention in ("eager", ATTENTION):
        llama.set_attn_implementation(attention)
        with torch.no_grad():
            cache.reset()
            ours = llama(ids, past_key_values=cache).logits
            llama.set_attn_implementation("eager")
            plain = llama(ids).logits
        assert 0 < float((ours - plain).abs().max()) < 0.1 * float(plain.abs().max())
    assert cache.stats().bytes_per_block < 0.4 * 16 * 2 * 2 * 2 * 16 * 4


def other_models() -> dict[str, Any]:
    small = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    return {
        "gpt2": transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=320, n_positions=128),
        "opt": transformers.OPTConfig(
            hidden_size=64, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=320,
            word_embed_proj_dim=64,
        ),
        "phi3": transformers.Phi3Config(**small, pad_token_id=0),
        "mla": transformers.DeepseekV3Config(
            **{**small, "num_key_value_heads": 4}, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
            kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
            moe_intermediate_size=32, n_shared_experts=1, first_k_dense_replace=1,
        ),
        "linear": transformers.Qwen3NextConfig(
            **{**small, "num_hidden_layers": 4}, head_dim=16, num_experts=2, num_experts_per_tok=1,
            moe_intermediate_size=32, shared_expert_intermediate_size=32, linear_num_value_heads=4,
            linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["gpt2", "opt", "phi3", "mla", "linear"])
def test_decoders_of_other_kinds(kind: str) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(other_models()[kind], attn_implementation="eager").eval()
    ids, settings = prompt(2, 7), {"do_sample": False, "num_beams": 2, "max_new_tokens": 8, "eos_token_id": None}
    plain = generate(endless(model), ids, DynamicCache(config=model.config), **settings)
    for attention in ("eager", ATTENTION):
        cache = paged(model)
        if (kind, attention) == ("mla", ATTENTION):
            with pytest.raises(RequestError, match="changes keys after they are cached"):
                generate(model, ids, cache, attention, **settings)
            continue
        assert torch.equal(generate(model, ids, cache, attention, **settings), plain)
        cache.pool.attention.audit()


def test_what_cannot_be_paged_is_refused(llama: Any) -> None:
    chunked = transformers.Llama4TextConfig(num_hidden_layers=4)
    with pytest.raises(ConfigError, match="layers of type chunked_attention keep something other"):
        PagedCache(chunked, num_blocks=4)
    with pytest.raises(ConfigError, match="give one of them"):
        PagedCache(llama.config)
    llama.set_attn_implementation(ATTENTION)
    with pytest.raises(RequestError, match="LlamaAttention came without: pass past_key_values=PagedCache"):
        llama(prompt(1, 3), use_cache=False)
    with pytest.raises(RequestError, match="keeps no gradients"):
        llama(prompt(1, 3), past_key_values=paged(llama))
    with torch.no_grad():
        four = torch.ones(1, 1, 3, 3, dtype=torch.bool)
        with pytest.raises(RequestError, match=r"a mask of shape \(1, 1, 3, 3\)"):
            llama(prompt(1, 3), attention_mask=four, past_key_values=paged(llama))
    llama.set_attn_implementation("eager")


def test_sinks_are_gathered_for_and_refused_in_place() -> None:
    config = transformers.GptOssConfig(
        vocab_size=320, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=2, num_experts_per_tok=1, sliding_window=8,
    )  # fmt: skip
    model = endless(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval())
    ids = prompt(1, 12)
    plain = generate(model, ids, DynamicCache(config=config), do_sample=False, eos_token_id=None)
    assert torch.equal(generate(model, ids, paged(model), do_sample=False, eos_token_id=None), plain)
    with pytest.raises(RequestError, match="asks for s_aux, which 'octavo_paged_cache' does not compute"):
        generate(model, ids, paged(model), ATTENTION, do_sample=False)


def test_a_full_pool_says_what_is_needed_and_the_cache_goes_on(llama: Any) -> None:
    cache = paged(llama, max_tokens=None, num_blocks=6)
    with pytest.raises(CapacityError, match=r"1 block is needed, 0 of 6 are free; held: request 0 with 6 blocks"):
        generate(llama, prompt(1, 20), cache, ATTENTION, do_sample=False, max_new_tokens=9)
    cache.pool.attention.audit()
    assert cache.get_seq_length() == 24  # every pass before it counts
    cache.crop(-20)
    plain = generate(llama, prompt(1, 20), DynamicCache(config=llama.config), do_sample=False, max_new_tokens=3)
    assert torch.equal(generate(llama, prompt(1, 20), cache, ATTENTION, do_sample=False, max_new_tokens=3), plain)


def test_a_batch_that_never_fitted_leaves_an_empty_cache(llama: Any) -> None:
    cache = paged(llama, max_tokens=None, num_blocks=6)
    with pytest.raises(CapacityError, match="a step of 2 requests and 40 tokens: 10 blocks are needed"):
        generate(llama, prompt(2, 20), cache, ATTENTION)
    assert cache.rows == [] and cache.stats().used == 0
    generate(llama, prompt(1, 10), cache, ATTENTION)


def test_a_mask_cannot_change_its_mind_in_place(llama: Any) -> None:
    ids, cache = prompt(1, 6), paged(llama)
    llama.set_attn_implementation(ATTENTION)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    with torch.no_grad():
        llama(ids, attention_mask=mask, past_key_values=cache)
        for wrong in (torch.ones(1, 7), torch.tensor([[0, 0, 0, 1, 1, 1, 1]])):
            with pytest.raises(RequestError, match="in the 6 columns that are cached"):
                llama(ids[:, :1], attention_mask=wrong, past_key_values=cache)
        llama(ids[:, :1], attention_mask=torch.cat([mask, mask[:, -1:]], 1), past_key_values=cache)
    llama.set_attn_implementation("eager")
    assert cache.stats().written_tokens == 5


def test_a_pass_that_failed_on_its_way_can_be_forgotten(llama: Any) -> None:
    cache = paged(llama)
    with torch.no_grad():
        llama(prompt(1, 5), past_key_values=cache)
        keys = torch.zeros(1, 2, 3, 16)
        cache.update(keys, keys, 0)
        assert (cache.get_seq_length(0), cache.get_seq_length(1)) == (8, 5)
        with pytest.raises(RequestError, match="layer 0 came when it was layer 1's turn"):
            llama(prompt(1, 3), past_key_values=cache)
        cache.abort()
        assert cache.get_seq_length(0) == 5
        ours = llama(prompt(1, 3, 4), past_key_values=cache).logits
        plain = llama(torch.cat([prompt(1, 5), prompt(1, 3, 4)], 1)).logits[:, 5:]
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
        with pytest.raises(RequestError, match="the cache holds 1 rows, this pass has 2"):
            llama(prompt(2, 3), past_key_values=cache)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_hole_in_the_mask_is_exact_or_refused(name: str, llama: Any) -> None:
    """The second turn of a chat in a batch: answers of unequal length leave padding between tokens."""
    model = llama
    if name == "mistral":
        model = endless(tiny_oracle(tiny_config("mistral", num_hidden_layers=2, sliding_window=12)))
    ids, mask = prompt(2, 24), torch.ones(2, 24, dtype=torch.long)
    mask[1, :3] = mask[1, 14:20] = 0
    expected = generate(model, ids, DynamicCache(config=model.config), attention_mask=mask, do_sample=False)
    assert torch.equal(generate(model, ids, paged(model), attention_mask=mask, do_sample=False), expected)
    cache = paged(model)
    if name == "llama":
        assert torch.equal(generate(model, ids, cache, ATTENTION, attention_mask=mask, do_sample=False), expected)
        return
    with pytest.raises(RequestError, match=r"attention_mask\[1, 14\] is padding between .*windows \(12\).*Set eager"):
        generate(model, ids, cache, ATTENTION, attention_mask=mask, do_sample=False)
    alone = generate(model, ids[:1], DynamicCache(config=model.config), do_sample=False)
    assert torch.equal(generate(model, ids[:1], cache, ATTENTION, do_sample=False), alone)  # nothing stayed behind


def test_padding_behind_tokens_is_refused_in_place(llama: Any) -> None:
    ids, mask = prompt(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    expected = generate(llama, ids, DynamicCache(config=llama.config), attention_mask=mask, do_sample=False)
    assert torch.equal(generate(llama, ids, paged(llama), attention_mask=mask, do_sample=False), expected)
    with pytest.raises(RequestError, match=r"ends with padding in row 1.*Pad on the left.*or set eager or sdpa"):
        generate(llama, ids, paged(llama), ATTENTION, attention_mask=mask, do_sample=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0: must be a whole number of at least 1"),
        ({"max_tokens": -4}, "max_tokens=-4"),
        ({"max_tokens": 32.5}, "max_tokens=32.5"),
        ({"max_tokens": None, "num_blocks": True}, "num_blocks=True"),
        ({"block_size": 0}, "block_size=0"),
        ({"kv_cache_dtype": "foo"}, "kv_cache_dtype='foo'"),
        ({"dtype": "foo"}, "dtype='foo'"),
        ({"backend": "foo"}, "backend='foo'"),
    ],
)
def test_settings_are_checked_when_the_cache_is_made(llama: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PagedCache(llama.config, **{"max_tokens": 64, **settings})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.BertConfig(), "BertConfig is an encoder: every token sees all others"),
        (transformers.DistilBertConfig(), "DistilBertConfig is an encoder"),
        (transformers.T5Config(), "T5Config is an encoder with a decoder.*EncoderDecoderCache"),
        (transformers.MambaConfig(), "MambaConfig has no attention heads"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_models_without_a_causal_decoder_are_refused(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PagedCache(config, max_tokens=64)


def test_rows_that_only_look_alike_are_noticed(llama: Any) -> None:
    cache = paged(llama)
    same = torch.ones(2, 2, 3, 16)
    other = torch.stack([same[0], -same[0]])
    cache.update(same, same, 0)
    with pytest.raises(RequestError, match="make this cache with share_rows=False"):
        cache.update(other, other, 1)


def test_the_benchmark_counts_bytes_and_compares_tokens(tmp_path: Path) -> None:
    file = tmp_path / "said.json"
    sizes = ["--prompt", "32", "--output", "5", "--layers", "2", "--samples", "3", "--beams", "2"]
    assert main(["bench", "hf-cache", *sizes, "--block-size", "4", "--json", str(file)]) == 0
    (rows,) = json.loads(file.read_text())["tables"].values()
    assert [row["same"] for row in rows] == [True] * 4
    one, samples, beams, mixed = rows
    token = 2 * 2 * 2 * 64 * 4  # layers, keys and values, heads, numbers, bytes
    assert one["dynamic"] == 36 * token and one["static"] == 37 * token and one["paged"] == 36 * token
    assert samples["dynamic"] == 3 * one["dynamic"] and samples["paged"] < 1.5 * one["paged"]
    assert beams["paged"] < 0.7 * beams["dynamic"]
    assert mixed["paged"] < 0.7 * mixed["dynamic"] and mixed["gathered"] == mixed["dynamic"]


def test_without_the_library_one_sentence_says_what_is_missing() -> None:
    program = "import sys; sys.modules['transformers'] = None; import octavo.integrations.transformers"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "needs the transformers library: pip install 'transformers>=5.0'" in done.stderr


def test_the_view_shows_the_shared_prompt(llama: Any) -> None:
    cache = paged(llama)
    generate(llama, prompt(1, 9), cache, do_sample=True, num_return_sequences=2, max_new_tokens=6)
    text = str(cache.view())
    assert text.count("[0*, 1*") == 2 and "shared by several block tables" in text
