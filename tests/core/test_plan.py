"""`octavo plan` without a model: its arithmetic is the scheduler's, its advice follows from it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from helpers.scheduling import Rig, never_ends, prompt
from octavo.cli.main import main
from octavo.errors import ConfigError
from octavo.planning.plan import GIB, Ask, Plan, block_row, held, make_plan, memory_of, sequences_at_once
from octavo.planning.plan_text import plan_as_json, plan_lines
from octavo.planning.shapes import KNOWN, ModelShape

LLAMA = KNOWN["llama-2-7b"]
WINDOWED = ModelShape("w", 4, 64, 128, 4, 2, 16, 320, 512, windows=(32, 32, 32, None))
MIXED = [(100, 100), (400, 60), (30, 300), (900, 40)]


def ask(**given: Any) -> Ask:
    values = {"shape": LLAMA, "weight_bytes": LLAMA.num_parameters * 2, "memory": 80 * GIB, "lengths": MIXED, **given}
    return Ask(**values)


def test_llama_in_80_gib() -> None:
    """13.5 GB of weights, half a MiB a token, 2 GiB a sequence when 4,096 positions are reserved."""
    plan = make_plan(ask())
    assert plan.memory.weights == 6_738_149_376 * 2
    assert plan.kv_bytes_per_token == 512 * 1024
    assert plan.static_bytes_per_sequence == 2 * GIB
    assert plan.static_fits == plan.memory.kv // (2 * GIB) == 29
    assert [r.block_size for r in plan.rows] == [8, 16, 32, 64]
    assert plan.memory.planned <= plan.memory.usable < plan.memory.planned + plan.row.bytes_per_block
    assert plan.row.fits > 10 * plan.static_fits


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("windows", [(None,), (8, None), (24, 24, 24, None)])
def test_held_is_what_the_scheduler_holds(block_size: int, windows: tuple[int | None, ...]) -> None:
    rig = Rig(200, block_size=block_size, windows=windows, script=never_ends, max_num_batched_tokens=block_size)
    request = rig.add(prompt(40), max_tokens=50)
    while not request.finished:
        plan = rig.plan()
        position = request.sequences[0].num_computed - 1
        # A chunk of the prompt keeps what its first position reads until the sequence begins another block.
        if position >= 40 + block_size:
            assert plan.num_tokens == 1
            assert rig.pool.num_used == held(rig.layout, position)
        rig.take(rig.device.submit(plan))


def test_as_many_sequences_run_as_were_planned() -> None:
    """The real scheduler over the planned pool: as many at once as the plan says, within a tenth."""
    lengths = [(30 + i * 7 % 60, 40 + i * 11 % 80) for i in range(60)]
    planned = ask(
        shape=WINDOWED, weight_bytes=1 << 20, memory=33 << 20, lengths=lengths, dtype="float32", device="cpu",
        max_num_seqs=512, max_num_batched_tokens=256, max_model_len=256,
    )  # fmt: skip
    plan = make_plan(planned)
    row = plan.row
    assert plan.memory.num_blocks == row.num_blocks > 20
    rig = Rig(
        row.num_blocks, block_size=16, windows=WINDOWED.windows, script=never_ends, max_model_len=256, max_num_seqs=512,
        max_num_batched_tokens=256,
    )  # fmt: skip
    for i in range(3 * row.fits):
        length, output = lengths[i % len(lengths)]
        rig.add(prompt(length, i), max_tokens=output)
    counts = []
    while len(rig.scheduler.waiting) or not counts:
        rig.scheduler.update(rig.runner.execute(rig.scheduler.schedule()))
        counts.append(rig.scheduler.counters.live)
    steady = counts[len(counts) // 4 :]
    assert sum(steady) / len(steady) == pytest.approx(row.fits, rel=0.15)


def test_rows_trade_waste_for_tables() -> None:
    rows = make_plan(ask()).rows
    for small, large in pairwise(rows):
        assert small.waste < large.waste and small.table_bytes > large.table_bytes and small.fits >= large.fits
        assert large.bytes_per_block == 2 * small.bytes_per_block
    # On average half a block of a growing sequence is empty.
    mean = sum(o * (p + o / 2) for p, o in MIXED) / sum(o for _, o in MIXED)
    assert rows[1].waste == pytest.approx(8 / (mean + 8), rel=0.2)


def test_memory_adds_up() -> None:
    for device in ("cuda", "cpu"):
        memory = memory_of(ask(device=device, max_num_seqs=256))
        assert memory.planned == memory.weights + memory.activations + memory.runtime + memory.kv <= memory.usable
        assert memory.usable == int(0.9 * 80 * GIB)


def test_the_recommendation_runs_more_than_what_was_asked() -> None:
    asked = ask(memory=24 * GIB, max_num_seqs=8, block_size=64)
    plan = make_plan(asked)
    r = plan.recommended
    better = replace(
        asked, block_size=int(r["block_size"]), max_num_seqs=int(r["max_num_seqs"]),
        utilization=r["gpu_memory_utilization"], max_model_len=int(r["max_model_len"]),
    )  # fmt: skip
    assert sequences_at_once(better) > plan.now == 8
    assert r["max_model_len"] == 1024 and 0.8 < r["gpu_memory_utilization"] <= 0.9
    assert int(r["max_num_seqs"]) <= block_row(better, better.block_size).fits


def best(plan: Plan) -> tuple[str, object]:
    assert plan.best is not None and plan.best.sequences > plan.now
    return plan.best.setting, plan.best.new


def test_the_change_that_buys_most() -> None:
    small = ask(memory=24 * GIB, max_num_seqs=4, max_num_batched_tokens=512)
    assert best(make_plan(small))[0] == "max_num_seqs"
    wide = replace(small, max_num_seqs=512)
    assert best(make_plan(wide)) == ("memory", "30.00 GiB")
    assert best(make_plan(replace(wide, utilization=0.7))) == ("gpu_memory_utilization", 0.9)
    single = replace(wide, memory=40 * GIB, dtype="float32", weight_bytes=2 * wide.weight_bytes)
    assert best(make_plan(single)) == ("dtype", "bfloat16")
    short = replace(wide, block_size=256, lengths=[(10, 10)])
    assert best(make_plan(short)) == ("block_size", 16)
    whole = ask(
        shape=WINDOWED, weight_bytes=1 << 20, memory=600 << 20, lengths=[(400, 100)], hybrid_kv=False, device="cpu",
        max_num_seqs=4096, max_num_batched_tokens=512,
    )  # fmt: skip
    assert best(make_plan(whole)) == ("hybrid_kv", True)


def test_too_little_memory_says_how_much() -> None:
    with pytest.raises(ConfigError, match=r"12\.55 GiB of weights.* at least 14\.\d+ GiB are needed"):
        make_plan(ask(memory=12 * GIB))
    # What it says is enough is enough.
    make_plan(ask(memory=int(15.0 * GIB)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"utilization": 1.5}, "utilization 1.5: must lie in"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"lengths": []}, "lengths"),
        ({"lengths": [(0, 5)]}, "lengths"),
        ({"max_model_len": 8000}, "the model has 4096 positions"),
        ({"dtype": "int3"}, "dtype='int3'"),
    ],
)
def test_refusals(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ask(**given)


def test_prompts_longer_than_the_limit() -> None:
    assert make_plan(ask(max_model_len=450)).cut_requests == 2
    with pytest.raises(ConfigError, match="every prompt of the load is longer"):
        make_plan(ask(max_model_len=20))


def test_the_command_names_what_can_be_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    def commands(*words: str) -> list[str]:
        assert main(["plan", *words, "--memory", "80GiB"]) == 0
        lines = capsys.readouterr().out.splitlines()
        return [line.strip() for line in lines if "octavo serve" in line or "path/to" in line]

    command, remark = commands("llama-2-7b", "--device", "cpu")
    assert command.startswith("octavo serve --model path/to/checkpoint --device cpu --dtype float32 ")
    assert remark == "(path/to/checkpoint: the directory, .gguf file or hub id of your llama-2-7b weights)"
    (command,) = commands("meta-llama/Llama-2-7b-hf")
    assert command.startswith("octavo serve --model meta-llama/Llama-2-7b-hf --dtype bfloat16 ")
    (command,) = commands("gemma-3-270m")
    assert command.startswith("octavo serve --model gemma-3-270m --dtype ")


def test_an_npu_gets_its_own_block_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama-2-7b", "--device", "npu"]
    assert main([*words, "--memory", "64GiB", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [row["block_size"] for row in facts["paged"]] == [128, 256]
    assert facts["recommended"]["block_size"] in (128, 256) and "gpu_memory_utilization" in facts["recommended"]
    assert main([*words, "--memory", "64GiB"]) == 0
    text = capsys.readouterr().out
    assert "NPU with 64.00 GiB" in text and "path/to/checkpoint --device npu --dtype bfloat16" in text
    assert "kv_cache_dtype" not in text and "kv-cache-dtype" not in text
    assert main(words) == 2
    assert "how much has the NPU?" in capsys.readouterr().err


def test_text_and_json_say_the_same() -> None:
    plan = make_plan(ask())
    facts = json.loads(json.dumps(plan_as_json(plan, "llama-2-7b")))
    text = "\n".join(plan_lines(plan, "llama-2-7b", "a load"))
    assert facts["static"]["fits"] == plan.static_fits and f"static            {plan.static_fits:>6}" in text
    assert facts["sequences_at_once"] == plan.now and f"{plan.now} sequences run at once" in text
    assert all(f"  {k}={v}" in text for k, v in facts["recommended"].items())
    assert facts["best_change"]["setting"] in text
    assert sum(facts["memory"][k] for k in ("weights", "activations", "runtime", "kv")) == facts["memory"]["planned"]


# Fewer bits


def short_of_memory(**given: Any) -> Ask:
    sizes = {kind: LLAMA.weight_bytes("bfloat16", kind) for kind in ("int8", "int4")}
    return ask(memory=24 * GIB, max_num_seqs=512, quantized_bytes=sizes, **given)


def test_fewer_bits_are_proposed_where_memory_is_short() -> None:
    asked = short_of_memory()
    plan = make_plan(asked)
    fits = {(s.quantization, s.kv_cache_dtype): s.fits for s in plan.smaller}
    assert list(fits.values()) == sorted(fits.values()) and min(fits.values()) > plan.now
    assert set(fits) == {(q, kv) for q in (None, "int8", "int4") for kv in ("auto", "int8", "int4")} - {(None, "auto")}
    # Half a key and value, and a scale each, make room for nearly twice the sequences in the same pool.
    assert fits[None, "int8"] / plan.row.fits == pytest.approx(2, rel=0.05)
    # What it says of both together is what a plan with both says of itself.
    both = replace(asked, kv_cache_dtype="int8", quantization="int4", weight_bytes=asked.quantized_bytes["int4"])
    assert make_plan(both).row.fits == fits["int4", "int8"]
    text = "\n".join(plan_lines(plan, "llama-2-7b", "a load"))
    line = next(line for line in text.splitlines() if "quantization=int4, kv_cache_dtype=int8" in line)
    assert "with fewer bits" in text and line.split()[2] == str(fits["int4", "int8"])
    assert {s["fits"] for s in plan_as_json(plan, "llama-2-7b")["smaller"]} == set(fits.values())


def test_nothing_is_proposed_where_seats_are_what_is_short() -> None:
    assert make_plan(replace(short_of_memory(), memory=80 * GIB, max_num_seqs=8)).smaller == ()


def test_a_format_that_is_asked_for_is_kept() -> None:
    asked = replace(short_of_memory(quantization="int8", kv_cache_dtype="int8"), quantized_bytes={}, memory=10 * GIB)
    plan = make_plan(replace(asked, weight_bytes=LLAMA.weight_bytes("bfloat16", "int8")))
    assert plan.smaller == ()
    command = next(line for line in plan_lines(plan, "m/x", "a load") if "octavo serve" in line)
    assert "--kv-cache-dtype int8 --quantization int8" in command


def test_too_little_memory_names_what_would_be_enough() -> None:
    with pytest.raises(
        ConfigError, match=r"or 7\.\d+ GiB with quantization='int8' and 5\.\d+ GiB with .*int4"
    ) as caught:
        make_plan(replace(short_of_memory(), memory=10 * GIB))
    enough = float(str(caught.value).rpartition("' and ")[2].split(" GiB")[0])
    asked = short_of_memory(quantization="int4")
    make_plan(replace(asked, weight_bytes=asked.quantized_bytes["int4"], memory=int((enough + 0.1) * GIB)))


@pytest.mark.parametrize("kind", [None, "int8", "int4:pure", "int4:128:pure"])
def test_weight_bytes_by_hand(kind: str | None) -> None:
    shape = ModelShape("s", 3, 256, 512, 4, 2, 64, 1000, 512)
    linear = {None: lambda r, c: 2 * r * c, "int8": lambda r, c: r * (c + 4),
              "int4:pure": lambda r, c: r * c // 32 * 19,
              "int4:128:pure": lambda r, c: r * c // 128 * 67}[kind]  # fmt: skip
    layer = 2 * linear(256, 256) + 2 * linear(128, 256) + 2 * linear(512, 256) + linear(256, 512)
    assert shape.weight_bytes("bfloat16", kind) == 3 * layer + 2 * linear(1000, 256)
    assert shape.weight_bytes("bfloat16", kind, step=True) == 3 * layer + linear(1000, 256)


def test_the_command_takes_formats(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama-2-7b", "--memory", "12GiB", "--json"]
    assert main([*words, "--quantization", "int8"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["memory"]["weights"] == LLAMA.weight_bytes("bfloat16", "int8") and facts["quantization"] == "int8"
    assert main([*words, "--quantization", "int5"]) == 2
    assert "quantization='int5'" in capsys.readouterr().err
    assert main([*words, "--quantization", "fp8", "--device", "cpu"]) == 2
    assert "needs a GPU" in capsys.readouterr().err
