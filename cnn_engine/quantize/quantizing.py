"""Quantizes a model: calibration, equalisation, and the search for layers that must stay in float."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from ..engine.engine import Engine
from ..errors import did_you_mean, expected, not_one_of
from ..graph.form import Form, form_of
from ..graph.model import Model
from ..graph.onnx import load
from ..graph.onnx import model as protobuf
from ..io import model_inputs
from ..workload import Samples
from . import equalising
from .network import FloatModel, Plan, plan
from .ranges import METHODS, Numbers, quantization_of
from .writing import Settings, Writer

#: Images of a pass while calibrating.
BATCH = 8

#: Noise is compared with a channel's signal, but at least with this part of the mean one: some are dead.
QUIET = 1e-6


#: A layer answers for all noise that it makes where that is so many times what it passes on.
INHERITED = 100

#: Noise that rounding weights to 8 bits adds where no filter has an outlier: 35 dB.
HEALTHY = 10**-3.5


@dataclass(frozen=True)
class LayerReport:
    """Noise that one layer adds in 8 bits, and whether it stays float.

    Attributes:
        name, operator: the node's.
        noise: mean over its channels of noise power over signal power, of the layer alone: its weights and
            what it makes.
        read_noise: the same of its weights and what it reads: what float would regain.
        through: the same of its output in the quantized network, where all layers before add theirs.
        kept: whether it stays float.
    """

    name: str
    operator: str
    noise: float
    read_noise: float
    through: float
    kept: bool

    @property
    def decibels(self) -> float:
        """The signal-to-noise ratio of the layer alone, in dB."""
        return decibels(self.noise)


def decibels(noise: float) -> float:
    """Returns a ratio of noise to signal power as a signal-to-noise ratio in dB, at most 200."""
    return float(min(-10 * np.log10(max(noise, 1e-20)), 200.0))


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of a network, and of the float network.

    Attributes:
        agreement: the part of images of which both name the same class first; None where outputs are no
            rows of scores.
        top1: the part that is right, where labels are known.
        noise: over signal, of the output that has most of it.
    """

    agreement: float | None
    top1: float | None
    noise: float


@dataclass(frozen=True)
class Quantized:
    """A quantized model, and its loss.

    Attributes:
        model: the ``onnx.ModelProto``.
        layers: the worst first.
        accuracy: of the quantized network; ``float_top1``: of the float one, or None.
        loss: points of top-1 that are lost, or of agreement where there are no labels; of other outputs the
            noise in percent of their root mean square, of the one that loses most.
        equalised: pairs of layers whose channels were equalised.
        tensors: how many scales of activations there are.
        images: on how many it was calibrated and measured.
        settings: how numbers became integers.
        others: names of layers that stay float, since they are transposed, or weights or biases are computed.
    """

    model: object
    layers: tuple[LayerReport, ...]
    accuracy: Accuracy
    float_top1: float | None
    loss: float
    equalised: int
    tensors: int
    images: int
    settings: Settings
    others: tuple[str, ...] = ()

    @property
    def loss_is(self) -> str:
        """Unit of the loss."""
        if self.accuracy.top1 is not None:
            return "points of top-1 accuracy"
        if self.accuracy.agreement is not None:
            return "points of agreement with the float model"
        return "percent of the outputs' root mean square"

    def to_dict(self) -> dict:
        """Returns the content of ``--json``."""
        return {
            "schema": 1,
            "command": "quantize",
            "method": self.settings.method,
            "activations": "int8" if self.settings.symmetric else "uint8",
            "images": self.images,
            "loss": self.loss,
            "loss_is": self.loss_is,
            "agreement": self.accuracy.agreement,
            "top1": self.accuracy.top1,
            "float_top1": self.float_top1,
            "output_snr_db": decibels(self.accuracy.noise),
            "equalised_pairs": self.equalised,
            "scales": self.tensors,
            "others": list(self.others),
            "layers": [
                {
                    "name": layer.name,
                    "operator": layer.operator,
                    "snr_db": layer.decibels,
                    "snr_read_db": decibels(layer.read_noise),
                    "snr_through_db": decibels(layer.through),
                    "kept": layer.kept,
                }
                for layer in self.layers
            ],
        }


