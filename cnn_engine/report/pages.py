"""HTML pages: templates that extend ``base.html``, which has their one head and style sheet."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from . import units


@cache
def template(name: str, package: str = __package__) -> Any:
    """Returns a Jinja template by name.

    Args:
        name: of the file, beside the modules of ``package``.
    """
    from jinja2 import (  # only for those who want a page
        Environment,
        FunctionLoader,
        StrictUndefined,
    )

    def read(file: str) -> str:
        return files(package if file == name else __package__).joinpath(file).read_text("utf-8")

    return Environment(
        loader=FunctionLoader(read),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if hasattr(value, "__html__") else units.printable(value),
    ).get_template(name)
