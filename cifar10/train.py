"""Trains the weights that the project ships: ``python -m cifar10.train --data FOLDER``.

The network is the one that runs, and nothing else runs with the weights: each convolution is
followed by a batch normalisation while it trains (Ioffe & Szegedy, 2015), which is folded into the
convolution's weights and bias at the end. Images are shifted and mirrored at random, but no longer
shifted in the last epochs; AdamW (Loshchilov & Hutter, 2019) follows a one-cycle schedule (Smith &
Topin, 2018). The last epoch's weights are written: the test images are only looked at for the log.

The images stay on the device as bytes, and are shuffled and augmented there once an epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import safetensors.numpy
from rich.console import Console
from rich.progress import Progress

from cnn_engine.errors import InputError, UnsupportedError, expected
from cnn_engine.files import atomic_write, check_writable
from cnn_engine.network import Layer, Network
from cnn_engine.workload import Dataset

from . import dataset
from .network import NETWORK

try:
    import torch
    import torch.nn.functional as F
except ImportError:  # an optional package; main() says so
    torch = None

_EPSILON = 1e-5
_EVALUATION_BATCH = 1000


@dataclass(frozen=True)
class Recipe:
    """What training depends on, besides the images.

    Attributes:
        epochs: passes over the training images.
        batch_size: images a step; what is left over of an epoch is left out.
        learning_rate: the schedule's highest.
        weight_decay: of weights, not of biases and normalisation.
        shift: the most pixels that an image is shifted by in each direction.
        settle: the part of the epochs, at the end, in which images are no longer shifted.
        seed: of the first weights, the shuffling, the shifts and the mirroring.
    """

    epochs: int = 300
    batch_size: int = 512
    learning_rate: float = 0.01
    weight_decay: float = 0.01
    shift: int = 2
    settle: float = 0.1
    seed: int = 0


def initial_parameters(network: Network, seed: int) -> dict[str, torch.Tensor]:
    """Draws the first parameters, on the CPU: He et al. (2015) for weights, zero for biases.

    A convolution with a bias gets a batch normalisation, whose ``<name>.gain``, ``<name>.bias``,
    ``<name>.mean`` and ``<name>.variance`` stand in for the bias until :func:`fold`.

    Returns:
        name -> float32 tensor.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters: dict[str, torch.Tensor] = {}
    x = torch.zeros(1, *network.input_shape)
    for layer in network.layers:
        for name, shape in layer.parameters(tuple(x.shape[1:])).items():
            value = torch.zeros(shape)
            if name.endswith(".weight"):
                value.normal_(0, (2 / value[0].numel()) ** 0.5, generator=generator)
            parameters[name] = value
        if layer.kind == "conv" and layer.bias:
            channels = layer.out_channels
            parameters[f"{layer.name}.gain"] = torch.ones(channels)
            parameters[f"{layer.name}.mean"] = torch.zeros(channels)
            parameters[f"{layer.name}.variance"] = torch.ones(channels)
        x = _apply(layer, parameters, x, training=False)
    return parameters


def _is_statistic(name: str) -> bool:
    return name.endswith((".mean", ".variance"))  # moved by batch_norm, not by the optimiser


def _apply(
    layer: Layer, parameters: dict[str, torch.Tensor], x: torch.Tensor, training: bool
) -> torch.Tensor:
    def of(name: str) -> torch.Tensor | None:
        return parameters.get(f"{layer.name}.{name}")

    if layer.kind == "conv":
        normalised = of("gain") is not None
        bias = None if normalised else of("bias")
        x = F.conv2d(x, of("weight"), bias, layer.stride, layer.padding)
        if normalised:
            x = F.batch_norm(
                x, of("mean"), of("variance"), of("gain"), of("bias"), training, eps=_EPSILON
            )
        return x
    if layer.kind == "relu":
        return F.relu(x)
    if layer.kind == "tanh":
        return torch.tanh(x)
    if layer.kind == "pool":
        return F.max_pool2d(x, layer.kernel, layer.strides, layer.padding)
    if layer.kind == "fc":
        return F.linear(x.flatten(1), of("weight"), of("bias"))
    if layer.kind == "softmax":
        return x  # the loss has it built in, and the best class is the same without it
    raise UnsupportedError(
        f"{layer.name}: expected a layer that can be trained, found {layer.kind}"
    )


