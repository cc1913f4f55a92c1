"""`octavo serve` as a child process, for benchmarks: started, awaited until it is ready, ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from types import TracebackType

from octavo.errors import InternalError

READY_SECONDS = 600.0


class ServerProcess:
    """`with ServerProcess(["gemma-3-270m", "--max-model-len", "2048"]) as server: server.url`"""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = list(arguments)
        self.url = ""

    def __enter__(self) -> ServerProcess:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._output = tempfile.TemporaryFile()
        command = [sys.executable, "-m", "octavo", "serve", "--port", str(port), *self._arguments]
        environment = {n: v for n, v in os.environ.items() if n not in ("OCTAVO_PORT", "OCTAVO_HOST", "OCTAVO_CONFIG")}
        self._process = subprocess.Popen(command, stdout=self._output, stderr=self._output, env=environment)
        try:
            self._await_ready()
        except BaseException:
            self.close()
            raise
        return self

    def _await_ready(self) -> None:
        limit = time.monotonic() + READY_SECONDS
        while time.monotonic() < limit:
            if self._process.poll() is not None:
                raise InternalError(f"octavo serve ended with {self._process.returncode}: {self.tail()}")
            try:
                with urllib.request.urlopen(self.url + "/ready", timeout=10):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise InternalError(f"octavo serve was not ready within {READY_SECONDS:g} s: {self.tail()}")

    def tail(self) -> str:
        """The end of what it said."""
        self._output.seek(0)
        return self._output.read()[-2000:].decode("utf-8", "replace")

    def close(self) -> None:
        """SIGTERM, and SIGKILL for one that does not go."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._output.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
