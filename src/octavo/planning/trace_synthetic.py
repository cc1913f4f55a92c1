"""Made-up traces: lengths from one distribution, arrivals from another, perhaps a shared beginning.

Lengths and arrivals are written as short texts, so that a command line, a report and a test say the same:

    lengths    fixed:512+128              prompt + output, the same for all
               uniform:256-2048           total length, evenly; `output_share` of each is output
               uniform:32-512+32-256      prompt and output, both evenly
               lognormal:1000+200         medians of prompt and output; long tails (sigma 1)
    arrivals   all                        everything at time 0
               constant:4                 4 a second, evenly
               poisson:4                  4 a second, independent of each other
               bursty:4                   4 a second on average, in bursts (gamma gaps, coefficient of variation 3)

Everything is drawn from `random.Random(seed)`: the same trace on every machine.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from octavo.errors import ConfigError
from octavo.planning.trace import MOST_TOKENS, SYSTEM, Trace, TraceRequest

BURST_VARIATION = 3.0  # standard deviation of the gaps over their mean; 1 is Poisson
SIGMA = 1.0  # of the logarithm of lognormal lengths
TAIL = 32.0  # no lognormal length is more than so many medians

Draw = Callable[[random.Random], tuple[int, int]]


def synthetic(
    count: int,
    lengths: str = "uniform:256-2048",
    arrivals: str = "all",
    *,
    output_share: float = 0.25,
    shared_prefix: int = 0,
    seed: int = 0,
) -> Trace:
    """`count` requests. shared_prefix: so many first tokens of every prompt are the same (a system prompt); prompts
    that are not longer are all shared but for one token. Raises `ConfigError` for a text that says nothing.
    """
    if count < 1:
        raise ConfigError(f"{count} requests: at least one is needed")
    if not 0.0 < output_share < 1.0:
        raise ConfigError(f"output share {output_share}: must lie between 0 and 1")
    if shared_prefix < 0:
        raise ConfigError(f"shared prefix of {shared_prefix} tokens: must be at least 0")
    stream = random.Random(seed)
    draw, times = _length_drawer(lengths, output_share), _times(arrivals, count, random.Random(seed + 1))
    requests = []
    for number, at in enumerate(times):
        prompt, output = draw(stream)
        shared = min(shared_prefix, prompt - 1)
        runs = ((SYSTEM, shared), (f"own {number}", prompt - shared)) if shared else ()
        requests.append(TraceRequest(at, prompt, output, runs))
    name = f"{lengths}, {arrivals}" + (f", first {shared_prefix} shared" if shared_prefix else "")
    return Trace(name, requests)


def _length_drawer(text: str, output_share: float) -> Draw:
    kind, _, rest = text.partition(":")
    if kind == "fixed" and (m := re.fullmatch(r"(\d+)\+(\d+)", rest)):
        prompt, output = _checked(text, *map(int, m.groups()))
        return lambda stream: (prompt, output)
    if kind == "uniform" and (m := re.fullmatch(r"(\d+)-(\d+)", rest)):
        low, high = _range(text, *map(int, m.groups()))
        if low < 2:
            raise ConfigError(f"lengths {text!r}: a total of {low} leaves no room for a prompt and an output; use 2")
        return lambda stream: _split(stream.randint(low, high), output_share)
    if kind == "uniform" and (m := re.fullmatch(r"(\d+)-(\d+)\+(\d+)-(\d+)", rest)):
        a, b, c, d = map(int, m.groups())
        prompts, outputs = _range(text, a, b), _range(text, c, d)
        return lambda stream: (stream.randint(*prompts), stream.randint(*outputs))
    if kind == "lognormal" and (m := re.fullmatch(r"(\d+)\+(\d+)", rest)):
        medians = _checked(text, *map(int, m.groups()))
        return lambda stream: (_lognormal(stream, medians[0]), _lognormal(stream, medians[1]))
    raise ConfigError(
        f"lengths {text!r}: write fixed:PROMPT+OUTPUT, uniform:LOW-HIGH (total), uniform:LOW-HIGH+LOW-HIGH (prompt and "
        "output) or lognormal:PROMPT+OUTPUT (medians)"
    )


def _split(total: int, output_share: float) -> tuple[int, int]:
    output = min(total - 1, max(1, round(total * output_share)))
    return total - output, output


def _lognormal(stream: random.Random, median: int) -> int:
    return max(1, round(median * min(TAIL, stream.lognormvariate(0.0, SIGMA))))


def _checked(text: str, *counts: int) -> tuple[int, int]:
    for count in counts:
        if not 1 <= count <= MOST_TOKENS:
            raise ConfigError(f"lengths {text!r}: {count} must lie between 1 and {MOST_TOKENS}")
    return counts[0], counts[1]


def _range(text: str, low: int, high: int) -> tuple[int, int]:
    low, high = _checked(text, low, high)
    if low > high:
        raise ConfigError(f"lengths {text!r}: {low} is more than {high}; put the smaller number first")
    return low, high


def _times(text: str, count: int, stream: random.Random) -> list[float]:
    """Arrival times in seconds; the first request comes at 0."""
    if text == "all":
        return [0.0] * count
    kind, _, rest = text.partition(":")
    try:
        rate = float(rest)
    except ValueError:
        rate = 0.0
    if kind not in ("constant", "poisson", "bursty") or not 0.0 < rate < float("inf"):
        raise ConfigError(f"arrivals {text!r}: write all, constant:RATE, poisson:RATE or bursty:RATE (a second)")
    times, now = [], 0.0
    shape = 1.0 / BURST_VARIATION**2
    for _ in range(count):
        times.append(now)
        if kind == "constant":
            now += 1.0 / rate
        elif kind == "poisson":
            now += stream.expovariate(rate)
        else:
            now += stream.gammavariate(shape, 1.0 / (rate * shape))
    return times
