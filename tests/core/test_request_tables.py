"""`RequestTables` against a model that stores every token by itself: contents, exact needs, nothing half done."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.kv_layout import KVLayout, build_layout
from octavo.core.request_tables import RequestId, RequestTables
from octavo.core.view import requests_view
from octavo.errors import AuditError, CapacityError, RequestError


def layout_of(windows: tuple[int | None, ...] = (None,), block_size: int = 4) -> KVLayout:
    return build_layout(windows, block_size=block_size, bytes_per_token_layer=1)


class Blocks:
    """What blocks contain, written and copied as a step says: cells[block][offset] = token."""

    def __init__(self, memory: RequestTables) -> None:
        self.memory = memory
        self.cells: dict[int, list[Any]] = {b: [None] * memory.layout.block_size for b in range(memory.pool.num_blocks)}

    def step(self, rows: list[tuple[RequestId, list[int]]], *, commit: bool = True) -> None:
        copies = self.memory.begin([(r, len(tokens)) for r, tokens in rows])
        for source, destination in copies:
            self.cells[destination] = list(self.cells[source])
        for row, (_, tokens) in zip(self.memory.step, rows, strict=True):
            for table in row.request.tables:
                for position, token in zip(range(row.start, row.end), tokens, strict=True):
                    assert self.memory.pool.is_private(table.ids[position // table.block_size])
                    block, offset = divmod(table.slot(position), table.block_size)
                    self.cells[block][offset] = token
        if commit:
            self.memory.commit()
        else:
            self.memory.abort()

    def read(self, request_id: RequestId, group: int = 0) -> list[Any]:
        """The context, without what lies behind the group's window."""
        request = self.memory.get(request_id)
        table = request.tables[group]
        first = table.first_live * table.block_size
        out: list[Any] = [None] * min(first, request.context_len)
        for position in range(len(out), request.context_len):
            block, offset = divmod(table.slot(position), table.block_size)
            out.append(self.cells[block][offset])
        return out


def state(memory: RequestTables) -> Any:
    """Everything that a refused call must leave alone."""
    requests = {
        r: (q.seq_id, q.context_len, q.seq_len, [(list(t.ids), t.first_live) for t in q.tables])
        for r, q in memory.requests.items()
    }
    counters = (memory.num_forks, memory.num_copies, memory.num_steps, memory.step, memory._next_seq_id)
    return requests, counters, memory.pool.snapshot(), memory.pool.reuse_order()


OPS = st.tuples(
    st.sampled_from(("allocate", "append", "fork", "truncate", "free", "step", "step", "step", "reorder", "abort")),
    st.integers(0, 5), st.integers(0, 5), st.integers(0, 19), st.integers(1, 9),
)  # fmt: skip


class Model:
    """Requests as lists of tokens, and how long each may be without another block."""

    def __init__(self, windows: tuple[int | None, ...], num_blocks: int) -> None:
        self.memory = RequestTables(layout_of(windows), num_blocks)
        self.blocks = Blocks(self.memory)
        self.tokens: dict[RequestId, list[int]] = {}
        self.rooms: dict[RequestId, int] = {}
        self.fresh = 0

    def new(self, count: int) -> list[int]:
        self.fresh += count
        return list(range(self.fresh - count, self.fresh))

    def act(self, op: str, a: int, b: int, length: int, count: int) -> None:
        memory, tokens, rooms = self.memory, self.tokens, self.rooms
        if op == "allocate":
            memory.allocate(a, length)
            tokens[a], rooms[a] = [], length
        elif op == "append":
            memory.append(a, count)
            rooms[a] += count
        elif op == "fork":
            memory.fork(a, b)
            tokens[b], rooms[b] = list(tokens[a]), len(tokens[a])
        elif op == "truncate":
            memory.truncate(a, length)
            tokens[a], rooms[a] = tokens[a][:length], length
        elif op == "free":
            memory.free(a)
            del tokens[a], rooms[a]
        elif op == "reorder":
            memory.reorder([a, b], [b, b])
            tokens[a], rooms[a] = list(tokens[b]), len(tokens[b])
        else:
            ids = list(dict.fromkeys([a, b]))
            rows = [(r, self.new(count)) for r in ids]
            wanted = memory.blocks_needed(memory.rows([(r, count) for r in ids]))
            free = memory.pool.num_available
            held = memory.pool.num_used
            self.blocks.step(rows, commit=op == "step")
            assert wanted <= free
            if op == "abort" or all(g.window is None for g in memory.layout.groups):
                assert memory.pool.num_used - held == wanted  # exactly
            for request_id, added in rows:
                rooms[request_id] = max(rooms[request_id], len(tokens[request_id]) + count)
                if op == "step":
                    tokens[request_id] += added

    def check(self) -> None:
        self.memory.audit()
        assert set(self.memory.requests) == set(self.tokens)
        for request_id, expected in self.tokens.items():
            request = self.memory.get(request_id)
            assert (request.context_len, request.seq_len) == (len(expected), self.rooms[request_id])
            for group in range(self.memory.layout.num_groups):
                found = self.blocks.read(request_id, group)
                assert all(x is None or x == y for x, y in zip(found, expected, strict=True))
                needed = self.memory.layout.groups[group].first_needed(len(expected))
                assert found[needed:] == expected[needed:]


