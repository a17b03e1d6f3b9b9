"""Random graphs of branches, loops and data-dependent shapes, beside ONNX Runtime: equal numbers."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx_models import model, onnxruntime_outputs, tensor

from cnn_engine import Engine

node = helper.make_node

#: Graphs, the last of a branch within a branch that decides on a length, and calls of each.
SEEDS, CALLS = (*range(23), 112), 3


class Body:
    """Nodes over vectors of whole numbers in float32; each method adds one and returns its name."""

    def __init__(self, rng, constants: dict, prefix: str = "") -> None:
        self.rng, self.constants, self.prefix = rng, constants, prefix
        self.nodes: list = []

    def __call__(self, operator: str, *inputs: str, **attributes) -> str:
        name = f"{self.prefix}t{len(self.nodes)}"
        self.nodes.append(node(operator, [*inputs], [name], **attributes))
        return name

    def constant(self, array) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(array)
        return name

    def number(self, number: float) -> str:
        return self.constant(np.float32(number))

    def modulo(self, x: str) -> str:
        """Keeps numbers small enough for float32 to hold them and their sums."""
        return self("Mod", x, self.number(97), fmod=1)

    def length(self, x: str) -> str:
        return self("Shape", x)

    def function(self, x: str) -> str:
        return self(self.rng.choice(["Neg", "Abs", "Relu"]), x)

    def linear(self, x: str) -> str:
        scaled = self("Mul", x, self.number(self.rng.integers(-3, 4)))
        return self.modulo(self("Add", scaled, self.number(self.rng.integers(-9, 10))))

    def positive(self, x: str) -> str:
        """The numbers above 0."""
        at = self("Transpose", self("NonZero", self("Relu", x)), perm=[1, 0])
        return self("GatherND", x, at)

    def compress(self, x: str) -> str:
        return self("Compress", x, self("Less", x, self.number(self.rng.integers(-5, 6))), axis=0)

    def unique(self, x: str) -> str:
        return self("Unique", x)

    def half(self, x: str) -> str:
        zero, two = self.constant(np.int64([0])), self.constant(np.int64([2]))
        return self("Slice", x, zero, self("Div", self.length(x), two))

    def best(self, x: str) -> str:
        k = self("Min", self.length(x), self.constant(np.int64([self.rng.integers(0, 5)])))
        name = self("TopK", x, k)
        self.nodes[-1].output.append(f"{name}.at")
        return name

    def repeated(self, x: str) -> str:
        return self("Tile", x, self.few(x))

    def padded(self, x: str) -> str:
        zero = self.constant(np.int64([0]))
        return self("Pad", x, self("Concat", self.few(x), zero, axis=0))

    def counted(self, x: str) -> str:
        """x and 0, 1, 2 ... as far as it has numbers."""
        zero, one = self.constant(np.int64(0)), self.constant(np.int64(1))
        whole = self("Range", zero, self("Squeeze", self.length(x)), one)
        return self("Concat", x, self("Cast", whole, to=TensorProto.FLOAT), axis=0)

    def joined(self, x: str) -> str:
        """x, a number as often as a count says, and zeros as many."""
        number, count = self("ReduceMax", self("Concat", x, self.zero(), axis=0)), self.few(x)
        return self(
            "Concat", x, self("Expand", number, count), self("ConstantOfShape", count), axis=0
        )

    def part(self, x: str) -> str:
        """The first or the second of two parts of computed lengths."""
        first = self("Div", self.length(x), self.constant(np.int64([self.rng.integers(1, 4)])))
        lengths = self("Concat", first, self("Sub", self.length(x), first), axis=0)
        name = self("Split", x, lengths)
        self.nodes[-1].output.append(f"{name}.rest")
        return name if self.rng.integers(0, 2) else f"{name}.rest"

    def summed(self, x: str) -> str:
        zero = self.constant(np.int64(0))
        return self.modulo(self("CumSum", x, zero, reverse=int(self.rng.integers(0, 2))))

    def products(self, x: str) -> str:
        """The sums of the rows or columns, of which a computed number says, of x times its first half."""
        column = self("Unsqueeze", x, self.constant(np.int64([1])))
        axis = self("Mod", self.length(x), self.constant(np.int64([2])))
        return self.modulo(self("ReduceSum", self("Mul", column, self.half(x)), axis, keepdims=0))

    def rows(self, x: str) -> str:
        """x as rows, as many as a count says, of which all but the first are kept."""
        count = self("Add", self.few(x), self.constant(np.int64([1])))
        rest = self.constant(np.int64([-1]))
        full = self("Tile", self("Concat", x, self.zero(), axis=0), count)
        kept = self(
            "Slice", self("Reshape", full, self("Concat", count, rest, axis=0)), *self.ends(1)
        )
        return self("Reshape", kept, rest)

    def stored(self, x: str) -> str:
        """x with its first elements in reverse."""
        longer = self("Concat", x, self.zero(), self.zero(), axis=0)
        at = self(
            "Range",
            self.constant(np.int64(0)),
            self("Squeeze", self.few(x)),
            self.constant(np.int64(1)),
        )
        return self("ScatterElements", longer, at, self("Gather", longer, self("Neg", at)), axis=0)

    def chosen(self, x: str) -> str:
        number = self("Cast", self.few(x), to=TensorProto.FLOAT)
        return self("Where", self("Less", x, number), number, x)

    def zero(self) -> str:
        return self.constant(np.float32([0]))

    def ends(self, first: int) -> list[str]:
        return [self.constant(np.int64([first])), self.constant(np.int64([2**62]))]

    def few(self, x: str) -> str:
        """A number from 0 to 2 that depends on how long x is, by way of integers or of floats."""
        length, kind = self.length(x), self.rng.integers(0, 4)
        if kind == 0:
            half = self("Mul", self("Cast", length, to=TensorProto.FLOAT), self.number(0.5))
            rounded = self(self.rng.choice(["Floor", "Ceil", "Round"]), half)
            length = self("Cast", rounded, to=TensorProto.INT64)
        elif kind == 1:
            length = self("Shape", self("NonZero", x), start=1)
        elif kind == 2:
            length = self(
                "Cast",
                self("Sqrt", self("Cast", length, to=TensorProto.DOUBLE)),
                to=TensorProto.INT64,
            )
        return self("Mod", length, self.constant(np.int64([3])))

    def condition(self, x: str) -> str:
        total = self("ReduceSum", x, keepdims=0)
        return self("Less", total, self.number(self.rng.integers(-20, 21)))

    def branch(self, x: str, depth: int) -> str:
        condition, bodies = self.condition(x), []
        for side in ("then", "else"):
            body = Body(self.rng, self.constants, f"{self.prefix}{len(self.nodes)}{side}/")
            made = body("Identity", body.steps(x, 2, depth + 1))
            bodies.append(helper.make_graph(body.nodes, side, [], [tensor(made, None)]))
        return self("If", condition, then_branch=bodies[0], else_branch=bodies[1])

    def loop(self, x: str, depth: int) -> str:
        """A state, of a length that may change, for a few steps, or until its sum is large."""
        body = Body(self.rng, self.constants, f"{self.prefix}{len(self.nodes)}loop/")
        i, on, state = (f"{body.prefix}{part}" for part in ("i", "on", "state"))
        added = body("Add", state, body("Cast", i, to=TensorProto.FLOAT))
        made = body("Identity", body.steps(added, 1, depth + 1))
        again = body("Identity", on if self.rng.integers(0, 2) else body.condition(made))
        graph = helper.make_graph(
            body.nodes, "body",
            [tensor(i, [], TensorProto.INT64), tensor(on, [], TensorProto.BOOL), tensor(state, None)],
            [tensor(again, [], TensorProto.BOOL), tensor(made, None)],
        )  # fmt: skip
        return self("Loop", self("Squeeze", self.few(x)), "", x, body=graph)

    def steps(self, x: str, count: int, depth: int = 0) -> str:
        """Adds so many random steps, one after the other."""
        simple = [
            self.function, self.linear, self.positive, self.compress, self.unique, self.half, self.best,
            self.repeated, self.padded, self.counted, self.joined, self.part, self.summed, self.products,
            self.rows, self.stored, self.chosen,
        ]  # fmt: skip
        for _ in range(count):
            kind = self.rng.integers(0, len(simple) + (6 if depth < 2 else 0))
            compound = self.branch if kind % 2 else self.loop
            x = simple[kind](x) if kind < len(simple) else compound(x, depth)
        return x


def random_graph(rng):
    constants: dict = {}
    body = Body(rng, constants)
    first = body.steps("x", 3)
    other = body.steps("x", 2)
    y = body("Concat", first, other, axis=0)
    z = body.steps(y, 2)
    outputs = [tensor(name, None) for name in dict.fromkeys((y, body("Identity", z)))]
    return model(body.nodes, [tensor("x", ["n"])], outputs, constants, opset=18)


def compare(seed: int, calls: int = CALLS) -> None:
    rng = np.random.default_rng(seed)
    proto = random_graph(rng)
    engine = Engine(proto, device="cpu", threads=1)
    given = [rng.integers(-6, 7, rng.integers(0, 9)).astype(np.float32) for _ in range(calls)]
    for x in (*given, given[0]):
        wanted = onnxruntime_outputs(proto, {"x": x})
        for found, exact in zip(engine.run({"x": x}).values(), wanted, strict=True):
            np.testing.assert_array_equal(found, exact, err_msg=f"{seed}: {x}")


@pytest.mark.parametrize("seed", SEEDS)
def test_random_graphs(seed):
    compare(seed)
