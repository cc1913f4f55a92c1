"""An answer as it comes. Leaving the loop early ends the request, and its blocks are free.

python examples/streaming.py [--model NAME]
"""

import argparse

from octavo import LLM, SamplingParams

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="gemma-3-270m", help="a known name, a directory, a GGUF file")
args = parser.parse_args()

with LLM(args.model, max_model_len=256, num_blocks=512) as llm:
    for delta in llm.stream("Three good reasons to read books:", SamplingParams(temperature=0, max_tokens=32)):
        print(delta.text, end="", flush=True)
    print()
    with llm.stream("Count from one to a thousand:", SamplingParams(temperature=0, max_tokens=200)) as stream:
        for number, _ in enumerate(stream):
            if number == 4:
                break
    print(f"stopped early; blocks in use now: {llm.pool_view().num_used}")
