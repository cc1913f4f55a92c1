"""`without_collecting`: imports and loading with the garbage collector at rest.

Importing torch makes some hundred thousand objects that stay; looking through them again and again for garbage that is
not there takes more than a tenth of the time. Afterwards they count as old, so that nobody looks at them all at once
when the first step is waiting. It knows nothing of what is imported.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collecting() -> Iterator[None]:
    """No garbage collection in the body, unless somebody else starts one. Leaves the collector as it was."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:  # else the program has frozen objects of its own, which are to stay frozen
            gc.freeze()  # everything alive moves out of the young generation …
            gc.unfreeze()  # … into the oldest one, where it can be collected as ever
        gc.enable()