def forward(
    network: Network,
    parameters: dict[str, torch.Tensor],
    images: torch.Tensor,
    training: bool = False,
) -> torch.Tensor:
    """Runs the network as PyTorch does.

    Args:
        network: the network; its softmax is left out.
        parameters: of :func:`initial_parameters`, or folded ones.
        images: uint8 [N, C, H, W] on the parameters' device.
        training: whether batch normalisation uses the batch's statistics, and moves its own.

    Returns:
        float32 [N, classes], before the softmax.
    """
    x = images.float() * network.scale + network.offset
    for layer in network.layers:
        x = _apply(layer, parameters, x, training)
    return x


def fold(network: Network, parameters: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Folds each batch normalisation into its convolution.

    ``gain * (conv(x) - mean) / sqrt(variance + epsilon) + bias`` is a convolution too: the weights
    times ``gain / sqrt(...)``, and the bias less ``mean`` times that.

    Returns:
        name -> float32 array: the parameters of the network, and no others.
    """
    values = {name: value.detach().cpu().double().numpy() for name, value in parameters.items()}
    for name in [layer.name for layer in network.layers if f"{layer.name}.gain" in values]:
        factor = values.pop(f"{name}.gain") / np.sqrt(values.pop(f"{name}.variance") + _EPSILON)
        values[f"{name}.weight"] *= factor[:, None, None, None]
        values[f"{name}.bias"] -= values.pop(f"{name}.mean") * factor
    return {name: np.ascontiguousarray(value, np.float32) for name, value in values.items()}


def _augmented(
    images: torch.Tensor, order: torch.Tensor, shift: int, generator: torch.Generator
) -> torch.Tensor:
    """Returns ``images`` (uint8 [N, C, H, W]) in ``order``, mirrored and shifted at random.

    Numbers are drawn on the CPU, so that every device sees the same images.
    """
    _, channels, height, width = images.shape
    count = len(order)

    def draw(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (count, 1, 1, 1), generator=generator).to(images.device)

    def reflected(position: torch.Tensor, size: int) -> torch.Tensor:
        return size - 1 - (size - 1 - position.abs()).abs()

    def span(size: int, *shape: int) -> torch.Tensor:
        return torch.arange(size, device=images.device).view(shape)

    row = span(height, 1, 1, -1, 1) + draw(-shift, shift + 1)
    column = span(width, 1, 1, 1, -1)
    column = torch.where(draw(0, 2) == 1, width - 1 - column, column) + draw(-shift, shift + 1)
    channel = span(channels, 1, -1, 1, 1)
    image = order.to(images.device).view(-1, 1, 1, 1)
    return images[image, channel, reflected(row, height), reflected(column, width)]


def _accuracy(
    network: Network,
    parameters: dict[str, torch.Tensor],
    images: torch.Tensor,
    labels: torch.Tensor,
) -> float:
    """Returns the part of ``images`` whose best class is their label."""
    with torch.no_grad():
        correct = sum(
            (forward(network, parameters, some).argmax(1) == wanted).sum()
            for some, wanted in zip(
                images.split(_EVALUATION_BATCH), labels.split(_EVALUATION_BATCH), strict=True
            )
        )
    return correct.item() / len(labels)


def accuracy(network: Network, weights: dict[str, np.ndarray], data: Dataset) -> float:
    """Returns the part of ``data`` that the folded ``weights`` get right, in float32 on the CPU."""
    parameters = {name: torch.from_numpy(value) for name, value in weights.items()}
    return _accuracy(network, parameters, *_tensors(data, "cpu"))


def _tensors(data: Dataset, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.from_numpy(data.images).to(device)
    return images, torch.from_numpy(data.labels.astype(np.int64)).to(device)


@contextmanager
def _deterministic() -> Iterator[None]:
    """Asks PyTorch for algorithms that give the same sums every time, within the block."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def train(
    network: Network,
    data: Dataset,
    recipe: Recipe,
    device: str = "cpu",
    evaluate: dict[str, Dataset] | None = None,
    log: Callable[[dict], None] = lambda entry: None,
) -> dict[str, np.ndarray]:
    """Trains ``network`` on ``data``: the same numbers give the same weights on the same machine.

    Args:
        network: convolutions, activations and poolings, then fully connected layers and a softmax.
        data: images with labels.
        recipe: see :class:`Recipe`.
        device: ``"cpu"`` or ``"cuda"``.
        evaluate: name -> images with labels, whose accuracy each entry of the log has.
        log: called after each epoch with ``epoch``, ``learning_rate`` (of its last step), ``loss``
            and ``train_accuracy`` (means over the epoch's augmented images, as the weights change),
            ``<name>_accuracy`` and ``seconds`` (since training began).

    Returns:
        name -> float32 array, ready for :meth:`Network.check_weights`.

    Raises:
        InputError: the recipe does not fit the images, or training diverged.
    """
    with _deterministic():
        return _train(network, data, recipe, device, evaluate or {}, log)


