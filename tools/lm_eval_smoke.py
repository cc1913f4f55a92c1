"""lm-eval's `local-completions` adapter against a server, on a small task of its own data.

    pip install lm_eval        # not among the development tools: it brings a great deal
    python tools/lm_eval_smoke.py [--model NAME]

Starts `octavo serve`, runs a multiple-choice task (log-probabilities of given answers: echo with logprobs) and checks
each of its choices against the offline engine's own log-probabilities.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

QUESTIONS = [
    ("The capital of France is", ["Paris", "Banana", "seventeen"], 0),
    ("Two plus two is", ["purple", "four", "Monday"], 1),
    ("The opposite of hot is", ["cold", "piano", "Tuesday"], 0),
    ("Water is made of hydrogen and", ["music", "carpets", "oxygen"], 2),
    ("The sun rises in the", ["east", "fridge", "alphabet"], 0),
    ("A week has seven", ["horses", "days", "clouds"], 1),
]
TASK = """
task: octavo_smoke
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def evaluate(url: str, model: str, tokenizer: str, folder: Path) -> dict[str, Any]:
    """lm-eval's results, with the samples."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    data = folder / "questions.jsonl"
    rows = [{"question": q, "choices": choices, "answer": answer} for q, choices, answer in QUESTIONS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "octavo_smoke.yaml").write_text(TASK.format(data=data))
    arguments = {"model": model, "base_url": f"{url}/v1/completions", "num_concurrent": 4, "max_retries": 1}
    arguments |= {"tokenizer": tokenizer, "tokenizer_backend": "huggingface", "tokenized_requests": True}
    found: dict[str, Any] = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=arguments,
        tasks=["octavo_smoke"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    return found


def offline(model: str, samples: list[dict[str, Any]]) -> float:
    """The largest difference between lm-eval's log-likelihoods and the offline engine's."""
    from octavo import LLM, SamplingParams

    worst = 0.0
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    with LLM(model=model, num_blocks=256, max_model_len=256) as llm:
        for sample in samples:
            for choice, answer in zip(sample["doc"]["choices"], sample["filtered_resps"], strict=True):
                text = f"{sample['doc']['question']} {choice}"
                # lm-eval encodes without special tokens, the question first.
                whole = llm.encode(text, add_special_tokens=False)
                context = llm.encode(sample["doc"]["question"], add_special_tokens=False)
                output = llm.generate({"prompt_token_ids": whole}, params, use_tqdm=False)[0]
                assert output.prompt_logprobs is not None
                entries = list(zip(whole, output.prompt_logprobs, strict=True))[len(context) :]
                total = sum(entry[token].logprob for token, entry in entries if entry is not None)
                worst = max(worst, abs(total - float(answer[0])))
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a directory with a model and its tokenizer")
    args = parser.parse_args()
    from octavo.bench.server_process import ServerProcess

    options = [args.model, "--num-blocks", "256", "--max-model-len", "256", "--served-model-name", "smoke"]
    with ServerProcess(options) as server, tempfile.TemporaryDirectory() as folder:
        found = evaluate(server.url, "smoke", args.model, Path(folder))
    samples = found["samples"]["octavo_smoke"]
    worst = offline(args.model, samples)
    accuracy = found["results"]["octavo_smoke"]["acc,none"]
    print(f"{len(samples)} questions through lm-eval, accuracy {accuracy:.2f}; largest difference of a log-likelihood")
    print(f"from the offline engine: {worst:.2e}")
    return 0 if worst < 1e-3 and len(samples) == len(QUESTIONS) else 1


if __name__ == "__main__":
    sys.exit(main())
