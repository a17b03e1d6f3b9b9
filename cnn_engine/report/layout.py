"""Layout of text reports: labelled lines and tables, at most 100 columns wide, without colours."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from . import units

WIDTH = 100
SHORTEST_NAME = 24  # however little room the numbers leave
NO_BREAK = "\ue000"  # for private use, in no printable text; rich breaks lines at every real space


def fields(rows: list[tuple[str, str]]) -> list[str]:
    """Returns ``label : value`` lines; long values continue under their beginning."""
    table = Table.grid(padding=(0, 1))
    table.add_column(min_width=28, overflow="fold")
    table.add_column()
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(label, ":" if label else "", value)
    return rendered(table) if rows else []


def table(names: list[str], rows: list[list[str]]) -> list[str]:
    """Returns a table with a first column of names, shortened to the page's width, and others of numbers."""
    others = zip(*(cells for _, *cells in [names, *rows]), strict=True)
    room = WIDTH - sum(2 + max(map(len, column)) for column in others)
    titles = units.shortened_apart([name for name, *_ in rows], max(room, SHORTEST_NAME))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, name in enumerate(names):
        if index == 0:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    for title, (_, *cells) in zip(titles, rows, strict=True):
        # So that a name too long for its column is folded after "Time for", not before: grep finds it.
        table.add_row(title.replace(" ", NO_BREAK), *cells)
    return [line.replace(NO_BREAK, " ").rstrip() for line in rendered(table)]


def rendered(table: Table, width: int = WIDTH) -> list[str]:
    """Returns the lines of ``table``, without colours."""
    console = Console(
        file=io.StringIO(), width=width, color_system=None, force_terminal=False, force_jupyter=False,
        markup=False, emoji=False, highlight=False,
    )  # fmt: skip
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines()]
