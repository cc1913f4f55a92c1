"""`octavo bench scheduler` and the scheduling that other benchmarks count with: arithmetic and shape, no times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.bench import scheduler as bench
from octavo.bench.scripted import answer, request, simulate
from octavo.bench.standing import Noting, blocks_for, length_of
from octavo.bench.workloads import Item
from octavo.cli.main import main
from octavo.core.kv_layout import build_layout
from octavo.core.scheduler import Scheduler
from octavo.core.settings import SchedulerSettings
from octavo.core.step import StepPlan, StepResult
from octavo.errors import InternalError

LAYOUT = build_layout([None, None], block_size=16, bytes_per_token_layer=10)
BLOCK = 16 * 2 * 10


def settings(**given: object) -> SchedulerSettings:
    return SchedulerSettings(**{"num_blocks": 32, "max_model_len": 64, **given})  # type: ignore[arg-type]


def test_command_writes_every_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    given = ["--sequences", "1,3", "--pools", "40,200", "--steps", "4", "--operations", "30", "--json", str(file)]
    assert main(["bench", "scheduler", *given]) == 0
    said = json.loads(file.read_text())
    step, pool = said["tables"].values()
    assert [(r["sequences"], r["num_blocks"]) for r in step] == 2 * [(1, 40), (1, 200), (3, 40), (3, 200)]
    assert all(r["per_sequence"] > 0 and r["admission"] > 0 for r in step)
    assert [r.get("num_blocks") for r in pool] == [40] * 6 + [200] * 6 + [None]
    assert {g["name"] for g in said["goals"]} == {"µs per pool operation, worst"}  # 64 sequences were not asked for
    shown = capsys.readouterr().out
    assert "revive a cached block" in shown and said["facts"]["versions"]["octavo"] in shown


def test_figures_of_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "decode_times", lambda *args: (8e-6, [1e-6, 5e-6, 3e-6], [1e-6, 1e-6, 1e-6]))
    row = bench._case("one table", 2, 1000, 3, True)
    assert row["schedule"] == pytest.approx(3) and row["update"] == pytest.approx(1) and row["step"] == pytest.approx(4)
    assert row["per_sequence"] == pytest.approx(12 / 3 / 2)  # the mean, not the median
    assert row["admission"] == pytest.approx(4)


def test_case_that_does_not_fit_has_no_figures() -> None:
    row = bench._case("Gemma 3 270M, 6 tables", 4, 40, 16, True)
    assert row["step"] is None and row["per_sequence"] is None


@pytest.mark.parametrize("caching", [True, False])
def test_decode_times_has_one_figure_per_step(caching: bool) -> None:
    admission, schedule, update = bench.decode_times(LAYOUT, 5, 100, 16, caching)
    assert len(schedule) == len(update) == 16 and admission > 0


def test_simulation_counts_bytes_by_hand() -> None:
    # 20 prompt tokens are 2 blocks; the 33rd position would be a third, 20 + 4 tokens stay within two.
    samples = simulate(settings(), LAYOUT, [Item(tuple(range(1, 21)), 4)])
    assert [s.filled for s in samples] == [20 * 20, 21 * 20, 22 * 20, 23 * 20]
    assert [s.held for s in samples] == [2 * BLOCK] * 4
    assert {s.pool for s in samples} == {32 * BLOCK} and {s.sequences for s in samples} == {1}
    assert samples[-1].use == pytest.approx(23 * 20 / (32 * BLOCK))


def test_simulation_of_static_reserves_the_longest() -> None:
    item = Item(tuple(range(1, 21)), 4)
    samples = simulate(settings(allocation="static"), LAYOUT, [item] * 10)
    assert max(s.sequences for s in samples) == 8  # 32 blocks / 4 per reservation of 64 tokens
    assert samples[0].held == 8 * 4 * BLOCK and samples[0].waiting == 2


def test_windowed_blocks_that_are_released_hold_nothing() -> None:
    layout = build_layout([16, None], block_size=16, bytes_per_token_layer=10)
    samples = simulate(settings(max_num_batched_tokens=16), layout, [Item(tuple(range(1, 50)), 2)])
    # Position 49 is computed with the window 34..49: the windowed table has given back its first two blocks.
    assert samples[-1].filled == (50 * 10) + (50 - 32) * 10


class Inner:
    """Remembers plans."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        return answer(plan)


def test_noted_prompts_reach_the_runner_with_the_first_computed_step() -> None:
    scheduler, inner = Scheduler(settings(max_num_batched_tokens=32), LAYOUT), Inner()
    noting = Noting(inner)
    for number in range(2):
        scheduler.add(request(number, Item(tuple(range(1, 41)), 12)))
    for _ in range(4):
        scheduler.update(noting.execute(scheduler.schedule()))
    assert not inner.plans
    noting.computing = True
    for _ in range(2):
        scheduler.update(noting.execute(scheduler.schedule()))
    first, second = inner.plans
    assert len(first.starts) == 2 and not second.starts
    for start, scheduled in zip(first.starts, first.scheduled, strict=True):
        assert start.token_ids[:40] == tuple(range(1, 41)) and len(start.token_ids) == scheduled.start + 1
        table: dict[int, int] = {}
        for update in scheduled.tables:
            table.update(enumerate(update.block_ids, update.first))
        sequence = scheduler.sequence(scheduled.seq_id)
        assert sequence is not None
        assert [table[i] for i in range(len(table))] == sequence.tables[0].ids[: len(table)]
        assert len(table) * 16 > scheduled.start


def test_a_noted_sequence_that_is_left_out_is_an_error() -> None:
    scheduler, noting = Scheduler(settings(max_num_seqs=2), LAYOUT), Noting(Inner())
    scheduler.add(request(0, Item((1, 2, 3), 4)))
    scheduler.update(noting.execute(scheduler.schedule()))
    noting.computing = True
    with pytest.raises(InternalError, match="not in the first"):
        noting.execute(StepPlan(9, ()))


def test_a_noted_sequence_that_ends_is_forgotten() -> None:
    scheduler, inner = Scheduler(settings(), LAYOUT), Inner()
    noting = Noting(inner)
    scheduler.add(request(0, Item((1, 2, 3), 4)))
    scheduler.update(noting.execute(scheduler.schedule()))
    scheduler.abort("r0")
    noting.execute(plan := scheduler.schedule())
    assert plan.ends
    noting.computing = True
    noting.execute(StepPlan(9, ()))
    assert inner.plans == [StepPlan(9, ())]  # neither a start nor an end of what the runner never knew


def test_pool_is_large_enough_for_the_largest_standing_case() -> None:
    cases, steps, chunk = [(1, 64), (6, 100), (2, 200)], 4, 32
    layout = build_layout([16, None, 16, None], block_size=16, bytes_per_token_layer=1)
    blocks = blocks_for(layout, cases, steps, chunk)
    for sequences, context in cases:
        limit = length_of(sequences, context, steps, chunk)
        plain = SchedulerSettings(
            num_blocks=blocks, max_model_len=limit, max_num_seqs=sequences, max_num_batched_tokens=chunk
        )
        scheduler = Scheduler(plain, layout)
        for number in range(sequences):
            scheduler.add(request(number, Item(tuple(range(1, context + 1)), limit - context)))
        while scheduler.waiting or any(s.num_tokens - s.num_computed > 1 for r in scheduler.running for s in r.live()):
            scheduler.update(answer(scheduler.schedule()))
        for _ in range(2 + steps):
            plan = scheduler.schedule()
            assert plan.num_tokens == sequences
            scheduler.update(answer(plan))
        assert scheduler.counters.preemptions == 0
