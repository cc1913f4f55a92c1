"""`Probe`: tries a grammar in a process of its own before it is compiled in ours, so that nothing it does can hurt.

A compiler for foreign input may run for ever, overflow its stack or take all memory; a thread that does so cannot be
stopped. The process compiles for an alphabet of single bytes, which takes no tokenizer; it is started with the first
grammar, and again after it had to be ended. It ends with its parent.

Run as a program (`main`) it is the other side: a line of JSON in for each grammar, a line out.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import weakref
from dataclasses import asdict
from pathlib import Path
from typing import Any

from octavo.errors import RequestError, SamplingError
from octavo.sampling_params import StructuredOutputs

SECONDS = 3.0  # for one grammar; the start of the process does not count
START_SECONDS = 30.0
MEMORY_BYTES = 4 << 30  # address space of the process
_PROGRAM = "import sys; sys.path.insert(0, {path!r}); from octavo.grammar.probe import main; main()"


class Probe:
    """For any thread; one grammar at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Any = None
        self.ended = 0  # processes that had to be ended

    def check(self, asked: StructuredOutputs) -> None:
        """Raise `SamplingError` for a grammar that is refused, takes too long or brings the process down."""
        given = {k: v for k, v in asdict(asked).items() if v not in (None, False)}
        with self._lock:
            self._start()
            answer = self._ask(json.dumps(given).encode() + b"\n", SECONDS)
            if answer is None:
                how = "within " + f"{SECONDS:g} s" if self._alive() else "without bringing its process down"
                self._stop()
                raise SamplingError(f"{asked.kind}: the grammar cannot be compiled {how}; make it simpler")
        if answer:
            raise SamplingError(answer.decode())

    def close(self) -> None:
        with self._lock:
            if self._process is not None:
                self._end()
                self._process = None

    def _start(self) -> None:
        if self._process is not None and self._alive():
            return
        program = _PROGRAM.format(path=str(Path(__file__).parents[2]))
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is ours
        )
        self._end = weakref.finalize(self, _end, self._process)
        if self._ask(b"", START_SECONDS) is None:
            self._end()
            self._process = None
            raise RequestError("structured outputs: the process that tries grammars does not start; see the log")

    def _alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _stop(self) -> None:
        self.ended += 1
        self._end()
        self._process = None

    def _ask(self, line: bytes, seconds: float) -> bytes | None:
        """The next line that the process writes, without its end; None if there is none in time."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except OSError:
            return None
        answer = b""
        while not answer.endswith(b"\n"):
            if not select.select([self._process.stdout], [], [], seconds)[0]:
                return None
            part = os.read(self._process.stdout.fileno(), 1 << 16)
            if not part:
                self._process.wait(1)
                return None
            answer += part
        return answer[:-1]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def main() -> None:
    """Answer each line of standard input: an empty line for a grammar that compiles, else why not."""
    import resource

    from octavo.grammar.compiler import compile_for
    from octavo.grammar.vocabulary import ByteVocabulary

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    vocabulary = ByteVocabulary()
    print(flush=True)
    for line in sys.stdin:
        try:
            compile_for(StructuredOutputs(**json.loads(line)), vocabulary)
            print(flush=True)
        except Exception as error:
            print(" ".join(str(error).split()), flush=True)
