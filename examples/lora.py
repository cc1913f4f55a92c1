"""One model, several LoRA adapters, one batch: each prompt names its adapter, or none.

python examples/lora.py --model NAME --adapter chat=./chat-adapter --adapter code=./code-adapter
"""

import argparse

from octavo import LLM, SamplingParams

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="gemma-3-270m", help="a known name, a directory, a GGUF file")
parser.add_argument("--adapter", action="append", default=[], metavar="NAME=PATH", help="a directory in peft's format")
args = parser.parse_args()
adapters = dict(given.split("=", 1) for given in args.adapter)

with LLM(args.model, max_model_len=256, num_blocks=512, lora=adapters or None) as llm:
    names = [None, *adapters]
    prompts = ["The first page of the book says"] * len(names)
    for name, output in zip(names, llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16), lora=names)):
        print(f"{name or 'no adapter':>12}: {output.outputs[0].text!r}")
    for name in adapters:
        llm.drop_lora(name)  # others go on meanwhile; load_lora(name, path) brings one in
