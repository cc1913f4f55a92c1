"""Answers to several prompts in one batch.

python examples/quickstart.py [--model NAME]
"""

import argparse

from octavo import LLM, SamplingParams

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="gemma-3-270m", help="a known name, a directory, a GGUF file")
args = parser.parse_args()

prompts = ["The capital of France is", "Paged memory for attention means", "Once upon a time"]
with LLM(args.model, max_model_len=256, num_blocks=512) as llm:
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24)):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r} ({output.outputs[0].finish_reason})")
