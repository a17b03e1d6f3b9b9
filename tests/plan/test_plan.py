"""The steps of a pass, as they were when a plan was a walk along six kinds of layers.

``golden_steps.json`` was written by that walk. ``python tests/test_plan.py`` writes it again: after a
change that is meant to show, look at the difference before it is committed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import fake_cuda
import numpy as np
import pytest
import tolerances

from cnn_engine import Engine
from cnn_engine.graph import reference
from cnn_engine.kernels import select
from cnn_engine.plan.plan import Plan

GOLDEN = Path(__file__).with_name("golden_steps.json")
BATCH, CHUNK = 3, 2

CELLS = [
    (network, device, mode, row.name, reduction, pixels)
    for network in ("cifar10", "ece408")
    for device, modes in select.DATA_MODES.items()
    if device != "openacc"  # test_openacc.py has it
    for mode in modes
    for row in select.VARIANTS.values()
    if device in row.devices and mode in row.data_modes
    for reduction in ((False, True) if row.reduction else (False,))
    for pixels in (True, False)
]


def engine(network: str, device: str, mode: str, variant: str, reduction: bool) -> Engine:
    return Engine(
        network, weights="random", device=device, data_mode=mode, variant=variant, reduction=reduction,
        threads=1, chunk=CHUNK if mode == "stream" else None,
    )  # fmt: skip


def described(plan: Plan) -> list[list]:
    return [
        [step.name, step.kind, step.place, step.direction, step.flops, step.bytes]
        for step in plan.steps
    ]


def plans(cell: tuple) -> Iterator[tuple[str, list[list]]]:
    """Yields the steps of one cell, for images on the host, page-locked, and on the device."""
    *options, pixels = cell
    dtype = np.dtype(np.uint8 if pixels else np.float32)
    with engine(*options) as e:
        yield "host", described(e.plan(BATCH, dtype))
        if options[2] == "stream":
            yield "pinned", described(e.plan(BATCH, dtype, (True, True)))
        if options[1] == "cuda" and options[2] in ("resident", "stream"):
            yield "device", described(e._plans._build_on(9, BATCH, pixels))


def name_of(cell: tuple, side: str) -> str:
    *words, reduction, pixels = cell
    words += ["reduction"] * reduction + ["uint8" if pixels else "float32", side]
    return " ".join(words)


@pytest.fixture
def fake(monkeypatch):
    fake_cuda.install(monkeypatch)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: name_of(cell, ""))
def test_steps_are_as_they_were(fake, cell):
    golden = json.loads(GOLDEN.read_text())
    for side, found in plans(cell):
        assert found == golden["steps"][golden["cells"][name_of(cell, side)]], side


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: name_of(cell, ""))
def test_a_plan_for_a_gpu_computes_what_the_reference_does(fake, rng, cell):
    """Copies, placements and the memory that steps share, with a GPU's kernels played by the CPU's."""
    *options, pixels = cell
    with engine(*options) as e:
        shape = (5, *e.network.input_shape)
        images = rng.integers(0, 256, shape, dtype=np.uint8)
        if not pixels:
            images = (images / 128 - 1).astype(np.float32)
        wanted = reference.forward(e.network, e.weights, images)
        bound = tolerances.PROBABILITY
        tolerances.assert_close(e.predict(images, BATCH), wanted, bound)


def main() -> None:
    from cnn_engine import devices

    real = devices.select
    devices.select = lambda name: fake_cuda.FakeCuda() if name == "cuda" else real(name)
    cells, known = {}, {}
    for cell in CELLS:
        for side, steps in plans(cell):
            index = known.setdefault(json.dumps(steps), len(known))
            cells[name_of(cell, side)] = index
    lines = ",\n".join(known)
    rows = ",\n".join(f"{json.dumps(name)}: {index}" for name, index in cells.items())
    GOLDEN.write_text(f'{{"cells": {{\n{rows}\n}}, "steps": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
