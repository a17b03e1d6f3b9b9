"""The board of ``kernel rank`` as one HTML page that needs no network."""

from __future__ import annotations

from ..report import pages, units
from .rank import Board


def page(found: Board) -> str:
    """Returns the page."""
    longest = max((e.total.value for e in found.entries if e.total), default=1.0)
    return pages.template("board.html", __package__).render(
        title=f"{found.operator} of {found.network}", board=found, units=units, longest=longest
    )
