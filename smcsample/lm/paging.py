"""Which pages hold the keys and values of which row: block tables, and nothing of the keys and values themselves.

A page has room for one round of one particle, so a row opens a page at the start of a round and fills it by the end of
it. Rows that stem from the same ancestor name the same pages; a page named by two rows is never written again. Hence
resampling gathers rows of the table and touches nothing else, a row's table is its genealogy, and with N particles the
pages in use are bounded by T + c·N·log N for T rounds instead of N·T (Jacob, Murray & Rubenthaler 2015, Theorem 1).

When a row must write into a page that others name too, because a round did not fill it, it moves on to a fresh page if
half of the old one is used, and works on a copy otherwise. So nothing is copied as long as rounds fill pages, and less
than half of the slots is wasted when they do not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from smcsample.kernels.ops import gather_tables
from smcsample.lm.kv_pool import PagePool


class Writes(NamedTuple):
    """Where new tokens go: `slots` (page·page_size + offset), and the `positions` of their texts that they have."""

    slots: Int[Tensor, "row step"]
    positions: Int[Tensor, "row step"]


class Pages:
    """The block tables of rows that fork, die and write.

    `tables` int32 `[row, column]`: the pages of each row, in the order they were opened; −1: none. `cursor` int64
    `[row]`: the next slot along the row's own table. `lengths` int64 `[row]`: how many tokens the row holds. `copied`:
    pages copied so far.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.page_size = pool.page_size
        self.copied = 0
        self._forked = False
        # What the host knows without asking the device: the offset of every cursor in its page (None: they differ),
        # and a column that none is beyond.
        self._offset: int | None = 0
        self._columns = 0
        self.open(0)
        pool.users.append(self)

    def release(self) -> None:
        """Name no page any more. Doing so twice does no harm."""
        self.open(0)
        self.pool.users[:] = [user for user in self.pool.users if user is not self]

    def open(self, rows: int) -> None:
        """Start with rows that hold nothing."""
        device = self.pool.slot_positions.device
        self.tables = torch.zeros(rows, 0, dtype=torch.int32, device=device)
        self.cursor = torch.zeros(rows, dtype=torch.int64, device=device)
        self.lengths = self.cursor.clone()
        self._offset, self._columns = 0, 0

    def seal(self) -> None:
        """What comes next starts on a page of its own."""
        self.cursor = -(-self.cursor // self.page_size) * self.page_size
        self._offset = 0

    def extend(
        self, rows: Int[Tensor, " writing"], steps: int, going: Bool[Tensor, " writing"] | None = None
    ) -> Writes:
        """Room for `steps` more tokens in these rows. The others must not write before the next `select`.

        With `going`, only the rows where it is true get any; the others are along so that shapes stay the same, with
        slots and positions of −1, and `slot_positions` is left to `write_kv`. As long as rounds fill pages, or all rows
        may move on together to fresh ones, the host then asks the device for nothing.
        """
        if self._forked:
            self._leave_shared(rows, going)
        size, cursor = self.page_size, self.cursor[rows]
        first, stop = -(-cursor // size), -(-(cursor + steps) // size)  # the columns of the pages to open
        row, nth = self._openings(first, stop, steps)
        if len(row) > 0:
            pages = self.pool.take(len(row)).int()
            if going is not None:  # pages that nobody names are free again at the next sweep
                pages = pages.masked_fill(~going[row], -1)
            self.tables[rows[row], first[row] + nth] = pages
        along = cursor[:, None] + torch.arange(steps, device=rows.device)
        slots = self.tables[rows[:, None], along // size].long() * size + along % size
        positions = (self.lengths[rows, None] + torch.arange(steps, device=rows.device)).int()
        grown: int | Tensor = steps
        if going is None:
            self.pool.slot_positions.view(-1)[slots] = positions
        else:
            slots, positions = (x.masked_fill(~going[:, None], -1) for x in (slots, positions))
            grown = steps * going
        self.cursor[rows], self.lengths[rows] = cursor + steps, self.lengths[rows] + grown
        everybody = len(rows) == len(self.tables)
        self._offset = (self._offset + steps) % size if everybody and self._offset is not None else None
        return Writes(slots, positions)

    def _openings(self, first: Int[Tensor, " row"], stop: Int[Tensor, " row"], steps: int) -> tuple[Tensor, Tensor]:
        """Which row opens its n-th page, for every page to open: (row, n). Makes the tables wide enough."""
        if self._offset is not None:
            each = -(-(self._offset + steps) // self.page_size) - -(-self._offset // self.page_size)
            self._columns += each
            rows = torch.arange(len(first), device=first.device)
            row, nth = rows.repeat_interleave(each), torch.arange(each, device=first.device).repeat(len(first))
        else:
            opened = stop - first
            last, total = torch.stack([stop.max(), opened.sum()]).tolist()
            self._columns = max(self._columns, last)
            rows = torch.arange(len(first), device=first.device)
            row = torch.repeat_interleave(rows, opened, output_size=total)
            nth = torch.arange(total, device=first.device) - (opened.cumsum(0) - opened)[row]
        self._widen(self._columns)
        return row, nth

    def select(self, ancestors: Int[Tensor, " kept"]) -> None:
        """Row i becomes row `ancestors[i]`: pointers move, nothing else."""
        self.tables = gather_tables(self.tables, ancestors)
        self.cursor, self.lengths = self.cursor[ancestors], self.lengths[ancestors]
        self._forked = True

    def truncate(self, rows: Int[Tensor, " cut"], drop: Int[Tensor, " cut"]) -> None:
        """Take the last `drop[i]` tokens of row `rows[i]` back, as rejection decoding does. Only tokens that the row
        wrote since the last `select`: what it shares with others is not its to change."""
        size, stop = self.page_size, self.cursor[rows]
        start = stop - drop
        along = torch.arange(self.tables.shape[1] * size, device=rows.device)
        back = (along >= start[:, None]) & (along < stop[:, None])
        which, where = back.nonzero().unbind(1)
        page = self.tables[rows[which], where // size].long()
        self.pool.slot_positions[page, where % size] = -1
        columns = torch.arange(self.tables.shape[1], device=rows.device)
        empty = columns >= -(-start // size)[:, None]
        self.tables[rows] = self.tables[rows].masked_fill(empty, -1)
        self.cursor[rows], self.lengths[rows] = start, self.lengths[rows] - drop
        self._offset = None

    def _leave_shared(self, rows: Int[Tensor, " writing"], going: Bool[Tensor, " writing"] | None) -> None:
        """Let no row write into a page that another row names: it moves on, or works on a copy. Rows of one page were
        one row at the last `select`, so they have filled it equally far."""
        self._forked = False
        size = self.page_size
        if self._offset == 0:
            return
        if self._offset is not None and 2 * self._offset >= size:
            if going is not None:
                self.seal()  # who shares is not worth waiting for the device
                return
            self._offset = None  # only who shares leaves
        everybody = torch.arange(len(self.tables), device=rows.device)
        inside = everybody[self.cursor % size > 0]
        if going is not None:
            rows, inside = rows[going], inside[self.tables[inside, self.cursor[inside] // size] >= 0]
        column, offset = self.cursor[inside] // size, self.cursor[inside] % size
        page = self.tables[inside, column].long()
        shared = torch.bincount(page, minlength=self.pool.capacity)[page] > 1
        leaves = shared & (2 * offset >= size)
        self.cursor[inside[leaves]] = (column[leaves] + 1) * size

        copies = shared & ~leaves & torch.isin(inside, rows)
        # One of a page's rows may keep it, if it is the only one that does.
        firsts = everybody.new_full((self.pool.capacity,), len(everybody))
        firsts.scatter_reduce_(0, page[copies], inside[copies], "amin")
        idle = torch.bincount(page[shared & ~copies], minlength=self.pool.capacity)[page] > 0
        copies &= (firsts[page] != inside) | idle
        old, new = page[copies], self.pool.take(int(copies.sum()))
        self.tables[inside[copies], column[copies]] = new.int()
        if len(new) > 0:
            self.pool.copy(old, new)
        self.copied += len(new)

    def _widen(self, columns: int) -> None:
        if columns > self.tables.shape[1]:
            more = self.tables.new_full((len(self.tables), columns - self.tables.shape[1]), -1)
            self.tables = torch.cat([self.tables, more], dim=1)
