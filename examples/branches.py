"""Several answers to one prompt, as samples and as beams, and the block tables while they share it.

python examples/branches.py [--model NAME]
"""

import argparse

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.inspect.terminal import show_blocks

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="gemma-3-270m", help="a known name, a directory, a GGUF file")
args = parser.parse_args()

PROMPT = "A library lends single pages instead of whole books, because " * 3
with LLM(args.model, max_model_len=256, num_blocks=512, block_size=8, enable_prefix_caching=False) as llm:
    widest = None

    def look() -> None:
        """After every step: keep the picture with the most blocks shared."""
        global widest
        view = llm.pool_view()
        if widest is None or view.shared_saved_blocks > widest.shared_saved_blocks:
            widest = view

    llm.watch(look)
    output = llm.generate(PROMPT, SamplingParams(n=3, temperature=0.9, seed=7, max_tokens=12))[0]
    for sample in output.outputs:
        print(f"sample {sample.index}: {sample.text!r}")
    beams = llm.beam_search(PROMPT, BeamSearchParams(beam_width=3, max_tokens=12))[0]
    for beam in beams.sequences:
        print(f"beam {beam.score:8.3f}: {beam.text!r}")
    llm.watch(None)
    print("\n".join(show_blocks(widest, totals=llm.pool_view())))
