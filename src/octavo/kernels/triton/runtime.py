"""Where Triton kernels run: on a GPU, or in Triton's interpreter, which runs them in NumPy for tests.

The choice is made once per process, by TRITON_INTERPRET when Triton is imported. This module does not know kernels.
"""

from __future__ import annotations

from functools import lru_cache

INTERPRETER_PROCESSORS = 4  # so that tests at small sizes split rows too


def interpreting() -> bool:
    """Do kernels of this process run in the interpreter?"""
    from octavo.kernels.triton.jit.dense import copy_kernel

    return type(copy_kernel).__name__ == "InterpretedFunction"


@lru_cache(maxsize=1)
def capability() -> tuple[int, int]:
    """(major, minor) of the current device as CUDA counts; (0, 0) in the interpreter, (7, 5) for a device of others."""
    if interpreting():
        return (0, 0)
    from triton.runtime import driver

    architecture = driver.active.get_current_target().arch
    return divmod(architecture, 10) if isinstance(architecture, int) else (7, 5)


@lru_cache(maxsize=1)
def processors() -> int:
    """Multiprocessors of the current device."""
    if interpreting():
        return INTERPRETER_PROCESSORS
    from triton.runtime import driver

    active = driver.active
    return int(active.utils.get_device_properties(active.get_current_device())["multiprocessor_count"])
