"""`octavo simulate [TRACE]`: policies side by side on a trace, with the real scheduler and the time of a cost model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.options import byte_count
from octavo.cli.plan import read_model_sizes
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.planning.cost_model import CostModel
    from octavo.planning.devices import Device
    from octavo.planning.outcome import Outcome
    from octavo.planning.policies import Policy, Setup
    from octavo.planning.shapes import ModelShape
    from octavo.planning.trace import Trace

EPILOG = """\
examples:
  octavo simulate                                        (a mixed load, static and paged, Llama-2-7B on an A100)
  octavo simulate AzureLLMInferenceTrace_conv.csv --model llama-3.1-8b --device h100 --plot conv.svg
  octavo simulate chats.jsonl --policies paged:16,paged:16+prefix
  octavo simulate --lengths lognormal:800+150 --arrivals poisson:4 --requests 2000 --policies paged:8,paged:16,paged:32
  octavo simulate --calibrate run.jsonl --model gemma-3-270m --dtype float32 --kv-bytes 256MiB
  octavo simulate --reference

traces: CSV with the header TIMESTAMP,ContextTokens,GeneratedTokens, or JSON lines, one conversation each:
  {"arrival": 0, "system": {"name": "help", "tokens": 900}, "turns": [{"user": 30, "assistant": 200}, ...]}
lengths: fixed:512+128, uniform:256-2048 (in all), uniform:32-512+32-256 (prompt + output), lognormal:1000+200 (medians)
arrivals: all, constant:4, poisson:4, bursty:4 (a second)
policies: static, paged:16, paged:16+prefix, paged:16+swap, paged:16+auto, and other block sizes
"""
DEFAULT_POLICIES = "static,paged:8,paged:16,paged:32,paged:64"
SHARING_POLICIES = "static,paged:16,paged:16+prefix"
DEFAULT_MODEL, DEFAULT_DEVICE, DEFAULT_REQUESTS = "llama-2-7b", "a100-80gb", 500
DEFAULT_LENGTHS, DEFAULT_OVERHEAD_MS, DEFAULT_OUTPUT_SHARE = "uniform:256-2048", 4.0, 0.25


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "simulate",
        help="policies side by side on a trace: concurrency, use, throughput, latency; no model runs",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", nargs="?", metavar="TRACE", help=".csv or .jsonl (default: a made-up load)")
    load = parser.add_argument_group("load")
    load.add_argument("--requests", type=int, metavar="N", help="the first N, or a trace repeated (all; made up: 500)")
    load.add_argument("--speed", type=float, metavar="X", help="arrivals of a trace come X times as fast (1)")
    load.add_argument("--lengths", metavar="TEXT", help=f"of a made-up load ({DEFAULT_LENGTHS})")
    load.add_argument("--arrivals", metavar="TEXT", help="of a made-up load (all)")
    load.add_argument("--output-share", type=float, metavar="X", help="of total lengths that is output (0.25)")
    load.add_argument("--shared-prefix", type=int, metavar="N", help="first N tokens of every prompt are the same (0)")
    load.add_argument("--seed", type=int, metavar="N", help="of a made-up load (0)")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--policies", metavar="A,B,…", help=f"default: {DEFAULT_POLICIES}; with shared prefixes "
                        f"{SHARING_POLICIES}")  # fmt: skip
    engine.add_argument("--model", default=DEFAULT_MODEL, metavar="NAME", help=f"known, or files ({DEFAULT_MODEL})")
    engine.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    engine.add_argument("--quantization", metavar="KIND", help="of weights: int8, int4, … (as --dtype)")
    engine.add_argument("--kv-cache-dtype", metavar="KIND", help="of keys and values: int8, int4, … (as --dtype)")
    engine.add_argument("--kv-bytes", type=byte_count, metavar="BYTES", help="for blocks (default: from the device)")
    engine.add_argument("--gpu-memory-utilization", type=float, metavar="X", help="of the device's memory (0.9)")
    engine.add_argument("--max-model-len", type=int, metavar="N", help="longer requests are refused (the model's)")
    engine.add_argument("--max-num-seqs", type=int, default=256, metavar="N")
    engine.add_argument("--max-num-batched-tokens", type=int, default=2048, metavar="N")
    cost = parser.add_argument_group("time of a step")
    cost.add_argument("--device", metavar="NAME", help=f"roofline of a device ({DEFAULT_DEVICE}); cpu: this machine")
    cost.add_argument("--overhead-ms", type=float, metavar="MS", help=f"of every step ({DEFAULT_OVERHEAD_MS:g})")
    cost.add_argument("--calibrate", metavar="RECORDING", help="fit to a run recorded with --record")
    cost.add_argument("--cost-model", metavar="FILE", help="one that --save-model wrote")
    cost.add_argument("--save-model", metavar="FILE", help="write the cost model as JSON")
    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help='write everything to FILE ("-": to stdout, and no tables)')
    output.add_argument("--plot", metavar="FILE", help="four panels as .svg, .png or .pdf (needs octavo[plot])")
    output.add_argument("--no-timeline", action="store_true", help="no picture of the run in the terminal")
    output.add_argument("--reference", action="store_true", help="two published tables from first principles")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Simulate and print."""
    from octavo.planning.plots import check_target, plot_outcomes
    from octavo.planning.simulation_report import report_text, timeline_text

    if args.plot is not None:
        check_target(args.plot)
    if args.reference:
        return _reference(args)
    _check_cost_options(args)
    trace = _trace(args)
    policies = _policies(args, trace)
    device, setup = _setup(args)
    outcomes = []
    model: CostModel | None = None
    with _progress(len(policies) * len(trace)) as tick:
        for number, policy in enumerate(policies):
            done = number * len(trace)
            model, outcome = _simulate(args, policy, setup, device, trace, partial(_add, tick, done))
            outcomes.append(outcome)
    assert model is not None
    if args.save_model is not None:
        model.save(args.save_model)
    title = f"{setup.shape.name}, {setup.kv_bytes / (1 << 30):.2f} GiB of KV cache; {model.source}"
    if args.json != "-":
        print(f"{trace.describe()}\n{title}\n\n{report_text(outcomes)}")
        if not args.no_timeline:
            print("\n" + timeline_text(outcomes))
    if args.plot is not None:
        plot_outcomes(outcomes, args.plot, f"{trace.describe()}\n{title}")
    _write_json(args.json, {"trace": trace.describe(), "setup": title, "policies": [o.summary() for o in outcomes]})
    return 0


