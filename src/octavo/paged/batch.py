"""From the rows of a step to the `AttentionBatch` that a backend plans. Reads tables, changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from octavo.core.block_table import BlockTable
from octavo.core.kv_layout import KVLayout
from octavo.core.request_tables import StepRow
from octavo.kernels.interface import AttentionBatch


def attention_batch(rows: Sequence[StepRow], layout: KVLayout, device: torch.device) -> AttentionBatch:
    """The rows' tables already have room for what they write."""
    counts = np.array([row.count for row in rows])
    starts = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    ends = np.array([row.end for row in rows], np.int32)
    tables, slots = [], []
    for group in range(layout.num_groups):
        held = [row.request.tables[group] for row in rows]
        tables.append(torch.from_numpy(table_rows(held)).to(device))
        places = [slots_of(table, row.start, row.end) for table, row in zip(held, rows, strict=True)]
        slots.append(torch.from_numpy(np.concatenate(places)).to(device))
    return AttentionBatch(
        query_start=torch.from_numpy(starts).to(device),
        context_len=torch.from_numpy(ends).to(device),
        block_tables=tables,
        slots=slots,
        max_query=int(counts.max()),
        max_context=int(ends.max()),
    )


def table_rows(tables: Sequence[BlockTable]) -> npt.NDArray[np.int32]:
    """int32 [B, longest table]; entries behind a row's end, and those given back behind a window, read -1."""
    out = np.full((len(tables), max((len(t.ids) for t in tables), default=0)), -1, np.int32)
    for row, table in zip(out, tables, strict=True):
        row[: len(table.ids)] = table.ids
    return out


def slots_of(table: BlockTable, start: int, end: int) -> npt.NDArray[np.int64]:
    """int64 [end - start]: block * block_size + offset of positions start..end-1, as `BlockTable.slots`."""
    positions = np.arange(start, end)
    logical = positions // table.block_size
    if end > start:  # the two ends are inside the table, so everything between is
        table.slot(start), table.slot(end - 1)
    return np.asarray(table.ids, np.int64)[logical] * table.block_size + positions % table.block_size
