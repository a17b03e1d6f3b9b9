"""The board of ``kernel rank`` as one HTML page that needs no network."""

from __future__ import annotations

from importlib.resources import files

from ..report import units
from .rank import Board


def page(found: Board) -> str:
    """Returns the page."""
    from jinja2 import Environment, StrictUndefined  # only for those who want a page

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = files(__package__).joinpath("board.html").read_text(encoding="utf-8")
    longest = max((e.total.value for e in found.entries if e.total), default=1.0)
    return environment.from_string(source).render(board=found, units=units, longest=longest)
