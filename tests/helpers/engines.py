"""Whole engines: what they run, and a GPU's results beside the CPU's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import tolerances

from cnn_engine import Engine
from cnn_engine.graph.graph import Graph
from cnn_engine.plan.plan import Plan


def single(graph: Graph) -> Graph:
    """The same graph in float32."""
    constants = {name: array.astype(np.float32) for name, array in graph.constants.items()}
    inputs = tuple(replace(value, dtype="float32") for value in graph.inputs)
    return replace(graph, inputs=inputs, constants=constants)


def plan_of(engine: Engine, batch: int) -> Plan:
    """Returns a plan for float32 images in the host's memory."""
    plans = engine._plans
    return plans._build(plans._host_key(batch, False, (False, False)))


def steps_of(engine: Engine, batch: int) -> dict:
    """Returns the steps of a pass by their names."""
    return {step.name: step for step in plan_of(engine, batch).steps}


def running(steps: dict, kernel: str) -> list[str]:
    """Returns the names of the steps that a kernel runs."""
    return [name for name, step in steps.items() if step.kernel == kernel]


def built(graph: Graph, dtype: str, batch: int = 2) -> tuple[Graph, dict]:
    """Returns the graph that an engine on a GPU runs, and its steps by their names."""
    with Engine(graph, device="cuda", dtype=dtype) as engine:
        return engine._plans.open().placed(batch, False).graph, steps_of(engine, batch)


def assert_as_on_cpu(graph: Graph, rng: np.random.Generator, atol: float) -> None:
    """Asserts that an engine on a GPU, be it one that is not there, makes what the CPU makes."""
    (images,) = graph.inputs
    x = {images.name: rng.uniform(-1, 1, images.shape).astype(np.float32)}
    made = []
    for device in ("cpu", "cuda"):
        with Engine(graph, device=device) as engine:
            made += engine.run(x).values()
    wanted, found = made
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=atol)


def on_gpu(graph: Graph, dtype: str) -> tuple[Graph, list[str]]:
    """Runs a graph of one input and one output on a GPU; returns the graph that ran, and its kernels.

    Asserts that what it makes is near what the CPU makes, and that it has the same bits again.
    """
    (images,) = graph.inputs
    x = {images.name: np.random.default_rng(3).uniform(-1, 1, images.shape).astype(np.float32)}
    with Engine(graph, device="cpu") as engine:
        (wanted,) = engine.run(x).values()
    with Engine(graph, device="cuda", dtype=dtype) as engine:
        (found,) = engine.run(x).values()
        for _ in range(3):
            (again,) = engine.run(x).values()
            assert np.array_equal(again, found)
        placed = engine._plans.open().placed(images.shape[0], False).graph
        kernels = [step.kernel for step in steps_of(engine, images.shape[0]).values()]
    limit = tolerances.FEW_LAYERS[dtype] * np.abs(wanted).max()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=limit)
    return placed, kernels
