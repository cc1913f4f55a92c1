"""`Room`: memory that is cleared beside other work, on huge pages, for weights that are about to be loaded.

The system hands out zeroed pages, and zeroes them when they are first touched: half a GiB costs a quarter of a second
of a core, and more than one where a virtual machine must first be given the memory. While torch is imported the other
cores have nothing to do. It knows neither models nor torch.

Invariant: what nobody has taken is given back when the `with` block ends.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

HUGE = 2 << 20
#: Cleared in one call, which cannot be stopped.
SLICE = 8 * HUGE
#: Addresses beyond the expected bytes, which cost nothing: weights lie in regions that are rounded up.
SLACK = 256 << 20
_HUGEPAGE = 14  # MADV_HUGEPAGE of Linux
_FAILED = ctypes.c_void_p(-1).value


class Room:
    """`size` bytes on their way. files: those that will be read, which the system begins to fetch meanwhile.

    Where the system cannot do it, nothing happens: `take` returns (0, 0).
    """

    def __init__(self, size: int, files: Sequence[Path] = ()) -> None:
        self._size, self._files = size // HUGE * HUGE, files
        self._begin = self._length = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._libc = _libc() if sys.platform == "linux" else None

    def __enter__(self) -> Room:
        if self._libc is not None and self._size:
            self._reserve(self._size + SLACK)
            self._thread = threading.Thread(target=self._fill, name="octavo-room", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        begin, length = self.take()
        if length:
            self._unmap(begin, length)

    def stop(self) -> None:
        """Clear no more. For whoever is about to use all cores: a thread too many makes the others wait."""
        self._stop.set()

    def take(self) -> tuple[int, int]:
        """(address, bytes) of the whole reserve, the caller's from now on: pages of it that are not needed, too."""
        self.stop()
        if self._thread is not None:
            self._thread.join()
        taken = self._begin, self._length
        self._begin = self._length = 0
        return taken

    def _reserve(self, length: int) -> None:
        assert self._libc is not None
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        at = self._libc.mmap(None, length + HUGE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if at == _FAILED or not at:
            return
        begin = (at + HUGE - 1) // HUGE * HUGE
        self._unmap(at, begin - at)
        self._unmap(begin + length, at + HUGE - begin)
        self._begin, self._length = begin, length
        self._libc.madvise(begin, length, _HUGEPAGE)

    def _unmap(self, at: int, length: int) -> None:
        assert self._libc is not None
        if length:
            self._libc.munmap(at, length)

    def _fill(self) -> None:
        assert self._libc is not None
        for path in self._files:
            with suppress(OSError), path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        for offset in range(0, min(self._size, self._length), SLICE):
            length = min(SLICE, self._size - offset)
            if self._stop.is_set():
                return
            # Touched, not asked for (MADV_POPULATE_WRITE): that would lock the map of the whole address space, and an
            # import maps memory thousands of times.
            self._libc.memset(self._begin + offset, 0, length)


def _libc() -> Any:
    """The C library's calls for memory; they run without the interpreter lock."""
    libc = ctypes.CDLL(None)
    size, address = ctypes.c_size_t, ctypes.c_void_p
    libc.mmap.argtypes = [address, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mmap.restype = address
    libc.munmap.argtypes, libc.madvise.argtypes = [address, size], [address, size, ctypes.c_int]
    libc.memset.argtypes = [address, ctypes.c_int, size]
    return libc
