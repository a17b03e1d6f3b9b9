"""Random networks for rewrites to get wrong: read twice, computed where constants are usual, oddly named."""

from __future__ import annotations

import numpy as np

from cnn_engine.graph.graph import Graph, Node, Value
from cnn_engine.operators.average_pool2d import AveragePool2d
from cnn_engine.operators.binary import Add, Div, Max, Mul, Sub
from cnn_engine.operators.conv2d import Conv2d
from cnn_engine.operators.conv_transpose2d import ConvTranspose2d
from cnn_engine.operators.copy import Copy
from cnn_engine.operators.linear import Linear
from cnn_engine.operators.matmul import Matmul
from cnn_engine.operators.max_pool2d import MaxPool2d
from cnn_engine.operators.norm import BatchNorm, LayerNorm
from cnn_engine.operators.pad import Pad
from cnn_engine.operators.reduce import ReduceL2, ReduceMax, ReduceMean, ReduceSum
from cnn_engine.operators.resize import Resize
from cnn_engine.operators.shaping import Concat, Reshape, Slice, Split, Transpose
from cnn_engine.operators.softmax import Softmax
from cnn_engine.operators.unary import (
    Clip,
    Erf,
    Gelu,
    HardSigmoid,
    HardSwish,
    Relu,
    Sigmoid,
    Swish,
    Tanh,
)

FUNCTIONS = (
    Relu(), Clip(-0.5, 1.0), Sigmoid(), Tanh(), Swish(), Gelu(), HardSwish(), HardSigmoid(1 / 6, 0.5),
)  # fmt: skip

#: Ends of the names that rewrites, layouts and positions give to what is new.
ENDS = (
    ".weight", ".bias", ".scale", ".shift", ".rows", ".wide", ".back", ".sums", ".means", ".scaled", ".0",
    " NHWC", " NCHW", " NHWC.transpose", ".w.aligned", ".pad", " padded", " moved", ".transpose",
    "@cpu", "#2",
)  # fmt: skip

#: Powers of ten: of inputs, of factors, for whose products weights in float64 have no room, and of the most
#: that any value is made of. Beside a shift, products with numbers above the root of the largest may vanish.
SIZES, HOSTILE, MOST_LEVEL = (
    (-140, -70, 0, 70, 140),
    (-280, -200, -140, -70, 0, 70, 140, 200, 280),
    140,
)

MOST_ELEMENTS = 1 << 13


