"""What is known of a picture that is drafted in blocks, beyond what is committed.

A block of two rows of six codes, judged at once. Letters are codes that are kept, `1` and `2` the
islands of refused ones. The judging round has the target draw the first of them, `x`. The next one
reads what is known, gaps and all, and draws `?`: one code of every island, if the token before it
is known. Everything before the first gap is committed.

    judged         to be mended     read               drawn
    a b c d e f    a 1 1 d e f      . . . d e f        a x ? d e f
    g h i j k l    g 1 1 j 2 2      g . . j . .        g 1 1 j ? 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mmspec.codes.connected_cells import islands
from mmspec.codes.grid import Grid
from mmspec.drafters.rows.row_chain import DraftedCode, RowChain, said


@dataclass
class PartialImage:
    """What is known of one picture beyond what is committed."""

    begun: int = 0  # blocks drafted so far
    held: dict[int, DraftedCode] = field(default_factory=dict)  # by offset
    islands: list[list[int]] = field(default_factory=list)  # offsets that are to be drawn anew
    small: list[list[int]] = field(default_factory=list)  # rows of the small picture
    drawn: list[int] = field(default_factory=list)  # the next of them, as the small model drew it

    @property
    def is_done(self) -> bool:
        """Whether all of the block is known for good."""
        return not self.islands and all(one.settled for one in self.held.values())

    def hold(
        self, grid: Grid, tokens: Sequence[Sequence[int]], first: int, stop: int, start: int
    ) -> None:
        """Keep the rows from `first` to `stop`, except for what is committed, below `start`."""
        for row in range(first, stop):
            for column in range(grid.width):
                if grid.offset(row, column) >= start:
                    self.held[grid.offset(row, column)] = DraftedCode(tokens[row][column])

    def lacks(self, offset: int, start: int) -> bool:
        """Whether a code is still to be drafted: not committed, below `start`, and not judged."""
        if offset < start or any(offset in part for part in self.islands):
            return False
        return offset not in self.held or not self.held[offset].settled

    def judge(self, grid: Grid, line: RowChain, failed: Sequence[bool]) -> None:
        """Settle the judged codes, or drop them and find their islands."""
        dropped = []
        for node, (place, _) in enumerate(line.nodes[: line.sure]):
            offset = line.start + place
            if offset not in self.held or self.held[offset].settled:
                continue
            self.held[offset] = replace(self.held[offset], settled=True)
            cell = grid.cell(offset)
            if failed[node] and cell is not None:
                del self.held[offset]
                dropped.append(cell)
        if dropped:
            self.islands = [[grid.offset(*cell) for cell in part] for part in islands(dropped)]

    def forget(self, start: int) -> None:
        """Drop what is committed, below `start`."""
        self.held = {offset: one for offset, one in self.held.items() if offset >= start}
        left = [[offset for offset in part if offset >= start] for part in self.islands]
        self.islands = [part for part in left if part]


def lay(grid: Grid, page: PartialImage, rows: int, start: int) -> RowChain:
    """What is read behind `start` new tokens of a picture, `rows` of whose rows were begun."""
    nodes, fronts = list[tuple[int, int]](), list[tuple[int, int]]()
    offset = start
    while (token := said(grid, page.held, offset)) is not None:
        nodes.append((offset - start, token))
        offset += 1
    sure = last = len(nodes)
    firsts = {part[0] for part in page.islands}
    stop = grid.offset(rows - 1, grid.width - 1) + 1 if firsts else offset
    for behind in range(offset + 1, stop):
        token = said(grid, page.held, behind)
        if token is not None:
            nodes.append((behind - start, token))
        elif behind in firsts and said(grid, page.held, behind - 1) is not None:
            fronts.append((len(nodes), behind))
            last = len(nodes)
    return RowChain(start, tuple(nodes[:last]), sure, tuple(fronts))


def judged(grid: Grid, page: PartialImage, offset: int) -> tuple[int, int]:
    """The cell of a code that is to be judged; (-1, -1) for one that is settled."""
    held = page.held.get(offset)
    cell = None if held is None or held.settled else grid.cell(offset)
    return (-1, -1) if cell is None else cell


def filled(rows: Sequence[list[int]], height: int) -> list[list[int]]:
    """Rows of a picture, the last one repeated to the bottom."""
    return [*rows, *[rows[-1]] * (height - len(rows))]


def spelt(grid: Grid, rows: Sequence[Sequence[int]]) -> list[int]:
    """Everything that stands before the row below `rows`."""
    ends = [] if grid.separator is None else [grid.separator]
    return [*grid.header, *(token for row in rows for token in (*row, *ends))]
