"""Kernels that a user gave to an engine, and the nodes that they run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import expected
from ..kernels import Kernel
from ..operators import KINDS
from .placement import Placed


def own_kernels(given: Sequence[str | Kernel] | Mapping[str, str | Kernel]) -> dict[str, Kernel]:
    """Returns node, or operator -> the kernel of a user's own.

    Args:
        given: ``"my.cu"``, ``"conv2:my.cu"`` or kernels; or a mapping from nodes or operators to either.

    Raises:
        InputError: a file is at fault, or two kernels are for the same.
    """
    if isinstance(given, (str, os.PathLike, Kernel)):
        given = [given]
    if isinstance(given, Mapping):
        pairs = list(given.items())
    elif not isinstance(given, Iterable):
        raise expected("kernels", "files or kernels, or a mapping to them", given)
    else:
        pairs = [target_and_file(one) if isinstance(one, str) else (None, one) for one in given]
    found: dict[str, Kernel] = {}
    for target, one in pairs:
        if not isinstance(one, (str, os.PathLike, Kernel)):
            raise expected("kernels", "files or kernels, or a mapping to them", one)
        kernel = one if isinstance(one, Kernel) else Kernel.from_file(one)
        target = target or kernel.op
        if target in KINDS and target != kernel.op:
            raise expected(
                f"kernels: {kernel.name}", f"a kernel of {target}", f"one of {kernel.op}"
            )
        if target in found:
            raise expected(
                f"kernels: {target}", "one kernel", f"{found[target].name} and {kernel.name}"
            )
        found[target] = kernel
    return found


def target_and_file(text: str) -> tuple[str | None, str]:
    """Returns the parts of ``conv2:my.cu``: a node or an operator, or None, and a file."""
    target, colon, file = text.partition(":")
    # A path may hold a colon too; a node's name rarely holds a separator, and then the file tells.
    if not colon or os.path.exists(text):
        return None, text
    return target, file


def describe(own: Mapping[str, Kernel], placed: Placed) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the nodes that a user's kernels run in a pass, as JSON and as sentences."""
    found, words = [], []
    for target, kernel in own.items():
        nodes = [name for name, row in placed.kernels.items() if row is kernel]
        found.append(
            {"kernel": kernel.name, "file": kernel.file, "operator": kernel.op, "target": target,
             "nodes": nodes, "computes": kernel.computes[0]}
        )  # fmt: skip
        words.append(f"kernel: {kernel.name} runs {', '.join(nodes)}: named by --kernel")
    words += [f"kernel: not {name}: {why}" for name, why in placed.refused.items()]
    return found, words