class RandomNetwork:
    """A network of random nodes over ``x`` [N, C, H, W] and ``v`` [C], of which any operand may be computed.

    Args:
        hostile: factors of any size in one chain; else numbers of a usual size in any order.
    """

    def __init__(self, seed: int, dtype: str, hostile: bool = False) -> None:
        self.rng = np.random.default_rng(seed)
        self.dtype = dtype
        self.hostile = hostile
        channels = self.one(4, 8, 8, 12, 16, 3, 5)
        self.inputs = (
            Value("x", (self.one(1, 1, 2, 3), channels, self.one(1, 4, 6, 7), self.one(1, 4, 6, 7)), dtype),
            Value("v", (channels,), dtype),
        )  # fmt: skip
        self.values = {value.name: value for value in self.inputs}
        self.images, self.vectors = ["x"], ["v"]
        self.nodes: list[Node] = []
        self.constants: dict[str, np.ndarray] = {}
        self.names: set[str] = set(self.values)
        self.powers: dict[str, int] = {}  # of ten: of constants of either sign
        self.size = self.level = (
            self.one(*SIZES) if hostile else 0
        )  # of the inputs, and of what is made now

    # ---- what everything is made of ----

    def one(self, *choices):
        return choices[self.rng.integers(len(choices))]

    def chance(self, part: float) -> bool:
        return self.rng.random() < part

    def name(self, word: str) -> str:
        """Returns a name that no one has, in positions one that a rewrite might choose."""
        if self.names and self.chance(0.25):
            word = self.one(*sorted(self.names)) + self.one(*ENDS)
        found, number = word, 0
        while found in self.names:
            number += 1
            found = f"{word}{number}"
        self.names.add(found)
        return found

    def constant(
        self, shape: tuple[int, ...], low: float = -1.0, high: float = 1.0, shifts: bool = False
    ) -> str:
        """Returns a new constant, or one that others read, too.

        Factors of any size bring what they multiply to another; what ``shifts`` that is as large.
        """
        power = self.level if shifts else 0
        if self.hostile and low < 0 and not shifts:
            power = self.one(*(k for k in HOSTILE if abs(self.level + k) <= MOST_LEVEL))
            self.level += power
        power = power if low < 0 else 0
        alike = [n for n, array in self.constants.items() if array.shape == shape]
        alike = [n for n in alike if self.powers.get(n) == power and low < 0]
        if alike and self.chance(0.3):
            return self.one(*alike)
        name = self.name(f"c{len(self.constants)}")
        self.constants[name] = (self.rng.uniform(low, high, shape) * 10.0**power).astype(self.dtype)
        self.values[name] = Value(name, shape, self.dtype)
        if low < 0:
            self.powers[name] = power
        return name

    def add(self, op, *inputs: str | None) -> str:
        (output,) = self.add_all(op, *inputs)
        return output

    def add_all(self, op, *inputs: str | None) -> list[str]:
        made = op.infer([None if name is None else self.values[name] for name in inputs])
        name = self.name(f"{op.kind}{len(self.nodes)}")
        outputs = []
        for shape, dtype in made:
            output = name if len(made) == 1 and self.chance(0.5) else self.name(f"{name}.out")
            self.values[output] = Value(output, tuple(shape), dtype)
            outputs.append(output)
        self.nodes.append(Node(name, op, inputs, tuple(outputs)))
        return outputs

    def shape(self, name: str) -> tuple[int, ...]:
        return self.values[name].shape

    def image(self) -> str:
        """Returns an image, most often one of the last."""
        return self.one(*(self.images[-2:] if self.chance(0.7) else self.images))

    def image_like(self, x: str) -> str:
        return self.one(*(name for name in self.images if self.shape(name) == self.shape(x)))

    def image_of(self, x: str) -> str:
        """Returns an image of as many positions as ``x``, and of any channels."""
        n, _, *positions = self.shape(x)
        alike = [name for name in self.images if self.shape(name)[0] == n]
        return self.one(*(name for name in alike if list(self.shape(name)[2:]) == positions))

    def computed(self, shape: tuple[int, ...]) -> str:
        """Returns constants of a shape times a number that depends on an input."""
        number = self.add(ReduceMean((0,), keepdims=False), "v")
        return self.add(Mul(), self.constant(shape), self.add(Sigmoid(), number))

    def operand(
        self, shape: tuple[int, ...], low: float = -1.0, high: float = 1.0, shifts: bool = False
    ) -> str:
        """Returns a weight, a bias or a parameter: a constant, as a rule."""
        if self.hostile or self.chance(0.9):
            return self.constant(shape, low, high, shifts)
        if low > 0:
            return self.add(Clip(low, high), self.computed(shape))
        return self.one(*self.vectors) if self.shape("v") == shape else self.computed(shape)

    # ---- nodes ----

    def grow(self, steps: int) -> None:
        kinds = list(_CHAIN if self.hostile else _ALL)
        for _ in range(steps):
            x = self.images[-1] if self.hostile or self.chance(0.6) else self.image()
            y = getattr(self, f"_{self.one(*kinds)}")(x)
            made = [y] if isinstance(y, str) else y or []
            for name in made:
                values = self.values[name]
                if len(values.shape) == 4 and 0 < values.size <= MOST_ELEMENTS:
                    self.images.append(name)

    def _conv(self, x: str) -> str:
        _, channels, h, w = self.shape(x)
        groups = self.one(1, 1, 1, channels, 2) if channels % 2 == 0 else self.one(1, channels)
        side = self.one(1, 1, 3)
        pad = self.one(side // 2, side // 2, 0) if min(h, w) >= side else side // 2
        filters = channels if groups == channels > 1 else groups * self.one(2, 4, 8, channels)
        weight = self.operand((filters, channels // groups, side, side))
        bias = self.operand((filters,), shifts=True) if self.chance(0.6) else None
        stride = self.one(1, 1, 1, 2)
        op = Conv2d((stride, stride), (pad,) * 4, groups=groups)
        return (
            self.add(op, x, weight, bias) if bias or self.chance(0.5) else self.add(op, x, weight)
        )

    def _block(self, x: str) -> str:
        """A convolution, its norm and its function, and perhaps a pool."""
        y = self._conv(x)
        y = self._norm(y) if self.chance(0.7) else self._numbers(y)
        y = self._clamp(y) if self.chance(0.6) else self._function(y)
        return self._pool(y) if self.chance(0.3) else y

    def _stem(self, x: str) -> str:
        """Two convolutions and a pool over what a network is given."""
        x = "x"
        filters = self.one(4, 8)
        y = self.add(Conv2d((1, 1), (1,) * 4), x, self.constant((filters, self.shape(x)[1], 3, 3)))
        y = self.add(
            Conv2d((1, 1), (1,) * 4), self.add(Relu(), y), self.constant((8, filters, 3, 3))
        )
        window = (2, 2) if min(self.shape(y)[2:]) > 1 else (1, 1)
        return self.add(MaxPool2d(window, window), self.add(Relu(), y))

    def _branches(self, x: str) -> str:
        """A sum of two convolutions, as a block that changes its size ends with."""
        z = self.image_of(x)
        filters = self.one(8, 8, 5)
        made = [
            self.add(Conv2d(), one, self.constant((filters, self.shape(one)[1], 1, 1)))
            for one in (x, z)
        ]
        made = [self._norm(one) if self.chance(0.5) else one for one in made]
        return self.add(Relu(), self.add(Add(), *made))

    def _norm(self, x: str) -> str:
        channels = (self.shape(x)[1],)
        mean = self.operand(channels, shifts=True)
        scale, shift = self.operand(channels), self.operand(channels, shifts=True)
        return self.add(BatchNorm(), x, scale, shift, mean, self.operand(channels, 0.5, 2.0))

    def _numbers(self, x: str) -> str:
        n, c, h, w = self.shape(x)
        shape = self.one(
            (), (1,), (c, 1, 1), (1, c, 1, 1), (w,), (h, w), (1, 1, h, w), (n, c, h, w)
        )
        if self.hostile:
            shape = self.one((), (c, 1, 1))
        pair = [x, self.operand(shape)]
        if self.chance(0.3):
            pair.reverse()
        return self.add(Mul() if self.hostile else self.one(Add(), Sub(), Mul()), *pair)

    def _function(self, x: str) -> str:
        return self.add(self.one(*FUNCTIONS), x)

    def _clamp(self, x: str) -> str:
        return self.add(Relu(), x)

    def _copy(self, x: str) -> str:
        return self.add(Copy(), x)

    def _binary(self, x: str) -> str:
        return self.add(self.one(Add(), Add(), Sub(), Mul(), Max()), x, self.image_like(x))

    def _residual(self, x: str) -> str:
        channels = self.shape(x)[1]
        weight = self.constant((channels, channels, 1, 1))
        y = self.add(Conv2d(), x, weight)
        return self.add(Add(), *self.one((x, y), (y, x), (y, y), (y, self.image_like(x))))

    def _swish(self, x: str) -> str:
        gate = self.add(
            self.one(Sigmoid(), HardSigmoid(1 / 6, 0.5)), self.one(x, x, self.image_like(x))
        )
        return self.add(Mul(), *self.one((x, gate), (gate, x), (gate, gate)))

    def _gelu(self, x: str) -> str:
        def number(value: float) -> str:
            name = self.name("number")
            self.constants[name] = np.asarray(value, self.dtype)
            self.values[name] = Value(name, (), self.dtype)
            return name

        erf = self.add(Erf(), self.add(Div(), x, number(2**0.5)))
        more = self.add(Add(), erf, number(1))
        other = self.one(x, x, erf, more)
        half = self.add(Mul(), other, number(0.5))
        return self.add(Mul(), half, more)

    def _pool(self, x: str) -> str:
        side = self.one(1, 2, 3)
        if min(self.shape(x)[2:]) < side:
            side = 1
        pad = self.one(0, side // 2)
        stride = self.one(1, 2)
        window = (side, side), (stride, stride), (pad,) * 4
        averages = (AveragePool2d(*window, count_include_pad=counts) for counts in (False, True))
        return self.add(self.one(MaxPool2d(*window), *averages), x)

    def _pad(self, x: str) -> str:
        rows, columns = self.one(0, 1), self.one(0, 1, 2)
        pads = (0, 0, rows, columns, 0, 0, self.one(0, 1), columns)
        return self.add(Pad(pads, value=self.one(0.0, 0.0, 1.0)), x)

    def _concat(self, x: str) -> str:
        parts = [self.image_of(x) for _ in range(self.one(1, 1, 2, 3))]
        return self.add(Concat(1), *self.one((x, *parts), (*parts, x)))

    def _beside(self, x: str) -> str:
        """Convolutions side by side, some of them read again."""
        channels = self.shape(x)[1]
        made = [
            self.add(Conv2d(), x, self.constant((8, channels, 1, 1)))
            for _ in range(self.one(1, 2, 3))
        ]
        if self.chance(0.3):
            made.append(self.one(*made))
        joined = self.add(Concat(1), *made)
        return self.one(joined, [*made, joined], self.add(Relu(), joined))

    def _concat_again(self, x: str) -> str:
        """A concatenation that begins with another, as a dense block's."""
        n, _, h, w = self.shape(x)
        fits = [node for node in self.nodes if node.op == Concat(1)]
        fits = [node for node in fits if self.shape(node.outputs[0])[2:] == (h, w)]
        fits = [node for node in fits if self.shape(node.outputs[0])[0] == n]
        if not fits:
            return self._concat(x)
        return self.add(Concat(1), *self.one(*fits).inputs, x)

    def _split(self, x: str) -> list[str]:
        channels = self.shape(x)[1]
        if channels < 2:
            return [self.add(Slice((0,), (1,), (1,), (1,)), x)]
        first = int(self.rng.integers(1, channels))
        if self.chance(0.5):
            return self.add_all(Split(1, (first, channels - first)), x)
        begin = self.add(Slice((0,), (first,), (1,), (1,)), x)
        return [begin, self.add(Slice((first,), (channels,), (1,), (1,)), x)]

    def _partial_sum(self, x: str) -> str:
        """A sum of an image's first channels and something, and its other channels behind it."""
        first, rest = (*self._split(x), None)[:2]
        if rest is None:
            return first
        both = [first, self.image_like(first)] if first in self.images else [first, first]
        if self.chance(0.5):
            count, channels = self.shape(first)[1], self.shape(x)[1]
            both[1] = self.add(Conv2d(), x, self.constant((count, channels, 1, 1)))
        if self.chance(0.3):
            both.reverse()
        return self.add(Concat(1), self.add(Add(), *both), rest)

    def _slice(self, x: str) -> str:
        _, c, h, w = self.shape(x)
        axis = self.one(1, 2, 3, -1)
        size = (c, h, w)[axis - 1] if axis > 0 else w
        start = int(self.rng.integers(0, size))
        if self.chance(0.2):
            return self.add(Slice((size - 1,), (-size - 1,), (axis,), (-1,)), x)
        return self.add(Slice((start,), (size,), (axis,), (1,)), x)

    def _gate(self, x: str) -> str:
        channels = self.shape(x)[1]
        mean = self.add(self.one(ReduceMean, ReduceMean, ReduceMax)((2, 3)), x)
        hidden = self.one(2, 4, 8)
        y = self.add(Relu(), self.add(Conv2d(), mean, self.constant((hidden, channels, 1, 1))))
        y = self.add(Conv2d(), y, self.operand((channels, hidden, 1, 1)), self.operand((channels,)))
        y = self.add(self.one(Sigmoid(), HardSigmoid()), y)
        y = self.add(Mul(), *self.one((x, y), (y, x)))
        return self._project(y) if self.chance(0.5) else y

    def _project(self, x: str) -> str:
        channels = self.shape(x)[1]
        return self.add(Conv2d(), x, self.constant((self.one(8, 16), channels, 1, 1)))

    def _expansion(self, x: str) -> str:
        """An inverted residual block."""
        channels = self.shape(x)[1]
        y = self.add(Relu(), self.add(Conv2d(), x, self.constant((16, channels, 1, 1))))
        op = Conv2d((1, 1), (1,) * 4, groups=16)
        y = self.add(Relu(), self.add(op, y, self.constant((16, 1, 3, 3))))
        if self.chance(0.3):
            y = self._gate(y)
        back = self.constant((channels, self.shape(y)[1], 1, 1))
        y = self.add(Conv2d(), y, back)
        return self.add(Add(), x, y) if self.chance(0.5) else y

    def _bottleneck(self, x: str) -> str:
        channels = self.shape(x)[1]
        y = self.add(Relu(), self.add(Conv2d(), x, self.constant((8, channels, 1, 1))))
        y = self.add(Relu(), self.add(Conv2d((1, 1), (1,) * 4), y, self.constant((8, 8, 3, 3))))
        y = self.add(Conv2d(), y, self.constant((channels, 8, 1, 1)))
        return self.add(Relu(), self.add(Add(), y, self.one(x, self.image_like(x))))

    def _dense_layer(self, x: str) -> str:
        """A layer of a dense block, and the first convolution of the next."""
        channels = self.shape(x)[1]
        y = self.add(Relu(), self.add(Conv2d(), x, self.constant((8, channels, 1, 1))))
        y = self.add(Conv2d((1, 1), (1,) * 4), y, self.constant((8, 8, 3, 3)))
        joined = self.add(Concat(1), x, y)
        normed = self.add(Relu(), self._norm(joined))
        return self.add(Conv2d(), normed, self.constant((8, channels + 8, 1, 1)))

    def _mlp(self, x: str) -> str:
        """A block of ConvNeXt's, with its channels last."""
        channels = self.shape(x)[1]
        op = Conv2d((1, 1), (1,) * 4, groups=channels)
        y = self.add(op, x, self.constant((channels, 1, 3, 3)), self.constant((channels,)))
        y = self.add(Transpose((0, 2, 3, 1)), y)
        y = self.add(LayerNorm(), y, self.operand((channels,)), self.operand((channels,)))
        y = self.add(Matmul(), y, self.operand((channels, 8)))
        y = self.add(Gelu(), self.add(Add(), y, self.operand((8,))))
        y = self.add(Matmul(), y, self.constant((8, channels)))
        y = self.add(self.one(Mul(), Add()), self.operand((channels,)), y)
        return self.add(Transpose((0, 3, 1, 2)), y)

    def _tokens(self, x: str) -> str:
        n, channels, h, w = self.shape(x)
        rows = self.add(Transpose((0, 2, 1)), self.add(Reshape((n, channels, h * w)), x))
        y = self.add(Matmul(), rows, self.operand((channels, channels)))
        if self.chance(0.7):
            y = self.add(
                Add(), *self.one((y, self.operand((channels,))), (self.operand((channels,)), y))
            )
        y = self.add(self.one(Add(), Sub(), Mul()), *self.one((y, rows), (rows, y), (y, y)))
        y = self.add(self.one(*FUNCTIONS), y)
        return self.add(Reshape((n, channels, h, w)), self.add(Transpose((0, 2, 1)), y))

    def _shuffle(self, x: str) -> str:
        n, channels, h, w = self.shape(x)
        groups = self.one(*(g for g in (1, 2, 4) if channels % g == 0))
        y = self.add(Reshape((n, groups, channels // groups, h, w)), x)
        y = self.add(Transpose((0, 2, 1, 3, 4)), y)
        return self.add(Reshape((n, channels, h, w)), y)

    def _turn(self, x: str) -> str:
        perm = self.one((0, 1, 3, 2), (0, 1, 3, 2), (0, 2, 3, 1), (0, 3, 1, 2))
        return self.add(Transpose(perm), x)

    def _resize(self, x: str) -> str:
        n, c, h, w = self.shape(x)
        op = Resize((n, c, 2 * h, 2 * w), (1.0, 1.0, 2.0, 2.0), self.one("nearest", "linear"))
        return self.add(op, x)

    def _softmax(self, x: str) -> str:
        return self.add(Softmax(self.one(1, 2, -1)), x)

    def _transposed(self, x: str) -> str:
        channels = self.shape(x)[1]
        groups = 2 if channels % 2 == 0 and self.chance(0.5) else 1
        if self.chance(0.5):
            window, op = (2, 2), ConvTranspose2d((2, 2), groups=groups)
        else:
            window, strides, dilation = (
                (self.one(*choices), self.one(*choices))
                for choices in ((1, 2, 3, 4), (1, 2, 2, 3), (1, 1, 2))
            )
            pads = tuple(min(self.one(0, 1), (side - 1) // 2) for side in (*window, *window))
            more = tuple(self.one(0, step - 1) for step in strides)
            op = ConvTranspose2d(strides, pads, more, dilation, groups)
        given = [x, self.operand((channels, self.one(1, 2, 4), *window))]
        filters = self.shape(given[1])[1] * groups
        if not self.hostile and self.chance(0.4):
            given.append(self.operand((filters,), shifts=True))
        y = self.add(op, *given)
        y = self._function(y) if not self.hostile and self.chance(0.5) else y
        return self.add(Concat(1), self.image_of(y), y) if self.fits(y) and self.chance(0.5) else y

    def fits(self, y: str) -> bool:
        """Whether there is an image of as many positions as ``y``."""
        n, _, *positions = self.shape(y)
        shapes = (self.shape(name) for name in self.images)
        return any(shape[0] == n and list(shape[2:]) == positions for shape in shapes)

    def _grouped(self, x: str) -> str:
        """A convolution of few or odd channels a group, and what reads it."""
        groups, channels, filters = self.one(2, 3, 4, 8), self.one(1, 1, 2, 3, 9), self.one(1, 2, 3)
        weight = self.constant((groups * channels, self.shape(x)[1], 1, 1))
        y = self.add(self.one(*FUNCTIONS), self.add(Conv2d(), x, weight))
        side, step = self.one(1, 3), self.one(1, 1, 2)
        apart = self.one(1, 2)
        op = Conv2d((step, step), (apart * (side // 2),) * 4, (apart, apart), groups)
        given = [y, self.operand((groups * filters, channels, side, side))]
        y = self.add(op, *given, *([self.operand((groups * filters,))] if self.chance(0.5) else []))
        y = self._function(y) if self.chance(0.5) else y
        return self._project(y) if self.chance(0.5) else y

    def _multiples(self, x: str) -> str:
        """Sums of an image and of its multiples by numbers of channels, in any order."""
        channels = self.shape(x)[1]
        mean = self.add(ReduceMean((2, 3)), x)
        small = [
            mean,
            self.operand((1, channels, 1, 1)),
            self.operand((channels, 1, 1)),
            self.operand(()),
        ]
        made = [x]
        for _ in range(self.one(2, 3, 4, 5)):
            op = self.one(Add(), Sub(), Mul())
            others = small if op == Mul() or self.chance(0.4) else [x, *made[-2:]]
            pair = [self.one(*made[-2:]), self.one(*others)]
            if self.chance(0.5):
                pair.reverse()
            made.append(self.add(op, *pair))
        return made[-1]

    def _response_norm(self, x: str) -> str:
        channels = self.shape(x)[1]
        norm = self.add(ReduceL2((2, 3)), x)
        total = self.add(Add(), self.add(ReduceMean((1,)), norm), self.constant((), 0.5, 1.0))
        y = self.add(Mul(), x, self.add(Div(), norm, total))
        y = self.add(Mul(), self.operand((1, channels, 1, 1)), y)
        y = self.add(Add(), self.operand((1, channels, 1, 1)), y)
        y = self.add(Add(), *self.one((x, y), (y, x), (y, self.image_like(x))))
        return self._project(y) if self.chance(0.5) else y

    def _split_attention(self, x: str) -> str:
        """Groups of channels added up, by what a softmax over them gives."""
        n, channels, h, w = self.shape(x)
        radix = self.one(*(r for r in (1, 2, 3, 4, 5) if channels % r == 0))
        each = channels // radix
        apart = self.add(Reshape((n, radix, each, h, w)), x)
        mean = self.add(ReduceMean((2, 3)), self.add(ReduceSum((1,), keepdims=False), apart))
        gate = self.add(Conv2d(), mean, self.operand((channels, each, 1, 1)))
        gate = self.add(Softmax(1), self.add(Reshape((n, radix, each)), gate))
        gate = self.add(Reshape((n, radix, each, 1, 1)), gate)
        pair = self.one((apart, gate), (gate, apart))
        return self.add(ReduceSum((1,), keepdims=False), self.add(Mul(), *pair))

    def head(self) -> list[str]:
        """Returns outputs: rows of an image's means, or of all of it, and what linear layers make of them."""
        x = self.image()
        rows = self.add(ReduceMean((2, 3), keepdims=self.chance(0.5)), x) if self.chance(0.5) else x
        if len(self.shape(rows)) > 2:
            rows = self.add(Reshape((self.shape(x)[0], -1)), rows)
        made = [rows]
        for _ in range(self.one(1, 2, 3)):
            outputs = self.one(4, 8)
            y = self.add(
                Linear(),
                rows,
                self.operand((outputs, self.shape(rows)[1])),
                self.operand((outputs,)),
            )
            if self.chance(0.4):
                y = self.add(
                    BatchNorm(), y, *(self.operand((outputs,), 0.5, 2.0) for _ in range(4))
                )
            rows = self.add(Relu(), y) if self.chance(0.5) else y
            made.append(rows)
        made.append(self.add(Softmax(-1), rows))
        return made[-1:] if self.chance(0.7) else [self.one(*made), made[-1]]

    def graph(self) -> Graph:
        """Returns the network with several of its values for outputs."""
        outputs = [self.images[-1]]
        if not self.hostile:
            outputs += self.head() if self.chance(0.7) else []
            made = [name for name in self.values if name not in ("x", "v", *self.constants)]
            outputs += [self.one(*made) for _ in range(self.one(0, 0, 1, 2))]
        outputs = [name for name in dict.fromkeys(outputs) if name not in ("x", "v")]
        outputs = outputs or [self._copy("x")]
        return Graph("random", self.inputs, tuple(outputs), tuple(self.nodes), self.constants)


_CHAIN = ("conv", "conv", "numbers", "numbers", "norm", "clamp", "project", "pool", "transposed")
_ALL = (
    *_CHAIN, "block", "block", "block", "branches", "function", "copy", "binary", "residual", "swish", "gelu",
    "pad", "concat", "beside", "concat_again", "split", "partial_sum", "slice", "gate", "expansion",
    "stem", "bottleneck", "dense_layer", "mlp", "tokens", "shuffle", "turn", "resize", "softmax",
    "grouped", "multiples", "response_norm", "split_attention",
)  # fmt: skip


def network(seed: int, dtype: str, hostile: bool = False) -> tuple[Graph, dict[str, np.ndarray]]:
    """Returns a random network and its inputs, always the same for a seed."""
    made = RandomNetwork(seed, dtype, hostile)
    made.grow(int(made.rng.integers(2, 12)))
    graph = made.graph()
    inputs = {
        value.name: (made.rng.uniform(-2, 2, value.shape) * 10.0**made.size).astype(dtype)
        for value in graph.inputs
    }
    return graph, inputs