def _train(
    network: Network,
    data: Dataset,
    recipe: Recipe,
    device: str,
    evaluate: dict[str, Dataset],
    log: Callable[[dict], None],
) -> dict[str, np.ndarray]:
    steps = len(data) // recipe.batch_size
    if steps == 0:
        raise expected("--batch-size", f"at most {len(data)} (images)", recipe.batch_size)
    images, labels = _tensors(data, device)
    others = {name: _tensors(other, device) for name, other in evaluate.items()}
    generator = torch.Generator().manual_seed(recipe.seed)
    parameters = {k: v.to(device) for k, v in initial_parameters(network, recipe.seed).items()}
    trained = {k: v.requires_grad_() for k, v in parameters.items() if not _is_statistic(k)}
    decayed = [value for value in trained.values() if value.ndim > 1]
    others_trained = [value for value in trained.values() if value.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": others_trained, "weight_decay": 0.0}],
        lr=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        recipe.learning_rate,
        total_steps=recipe.epochs * steps + 1,  # one more, as it steps after the last one too
        pct_start=0.1,
        cycle_momentum=False,
    )
    settled = recipe.epochs - int(recipe.epochs * recipe.settle)
    begin = time.monotonic()
    for epoch in range(1, recipe.epochs + 1):
        shift = recipe.shift if epoch <= settled else 0
        order = torch.randperm(len(images), generator=generator)[: steps * recipe.batch_size]
        epoch_images = _augmented(images, order, shift, generator)
        epoch_labels = labels[order.to(device)]
        loss_sum = torch.zeros((), device=device)
        correct = torch.zeros((), device=device)
        batches = epoch_images.split(recipe.batch_size), epoch_labels.split(recipe.batch_size)
        for some, wanted in zip(*batches, strict=True):
            rate = schedule.get_last_lr()[0]
            scores = forward(network, parameters, some, training=True)
            loss = F.cross_entropy(scores, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            loss_sum += loss.detach()
            correct += (scores.detach().argmax(1) == wanted).sum()
        entry = {
            "epoch": epoch,
            "learning_rate": rate,
            "loss": loss_sum.item() / steps,
            "train_accuracy": correct.item() / len(order),
        }
        for name, tensors in others.items():
            entry[f"{name}_accuracy"] = _accuracy(network, parameters, *tensors)
        entry["seconds"] = round(time.monotonic() - begin, 2)
        if not np.isfinite(entry["loss"]):
            raise expected("--learning-rate", "one that converges", f"a loss of {entry['loss']}")
        log(entry)
    return fold(network, parameters)


def load(
    data: str | os.PathLike[str], test_data: str | os.PathLike[str] | None, hold_out: int
) -> tuple[Dataset, dict[str, Dataset]]:
    """Loads the training images, and by name (``held_out``, ``test``) those to evaluate.

    ``data`` and ``test_data`` are as :func:`cifar10.dataset.find_files` takes them; the test images
    are those of ``test_data``, or else those that ``data`` has. The last ``hold_out`` training
    images are held out.

    Raises:
        InputError: there are no training images, no labels, or fewer images than are held out.
    """
    training_files, test_files = dataset.find_files(data)
    if not training_files:
        raise expected(f"--data {data}", "training images", "test images only")
    if test_data is not None:
        files, found = dataset.find_files(test_data)
        test_files = found or files
    training = _read_labelled(training_files)
    if not 0 <= hold_out < len(training):
        raise expected("--hold-out", f"0 to {len(training) - 1} images", hold_out)
    evaluate = {}
    if hold_out:
        kept = len(training) - hold_out
        evaluate["held_out"] = _part(training, slice(kept, None))
        training = _part(training, slice(kept))
    if test_files:
        evaluate["test"] = _read_labelled(test_files)
    return training, evaluate


def _read_labelled(paths: Sequence[Path]) -> Dataset:
    data = dataset.read(paths)
    if data.labels is None:
        raise expected(data.source, "images with labels", "no labels")
    return data


def _part(data: Dataset, part: slice) -> Dataset:
    return Dataset(data.name, data.source, data.images[part], data.labels[part])


def _choose_device(device: str) -> str:
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise UnsupportedError("--device: expected a CUDA device that PyTorch can use, found none")
    return "cuda" if available and device != "cpu" else "cpu"


def _header(recipe: Recipe, device: str, command: str, images: int) -> dict:
    return {
        "command": command,
        "recipe": asdict(recipe),
        "images": images,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if device == "cuda" else None,
    }


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise InputError(message)  # so that every error is the same one line


def _positive(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 1_000_000:
        raise argparse.ArgumentTypeError(f"expected 1 to 1000000, found {text}")
    return value


def _number(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1000:
        raise argparse.ArgumentTypeError(f"expected 0 to 1000, found {text}")
    return value


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    recipe = Recipe()
    parser = _Parser(
        prog="python -m cifar10.train",
        description="Trains the cifar10 network and writes its weights.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--data", required=True, metavar="PATH", help="a folder or file of training images")
    add("--test-data", metavar="PATH", help="test images, for the log (default: those of --data)")
    add("--hold-out", type=int, default=0, metavar="N", help="evaluate on the last N, not train")
    add("--epochs", type=_positive, default=recipe.epochs, metavar="N", help="passes")
    add(
        "--batch-size", type=_positive, default=recipe.batch_size, metavar="N", help="images a step"
    )
    add("--learning-rate", type=_number, default=recipe.learning_rate, metavar="X", help="highest")
    add("--weight-decay", type=_number, default=recipe.weight_decay, metavar="X", help="of weights")
    add("--shift", type=int, choices=range(9), default=recipe.shift, help="most pixels shifted by")
    add("--seed", type=int, default=recipe.seed, metavar="N", help="of everything random")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to train")
    add("--output", type=Path, default="weights.safetensors", metavar="PATH", help="the weights")
    add("--log", type=Path, metavar="PATH", help="a line of JSON for the run and for each epoch")
    add("--quiet", action="store_true", help="print errors only")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0 done, 2 error, 130 interrupted."""
    try:
        _run(_options(arguments), sys.argv[1:] if arguments is None else arguments)
        return 0
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: no weights were written", file=sys.stderr)
        return 130


def _run(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    if torch is None:
        raise InputError(
            "expected PyTorch (pip install 'cnn-engine[train]'), found no such package"
        )
    for option, path in (("--output", options.output), ("--log", options.log)):
        if path is not None:
            check_writable(path, option)
    if not 0 <= options.seed < 2**63:
        raise expected("--seed", "0 to 2**63 - 1", options.seed)
    device = _choose_device(options.device)
    recipe = Recipe(
        epochs=options.epochs,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        weight_decay=options.weight_decay,
        shift=options.shift,
        seed=options.seed,
    )
    data, evaluate = load(options.data, options.test_data, options.hold_out)
    command = shlex.join(["python", "-m", "cifar10.train", *arguments])
    entries = [_header(recipe, device, command, len(data))]
    console = Console(stderr=True, quiet=options.quiet)
    hidden = options.quiet or not console.is_terminal
    try:
        with Progress(console=console, transient=True, disable=hidden) as progress:
            task = progress.add_task(f"training on {device}", total=recipe.epochs)

            def log(entry: dict) -> None:
                entries.append(entry)
                progress.advance(task)
                if len(entries) % max(1, recipe.epochs // 20) == 1 or len(entries) == 2:
                    console.print(_line(entry), highlight=False)

            weights = train(NETWORK, data, recipe, device, evaluate, log)
        # What counts is what the file holds, so the folded weights are measured, in full float32.
        final = {name: accuracy(NETWORK, weights, other) for name, other in evaluate.items()}
        entries.append({"final": final})
        _write_weights(options.output, weights, recipe, final)
    finally:  # also what was reached before an error or an interruption
        if options.log is not None and len(entries) > 1:
            with atomic_write(options.log) as file:
                file.writelines(json.dumps(entry) + "\n" for entry in entries)
    if not options.quiet:
        results = "".join(f", {100 * v:.2f} % {k.replace('_', ' ')}" for k, v in final.items())
        print(f"{options.output}: {len(data)} images, {recipe.epochs} epochs{results}")


def _line(entry: dict) -> str:
    accuracies = ", ".join(
        f"{name.removesuffix('_accuracy').replace('_', ' ')} {100 * value:.2f} %"
        for name, value in entry.items()
        if name.endswith("_accuracy")
    )
    return (
        f"epoch {entry['epoch']}: loss {entry['loss']:.4f}, {accuracies}, {entry['seconds']:.1f} s"
    )


def _write_weights(
    path: Path, weights: dict[str, np.ndarray], recipe: Recipe, final: dict[str, float]
) -> None:
    metadata = {
        "network": NETWORK.name,
        "normalisation": f"x = pixel * {NETWORK.scale!r} + {NETWORK.offset!r}",
        "recipe": json.dumps(asdict(recipe)),
        "accuracy": json.dumps(final),
    }
    with atomic_write(path, "wb") as file:
        file.write(safetensors.numpy.save(weights, metadata))


if __name__ == "__main__":
    sys.exit(main())
