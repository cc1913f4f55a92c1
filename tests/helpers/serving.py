"""A real engine over the scripted runner, with a byte tokenizer and a chat template; no model, no torch.

The script answers with printable bytes that depend on the whole text so far, so any mistake changes what follows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from octavo.config import EngineConfig, Resolved
from octavo.core.fake_runner import FakeRunner, default_script
from octavo.core.kv_layout import build_layout
from octavo.core.scheduler import Scheduler
from octavo.core.settings import SchedulerSettings
from octavo.core.step import StepPlan, StepResult
from octavo.engine import Engine
from octavo.models.tokenizer import Tokenizer

BEGIN, END = 256, 257
VOCABULARY = 260
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    """One token a byte (ids 0-255, in the order of the bytes), 256 begins a text, 257 ends it."""
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = {}
    for byte in range(256):
        try:
            letters[byte] = spelled.pre_tokenize_str(bytes([byte]).decode())[0][0]
        except UnicodeDecodeError:
            letters[byte] = None
    unused = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(filter(None, letters.values())))
    vocabulary = {letter if letter else unused.pop(0): byte for byte, letter in letters.items()}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = spelled
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", pair=None, special_tokens=[("<s>", BEGIN)])
    templates = {} if template is None else {"default": template}
    return Tokenizer(backend, BEGIN, (END,), {"bos_token": "<s>", "eos_token": "</s>"}, templates)


def printable(tokens: Sequence[int], sample: int) -> int:
    """Lower-case letters and blanks."""
    drawn = default_script(tokens, sample) % 27
    return 32 if drawn == 26 else 97 + drawn


class SlowRunner(FakeRunner):
    """Takes `seconds` a step, as a model would; `fault` is raised at the next step."""

    seconds = 0.0
    fault: BaseException | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        if self.fault is not None:
            raise self.fault
        if self.seconds:
            time.sleep(self.seconds)
        return super().execute(plan)


def scripted_engine(
    *,
    num_blocks: int = 256,
    script: Callable[[Sequence[int], int], int] = printable,
    seconds: float = 0.0,
    tokenizer: Tokenizer | None = None,
    max_model_len: int = 512,
    check: bool = True,
    **settings: Any,
) -> Engine:
    """An engine of the real kind. seconds: what a step takes. settings: those of the scheduler."""
    layout = build_layout((None,), block_size=16, bytes_per_token_layer=8)
    given = {"max_num_seqs": 32, "enable_prefix_caching": True, **settings}
    scheduler_settings = SchedulerSettings(num_blocks=num_blocks, max_model_len=max_model_len, **given)
    runner = SlowRunner(layout, num_blocks, script=script, vocab_size=VOCABULARY, check=check)
    runner.seconds = seconds
    config = EngineConfig(model="scripted", num_blocks=num_blocks, max_model_len=max_model_len)
    return Engine(
        Resolved(config),
        Scheduler(scheduler_settings, layout),
        runner,
        tokenizer=tokenizer or byte_tokenizer(),
        vocab_size=VOCABULARY,
        eos_token_ids=(END,),
    )