class _Runner:
    """Runs models on the calibration images, some tensors of them at a time.

    Args:
        samples: every input by name.
        form: what the network takes.
        given: of :func:`~cnn_engine.graph.onnx.load`: sizes and settings.
    """

    def __init__(
        self, samples: Samples, form: Form, given: Mapping[str, Mapping], device: str
    ) -> None:
        self._samples, self._given, self._device = samples, given, device
        count = len(samples)
        self._size = min(BATCH, count) if form.any_batch else form.batch if form.rows else count
        self._batch = self._size if form.any_batch else None

    def batches(self, proto, names: Sequence[str]) -> Iterator[dict[str, np.ndarray]]:
        """Yields ``names`` of one batch after another; extra outputs of the graph are made of them."""
        onnx = protobuf.package()
        asked = onnx.ModelProto()
        asked.CopyFrom(proto)
        have = {value.name for value in asked.graph.output} | self._samples.arrays.keys()
        asked.graph.output.extend(
            onnx.helper.make_empty_tensor_value_info(name)
            for name in dict.fromkeys(names) if name not in have
        )  # fmt: skip
        engine = Engine(load(asked, batch=self._batch, **self._given), device=self._device)
        for first in range(0, len(self._samples), self._size):
            part = self._samples[first : first + self._size].arrays
            found = {**engine.run(part), **part}
            yield {name: np.asarray(found[name], np.float32) for name in names}

    def outputs(self, proto, names: Sequence[str]) -> list[np.ndarray]:
        """Returns ``names`` of all images."""
        parts = [
            [np.atleast_1d(batch[name]) for name in names] for batch in self.batches(proto, names)
        ]
        return [np.concatenate(columns) for columns in zip(*parts, strict=True)]


class _Noise:
    """Noise over signal of a tensor, channel by channel."""

    def __init__(self) -> None:
        self._signal: np.ndarray | float = 0.0
        self._noise: np.ndarray | float = 0.0

    def add(self, exact: np.ndarray, found: np.ndarray) -> None:
        axes = (0, *range(2, exact.ndim)) if exact.ndim > 1 else (0,)
        change = (found.reshape(exact.shape) - exact).astype(np.float64)
        self._signal = self._signal + np.square(exact, dtype=np.float64).sum(axes)
        self._noise = self._noise + np.square(change).sum(axes)

    @property
    def mean(self) -> float:
        """The mean over channels, each at most 1: as much noise as signal."""
        signal = np.asarray(self._signal)
        least = max(QUIET * signal.mean(), 1e-30)
        return float(np.minimum(np.asarray(self._noise) / np.maximum(signal, least), 1.0).mean())


def quantize(
    source,
    images: np.ndarray | Mapping[str, np.ndarray],
    labels: np.ndarray | None = None,
    *,
    constants: Mapping[str, Any] | None = None,
    method: str = "mse",
    symmetric: bool = False,
    correct_bias: bool = True,
    equalise: bool | None = None,
    keep: Collection[str] = (),
    max_loss: float | None = None,
    device: str = "cpu",
    progress: Callable[[str], None] = lambda line: None,
) -> Quantized:
    """Returns a float ONNX model with layers of 8-bit integers, in the form of ``QuantizeLinear`` nodes.

    Args:
        source: a path, a model's bytes or an ``onnx.ModelProto``.
        images: what the network is calibrated and measured on: [N, ...] of its input's type, such as
            [N, C, H, W]; or name -> array of every input. Arrays give sizes that the file leaves open. Where
            the batch is fixed, samples past the last whole batch are left out.
        labels: [N], the right classes, or None.
        constants: values of inputs that are settings, as :func:`cnn_engine.load` takes them.
        method: how ranges follow from what was seen: minmax, percentile, entropy or mse.
        symmetric: whether activations are int8 around 0, which TensorRT wants; else they are uint8.
        correct_bias: whether biases make up for what rounding the weights shifts on average.
        equalise: whether channels around depthwise convolutions are equalised; None: if the outputs gain.
        keep: names of layers that stay float.
        max_loss: what :attr:`Quantized.loss` may be: as few layers as that needs stay float. None: none but
            ``keep``.
        device: that calibrates.
        progress: called with what is being done.

    Raises:
        InputError: the model, the images or an option is at fault.
        UnsupportedError: the model has no layers to quantize, or operators that the engine lacks.
    """
    if method not in METHODS:
        raise not_one_of("method", METHODS, method)
    if max_loss is not None and not 0 <= max_loss <= 100:
        raise expected("max_loss", "0 to 100 points", max_loss)
    settings = Settings(method, symmetric, correct_bias)
    given = source, images, labels, constants or {}, settings, device, progress
    work = _Work(*given)
    for name in keep:
        if name not in work.model.layers:
            hint = did_you_mean(name, list(work.model.layers), {})
            raise expected("keep", "the name of a layer", f"{name!r}{hint}")
    pairs = equalising.pairs(work.model) if equalise is not False else []
    if not pairs:
        return work.finished(keep, max_loss, 0)
    other = _Work(*given)
    count = equalising.equalise(other.model, work.seen)
    other.calibrate()
    if equalise is None and work.measured(keep).noise <= other.measured(keep).noise:
        return work.finished(keep, max_loss, 0)
    return other.finished(keep, max_loss, count)


