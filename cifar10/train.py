"""Trains the weights that the project ships: ``python -m cifar10.train --data FOLDER``.

``cifar10.training`` says how. The last epoch's weights are written: the test images are only looked at
for the log.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import safetensors.numpy
from rich.console import Console
from rich.progress import Progress

from cnn_engine import cli
from cnn_engine.errors import InputError, UnsupportedError, expected
from cnn_engine.graph.network import Conv2d, Linear, MaxPool2d, Network, Relu
from cnn_engine.io.files import atomic_write
from cnn_engine.workload import Dataset

from . import dataset
from .network import NETWORK
from .recipe import Recipe

try:
    import torch

    from . import training
except ImportError:  # an optional package; main() says so
    torch = None


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


def teacher_network() -> Network:
    """Returns the network that teaches: six convolutions of 3x3, 1.2 million parameters."""
    layers = []
    for number, channels in enumerate((64, 128, 256), start=1):
        for name in (f"conv{number}a", f"conv{number}b"):
            layers += [Conv2d(name, channels, kernel=3, padding=1), Relu(f"{name}_relu")]
        layers.append(MaxPool2d(f"pool{number}", kernel=2, stride=2))
    layers.append(Linear("fc", len(dataset.CLASSES)))
    return Network(
        "teacher", NETWORK.input_shape, tuple(layers), scale=NETWORK.scale, offset=NETWORK.offset
    )


def _choose_device(device: str) -> str:
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise UnsupportedError("--device: expected a CUDA device that PyTorch can use, found none")
    return "cuda" if available and device != "cpu" else "cpu"


def _header(recipes: dict[str, Recipe], device: str, command: str, images: int) -> dict:
    return {
        "command": command,
        "recipes": {name: asdict(recipe) for name, recipe in recipes.items()},
        "images": images,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if device == "cuda" else None,
    }


class _Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Help with each default, where there is one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    recipe = Recipe()
    parser = cli.ArgumentParser(
        prog=f"python -m {__package__}.train",
        description="Trains the cifar10 network and writes its weights.",
        formatter_class=_Defaults,
    )
    add = parser.add_argument
    count, amount = cli.whole_number(1, 1_000_000), cli.number(0, 1000)
    add("--data", required=True, metavar="PATH", help="a folder or file of training images")
    add("--test-data", metavar="PATH", help="test images, for the log (default: those of --data)")
    add(
        "--hold-out",
        type=cli.whole_number(0, dataset.MAX_IMAGES),
        default=0,
        metavar="N",
        help="evaluate on the last N, not train",
    )
    add("--epochs", type=count, default=recipe.epochs, metavar="N", help="passes")
    add("--batch-size", type=count, default=recipe.batch_size, metavar="N", help="images per step")
    add("--learning-rate", type=amount, default=recipe.learning_rate, metavar="X", help="highest")
    add("--weight-decay", type=amount, default=recipe.weight_decay, metavar="X", help="of weights")
    add(
        "--shift",
        type=cli.whole_number(0, 16),
        default=recipe.shift,
        metavar="N",
        help="most pixels",
    )
    add(
        "--seed",
        type=cli.whole_number(0, 2**63 - 1),
        default=recipe.seed,
        metavar="N",
        help="of everything random",
    )
    add(
        "--teacher-epochs",
        type=cli.whole_number(0, 1_000_000),
        default=0,
        metavar="N",
        help="train a larger network first, so many epochs, and learn from it too",
    )
    add(
        "--teacher-weight",
        type=cli.number(0, 1),
        default=recipe.teacher_weight,
        metavar="X",
        help="its part of the loss",
    )
    add(
        "--temperature",
        type=cli.number(0, 100),
        default=recipe.temperature,
        metavar="X",
        help="what scores are divided by before they are compared with its own",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to train")
    add("--output", type=Path, default="weights.safetensors", metavar="PATH", help="the weights")
    add("--log", type=Path, metavar="PATH", help="a line of JSON for the run and for each epoch")
    add("--quiet", action="store_true", help="print errors only")
    return parser.parse_args(arguments)


@cli.command
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0 done, 2 error, 130 interrupted."""
    options = _options(arguments)
    if torch is None:
        raise InputError(
            "expected PyTorch (pip install 'cnn-engine[train]'), found no such package"
        )
    cli.check_outputs({"--output": options.output, "--log": options.log})
    device = _choose_device(options.device)
    recipe = Recipe(
        epochs=options.epochs,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        weight_decay=options.weight_decay,
        shift=options.shift,
        seed=options.seed,
        teacher_weight=options.teacher_weight,
        temperature=options.temperature,
    )
    recipes = {NETWORK.name: recipe}
    if options.teacher_epochs:
        # A large network overfits where a small one does not: smaller steps, more decay, more shift.
        recipes["teacher"] = Recipe(
            epochs=options.teacher_epochs,
            batch_size=options.batch_size,
            learning_rate=0.003,
            weight_decay=0.1,
            shift=4,
            seed=options.seed,
        )
    data, evaluate = load(options.data, options.test_data, options.hold_out)
    command = shlex.join(["python", "-m", f"{__package__}.train", *(arguments or sys.argv[1:])])
    entries = [_header(recipes, device, command, len(data))]
    console = Console(stderr=True, quiet=options.quiet)
    hidden = options.quiet or not console.is_terminal
    total = sum(some.epochs for some in recipes.values())
    every = max(1, total // 20)
    try:
        with Progress(console=console, transient=True, disable=hidden) as progress:
            task = progress.add_task(f"training on {device}", total=total)

            def log(entry: dict) -> None:
                entries.append(entry)
                progress.advance(task)
                if entry["epoch"] == 1 or entry["epoch"] % every == 0:
                    console.print(_line(entry), highlight=False)

            teacher = None
            if "teacher" in recipes:
                network = teacher_network()
                taught = training.train(network, data, recipes["teacher"], device, evaluate, log)
                teacher = training.Teacher(network, taught)
            weights = training.train(NETWORK, data, recipe, device, evaluate, log, teacher)
        # What counts is what the file holds, so the folded weights are measured, in full float32.
        final = {
            name: training.accuracy(NETWORK, weights, other) for name, other in evaluate.items()
        }
        entries.append({"final": final})
        _write_weights(options.output, weights, recipes, final)
    finally:  # also what was reached before an error or an interruption
        if options.log is not None and len(entries) > 1:
            with atomic_write(options.log) as file:
                file.writelines(json.dumps(entry) + "\n" for entry in entries)
    if not options.quiet:
        results = "".join(f", {100 * v:.2f} % {k.replace('_', ' ')}" for k, v in final.items())
        print(f"{options.output}: {len(data)} images, {recipe.epochs} epochs{results}")
    return cli.DONE


def _line(entry: dict) -> str:
    accuracies = ", ".join(
        f"{name.removesuffix('_accuracy').replace('_', ' ')} {100 * value:.2f} %"
        for name, value in entry.items()
        if name.endswith("_accuracy")
    )
    where = f"{entry['network']}, epoch {entry['epoch']}"
    return f"{where}: loss {entry['loss']:.4f}, {accuracies}, {entry['seconds']:.1f} s"


def _write_weights(
    path: Path,
    weights: dict[str, np.ndarray],
    recipes: dict[str, Recipe],
    final: dict[str, float],
) -> None:
    metadata = {
        "network": NETWORK.name,
        "normalisation": f"x = pixel * {NETWORK.scale!r} + {NETWORK.offset!r}",
        "recipes": json.dumps({name: asdict(recipe) for name, recipe in recipes.items()}),
        "accuracy": json.dumps(final),
    }
    with atomic_write(path, "wb") as file:
        file.write(safetensors.numpy.save(weights, metadata))


if __name__ == "__main__":
    sys.exit(main())
