"""Parts of what is split or sliced stay where they are, and are not written over while they are read."""

from __future__ import annotations

import fake_cuda
import numpy as np
import pytest
from engines import assert_as_on_cpu, steps_of
from graphs import Builder

from cnn_engine import Engine
from cnn_engine.graph import reference
from cnn_engine.graph.graph import Graph, Node
from cnn_engine.operators.binary import Add
from cnn_engine.operators.shaping import Concat, Slice, Split
from cnn_engine.operators.unary import HardSwish, Relu


def split(b: Builder, x: str, *sizes: int) -> tuple[str, ...]:
    """Adds a split of channels."""
    name = f"split{len(b.nodes)}"
    made = tuple(f"{name}.{index}" for index in range(len(sizes)))
    b.nodes.append(Node(name, Split(1, sizes), (x,), made))
    n, _, *places = b.shapes[x]
    b.shapes.update((part, (n, size, *places)) for part, size in zip(made, sizes, strict=True))
    return made


def cross_stage(b: Builder, x: str, channels: int) -> str:
    """A block whose convolutions read one half of the channels (Wang et al., CSPNet, 2020), as in YOLO."""
    first, second = split(b, x, channels, channels)
    y = b.relu(b.conv(b.relu(b.conv(second, channels, 3)), channels, 3))
    return b.add(Concat(1), first, second, b.add(Add(), second, y))


def copies_of(steps: dict) -> dict[str, int]:
    """Returns how many copies each split, slice and concatenation makes."""
    return {
        name: len(step.args) // 3
        for name, step in steps.items()
        if name.startswith(("split", "slice", "concat"))
    }


def random_graph(rng: np.random.Generator) -> Graph:
    b = Builder((int(rng.integers(1, 3)), 8, 6, 5), seed=int(rng.integers(1 << 30)))
    values = [b.relu(b.conv("images", int(rng.choice([16, 24, 32])), 3))]
    for _ in range(int(rng.integers(4, 14))):
        x = str(rng.choice(values[-3:]))
        channels = b.shapes[x][1]
        kind = rng.choice(["conv", "split", "slice", "concat", "add", "function"])
        if kind == "conv":
            values.append(b.conv(x, int(rng.choice([8, 12, 16])), int(rng.choice([1, 3]))))
        elif kind == "split" and channels >= 4:
            first = int(rng.choice([4, channels // 2, 3]))
            values += split(b, x, first, channels - first)
        elif kind == "slice" and channels > 4:
            start = int(rng.choice([0, 4, 1]))
            values.append(
                b.add(Slice((start,), (int(rng.choice([channels, channels - 1])),), (1,), (1,)), x)
            )
        elif kind == "concat":
            values.append(b.add(Concat(1), *map(str, rng.choice(values, int(rng.integers(2, 4))))))
        elif kind == "add":
            same = [y for y in values if b.shapes[y] == b.shapes[x]]
            values.append(b.add(Add(), x, str(rng.choice(same))))
        elif kind == "function":
            values.append(b.add(rng.choice([Relu(), HardSwish()]), x))
    found = b.graph(values[-1])
    kept = {values[-1], *map(str, rng.choice(values, 2))}
    return Graph(
        found.name, found.inputs, tuple(sorted(kept)), found.nodes, found.constants, found.batched
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_random_splits_have_the_values_of_copies(rng, monkeypatch, device):
    if device == "cuda":
        fake_cuda.install(monkeypatch, tensor_cores=True)
    views = 0
    for _ in range(60):
        graph = random_graph(rng)
        batch = graph.inputs[0].shape[0]
        images = rng.normal(size=graph.inputs[0].shape).astype(np.float32)
        wanted = reference.reference(graph, {"images": images})
        with Engine(graph, device=device, threads=1) as engine:
            views += sum(not copies for copies in copies_of(steps_of(engine, batch)).values())
            for _ in range(2):  # the second pass finds what the first has left
                for name, array in engine.run({"images": images}).items():
                    limit = 1e-5 * max(abs(wanted[name]).max(initial=0), 1e-3)
                    np.testing.assert_allclose(array, wanted[name], rtol=0, atol=limit)
    assert views > 12


@pytest.mark.parametrize("batch", [1, 3])
def test_a_cross_stage_block_copies_nothing(rng, monkeypatch, batch):
    fake_cuda.install(monkeypatch, tensor_cores=True)
    b = Builder((batch, 16, 10, 10))
    x = b.relu(b.conv(cross_stage(b, b.relu(b.conv("images", 64, 3)), 32), 32, 1))
    graph = b.graph(b.head(x, 10))
    with Engine(graph, device="cuda") as engine:
        assert set(copies_of(steps_of(engine, batch)).values()) == {0}
    assert_as_on_cpu(graph, rng, 1e-5)


def test_on_the_cpu_parts_begin_at_any_element(rng):
    """Channels that are no multiple of 16 bytes are copied no more than others."""

    def copies(channels: int) -> dict[str, int]:
        b = Builder((2, 8, 10, 7))
        x = b.relu(b.conv("images", 2 * channels, 3))
        graph = b.graph(b.head(b.relu(b.conv(cross_stage(b, x, channels), 8, 1)), 10))
        images = rng.uniform(-1, 1, (2, 8, 10, 7)).astype(np.float32)
        (wanted,) = reference.reference(graph, {"images": images}).values()
        with Engine(graph, device="cpu") as engine:
            (found,) = engine.run({"images": images}).values()
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
            return copies_of(steps_of(engine, 2))

    assert copies(9) == copies(10) == copies(33) == copies(32)


def test_what_is_written_over_its_whole_is_copied(monkeypatch):
    """A function in the place of the whole would be read through a part that lives on."""
    fake_cuda.install(monkeypatch, tensor_cores=True)
    b = Builder((2, 8, 6, 6))
    x = b.conv("images", 32, 3)
    first, second = split(b, x, 16, 16)
    y = b.add(HardSwish(), b.add(Relu(), x))
    z = b.add(Concat(1), y, b.conv(first, 16, 3), second)
    graph = b.graph(b.head(b.conv(z, 16, 1), 10))
    assert_as_on_cpu(graph, np.random.default_rng(0), 1e-5)
