"""Where the actions of a schedule were written: what an error calls a place in a rank's list."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """Name the cell of each action, as it stands in the file that the schedule was read from.

    `cells[r][i]` is where action `i` of rank `r` stands, such as ``row 3, column 5``; `rows[r]` is
    where the row of rank `r` does. Without a file an action is named by its place in the list.
    """

    source: str = ""
    rows: tuple[str, ...] = ()
    cells: tuple[tuple[str, ...], ...] = ()

    def at(self, rank: int, place: int) -> str:
        """Return the name of one action's cell: ``place 3``, or its row and column."""
        return self.cells[rank][place] if self.source else f"place {place}"

    def file_at(self, rank: int, place: int | None = None) -> str:
        """Return the file and the cell (or the row alone); nothing where there is no file."""
        if not self.source:
            return ""
        if place is None:
            return f"{self.source}, {self.rows[rank]}" if rank < len(self.rows) else self.source
        return f"{self.source}, {self.cells[rank][place]}"


NO_FILE = Cells()
"""Name actions by their places in the lists."""
