"""Kernels of a user's own on a network's nodes, once each, before the network itself runs with them."""

from __future__ import annotations

import secrets

import numpy as np

from ..engine.engine import Engine
from ..graph.model import Model
from .cases import of_node
from .expected import judged
from .process import Fault, Limits
from .sandbox import Trial

#: Images: two, so that what is the second's is seen.
IMAGES = 2


def fault(engine: Engine, limits: Limits | None = None) -> str | None:
    """Returns the fault of one of the engine's user kernels in one line, or None.

    Each runs in a process of its own, on random numbers in the shapes of its nodes: what crashes, hangs or
    writes where it should not is known before it could harm this process.
    """
    program = engine._plans.open()
    batch = engine.network.batch if isinstance(engine.network, Model) else IMAGES
    if isinstance(engine.network, Model) and engine.network.any_batch:
        batch = IMAGES
    placed = program.placed(batch, program.first[1])
    generator = np.random.default_rng(secrets.randbits(128))
    subjects: dict[str, list] = {}
    for node in placed.graph.nodes:
        kernel = placed.kernels.get(node.name)
        if kernel is not None and kernel.file is not None:
            subjects.setdefault(kernel.file, []).append((node, kernel))
    for file, nodes in subjects.items():
        try:
            with Trial(file, engine.device.name, engine.threads, limits) as trial:
                for node, kernel in nodes:
                    case = of_node(placed.graph, node)
                    outcome = trial.check(case, judged(case, generator, kernel.computes[0]))
                    if outcome.refused:
                        return f"{file}: {node.name}: {outcome.refused}"
        except Fault as found:
            return f"{file}: {found}"
    return None