@settings(max_examples=120, deadline=None)
@given(
    windows=st.sampled_from([(None,), (5,), (None, 6)]),
    num_blocks=st.integers(3, 24),
    ops=st.lists(OPS, min_size=5, max_size=40),
)
def test_any_order_of_calls_keeps_every_token_or_changes_nothing(
    windows: tuple[int | None, ...], num_blocks: int, ops: list[tuple[str, int, int, int, int]]
) -> None:
    model = Model(windows, num_blocks)
    for op in ops:
        before = state(model.memory)
        try:
            model.act(*op)
        except (CapacityError, RequestError):
            assert state(model.memory) == before, op
        model.check()
    for request_id in list(model.tokens):
        model.memory.free(request_id)
    model.memory.audit()
    assert model.memory.pool.num_free == num_blocks


def test_a_capacity_error_is_raised_exactly_when_blocks_lack() -> None:
    memory = RequestTables(layout_of(), 4)
    memory.allocate("a", 8)
    memory.begin([("a", 8)])
    memory.commit()
    memory.fork("a", "b")
    memory.fork("a", "c")
    memory.truncate("a", 7), memory.truncate("b", 7), memory.truncate("c", 7)
    # Three holders of the last block write: two copies, the third keeps it. There are two free blocks.
    assert memory.blocks_needed(memory.rows([("a", 1), ("b", 1), ("c", 1)])) == 2
    assert memory.begin([("a", 1), ("b", 1), ("c", 1)]) == [(1, 2), (1, 3)]
    memory.commit()
    assert [memory.get(r).tables[0].ids for r in "abc"] == [[0, 2], [0, 3], [0, 1]]
    with pytest.raises(CapacityError) as caught:
        memory.append("b", 9)
    assert str(caught.value) == (
        "append('b', 9): 3 blocks are needed, 0 of 4 are free; held: request 'a' with 2 blocks (1 shared), "
        "request 'b' with 2 blocks (1 shared), request 'c' with 2 blocks (1 shared). Free or truncate a request, "
        "wait until one ends, or build the pool with num_blocks=7 or more"
    )


def test_long_lists_of_holders_are_cut_short() -> None:
    memory = RequestTables(layout_of(), 8)
    for i in range(8):
        memory.allocate(i, 1)
    with pytest.raises(CapacityError, match=r"request 4 with 1 block, 3 more requests\. Free"):
        memory.allocate("x", 1)