def _add(tick: Callable[[int], None], before: int, done: int) -> None:
    tick(before + done)


def _simulate(
    args: argparse.Namespace,
    policy: Policy,
    setup: Setup,
    device: Device,
    trace: Trace,
    on_progress: Callable[[int], None],
) -> tuple[CostModel, Outcome]:
    from octavo.planning.policies import settings_of
    from octavo.planning.simulate import Simulation

    bytes_per_block = settings_of(policy, setup)[1].bytes_per_block
    model = _cost_model(args, setup, device, bytes_per_block)
    settings, layout = settings_of(policy, setup, model)
    simulation = Simulation(
        trace, settings, layout, model, name=policy.name, on_progress=lambda ended, _: on_progress(ended)
    )
    return model, simulation.run()


def _check_cost_options(args: argparse.Namespace) -> None:
    """At most one source of times, and nothing that it makes pointless."""
    given = [n for n in ("calibrate", "cost_model", "device") if getattr(args, n) is not None]
    if len(given) > 1:
        options = " and ".join("--" + n.replace("_", "-") for n in given)
        raise ConfigError(f"{options} each say how long a step takes; give one of them")
    if args.overhead_ms is None:
        return
    if given and given[0] != "device":
        raise ConfigError(f"--overhead-ms has no effect with --{given[0].replace('_', '-')}; leave it out")
    if args.overhead_ms < 0:
        raise ConfigError(f"--overhead-ms {args.overhead_ms}: must be at least 0")


def _cost_model(args: argparse.Namespace, setup: Setup, device: Device, block_bytes: int) -> CostModel:
    from octavo.planning.cost_model import CostModel, roofline

    if args.cost_model is not None:
        return CostModel.load(args.cost_model)
    if args.calibrate is not None:
        from octavo.planning.calibrate import calibrate

        return _once(args.calibrate, calibrate)
    overhead = (DEFAULT_OVERHEAD_MS if args.overhead_ms is None else args.overhead_ms) / 1e3
    return roofline(
        setup.shape,
        device,
        setup.dtype,
        block_bytes=block_bytes,
        overhead=overhead,
        kv_dtype=setup.kv_dtype,
        quantization=setup.quantization,
    )


@lru_cache(maxsize=1)
def _once(path: str, calibrate: Callable[[str], CostModel]) -> CostModel:
    """All policies share one fit."""
    return calibrate(path)


def _trace(args: argparse.Namespace) -> Trace:
    from octavo.planning.trace import read_trace
    from octavo.planning.trace_synthetic import synthetic

    if args.requests is not None and args.requests < 1:
        raise ConfigError(f"--requests {args.requests}: at least one is needed")
    made_up = ("lengths", "arrivals", "output_share", "shared_prefix", "seed")
    if args.trace is None:
        if args.speed is not None:
            raise ConfigError("--speed has no effect without a trace; change the rate of --arrivals")
        return synthetic(
            args.requests or DEFAULT_REQUESTS,
            args.lengths or DEFAULT_LENGTHS,
            args.arrivals or "all",
            output_share=DEFAULT_OUTPUT_SHARE if args.output_share is None else args.output_share,
            shared_prefix=args.shared_prefix or 0,
            seed=args.seed or 0,
        )
    given = [name for name in made_up if getattr(args, name) is not None]
    if given:
        raise ConfigError(f"--{given[0].replace('_', '-')} has no effect with a trace ({args.trace}); leave one out")
    trace = read_trace(args.trace)
    if args.requests is not None:
        trace = trace.repeated(args.requests)
    return trace if args.speed is None else trace.faster(args.speed)