def _noise(exact: np.ndarray, found: np.ndarray) -> float:
    """Returns the noise power of an array over its signal power."""
    power = np.square(exact, dtype=np.float64).sum()
    change = np.square((found - exact).astype(np.float64)).sum()
    return float(change / max(power, 1e-30))


def _blamed(made: float, read: float, passed: float) -> float:
    """Returns the noise that a layer answers for: the part of what it makes, and what its weights add.

    Channels of very different ranges go on through depthwise layers: those that read them make noise, too.

    Args:
        made, read, passed: noise of what it makes, of its input and weights, and of its input alone.
    """
    own = made * min(1.0, made / max(INHERITED * passed, 1e-30)) ** 2
    return own + max(read - passed - HEALTHY, 0.0)


class _Work:
    """One model, calibrated."""

    def __init__(
        self,
        source,
        images: np.ndarray | Mapping[str, np.ndarray],
        labels: np.ndarray | None,
        constants: Mapping[str, Any],
        settings: Settings,
        device: str,
        progress: Callable[[str], None],
    ) -> None:
        self.model, self.settings, self.progress = FloatModel(source), settings, progress
        form, given = self._form(images, constants)
        arrays = self._by_name(form, images)
        rows = {n: a for n, a in arrays.items() if n in form.rows and a.ndim}
        count = max(map(len, rows.values()), default=1)
        if labels is not None and np.shape(labels) != (count,):
            raise expected("labels", f"{count} numbers", f"shape {list(np.shape(labels))}")
        if not form.any_batch:  # whole passes
            count = count // form.batch * form.batch or count
            arrays |= {name: array[:count] for name, array in rows.items()}
        samples = model_inputs.samples(form, arrays, model_inputs.check(form, "images", arrays))
        self.images = len(samples)
        self.labels = None if labels is None else np.asarray(labels)[: self.images]
        self.run = _Runner(samples, form, given, device)
        self.calibrate()

    def _form(self, images, constants: Mapping[str, Any]) -> tuple[Form, dict[str, Mapping]]:
        """Returns what the network takes, and what has its file loaded so: sizes and settings."""
        given: dict[str, Mapping] = {"constants": constants}
        form = self._loaded(given)
        if form.sizes_of is not None:
            arrays = self._by_name(form, images)
            for first in (None, 0):  # the batch stays open if it is one
                shapes = {
                    name: (None, *array.shape[1:]) if first is None and array.ndim else array.shape
                    for name, array in arrays.items()
                }
                given["input_shape"] = shapes
                form = self._loaded(given)
                if form.sizes_of is None:
                    break
        return form, given

    def _loaded(self, given: Mapping[str, Mapping]) -> Form:
        model = Model(load(self.model.proto, **given))
        return form_of(model, model.base)

    def _by_name(self, form: Form, images) -> dict[str, np.ndarray]:
        """Returns the arrays of all inputs by name."""
        names = [value.name for value in form.inputs]
        if not isinstance(images, Mapping):
            if len(names) != 1:
                words = ", ".join(names)
                raise expected("images", f"name -> array of the inputs {words}", "one array")
            images = {names[0]: images}
        if images.keys() != set(names):
            words = ", ".join(images) or "none"
            raise expected("images", f"the arrays {', '.join(names)}", words)
        return {name: np.require(images[name], requirements="C") for name in names}

    def calibrate(self) -> None:
        """Sees what the float model's tensors hold, and takes their ranges."""
        everything = plan(self.model)
        layers = self.model.layers.values()
        between = [name for _, name, _ in equalising.pairs(self.model)]
        names = list(dict.fromkeys((*everything.scales, *(layer.x for layer in layers), *between)))
        self.seen = {name: Numbers() for name in names}
        self.progress(f"calibrating on {self.images} images")
        for batch in self.run.batches(self.model.proto, names):
            for name in names:
                if not np.isfinite(batch[name]).all():
                    raise expected(f"tensor {name!r}", "finite numbers on all images", "others")
                self.seen[name].see(batch[name])
        if self.settings.method != "minmax":
            for batch in self.run.batches(self.model.proto, everything.scales):
                for name in everything.scales:
                    self.seen[name].count(batch[name])
        of = METHODS[self.settings.method]
        self.scales = {
            name: quantization_of(of(self.seen[name]), self.settings.symmetric)
            for name in everything.scales
        }
        self.writer = Writer(self.model, self.settings, self.scales, self.seen)
        self.exact = self.run.outputs(self.model.proto, self.model.outputs)
        (first, *others), known = self.exact, self.labels is not None
        rows = first.ndim == 2 and first.shape[1] > 1 and len(first) == self.images
        self.is_of_rows = rows and (known or not others)
        if not self.is_of_rows:
            self.labels = None

    def plan(self, keep: Collection[str]) -> Plan:
        """Returns the plan of a model with layers that stay float."""
        return plan(self.model, keep)

    def measured(self, keep: Collection[str]) -> Accuracy:
        """Returns the accuracy of the quantized model."""
        made = self.writer.quantized(self.plan(keep))
        found = self.run.outputs(made, self.model.outputs)
        noise = max(map(_noise, self.exact, found))
        if not self.is_of_rows:
            return Accuracy(None, None, noise)
        exact, first = self.exact[0].argmax(1), found[0].argmax(1)
        top1 = None if self.labels is None else float(np.mean(first == self.labels))
        return Accuracy(float(np.mean(first == exact)), top1, noise)

    @property
    def float_top1(self) -> float | None:
        if self.labels is None:
            return None
        return float(np.mean(self.exact[0].argmax(1) == self.labels))

    def loss(self, accuracy: Accuracy) -> float:
        """Returns what a quantized model loses: see :attr:`Quantized.loss`."""
        if accuracy.agreement is None:
            return 100 * float(np.sqrt(accuracy.noise))
        if accuracy.top1 is None:
            return 100 * (1 - accuracy.agreement)
        return 100 * (self.float_top1 - accuracy.top1)

    def noises(self) -> tuple[dict[str, float], ...]:
        """Returns noise over signal by layer: of what it makes, of what it reads, and what it passes on."""
        proto, probes = self.writer.probes(self.plan(()))
        names = [name for probe in probes.values() for name in astuple(probe)]
        made, read, passed = ({name: _Noise() for name in probes} for _ in range(3))
        for batch in self.run.batches(proto, list(dict.fromkeys(names))):
            for name, probe in probes.items():
                made[name].add(batch[probe.end], batch[probe.made])
                read[name].add(batch[probe.y], batch[probe.read])
                passed[name].add(batch[probe.y], batch[probe.passed])
        return tuple(
            {name: noise.mean for name, noise in found.items()} for found in (made, read, passed)
        )

    def through(self, keep: Collection[str]) -> dict[str, float]:
        """Returns the noise over signal of each layer's output in the quantized network."""
        names = [layer.y for layer in self.model.layers.values()]
        found = {name: _Noise() for name in names}
        made = self.writer.quantized(self.plan(keep))
        both = zip(
            self.run.batches(self.model.proto, names), self.run.batches(made, names), strict=True
        )
        for exact, quantized in both:
            for name in names:
                found[name].add(exact[name], quantized[name])
        return {layer.name: found[layer.y].mean for layer in self.model.layers.values()}

    def finished(self, keep: Collection[str], max_loss: float | None, equalised: int) -> Quantized:
        """Returns the quantized model, with as few layers in float as the loss that is allowed needs."""
        self.progress("measuring layer by layer")
        noises, read, passed = self.noises()
        worst = sorted(noises, key=lambda n: -_blamed(noises[n], read[n], passed[n]))
        kept, accuracy = tuple(keep), self.measured(keep)
        if max_loss is not None and self.loss(accuracy) > max_loss:
            order = sorted(read, key=lambda name: -read[name])
            kept, accuracy = self._fewest(order, kept, max_loss)
        through = self.through(kept)
        layers = tuple(
            LayerReport(
                name,
                self.model.layers[name].operator,
                noises[name],
                read[name],
                through[name],
                name in kept,
            )
            for name in worst
        )
        chosen = self.plan(kept)
        made = self.writer.quantized(chosen)
        return Quantized(
            made, layers, accuracy, self.float_top1, self.loss(accuracy), equalised,
            len(chosen.scales), self.images, self.settings, self.model.others,
        )  # fmt: skip

    def _fewest(
        self, worst: Sequence[str], keep: tuple[str, ...], max_loss: float
    ) -> tuple[tuple[str, ...], Accuracy]:
        """Returns the layers that stay float, the worst of them first, and the accuracy with them."""
        others = [name for name in worst if name not in keep]
        low, high = 0, len(others)
        found = self.measured((*keep, *others))
        while high - low > 1:  # ``high`` layers are enough, ``low`` are not
            middle = (low + high) // 2
            tried = self.measured((*keep, *others[:middle]))
            self.progress(f"{middle} layers in float: loses {self.loss(tried):.2f} points")
            if self.loss(tried) <= max_loss:
                high, found = middle, tried
            else:
                low = middle
        kept = list(others[:high])
        for name in kept[::-1][:8]:  # of those, the ones that are not needed after all
            tried = self.measured((*keep, *(other for other in kept if other != name)))
            if len(kept) > 1 and self.loss(tried) <= max_loss:
                kept.remove(name)
                found = tried
        return (*keep, *kept), found
