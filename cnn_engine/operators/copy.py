"""copy: y = x, in another memory space or under another name."""

from __future__ import annotations

from typing import ClassVar

from .operator import Operator, need, record


@record
class Copy(Operator):
    """Input: x of any shape and type."""

    kind: ClassVar[str] = "copy"

    def infer(self, inputs):
        need(inputs, 1)
        return ((inputs[0].shape, inputs[0].dtype),)

    def reference(self, x):
        return x