def _policies(args: argparse.Namespace, trace: Trace) -> list[Policy]:
    from octavo.planning.policies import parse_policy

    sharing = any(r.runs for r in trace.requests)
    names = args.policies or (SHARING_POLICIES if sharing else DEFAULT_POLICIES)
    policies = [parse_policy(name) for name in names.split(",")]
    if len({p.name for p in policies}) < len(policies):
        raise ConfigError(f"--policies {names}: one of them is there twice; leave it out")
    return policies


def _setup(args: argparse.Namespace) -> tuple[Device, Setup]:
    """The device and what all policies share."""
    from octavo.planning.devices import device
    from octavo.planning.policies import Setup, kv_budget

    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    where = device(args.device or DEFAULT_DEVICE)
    shape, kv_dtype = _shape(args)
    if args.kv_bytes is not None and args.gpu_memory_utilization is not None:
        raise ConfigError("--kv-bytes and --gpu-memory-utilization both size the cache; give one of them")
    if args.kv_bytes is None and (args.calibrate or args.cost_model):
        raise ConfigError("--kv-bytes is needed with a calibrated cost model, which knows no device's memory")
    kv_bytes = args.kv_bytes
    if kv_bytes is None:
        share = 0.9 if args.gpu_memory_utilization is None else args.gpu_memory_utilization
        if not 0.0 < share <= 1.0:
            raise ConfigError(f"--gpu-memory-utilization {share}: must lie in (0, 1]")
        tokens = args.max_num_batched_tokens
        kv_bytes = kv_budget(
            shape,
            where,
            args.dtype,
            utilization=share,
            max_num_batched_tokens=tokens,
            quantization=args.quantization,
        )
    limit = args.max_model_len or shape.max_position_embeddings
    if limit > shape.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {limit} exceeds the {shape.max_position_embeddings} positions of {shape.name}; "
            "use at most so many"
        )
    setup = Setup(
        shape,
        kv_bytes,
        limit,
        args.dtype,
        kv_dtype,
        quantization=args.quantization,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
    )
    return where, setup


def _shape(args: argparse.Namespace) -> tuple[ModelShape, str | None]:
    """The model, and the format of its cache if that is not --dtype; what cannot be asked for is refused."""
    from octavo.core.kv_format import check_kv_dtype
    from octavo.core.weight_format import parse_weight_format

    form = parse_weight_format(args.quantization)
    if form is not None and form.kind not in ("int8", "int4"):
        raise ConfigError(f"--quantization {args.quantization}: a simulation knows int8 and int4[:group][:pure]")
    if form is not None and (args.calibrate or args.cost_model):
        raise ConfigError("--quantization has no effect with a calibrated cost model; record a run that uses it")
    sizes = read_model_sizes(args.model, args.dtype)
    if sizes.stored is not None and form is None:
        raise ConfigError(
            f"--model {args.model}: its files are quantised ({sizes.stored}); say what to count the weights as, with "
            "--quantization int8 or int4"
        )
    if args.kv_cache_dtype in (None, "auto"):
        return sizes.shape, None
    check_kv_dtype(args.kv_cache_dtype, "any", sizes.shape.head_dim)
    return sizes.shape, args.kv_cache_dtype


def _reference(args: argparse.Namespace) -> int:
    from octavo.planning.plots import plot_outcomes
    from octavo.planning.reference import REQUESTS, reference_text, simulate_reference

    if args.trace is not None or args.policies is not None:
        raise ConfigError("--reference has its own load and policies; leave the trace and --policies out")
    with _progress(7) as tick:
        done = iter(range(1, 8))
        found = simulate_reference(lambda name: tick(next(done)), args.requests or REQUESTS)
    if args.json != "-":
        print(reference_text(found))
    if args.plot is not None:
        plot_outcomes(found.long, args.plot, "Llama-2-7B on an A100 with 80 GB, 256 to 2,048 tokens, 24 GiB of cache")
    _write_json(args.json, found.as_json())
    return 0


def _write_json(path: str | None, value: dict[str, Any]) -> None:
    if path is None:
        return
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    if path == "-":
        print(text)
        return
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot be written ({error.strerror})") from error


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, if that is a terminal; call the result with how much is done."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("simulate", total=total)
        yield lambda done: bar.update(task, completed=done)
