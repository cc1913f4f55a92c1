"""Soak: many streaming clients at once for minutes; no error, no leak, and nobody waits much longer than others.

    python tools/soak.py --model DIR [--clients 500] [--minutes 10]

Each client sends one streaming completion after the other. Every `--check` seconds the memory of the server process and
its blocks are read; at the end every block must be free or cached, nothing may run or wait, and memory must be back
near what it was after the first minute. Exit code 1 when any of that, or any request, failed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))
sys.path.insert(0, str(Path(__file__).parent))

from chaos import Server  # noqa: E402

from octavo.bench.http_load import Target, completion, percentile, send  # noqa: E402
from octavo.bench.workloads import Item, random_ids  # noqa: E402

GROWTH = 0.10  # of the memory after the first minute: what may be left at the end
UNFAIR = 3.0  # the slowest client's mean latency over the median client's


@dataclass
class Client:
    """What one client met."""

    latencies: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    tokens: int = 0
    errors: list[str] = field(default_factory=list)


async def live(client: Client, target: Target, end: float, chance: random.Random, vocabulary: int) -> None:
    while time.monotonic() < end:
        item = Item(random_ids(chance.randint(8, 64), chance.randrange(10**9), vocabulary), chance.randint(8, 64))
        sent = await send(target, completion(item))
        if not sent.good or sent.output_tokens != item.output:
            client.errors.append(sent.error or f"status {sent.status}, {sent.output_tokens} of {item.output} tokens")
            await asyncio.sleep(0.1)
            continue
        client.latencies.append(sent.end)
        client.first.append(sent.events[0])
        client.tokens += sent.output_tokens


def resident(pid: int) -> float:
    """MiB of the process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


async def soak(server: Server, clients: list[Client], minutes: float, check: float) -> list[float]:
    target = Target("127.0.0.1", server.port)
    begin = time.monotonic()
    end = begin + 60 * minutes
    tasks = [
        asyncio.ensure_future(live(client, target, end, random.Random(number), 250))
        for number, client in enumerate(clients)
    ]
    memory = []
    while not all(task.done() for task in tasks):
        await asyncio.wait(tasks, timeout=check)
        now = await asyncio.to_thread(server.metrics)
        memory.append(resident(server.process.pid))
        done, errors = sum(len(c.latencies) for c in clients), sum(len(c.errors) for c in clients)
        print(
            f"{time.monotonic() - begin:6.0f} s  {done:7} done {errors:4} errors  {memory[-1]:7.0f} MiB  "
            f"running {now['running']:.0f} waiting {now['waiting']:.0f}",
            flush=True,
        )
    await asyncio.gather(*tasks)
    return memory


def verdict(clients: list[Client], memory: list[float], after: float, left: str, seconds: float) -> bool:
    """Print what came of it; True when all is well."""
    errors = [error for client in clients for error in client.errors]
    latencies = [value for client in clients for value in client.latencies]
    first = [value for client in clients for value in client.first]
    means = [statistics.mean(client.latencies) for client in clients if client.latencies]
    starved = len(clients) - len(means)
    early = memory[min(len(memory) - 1, max(0, len(memory) // 10))]
    growth = after / early - 1
    unfair = max(means) / statistics.median(means)
    tokens = sum(client.tokens for client in clients)
    print(f"{len(latencies)} requests, {tokens} tokens, {tokens / seconds:.0f} tokens/s, {len(errors)} errors")
    for name, values in (("first token", first), ("whole answer", latencies)):
        shares = [percentile(values, share) or 0.0 for share in (0.5, 0.95, 0.99)]
        print(f"{name}: p50 {shares[0]:.2f} s, p95 {shares[1]:.2f} s, p99 {shares[2]:.2f} s")
    print(f"slowest client over the median one: {unfair:.2f} (at most {UNFAIR}); clients without an answer: {starved}")
    print(
        f"memory: {early:.0f} MiB early, {after:.0f} MiB after, {100 * growth:+.1f} % (at most +{100 * GROWTH:.0f} %)"
    )
    print(f"afterwards: {left or 'nothing runs, every block is free or cached, a good request works'}")
    for error in errors[:3]:
        print(f"an error: {error}")
    return not errors and not left and not starved and unfair <= UNFAIR and growth <= GROWTH


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gemma-3-270m")
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--check", type=float, default=10.0, help="seconds between two looks at the server")
    parser.add_argument("--num-blocks", type=int, default=2048)
    parser.add_argument("--max-model-len", type=int, default=256)
    args = parser.parse_args()
    engine = {"model": args.model, "num_blocks": args.num_blocks, "max_model_len": args.max_model_len}
    server = Server({**engine, "max_waiting": args.clients + 16})
    clients = [Client() for _ in range(args.clients)]
    try:
        begin = time.monotonic()
        memory = asyncio.run(soak(server, clients, args.minutes, args.check))
        seconds = time.monotonic() - begin
        left = asyncio.run(server.recovered())
        good = verdict(clients, memory, resident(server.process.pid), left, seconds)
    finally:
        server.stop()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
