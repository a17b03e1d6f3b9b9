"""Options that several commands share: networks and models, images, kernels, batch sizes, reports."""

from __future__ import annotations

import argparse
import json
import os
import re
from dataclasses import replace
from typing import Any

from . import workload
from .cli import print_error, show
from .errors import expected


class _List(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from .listing import text

        show(text())
        parser.exit()


def batch_sizes(texts: list[str], option: str, most: int, largest: int) -> list[int]:
    """Returns the batch sizes that ranges and lists name, sorted, each once.

    ``"1-4,8"`` is 1, 2, 3, 4, 8; ``"1-256:5"`` is every fifth from 1, up to 256.

    Args:
        most: how many sizes there may be.
        largest: what a size may be.

    Raises:
        InputError: names ``option``.
    """
    found: set[int] = set()
    for word in ",".join(texts).split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?", word.strip())
        if match is None:
            raise expected(option, "sizes such as 1-256, 1,2,4-8 or 1-256:5", repr(word))
        first = int(match[1])
        last = int(match[2] or first)
        step = int(match[3] or 1)
        if not (1 <= first <= last <= largest and step >= 1):
            raise expected(
                option, f"rising ranges from 1 to {largest} with a step above 0", repr(word)
            )
        sizes = range(first, last + 1, step)
        if len(sizes) > most or len(found | set(sizes)) > most:
            raise expected(option, f"at most {most} sizes", f"more with {word!r}")
        found.update(sizes)
    return sorted(found)


def add_batch_sizes(parser: argparse.ArgumentParser, default: str) -> None:
    """Adds ``--batch`` as every command has it that goes through batch sizes; see :func:`batch_sizes`."""
    parser.add_argument(
        "--batch",
        nargs="+",
        action="extend",
        metavar="N",
        help="images per pass: ranges, lists and steps, such as 1-256, 1,2,4-8 or 1-256:5 (default: "
        f"{default})",
    )


def _named_shape(text: str) -> tuple[str, tuple[int | None, ...]]:
    """Returns (input, shape) of ``images=1,3,224,224``; ``?`` is None: as the file has it."""
    name, equals, sizes = text.rpartition("=")
    words = sizes.split(",")
    if not (name and equals) or not all(re.fullmatch(r"[0-9]{1,9}|\?", word) for word in words):
        raise argparse.ArgumentTypeError(f"expected NAME=1,3,224,224, found {text!r}")
    return name, tuple(None if word == "?" else int(word) for word in words)


def _named_constant(text: str) -> tuple[str, Any]:
    """Returns (input, value) of ``sr=16000``, ``size=640,480``, ``flag=true`` or ``axes=[[0], [1]]``."""
    name, equals, value = text.partition("=")
    wanted = "NAME=VALUE: a number, true, false, or numbers with commas between them"
    try:
        if not (name and equals) or len(value) > 65536:
            raise ValueError
        bare = re.fullmatch(r"[^\[\]{}\"]*,[^\[\]{}\"]*", value)
        return name, json.loads(f"[{value}]" if bare else value)
    except (ValueError, RecursionError):
        raise argparse.ArgumentTypeError(f"expected {wanted}, found {text[:80]!r}") from None


def add_model_inputs(parser: argparse.ArgumentParser) -> None:
    """Adds ``--input-shape`` and ``--constant`` as every command has them that reads models."""
    parser.add_argument(
        "--input-shape",
        action="append",
        type=_named_shape,
        metavar="NAME=N,...",
        help="an input's shape, such as images=1,3,224,224, where the file leaves more than the batch "
        "open (? leaves one as the file has it); may be given again",
    )
    parser.add_argument(
        "--constant",
        action="append",
        type=_named_constant,
        metavar="NAME=VALUE",
        help="the value of an input that is a setting, such as sr=16000, size=640,480 or flag=true: it is "
        "no input of the network then; may be given again",
    )


def model_inputs(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of :func:`cnn_engine.graph.onnx.load` from ``--input-shape`` and ``--constant``.

    Raises:
        InputError: there is no ``--model`` beside them.
    """
    given = {
        "input_shape": dict(options.input_shape or []),
        "constants": dict(options.constant or []),
    }
    for option, values in (
        ("--input-shape", options.input_shape),
        ("--constant", options.constant),
    ):
        if values and not options.model:
            raise expected(option, "the option --model with it", "none")
    return given


def add_reports(parser: argparse.ArgumentParser, page: str) -> None:
    """Adds ``--json``, ``--html`` and ``--quiet`` as commands have them that describe a file.

    Args:
        page: what the page has, for ``--html``.
    """
    parser.add_argument(
        "--json", metavar="PATH", help="write the report as JSON; - for standard output"
    )
    parser.add_argument("--html", metavar="PATH", help=f"write a page with {page}")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")


def add_list(parser: argparse.ArgumentParser) -> None:
    """Adds ``--list``, to commands that take names of networks, variants or devices."""
    parser.add_argument(
        "--list", action=_List, nargs=0,
        help="print the networks, variants and devices that can be named, and exit",
    )  # fmt: skip


def weights_of(options: argparse.Namespace, found: workload.Workload) -> str:
    """Returns ``--weights``: random ones, said on standard error, for a network that comes without any."""
    from .graph.network import Network

    missing = isinstance(found.network, Network) and found.default_weights is None
    if options.weights != "default" or not missing:
        return options.weights
    words = f"{found.name} comes without any, and runs on random ones (--weights FILE reads yours)"
    print_error(f"weights: {words}", "note")
    return "random"


def add_network(parser: argparse.ArgumentParser) -> None:
    """Adds ``--network``, and in its place ``--model``; see :func:`workload_of`."""
    known = ", ".join(workload.names())
    add_list(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--network", help=f"one of {known} (default: cifar10)")
    which.add_argument(
        "--model", metavar="FILE.onnx", help="an ONNX model in the network's place; --data takes a "
        ".npy or .npz of its images, or files of images, --inputs all of its inputs (default: random ones)",
    )  # fmt: skip
    parser.add_argument(
        "--inputs", metavar="FILE.npz",
        help="every input of --model by name, dimension 0 being the images; labels where the file has them",
    )  # fmt: skip
    add_model_inputs(parser)


def add_kernels(parser: argparse.ArgumentParser) -> None:
    """Adds ``--kernel``: a list for ``Engine(kernels=...)``."""
    parser.add_argument(
        "--kernel",
        action="append",
        default=[],
        metavar="FILE",
        help="a kernel of your own (.cu, .cpp) in the place of the engine's, for all nodes of its operator, "
        "or for one: conv2:my.cu; may be given again (cnn-engine kernel new writes one that works)",
    )


def add_tune(parser: argparse.ArgumentParser) -> None:
    """Adds ``--tune``, for ``Engine(tune=...)``."""
    parser.add_argument(
        "--tune", action="store_true",
        help="measure the best few kernels of each node on this device, and keep what was found in the "
        "user's cache (default: those that the model of their costs names)",
    )  # fmt: skip


def workload_of(options: argparse.Namespace) -> workload.Workload:
    """Returns the network of ``--network`` or ``--model``; cifar10 where neither is given.

    Raises:
        InputError: there is no such network, or the model is at fault.
    """
    given = model_inputs(options)
    if options.model is not None:
        return workload.of_model(
            options.model,
            **given,
            inputs=getattr(options, "inputs", None),
            preprocess=getattr(options, "preprocess", None),
        )
    return workload.get("cifar10" if options.network is None else options.network)


def add_images(parser: argparse.ArgumentParser) -> None:
    """Adds the options for files of images in ``--data``; see :func:`dataset_of`."""
    parser.add_argument(
        "--preprocess",
        help="for files of images: imagenet (shorter side to 256, centre crop of 224, mean and standard "
        "deviation, as torchvision's presets), or settings such as resize=232,crop=224,"
        "mean=0.485/0.456/0.406,std=0.229/0.224/0.225,interpolation=bicubic, or both; images are turned "
        "upright as EXIF says, unless orientation=ignore is given (default: what the model's file says, else "
        "none: as they are, for networks that take pixels)",
    )
    parser.add_argument(
        "--classes",
        metavar="FILE",
        help="names of the network's outputs: JSON, or text with a line per name (default: what "
        "the model's file says, else folders in order of their names)",
    )


def dataset_of(
    options: argparse.Namespace, found: workload.Workload, images: int | None, **more: Any
) -> workload.Dataset:
    """Returns the images that ``--data`` names: the workload's own, or files of images.

    Args:
        images: how many; None: all.
        more: of :func:`cnn_engine.io.image_files.load`.

    Raises:
        InputError: an option or a file is at fault.
    """
    from .graph.form import form_of
    from .graph.model import Model
    from .io import image_files, model_metadata

    network = found.network
    if options.inputs is not None:
        if options.data != "auto" or not isinstance(network, Model):
            wanted = "the option --model with it, and no --data"
            raise expected("--inputs", wanted, "--data" if options.data != "auto" else "none")
        options.data = options.inputs
    if options.data in ("auto", "synthetic") or not image_files.is_image_files(options.data):
        for option in ("preprocess", "classes"):
            if getattr(options, option) is not None:
                raise expected(f"--{option}", "files of images in --data with it", options.data)
        return found.load_data(options.data, images)
    outputs: int | None = network.classes
    if isinstance(network, Model):
        form = form_of(network, network.base)
        if not form.is_of_images:
            wanted = f"a .npz of arrays, for {network.name} takes no images [N, C, H, W]"
            raise expected("--data", wanted, options.data)
        if form.sizes_of is not None:
            name, shape = network.inputs[0].name, ",".join(map(str, network.inputs[0].shape))
            wanted = f"a size, for {network.name} leaves it open: {name} [{shape}]"
            raise expected("--preprocess", f"{wanted}; such as letterbox=640", options.preprocess)
        outputs = outputs if form.is_of_rows else None
        more["batch"] = 1 if network.any_batch else network.batch
    if options.classes and outputs is None:
        raise expected(
            "--classes", f"a network of classes, for {network.name} is none", options.classes
        )
    settings = model_metadata.image_settings(network, options.preprocess, options.classes)
    dtype, preprocess, classes = settings.dtype, settings.preprocess, settings.classes
    dataset = image_files.load(
        options.data, network.input_shape, outputs,
        dtype=dtype, preprocess=preprocess, classes=classes, images=images, **more,
    )  # fmt: skip
    notes = [note for note in (settings.stated, dataset.note) if note]
    return replace(dataset, note="; ".join(notes) or None)


def files_read(options: argparse.Namespace) -> list[str]:
    """Returns the files that the options name to read: models, weights, data, classes, kernels."""
    words: list[str] = []
    for name in ("model", "weights", "data", "classes", "inputs"):
        given = getattr(options, name, None) or ()
        words += [given] if isinstance(given, str) else given
    words += [word.rpartition(":")[2] for word in getattr(options, "kernel", ())]
    return [word for word in words if os.path.isfile(word)]
