"""The known codes of an image that is drafted in blocks, beyond the committed ones.

A block of two rows of six codes, verified at once. Letters are accepted codes, `1` and `2` islands
of rejected ones. In the verifying round the target draws the first of them, `x`. The next round
reads all known codes, with gaps, and draws `?`: one code of every island whose previous token is
known. Everything before the first gap is committed.

    verified       to be redrawn    read               drawn
    a b c d e f    a 1 1 d e f      . . . d e f        a x ? d e f
    g h i j k l    g 1 1 j 2 2      g . . j . .        g 1 1 j ? 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mmspec.codes.connected_cells import find_islands
from mmspec.codes.grid import Grid
from mmspec.drafters.rows.row_chain import DraftedCode, RowChain, known_token


@dataclass
class PartialImage:
    """The known codes of one image beyond the committed ones."""

    num_blocks: int = 0  # blocks drafted so far
    drafted_codes: dict[int, DraftedCode] = field(default_factory=dict)  # by offset
    islands: list[list[int]] = field(default_factory=list)  # offsets to redraw
    small: list[list[int]] = field(default_factory=list)  # rows of the small image
    last_row: list[int] = field(default_factory=list)  # the next small row, as generated

    @property
    def is_done(self) -> bool:
        """Whether all codes of the block are final."""
        return not self.islands and all(one.is_final for one in self.drafted_codes.values())

    def add_rows(
        self, grid: Grid, tokens: Sequence[Sequence[int]], first: int, stop: int, start: int
    ) -> None:
        """Add the rows from `first` to `stop`, except for the committed codes below `start`."""
        for row in range(first, stop):
            for column in range(grid.width):
                if grid.offset_of(row, column) >= start:
                    self.drafted_codes[grid.offset_of(row, column)] = DraftedCode(
                        tokens[row][column]
                    )

    def needs_draft(self, offset: int, start: int) -> bool:
        """Whether a code must still be drafted: neither committed (below `start`) nor verified."""
        if offset < start or any(offset in part for part in self.islands):
            return False
        return offset not in self.drafted_codes or not self.drafted_codes[offset].is_final

    def judge(self, grid: Grid, chain: RowChain, failed: Sequence[bool]) -> None:
        """Mark the verified codes as final, or drop them and find their islands."""
        dropped = []
        for node, (place, _) in enumerate(chain.nodes[: chain.num_contiguous]):
            offset = chain.start + place
            if offset not in self.drafted_codes or self.drafted_codes[offset].is_final:
                continue
            self.drafted_codes[offset] = replace(self.drafted_codes[offset], is_final=True)
            cell = grid.cell_at(offset)
            if failed[node] and cell is not None:
                del self.drafted_codes[offset]
                dropped.append(cell)
        if dropped:
            self.islands = [
                [grid.offset_of(*cell) for cell in part] for part in find_islands(dropped)
            ]

    def drop_committed(self, start: int) -> None:
        """Drop the committed codes, below `start`."""
        self.drafted_codes = {
            offset: one for offset, one in self.drafted_codes.items() if offset >= start
        }
        left = [[offset for offset in part if offset >= start] for part in self.islands]
        self.islands = [part for part in left if part]


def build_chain(grid: Grid, image: PartialImage, rows: int, start: int) -> RowChain:
    """The chain to read after `start` new tokens of an image with `rows` drafted rows."""
    nodes, fronts = list[tuple[int, int]](), list[tuple[int, int]]()
    offset = start
    while (token := known_token(grid, image.drafted_codes, offset)) is not None:
        nodes.append((offset - start, token))
        offset += 1
    num_contiguous = last = len(nodes)
    firsts = {part[0] for part in image.islands}
    stop = grid.offset_of(rows - 1, grid.width - 1) + 1 if firsts else offset
    for later in range(offset + 1, stop):
        token = known_token(grid, image.drafted_codes, later)
        if token is not None:
            nodes.append((later - start, token))
        elif later in firsts and known_token(grid, image.drafted_codes, later - 1) is not None:
            fronts.append((len(nodes), later))
            last = len(nodes)
    return RowChain(start, tuple(nodes[:last]), num_contiguous, tuple(fronts))


def cell_to_verify(grid: Grid, image: PartialImage, offset: int) -> tuple[int, int]:
    """The cell of a code that is to be verified; (-1, -1) for a final one."""
    drafted_codes = image.drafted_codes.get(offset)
    cell = None if drafted_codes is None or drafted_codes.is_final else grid.cell_at(offset)
    return (-1, -1) if cell is None else cell


def repeat_last_row(rows: Sequence[list[int]], height: int) -> list[list[int]]:
    """Rows of an image, the last one repeated to the bottom."""
    return [*rows, *[rows[-1]] * (height - len(rows))]


def image_prefix(grid: Grid, rows: Sequence[Sequence[int]]) -> list[int]:
    """All tokens before the row below `rows`."""
    ends = [] if grid.separator is None else [grid.separator]
    return [*grid.header, *(token for row in rows for token in (*row, *ends))]
