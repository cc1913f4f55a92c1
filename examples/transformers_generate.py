"""transformers' own `generate`, with its keys and values in Octavo's blocks: samples and beams keep their prompt once.

python examples/transformers_generate.py [--model NAME]     (a checkpoint for transformers; default: made up)
"""

import argparse
import copy
import warnings

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from octavo.integrations.transformers import ATTENTION, PagedCache

warnings.filterwarnings("ignore", message=".*past_key_values.*")  # newer releases call it `cache`; both work
parser = argparse.ArgumentParser()
parser.add_argument("--model")
args = parser.parse_args()

torch.manual_seed(0)
if args.model:
    model = AutoModelForCausalLM.from_pretrained(args.model).eval()
else:
    made_up = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                          num_key_value_heads=2, vocab_size=300, eos_token_id=None)  # fmt: skip
    model = AutoModelForCausalLM.from_config(made_up).eval()
settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
prompt = torch.randint(3, 250, (1, 100))
mask = torch.ones_like(prompt)

# 1. The same tokens as with transformers' own cache. Attention reads the blocks in place.
own = model.generate(prompt, attention_mask=mask, past_key_values=DynamicCache(config=model.config), **settings)
model.set_attn_implementation(ATTENTION)
cache = PagedCache(model.config, max_tokens=2048)
paged = model.generate(prompt, attention_mask=mask, past_key_values=cache, **settings)
print("the same tokens:", bool((own == paged).all()))

# 2. Four beams over one prompt.
cache = PagedCache(model.config, max_tokens=2048)
model.generate(prompt, attention_mask=mask, past_key_values=cache, num_beams=4, **settings)
print(cache.view())

# 3. A prompt computed once, continued twice: a copy of a cache is a fork.
prefix = PagedCache(model.config, max_tokens=2048)
with torch.no_grad():
    model(prompt, past_key_values=prefix)
before = prefix.stats().used
for question in ([5, 6, 7], [8, 9]):
    whole = torch.cat([prompt, torch.tensor([question])], 1)
    branch = copy.deepcopy(prefix)
    out = model.generate(whole, attention_mask=torch.ones_like(whole), past_key_values=branch, **settings)
    print(f"{question} -> {out[0, whole.shape[1] :].tolist()}, {prefix.stats().used - before} blocks more")
