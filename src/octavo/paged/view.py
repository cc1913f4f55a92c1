"""`PagedView`: a `PoolView` of a `PagedAttention` that prints as a picture of its tables. No tensors."""

from __future__ import annotations

from dataclasses import dataclass, fields

from octavo.core.request_tables import RequestTables
from octavo.core.view import PoolView, requests_view


@dataclass(frozen=True, slots=True)
class PagedView(PoolView):
    """What `PagedAttention.view()` returns: plain numbers (see `PoolView`), and as text

    request 1: [0*, 1*, 2]
    request 2: [0*, 1*, 3]
    * shared by several block tables
    pool █████░░░░░ 4 of 8 blocks used (50.0%), 2 of them shared; …
    """

    def __str__(self) -> str:
        from octavo.inspect.terminal import show_blocks

        return "\n".join(show_blocks(self, labels={seq: f"request {name}" for seq, name in self.requests.items()}))


def paged_view(memory: RequestTables) -> PagedView:
    """Take it; time proportional to the blocks in use."""
    view = requests_view(memory)
    return PagedView(**{field.name: getattr(view, field.name) for field in fields(PoolView)})
