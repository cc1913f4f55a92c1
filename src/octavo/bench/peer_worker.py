"""One engine in a process of its own, for `octavo bench peers`: reads loads as JSON lines, answers with seconds.

A script for the interpreter in which that engine is installed; nothing of Octavo is imported unless it is the engine.

    PYTHON peer_worker.py KIND MODEL DTYPE THREADS PREFIX(on|off) MAX_LEN QUANTIZATION(none|...)

in:  {"requests": [{"ids": [...], "output": N, "samples": N, "temperature": T}, ...]}
out: {"ready": version} once, then per load {"seconds": S, "outputs": [[tokens of each sample], ...]} or {"error": text}

Answers go to the original stdout; whatever the engine prints goes to stderr. Every sample produces exactly `output`
tokens; the caller checks the counts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

#: requests -> tokens produced by each sample of each request
Generate = Callable[[list[dict[str, Any]]], list[list[int]]]


def vllm_like(module: str, model: str, dtype: str, prefix: bool, max_len: int, **more: Any) -> Generate:
    """Octavo and vLLM have the same offline interface."""
    from importlib import import_module

    package = import_module(module)
    llm = package.LLM(
        model=model, dtype=dtype, max_num_seqs=64, max_model_len=max_len, enable_prefix_caching=prefix, **more
    )

    def generate(requests: list[dict[str, Any]]) -> list[list[int]]:
        params = [
            package.SamplingParams(
                n=r["samples"],
                temperature=r["temperature"],
                max_tokens=r["output"],
                min_tokens=r["output"],
                ignore_eos=True,
            )
            for r in requests
        ]
        answers = llm.generate([{"prompt_token_ids": r["ids"]} for r in requests], params, use_tqdm=False)
        return [[len(sample.token_ids) for sample in answer.outputs] for answer in answers]

    return generate


def vllm(model: str, dtype: str, threads: int, prefix: bool, max_len: int) -> Generate:
    for name, value in {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }.items():
        os.environ.setdefault(name, value)
    return vllm_like("vllm", model, dtype, prefix, max_len)


def octavo(model: str, dtype: str, threads: int, prefix: bool, max_len: int, quantization: str) -> Generate:
    load_format = os.environ.get("OCTAVO_PEERS_LOAD_FORMAT", "auto")
    # Prompts are ids: a directory without a tokenizer will do.
    bare = os.path.isdir(model) and not os.path.exists(os.path.join(model, "tokenizer.json"))
    more = {} if quantization == "none" else {"quantization": quantization}
    return vllm_like("octavo", model, dtype, prefix, max_len, load_format=load_format, skip_tokenizer_init=bare, **more)


def transformers(model: str, dtype: str, threads: int, prefix: bool, max_len: int) -> Generate:
    """`generate`: one left-padded batch of all requests, run to the longest output."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def generate(requests: list[dict[str, Any]]) -> list[list[int]]:
        width, longest = max(len(r["ids"]) for r in requests), max(r["output"] for r in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, r in enumerate(requests):
            ids[row, width - len(r["ids"]) :] = torch.tensor(r["ids"])
            mask[row, width - len(r["ids"]) :] = 1
        samples, heat = requests[0]["samples"], requests[0]["temperature"]
        more = {"do_sample": True, "temperature": heat, "top_k": 0} if heat else {"do_sample": False}
        out = oracle.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=longest,
            min_new_tokens=longest,
            num_return_sequences=samples,
            eos_token_id=None,
            pad_token_id=0,
            **more,
        )
        produced = out.shape[1] - width
        return [[min(produced, r["output"])] * samples for r in requests]  # what goes beyond a request's own is waste

    return generate


def openvino(model: str, dtype: str, threads: int, prefix: bool, max_len: int) -> Generate:
    """OpenVINO GenAI's continuous batching; `model` is a directory exported for it."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs = 4, 64
    scheduler.enable_prefix_caching = prefix
    precision = {"bfloat16": "bf16", "float32": "f32", "float16": "f16"}[dtype]
    properties = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads}
    pipe = genai.ContinuousBatchingPipeline(model, scheduler_config=scheduler, device="CPU", properties=properties)

    def config_of(r: dict[str, Any]) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = r["output"]
        config.ignore_eos, config.num_return_sequences = True, r["samples"]
        config.do_sample = r["temperature"] > 0
        if config.do_sample:
            config.temperature, config.top_p, config.top_k = r["temperature"], 1.0, 1 << 30
        return config

    def generate(requests: list[dict[str, Any]]) -> list[list[int]]:
        ids = [ov.Tensor(np.array([r["ids"]], dtype=np.int64)) for r in requests]
        answers = pipe.generate(ids, [config_of(r) for r in requests])
        return [[len(sample) for sample in answer.m_generation_ids] for answer in answers]

    return generate


ENGINES: dict[str, Callable[..., Generate]] = {
    "octavo": octavo,
    "vllm": vllm,
    "transformers": transformers,
    "openvino": openvino,
}


def main(arguments: list[str]) -> int:
    kind, model, dtype, threads, prefix, max_len, quantization = arguments
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(**what: Any) -> None:
        answers.write(json.dumps(what) + "\n")

    try:
        more = (quantization,) if kind == "octavo" else ()
        generate = ENGINES[kind](model, dtype, int(threads), prefix == "on", int(max_len), *more)
        from importlib import metadata

        package = {"openvino": "openvino-genai"}.get(kind, kind)
        try:
            say(ready=metadata.version(package))
        except metadata.PackageNotFoundError:
            say(ready="")
        for line in sys.stdin:
            requests = json.loads(line)["requests"]
            begin = time.perf_counter()
            outputs = generate(requests)
            say(seconds=time.perf_counter() - begin, outputs=outputs)
    except Exception as error:  # whatever an engine raises is an answer, too
        say(error=f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    # The folder of this script holds modules named like the standard library's.
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != os.path.dirname(__file__)]
    sys.exit(main(sys.argv[1:]))
