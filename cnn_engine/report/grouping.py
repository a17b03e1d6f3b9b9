"""Many layers as few rows: by operator, by block, or the longest ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from ..measure.result import LayerPart, LayerTime

#: What ``--group-by`` takes.
WAYS = ("operator", "block")


def blocks(names: Sequence[str]) -> list[str]:
    """Returns the block that each of a network's nodes belongs to, by the names that exporters give them.

    A block is a module with a number in its path: ``/layer1/layer1.0/conv1/Conv`` is of ``layer1.0``,
    ``/features/features.3/squeeze/Conv`` of ``features.3``, ``/inception3a/branch1/conv/Conv`` of
    ``inception3a``. A node that is of no such module is a block of its own.
    """
    paths = [_path(name) for name in names]
    while all(len(path) > 1 for path in paths) and len({path[0] for path in paths}) == 1:
        paths = [path[1:] for path in paths]  # what all have in front tells nothing apart
    inner = {_block(path, 1) for path in paths}
    found = []
    for path, name in zip(paths, names, strict=True):
        whole = _block(
            path, 0
        )  # an addition at the end of layer1.0 is of it, as its convolutions are
        found.append((whole if whole in inner else _block(path, 1)) or name)
    return found


def _path(name: str) -> list[str]:
    """Returns the modules around a node: ``/layer1/layer1.0/conv1/Conv`` is layer1, 0, conv1."""
    words = [word for word in name.split("/") if word]
    modules = words[:-1] if len(words) > 1 else words  # the last is the operator
    found: list[str] = []
    before = ""
    for module in modules:
        inner = module.removeprefix(f"{before}.") if before else module
        if inner == module:  # not written in full, as "layer1.0" in "layer1"
            inner = module.removeprefix(f"{before}-") if before else module
        found += inner.split(".")
        before = module
    return [word for word in found if word]


def _block(path: list[str], own: int) -> str:
    """Returns the front of ``path`` up to its first word with a number, and the numbers after that.

    The last ``own`` words are the node's own module, not what it lies in.
    """
    end = 0
    while end < len(path) - 1 and not re.search("[0-9]", path[end]):
        end += 1
    end += 1
    while end < len(path) - own and path[end].isdigit():
        end += 1
    return ".".join(path[:end])


def grouped(
    layers: Sequence[LayerTime], way: str | None = None, top: int | None = None
) -> list[LayerTime]:
    """Returns ``layers`` in fewer rows, whose times, FLOPs and bytes are sums.

    Parts of a fused network stand for it, so that nothing counts twice.

    Args:
        way: of :data:`WAYS`; None: a row per layer. Operators come with the longest first, blocks in order.
        top: how many rows at most, the longest first, before one for all others; None: all.
    """
    rows = list(layers)
    if way is not None:
        found = steps(layers)
        rows = _by(found, [step.kind for step in found]) if way == "operator" else _by(
            found, blocks([step.name for step in found])
        )  # fmt: skip
    if way == "operator" or top is not None:
        rows.sort(key=lambda row: -row.seconds)
    if top is not None and len(rows) > top:
        others = total(f"{len(rows) - top} others", rows[top:])
        rows = [*rows[:top], others]
    return rows


def steps(layers: Sequence[LayerTime]) -> list[LayerTime]:
    """Returns ``layers`` in order, with the parts of a fused network in its place where they are timed."""
    return [
        step
        for layer in layers
        for step in ([_of_part(layer, part) for part in layer.inside] or [layer])
    ]


def _of_part(layer: LayerTime, part: LayerPart) -> LayerTime:
    device_s = None if layer.device_s is None else part.seconds
    return LayerTime(
        part.name, part.kind, layer.place, layer.calls, part.seconds, device_s, part.flops
    )


def _by(steps: Sequence[LayerTime], keys: Sequence[str]) -> list[LayerTime]:
    found: dict[str, list[LayerTime]] = {}
    for key, step in zip(keys, steps, strict=True):
        found.setdefault(key, []).append(step)
    return [total(key, part) for key, part in found.items()]


def total(name: str, layers: Sequence[LayerTime]) -> LayerTime:
    """Returns one row for all of ``layers``: sums of times, FLOPs and bytes; a kernel where all have one."""

    def all_of(attribute: Callable[[LayerTime], str]) -> str:
        return ", ".join(dict.fromkeys(map(attribute, layers)))

    on_device = any(layer.device_s is not None for layer in layers)
    kernels = all_of(lambda layer: layer.kernel)
    return LayerTime(
        name,
        kind=all_of(lambda layer: layer.kind),
        place=all_of(lambda layer: layer.place),
        calls=sum(layer.calls for layer in layers),
        host_s=sum(layer.host_s for layer in layers),
        device_s=sum(layer.seconds for layer in layers) if on_device else None,
        flops=sum(layer.flops for layer in layers),
        bytes=sum(layer.bytes for layer in layers),
        kernel=kernels if "," not in kernels else "",
    )
