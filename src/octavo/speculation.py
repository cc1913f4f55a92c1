"""From `speculative=` to what scheduler and runner need: settings with measured costs, and the draft model.

Used by the builder only. Measures once, on the engine's own runner, before anything is served.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from octavo.config import Choice, EngineConfig, Resolved
from octavo.core.kv_layout import KVLayout
from octavo.core.kv_sharing import SharedPool, share_pool
from octavo.core.settings import SpeculationSettings
from octavo.core.weight_format import check_weight_format
from octavo.errors import ConfigError, ModelError
from octavo.kernels import cpu
from octavo.kernels.interface import KVCache, make_backend
from octavo.kernels.ops import Ops, TorchOps
from octavo.models.load import LoadedModel, load_model
from octavo.runner.draft import Draft
from octavo.runner.kv_store import KVStore
from octavo.runner.model_runner import ModelRunner
from octavo.runner.row_costs import CROWD, ROWS, measure_row_costs


@dataclass(frozen=True)
class LoadedDraft:
    """A draft model and how it shares the pool."""

    model: LoadedModel
    pool: SharedPool

    def place(self, store: KVStore, attention_backend: str) -> Draft:
        """Over the blocks of `store`: the same bytes, cut into the draft's layers."""
        kv, spec, layout = store.cache.kv, self.model.spec, self.pool.draft
        shape = (kv.shape[0], layout.layers_per_group, 2, spec.num_kv_heads, layout.block_size, spec.head_dim)
        cache = KVCache(kv.view(shape), layout)
        return Draft(self.model.decoder, cache, make_backend(attention_backend, cache, spec))


def load_draft(
    config: EngineConfig, target: LoadedModel, layout: KVLayout, dtype: torch.dtype, device: str, ops: Ops,
    on_progress: Callable[[int, int], None] | None,
) -> LoadedDraft | None:  # fmt: skip
    """The draft model that `config.speculative` names; None without one. Raises `ConfigError`, `ModelError`."""
    asked: Any = config.speculative
    if asked is None or asked["method"] != "draft":
        return None
    if config.allocation == "static":
        raise ConfigError(
            "speculative: a draft model needs allocation='paged': with one table for all layers its blocks do not fit; "
            "use method ngram"
        )
    if layout.kv_dtype != "auto":
        raise ConfigError(
            f"speculative: a draft model cannot share blocks of kv_cache_dtype={layout.kv_dtype!r} (scales lie at "
            "other places for other shapes); use kv_cache_dtype='auto', or method ngram"
        )
    own = replace(
        config,
        model=asked["model"],
        tokenizer=None,
        skip_tokenizer_init=True,
        speculative=None,
        screen_head=False,  # a draft's guesses are drawn from its logits
    )
    try:
        if "quantization" in asked:
            form = check_weight_format(asked["quantization"], device.partition(":")[0])
            own = replace(own, quantization=asked["quantization"])
            through_torch = ops.name == "torch" or device != "cpu"
            ops = TorchOps(form) if through_torch else cpu.make_ops(dtype, form, own.fixed_point)
        model = load_model(own, dtype=dtype, device=device, ops=ops, on_progress=on_progress)
    except (ConfigError, ModelError) as error:
        raise type(error)(f"speculative: the draft: {error}") from error
    if model.spec.vocab_size != target.spec.vocab_size:
        raise ConfigError(
            f"speculative: the draft {asked['model']!r} has {model.spec.vocab_size} tokens in its vocabulary, the "
            f"model {target.spec.vocab_size}; a draft must use the model's tokenizer"
        )
    if config.max_model_len is not None and config.max_model_len > model.spec.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={config.max_model_len} exceeds the draft's {model.spec.max_position_embeddings} positions; "
            "lower it, or use another draft"
        )
    per_token = model.spec.kv_values_per_token_layer() * dtype.itemsize
    windows = model.spec.windows if config.hybrid_kv else [None] * model.spec.num_layers
    return LoadedDraft(model, share_pool(layout, windows, per_token))


def settle_speculation(
    resolved: Resolved, target: LoadedModel, store: KVStore, runner: Callable[..., ModelRunner], draft: Draft | None,
    words: str,
) -> tuple[SpeculationSettings | None, Resolved]:  # fmt: skip
    """Measure what rows cost and say so. runner(decoder, cache, backend): one without a draft, for measuring.

    words: how a draft shares the pool, for the report.
    """
    asked: Any = resolved.config.speculative
    if asked is None:
        return None, resolved
    final = resolved.config
    k, seats = asked["num_speculative_tokens"], final.max_num_seqs
    room = min(final.max_num_batched_tokens, final.max_model_len or 1, _positions(store, store.cache.layout))
    backend = make_backend(final.attention_backend, store.cache, target.spec)
    most = min(room, seats * (k + 1), ROWS[-1])
    costs = measure_row_costs(
        runner(target.decoder, store, backend),
        store.cache.layout,
        alone=min(room, k + 1),
        most=most,
        first=target.spec.bos_token_id or 0,
    )
    draft_costs: tuple[tuple[int, float], ...] = ()
    if draft is not None:
        alone = runner(draft.decoder, draft.cache, draft.backend)
        draft_costs = measure_row_costs(alone, draft.cache.layout, alone=1, most=min(room, seats, CROWD), budget=1.0)
    settings = SpeculationSettings(
        method=asked["method"],
        num_tokens=k,
        lookup_min=asked.get("prompt_lookup_min", 1),
        lookup_max=asked.get("prompt_lookup_max", 1),
        row_costs=costs,
        draft_costs=draft_costs,
    )
    why = "measured: a step of " + ", ".join(f"{rows} rows {1e3 * time:.1f} ms" for rows, time in costs[:8])
    if draft is not None:
        why += f", a pass of the draft {1e3 * draft_costs[0][1]:.1f} ms; {words}"
    choice = Choice("speculative", asked, asked, why)
    return settings, Resolved(final, (*resolved.choices, choice))


def _positions(store: KVStore, layout: KVLayout) -> int:
    """Most positions of one sequence for which the pool has blocks in every group."""
    return store.num_blocks // layout.num_groups * layout.block_size
