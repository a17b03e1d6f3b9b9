"""What a network with several outputs gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import did_you_mean


class Outputs(tuple):
    """The outputs of one call, in the network's order, by place or by exact name.

    ``outputs[0]``, ``outputs["/head/0"]`` and ``first, second = outputs`` all work.

    Args:
        arrays: name -> array.

    Attributes:
        names: of the outputs, in the same order.
    """

    names: tuple[str, ...]

    def __new__(cls, arrays: Mapping[str, Any]) -> Outputs:
        made = super().__new__(cls, arrays.values())
        made.names = tuple(arrays)
        return made

    def __getnewargs__(self) -> tuple[dict[str, Any]]:
        return (self.to_dict(),)

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        if key not in self.names:
            hint = did_you_mean(key, self.names)
            raise KeyError(f"expected one of {', '.join(self.names)}, found {key!r}{hint}")
        return super().__getitem__(self.names.index(key))

    def to_dict(self) -> dict[str, Any]:
        """Returns name -> array."""
        return dict(zip(self.names, self, strict=True))

    def __repr__(self) -> str:
        return f"Outputs({self.to_dict()!r})"
