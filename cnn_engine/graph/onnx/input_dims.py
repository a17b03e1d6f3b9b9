"""Dimensions of inputs that a file leaves open: their names, usual sizes, and other sizes to try."""

from __future__ import annotations

from collections.abc import Sequence

from ..dims import Dim, Sizes
from ..guards import Guard
from ..terms import Evaluator, lowest, symbols_of

#: Numbers of dimensions by their symbols, for a graph that is made before the first pass says them.
EXAMPLES = {"batch": 1, "channels": 3, "height": 224, "width": 224}
EXAMPLE = 16

#: Sizes that are tried in the place of one that a model cannot have; usual ones first.
CANDIDATES = (*range(32, 1025, 32), *range(1, 32), *range(33, 1025), 8000, 16000, 48000)

#: Numbers that are tried first for an element that the graph finds: axes, splits, shapes, and counts.
ELEMENT_CANDIDATES = (0, 2, -1, 3, 4, 5, 6)

#: Names of dimensions that say nothing: exporters write them in the place of none.
UNNAMED = ("", "?", "None", "none", "unk")


def dims_of(tensor) -> list[int | str | None] | None:
    """Returns a tensor type's dimensions: a number, or a name or None where it is open; None: no shape.

    A negative number is open too: some exporters write -1.
    """
    if not tensor.HasField("shape"):
        return None
    return [
        d.dim_value
        if d.HasField("dim_value") and d.dim_value >= 0
        else (None if d.dim_param in UNNAMED else d.dim_param)
        for d in tensor.shape.dim
    ]


def text_of(dims: Sequence[int | str | Dim | None] | None) -> str:
    """Returns dimensions for a message, unknown ones as ``?``."""
    if dims is None:
        return "any"
    return f"[{', '.join('?' if d is None else str(d) for d in dims)}]"


def usual_names(dims: Sequence[int | str | Dim | None]) -> list[str]:
    """Returns names for the dimensions of an input where the file has none."""
    names = [f"dim{axis}" for axis in range(len(dims))]
    if names:
        names[0] = "batch"
    if len(dims) == 4:
        last = isinstance(dims[3], int) and not isinstance(dims[1], int)
        names[1:] = ["height", "width", "channels"] if last else ["channels", "height", "width"]
    elif len(dims) in (2, 3):
        names[-1 if not isinstance(dims[-1], int) else 1] = "time"
    return names


def decided_otherwise(
    guards: Sequence[Guard],
    sizes: Sizes,
    tried: set[Sizes],
    fixed: frozenset[str] = frozenset(),
    elements_first: bool = False,
) -> Sizes | None:
    """Returns sizes for which the last decision that can be is another one, or None.

    Args:
        fixed: symbols that keep their numbers, beside the batch.
        elements_first: whether decisions by elements that the graph finds are changed before others.
    """
    last = [(guard, symbols_of(guard.terms)) for guard in reversed(guards[-4:])]
    elements = [
        (guard, {symbol for symbol in symbols_of(guard.terms) if lowest(symbol) is None})
        for guard in reversed(guards)
    ]
    for guard, symbols in elements + last if elements_first else last + elements:
        for symbol in sorted(symbols - {sizes.batch} - fixed):
            first = ELEMENT_CANDIDATES if lowest(symbol) is None else ()
            for number in (*first, *CANDIDATES):
                other = sizes.updated({symbol: number})
                if other not in tried and not guard.holds(Evaluator(other.numbers)):
                    return other
    return None


def example(dims: Sequence[int | Dim] | None) -> tuple[int, ...]:
    """Returns a shape of these dimensions: a batch of 1, images of 224 x 224, 16 of anything else."""
    if dims is None:
        return (1, 3, 224, 224)
    return tuple(
        dim if isinstance(dim, int) else EXAMPLES.get(usual, EXAMPLE)
        for dim, usual in zip(dims, usual_names(dims), strict=True)
    )
