"""Loads the compiled module once and says why when it cannot.

Invariant: torch is imported first. The module is not linked to an OpenMP runtime; its calls resolve to the one that
torch has loaded, so torch and the kernels share one thread pool and `torch.set_num_threads` governs both. (Two pools
would spin against each other.)
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from importlib import import_module
from typing import Any

import torch

from octavo.errors import ConfigError

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
#: Instruction sets that are tested in emulation only, and so are checked at start.
UNPROVEN = ("avx512", "amx")
_LOSS = "attention and matrix products then run through torch: the same answers, several times slower"


@cache
def _load() -> tuple[Any, str]:
    try:
        module = import_module("octavo.kernels.cpu._native")
    except ModuleNotFoundError:
        return None, (
            "the native kernels are not built in this installation (no C++ compiler was found when it was installed); "
            f"install one and reinstall octavo, or run tools/build_native.sh in a checkout; {_LOSS}"
        )
    except ImportError as error:
        return None, f"the native kernels cannot be loaded ({error}); reinstall octavo; {_LOSS}"
    wanted = os.environ.get("OCTAVO_ISA", "")
    if wanted:
        known = module.instruction_sets()
        if wanted not in known:
            raise ConfigError(f"OCTAVO_ISA={wanted!r}: this build and processor offer {', '.join(known)}")
        module.use(wanted)
    elif problem := _settle(module):
        warnings.warn(problem, stacklevel=2)
    return module, ""


def _settle(module: Any) -> str:
    """Use the best instruction set that computes what the portable kernels do; what was wrong with a better one."""
    from octavo.kernels.cpu.self_check import differs

    problems = []
    for name in module.instruction_sets():
        wrong = differs(module, name) if name in UNPROVEN else ""
        module.use(name)
        if not wrong:
            break
        problems.append(f"the {name} kernels get {wrong} wrong on this processor")
    return "" if not problems else f"{'; '.join(problems)}: {module.in_use()} is used instead. Please report this"


def problem() -> str:
    """Empty when the compiled module is loaded, else why not. Raises ConfigError for an unknown OCTAVO_ISA."""
    return _load()[1]


def native() -> Any:
    """The compiled module; ConfigError when there is none."""
    module, reason = _load()
    if module is None:
        raise ConfigError(reason)
    return module


def dtype_code(dtype: torch.dtype) -> int | None:
    """The kernels' number for a dtype; None for one they do not handle."""
    return _DTYPES.get(dtype)