def test_wrong_ids_and_lengths_are_named() -> None:
    memory = RequestTables(layout_of(), 4)
    memory.allocate(1, 5)
    cases: list[tuple[str, Any]] = [
        ("request 7 is unknown; there are: 1", lambda: memory.free(7)),
        ("must be an int or a string", lambda: memory.get([])),  # type: ignore[arg-type]
        ("request 1 is there already", lambda: memory.allocate(1, 1)),
        ("request 1 is there already", lambda: memory.fork(1, 1)),
        ("must be an int or a string", lambda: memory.allocate(2.5, 1)),  # type: ignore[arg-type]
        ("must be an int or a string", lambda: memory.allocate(True, 1)),
        ("seq_len must be at least 0", lambda: memory.allocate(2, -1)),
        ("give 0 to 5", lambda: memory.truncate(1, 6)),
        ("truncate\\(\\) takes back", lambda: memory.append(1, -1)),
        ("at least one", lambda: memory.begin([(1, 0)])),
        ("twice in one step", lambda: memory.begin([(1, 1), (1, 1)])),
        ("of no request", lambda: memory.begin([])),
        ("each request is given once", lambda: memory.reorder([1, 1], [1, 1])),
    ]
    for message, call in cases:
        before = state(memory)
        with pytest.raises(RequestError, match=message):
            call()
        assert state(memory) == before


def test_requests_of_an_open_step_are_left_alone() -> None:
    memory = RequestTables(layout_of(), 8)
    memory.allocate(1, 4), memory.allocate(2, 4)
    memory.begin([(1, 2)])
    for call in (
        lambda: memory.free(1),
        lambda: memory.truncate(1, 0),
        lambda: memory.append(1, 1),
        lambda: memory.fork(1, 3),
        lambda: memory.reorder([2], [1]),
    ):
        with pytest.raises(RequestError, match="request 1 is in the step that is open"):
            call()
    with pytest.raises(RequestError, match="a step of request 1 is open"):
        memory.begin([(2, 1)])
    memory.append(2, 4), memory.free(2)  # others come and go
    memory.abort()
    assert memory.get(1).context_len == 0 and memory.free(1) == 1


def test_room_that_is_not_written_is_not_shared() -> None:
    memory = RequestTables(layout_of(), 8)
    memory.allocate(1, 16)
    memory.begin([(1, 5)])
    memory.commit()
    memory.fork(1, 2)
    assert memory.get(1).tables[0].ids == [0, 1, 2, 3]
    assert memory.get(2).tables[0].ids == [0, 1]
    assert memory.get(2).seq_len == 5


def test_behind_a_window_the_last_step_can_be_taken_back_and_no_more() -> None:
    memory = RequestTables(layout_of((8,)), 16)
    memory.allocate(1, 0)
    for count in (20, 1, 3):
        memory.begin([(1, count)])
        memory.commit()
    # The last step began at 21 and saw 14 and later: block 3 (from 12) and later are live.
    table = memory.get(1).tables[0]
    assert table.first_live == 3
    assert memory.first_truncation(memory.get(1)) == 19
    with pytest.raises(RequestError, match="this request can be cut to 19 positions or more"):
        memory.truncate(1, 18)
    memory.truncate(1, 21)
    for count in (30, 1):
        memory.begin([(1, count)])
        memory.commit(keep_windows=True)
    assert memory.get(1).tables[0].first_live == 3
    assert memory.release_behind_windows(1) == 8  # 52 written: 45 and later are needed, block 11 on
    memory.audit()


def test_the_view_counts_as_the_pool_does() -> None:
    memory = RequestTables(layout_of((None, 4)), 16)
    memory.allocate("a", 9)
    memory.begin([("a", 9)])
    memory.commit()
    memory.fork("a", "b")
    view = requests_view(memory)
    assert view.requests == {0: "a", 1: "b"} and view.num_shared == view.num_used == 6
    assert view.filled_slots == 18 and view.reserved_slots == 24 and view.shared_saved_blocks == 6
    assert view.block_tables[0] == view.block_tables[1] == [[0, 1, 2], [3, 4, 5]]


def test_an_audit_finds_a_lost_block() -> None:
    memory = RequestTables(layout_of(), 4)
    memory.allocate(1, 8)
    memory.get(1).tables[0].ids.pop()
    with pytest.raises(AuditError, match="1 blocks cannot hold 8 positions"):
        memory.audit()
    memory.get(1).seq_len = 4
    with pytest.raises(AuditError, match="block 1: count is 1, but 0 tables hold it"):
        memory.audit()
    memory.get(1).context_len = 5
    with pytest.raises(AuditError, match="5 positions written, room for 4"):
        memory.audit()
