"""Label columns: integers in one, texts in another; all others are counted and named."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from . import packages

LOWEST, HIGHEST = -(2**63), 2**63 - 1

_WHOLE = re.compile(r"[+-]?[0-9]+")

#: Characters of a number of 64 bits, at most, and of a label that a message shows.
_DIGITS, _SHOWN = 20, 40


class Label(NamedTuple):
    """One label: a number, a text, none at all, or the fault of one that can be neither."""

    number: int | None = None
    text: str | None = None
    lost: str | None = None


@dataclass
class Labels:
    """Labels of some images.

    Attributes:
        numbers: int64 as Arrow has them, null where there is none.
        texts: those that are no numbers, as Arrow has them; None: all are numbers or null.
        lost: position -> what is wrong with a label that neither column has room for.
    """

    numbers: Any
    texts: Any = None
    lost: dict[int, str] = field(default_factory=dict)

    def __getitem__(self, some: slice) -> Labels:
        begin, end, _ = some.indices(len(self.numbers))
        lost = {at - begin: what for at, what in self.lost.items() if begin <= at < end}
        texts = None if self.texts is None else self.texts[some]
        return Labels(self.numbers[some], texts, lost)

    def each(self) -> list[Label]:
        """Returns them one by one."""
        texts = [None] * len(self.numbers) if self.texts is None else self.texts.to_pylist()
        pairs = enumerate(zip(self.numbers.to_pylist(), texts, strict=True))
        return [Label(number, text, self.lost.get(at)) for at, (number, text) in pairs]

    @classmethod
    def of(cls, labels: Iterable[Label]) -> Labels:
        """Returns the labels of a sequence."""
        pa = packages.arrow()
        numbers, texts, lost = map(list, zip(*labels, strict=True))
        some = any(text is not None for text in texts)
        return cls(
            pa.array(numbers, pa.int64()),
            pa.array(texts, pa.string()) if some else None,
            {at: what for at, what in enumerate(lost) if what is not None},
        )

    @classmethod
    def of_column(cls, column: Any) -> Labels:
        """Returns the labels of a column, as Arrow has it; those of a dictionary are its values."""
        pa = packages.arrow()
        kind = column.type
        if pa.types.is_integer(kind) and kind != pa.uint64():
            return cls(column.cast(pa.int64()))
        return cls.of(map(label_of, values_of(column)))

    @classmethod
    def none(cls, count: int) -> Labels:
        pa = packages.arrow()
        return cls(pa.nulls(count, pa.int64()))

    @classmethod
    def join(cls, parts: list[Labels]) -> Labels:
        """Returns the labels of all parts, one after the other."""
        if len(parts) == 1:
            return parts[0]
        pa = packages.arrow()
        lost, at, texts = {}, 0, []
        for part in parts:
            lost.update({at + place: what for place, what in part.lost.items()})
            at += len(part.numbers)
            texts.append(
                pa.nulls(len(part.numbers), pa.string()) if part.texts is None else part.texts
            )
        numbers = pa.concat_arrays([part.numbers for part in parts])
        some = any(part.texts is not None for part in parts)
        return cls(numbers, pa.concat_arrays(texts) if some else None, lost)


def is_text(kind: Any) -> bool:
    """Whether a column of an Arrow type may have texts as labels."""
    types = packages.arrow().types
    if types.is_dictionary(kind):
        kind = kind.value_type
    return any(
        is_kind(kind)
        for is_kind in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary,
                        types.is_string_view, types.is_binary_view, types.is_fixed_size_binary)
    )  # fmt: skip


def values_of(column: Any) -> list[Any]:
    """Returns a column's values; texts, and bytes that stand for some, as UTF-8 can have them."""
    pa = packages.arrow()
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string_view(column.type):
        column = column.cast(pa.large_string())
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = column.cast(pa.large_binary())  # what another program wrote need not be UTF-8
    return [
        value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value
        for value in column.to_pylist()
    ]


def label_of(value: Any) -> Label:
    """Returns the label that a value of Python's is; NaN is none, as pandas has it."""
    if value is None or value != value:
        return Label()
    number = value
    if isinstance(value, str):
        text = value.strip()
        if text and not _WHOLE.fullmatch(text):
            return Label(text=value)
        number = int(text) if 0 < len(text) <= _DIGITS else None
    elif not isinstance(value, int):
        try:
            number = int(value) if value == int(value) else None
        except (TypeError, ValueError, ArithmeticError):
            number = None
    if number is None or not LOWEST <= number <= HIGHEST:
        return Label(
            lost=f"expected a whole number of 64 bits or a text as label, found {_shown(value)}"
        )
    return Label(int(number))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def idx_labels(path: str) -> str | None:
    """Returns the file of labels next to a file of images, or None."""
    folder, name = os.path.split(path)
    labels = os.path.join(folder, name.replace("-images-idx3-", "-labels-idx1-"))
    return labels if os.path.exists(labels) else None
