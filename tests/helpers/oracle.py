"""The transformers library as the oracle of whole answers: teacher-forced greedy checks, beam search, Gemma 3 itself.

A greedy answer is right when at every position the oracle's own forward pass over prompt and answer has its largest
logit at the token that was drawn: the same statement as "equal to generate()", by induction over positions, in one
forward pass. The oracle is always given an attention mask of ones (from ids alone the library would guess that a
padding id in a prompt is padding).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from helpers.tiny_models import VOCABULARY, write_tiny
from octavo import LLM


@dataclass(frozen=True)
class Model:
    """Files an engine loads, and the oracle for them."""

    path: Path
    oracle: Any

    def engine(self, **settings: Any) -> LLM:
        """An engine over the files: float32, memory for 8,192 tokens, audited after every step."""
        block_size = settings.get("block_size", 16)
        if "cpu_kv_bytes" not in settings:
            settings.setdefault("num_blocks", 2 * 4096 // block_size)
        return LLM(model=str(self.path), **{"dtype": "float32", "debug": True, **settings})


def tiny(family: str, root: Path, **settings: Any) -> Model:
    """A tiny random model of a family, written under `root`."""
    path = root / family
    return Model(path, write_tiny(family, path, **settings))


def gemma(path: Path) -> Model:
    """Gemma 3 270M as the library itself reads the GGUF file `path`: its own weights, names and configuration."""
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"):
        shell = AutoModelForCausalLM.from_config(config)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=shell)["tensors"]
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    # Buffers (rotary frequencies, embedding scale) are computed at construction, so not on the meta device.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(tensors, strict=True, assign=True)
    return Model(path, model.eval())


def random_ids(length: int, seed: int, vocabulary: int = VOCABULARY) -> list[int]:
    draw = random.Random(1000 * length + seed)
    return [draw.randrange(vocabulary) for _ in range(length)]


def logits_of(oracle: Any, token_ids: list[int], last: int) -> torch.Tensor:
    """float32 [last, V]: logits of the last positions of one sequence."""
    with torch.inference_mode():
        ids = torch.tensor([token_ids])
        out = oracle(ids, attention_mask=torch.ones_like(ids), use_cache=False, logits_to_keep=last)
    logits: torch.Tensor = out.logits[0].float()
    return logits


def assert_greedy(oracle: Any, prompt: list[int], answer: list[int]) -> float:
    """Every token of `answer` is the oracle's argmax after what precedes it; returns the smallest lead it had."""
    assert answer
    logits = logits_of(oracle, prompt + answer[:-1], len(answer))
    best = logits.argmax(-1).tolist()
    wrong = [
        f"token {i}: drew {token}, the oracle {b} (leads by {float(logits[i, b] - logits[i, token]):.2e})"
        for i, (token, b) in enumerate(zip(answer, best, strict=True))
        if token != b
    ]
    assert not wrong, f"prompt of {len(prompt)} tokens: {'; '.join(wrong[:3])}"
    top = logits.topk(2, dim=-1).values
    return float((top[:, 0] - top[:, 1]).min())


def greedy(oracle: Any, prompt: list[int], count: int) -> list[int]:
    """`count` greedy tokens by the library's own loop and KV cache, end of text ignored."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = oracle.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def logprobs_of(oracle: Any, token_ids: list[int]) -> torch.Tensor:
    """float32 [T, V]: log-softmax of a plain forward pass."""
    return logits_of(oracle, token_ids, len(token_ids)).log_softmax(-1)


@dataclass(frozen=True)
class Beam:
    """A beam the library returned: generated ids (end token included, padding cut) and its score."""

    token_ids: list[int]
    score: float


def beams(
    oracle: Any,
    prompt: list[int],
    width: int,
    *,
    max_tokens: int,
    end_ids: list[int],
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
) -> list[Beam]:
    """The library's beam search, best first. Beams it makes up for want of real ones (score -1e9) are left out."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = oracle.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, num_beams=width, do_sample=False,
            num_return_sequences=width, eos_token_id=end_ids or None, pad_token_id=0, length_penalty=length_penalty,
            early_stopping=early_stopping, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
    if width == 1:  # the library falls back to greedy search, which has no scores
        answer = out.sequences[0, len(prompt) :].tolist()
        logprobs = logprobs_of(oracle, prompt + answer)[len(prompt) - 1 : -1]
        total = float(logprobs[range(len(answer)), answer].sum())
        return [Beam(answer, total / len(answer) ** length_penalty)]
    found = []
    for row, score in zip(out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist(), strict=True):
        ends = [i for i, token in enumerate(row) if token in end_ids]
        if score > -1e6:
            found.append(Beam(row[: ends[0] + 1] if ends else row, score))
    return found


def transformers_tokenizer(path: Path) -> Any:
    """The library's own tokenizer for a GGUF file or a directory."""
    if path.suffix == ".gguf":
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return AutoTokenizer.from_pretrained(path)
