"""Functions of a model's own: written out before its nodes are read, where that stays of bounded size."""

from __future__ import annotations

from typing import Any

from ...errors import InputError

#: What local functions may grow to when they are written out.
MOST_NODES = 200_000


def written_out(model: Any, source: str) -> Any:
    """Returns ``model``, an ONNX ModelProto, with its local functions written out.

    Raises:
        InputError: they call themselves, grow too large, or are not sound.
    """
    if not model.functions:
        return model
    bodies = {(f.domain, f.name): f.node for f in model.functions}
    sizes: dict[tuple[str, str], int] = {}

    def size(nodes, above: tuple) -> int:
        total = 0
        for node in nodes:
            key = (node.domain, node.op_type)
            if key not in bodies:
                total += 1
            elif key in above:
                raise InputError(
                    f"{source}: expected functions that do not call themselves, found {key[1]!r}"
                )
            else:
                if key not in sizes:
                    if len(above) > 64:
                        raise InputError(f"{source}: expected functions in up to 64 levels")
                    sizes[key] = size(bodies[key], (*above, key))
                total += sizes[key]
        if total > MOST_NODES:
            raise InputError(
                f"{source}: expected functions that grow to up to {MOST_NODES} nodes, found more"
            )
        return total

    size(model.graph.node, ())
    from onnx import inliner

    try:
        return inliner.inline_local_functions(model)
    except Exception as error:  # ONNX's own C++, on functions that are not sound
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{source}: its functions cannot be written out: {reason}") from None
