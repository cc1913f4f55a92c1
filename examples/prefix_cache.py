"""A second prompt with the same beginning: what comes from the prefix cache, and why not more.

python examples/prefix_cache.py [--model NAME]
"""

import argparse

from octavo import LLM, SamplingParams

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="gemma-3-270m", help="a known name, a directory, a GGUF file")
args = parser.parse_args()

SYSTEM = "You are a librarian. Answer in one sentence, and name the shelf where the reader finds the book. "
with LLM(args.model, max_model_len=256, num_blocks=512) as llm:
    for question in ("Where is Moby Dick?", "Where is the atlas?", "Where is Moby Dick?"):
        output = llm.generate(SYSTEM + question, SamplingParams(temperature=0, max_tokens=4))[0]
        print(f"{question:20} {output.num_cached_tokens:3} of {len(output.prompt_token_ids)} tokens were cached")
        print(f"{'':20} {output.cache_report}")
