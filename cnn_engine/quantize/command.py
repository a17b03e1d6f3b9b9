"""``cnn-engine quantize``: an ONNX file of 8-bit integers from one of floats, and the loss of each layer."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import replace

import numpy as np

from .. import cli, shared_options
from ..errors import expected
from ..graph.form import form_of
from ..io import image_files
from ..io.files import atomic_write, write_text
from ..report import units
from ..report.pages import template
from ..workload import Dataset, Samples
from .quantizing import LayerReport, Quantized, decibels, quantize
from .ranges import METHODS

#: Images on which a model is calibrated unless said.
IMAGES = 128

#: Layers that the text shows, the worst first.
SHOWN = 12


def parser() -> cli.ArgumentParser:
    """Returns the command's parser."""
    p = cli.ArgumentParser(
        prog="cnn-engine quantize",
        description="Makes an ONNX model of 8-bit integers from one of floats: ranges from images of yours, "
        "a scale for each filter, and a report of what each layer loses. The file has QuantizeLinear and "
        "DequantizeLinear nodes, which ONNX Runtime, OpenVINO and TensorRT read, too.",
        epilog="exit codes: 0 done; 1 more is lost than --max-loss; 2 the file or an option is at fault",
    )
    p.add_argument("model", metavar="MODEL", help="an .onnx file of floats")
    p.add_argument(
        "--data", metavar="PATH", default="synthetic",
        help="images that are typical: a folder or list of files, in folders by class where the loss is to "
        "be of top-1 accuracy; a .npy or .npz; or synthetic: random numbers, to try the command (default)",
    )  # fmt: skip
    shared_options.add_images(p)
    p.add_argument(
        "--inputs", metavar="FILE.npz",
        help="in the place of --data, for networks that do not take images: every input by name, dimension 0 "
        "being the samples; labels where the file has them",
    )  # fmt: skip
    shared_options.add_model_inputs(p)
    p.add_argument(
        "--images", type=cli.whole_number(1, 1 << 20), default=IMAGES, metavar="N",
        help=f"at most so many images, spread over --data (default: {IMAGES})",
    )  # fmt: skip
    p.add_argument(
        "--method", choices=list(METHODS), default="mse",
        help="how a tensor's range follows from the images: all that was seen (minmax), 99.99 %% of it, the "
        "least divergence of its distribution, or the least mean square error (mse, the default)",
    )  # fmt: skip
    p.add_argument(
        "--symmetric", action="store_true",
        help="activations in int8 around 0, as TensorRT wants them, not uint8",
    )  # fmt: skip
    p.add_argument(
        "--keep", action="append", default=[], metavar="LAYER",
        help="a layer that stays float; may be given again",
    )  # fmt: skip
    p.add_argument(
        "--max-loss", type=float, metavar="POINTS",
        help="points of top-1 accuracy that may be lost (of agreement with the float model, where images "
        "have no labels; percent of the outputs' size, where they are no scores of classes): as few layers "
        "as that needs stay float",
    )  # fmt: skip
    p.add_argument(
        "--equalise", action=argparse.BooleanOptionalAction, default=None,
        help="whether channels around depthwise convolutions are scaled to one range (default: if the "
        "outputs gain)",
    )  # fmt: skip
    p.add_argument("--output", metavar="PATH", required=True, help="the quantized .onnx file")
    p.add_argument(
        "--device", default="cpu", help="device that calibrates: cpu (default), cuda, cuda:N"
    )
    shared_options.add_reports(p, "the report and a chart")
    return p


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    options = parser().parse_args(arguments)
    outputs = {"--output": options.output, "--json": options.json, "--html": options.html}
    if options.output == "-":
        raise expected("--output", "a path", "-")
    cli.check_outputs(outputs, [options.model, *shared_options.files_read(options)])
    if options.max_loss is not None and not 0 <= options.max_loss <= 100:
        raise expected("--max-loss", "0 to 100 points", options.max_loss)
    dataset = _dataset(options)
    images = dataset.images.arrays if isinstance(dataset.images, Samples) else dataset.images
    shows = not options.quiet and options.json != "-"
    if shows and dataset.note:
        cli.show(dataset.note)
    found = quantize(
        options.model, images, dataset.labels, constants=dict(options.constant or []),
        method=options.method, symmetric=options.symmetric, equalise=options.equalise, keep=options.keep,
        max_loss=options.max_loss, device=options.device,
        progress=(lambda line: cli.show(line, sys.stderr)) if shows else lambda line: None,
    )  # fmt: skip
    words = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["cnn-engine", "quantize", *words])
    with atomic_write(options.output, "wb") as file:
        file.write(found.model.SerializeToString())
    content = {**found.to_dict(), "model": options.model, "output": options.output}
    if options.json is not None:
        write_text(options.json, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    if options.html is not None:
        write_text(options.html, page(found, options.model, command))
    if shows:
        cli.show(text(found, options.output), end="")
    within = options.max_loss is None or found.loss <= options.max_loss
    return cli.DONE if within else cli.CHECK_FAILED


def _dataset(options: argparse.Namespace) -> Dataset:
    """Returns the images to calibrate on: at most so many, at even distances."""
    if options.data == "auto":
        raise expected("--data", "a path, or synthetic", "auto")
    if options.inputs is not None:
        if options.data != "synthetic":
            raise expected("--inputs", "no --data with it", options.data)
        options.data = "auto"
    found = shared_options.workload_of(options)
    form = form_of(found.network, found.network.base)

    def most(count: int) -> int:
        """Returns how many of ``count`` images are taken: whole passes."""
        least = 1 if form.any_batch else form.batch
        return max(min(count, options.images) // least, 1) * least if form.rows else 1

    if options.inputs is None and options.data == "synthetic":
        return shared_options.dataset_of(options, found, most(options.images))
    if options.inputs is None and image_files.is_image_files(options.data):
        outputs = found.network.classes if form.is_of_rows else None
        count = len(image_files.find(options.data, outputs))
        return shared_options.dataset_of(options, found, most(count), held_bytes=None)
    dataset = shared_options.dataset_of(options, found, None)
    count = len(dataset)
    places = np.arange(most(count)) * count // most(count)
    images, labels = dataset.images, dataset.labels
    if isinstance(images, Samples):
        arrays = {n: a if n in images.shared else a[places] for n, a in images.arrays.items()}
        some: np.ndarray | Samples = Samples(arrays, len(places), images.shared)
    else:
        some = images[places]
    return replace(dataset, images=some, labels=None if labels is None else labels[places])


# -- the report ----------------------------------------------------------------------------------


def summary(found: Quantized) -> list[tuple[str, str]]:
    """Returns the report's lines as (name, value)."""
    kept = [layer.name for layer in found.layers if layer.kept]
    lines = [
        ("images", str(found.images)),
        ("method", f"{found.settings.method}, activations in {found.settings.dtype.__name__}"),
        ("layers in 8 bits", f"{len(found.layers) - len(kept)} of {len(found.layers)}"),
        ("lost", f"{found.loss:.2f} {found.loss_is}"),
        ("signal to noise of the outputs", f"{decibels(found.accuracy.noise):.1f} dB"),
    ]
    if found.accuracy.top1 is not None:
        both = f"{units.percent(found.accuracy.top1)}, float {units.percent(found.float_top1)}"
        lines.append(("top-1 accuracy", both))
    if found.accuracy.agreement is not None:
        lines.append(("same first class", units.percent(found.accuracy.agreement)))
    if found.equalised:
        lines.append(("equalised", f"{found.equalised} pairs of layers"))
    if kept:
        lines.append(("kept in float", ", ".join(kept)))
    if found.others:
        names = ", ".join(found.others[:3]) + (", ..." if len(found.others) > 3 else "")
        why = "transposed, or with computed weights or biases"
        lines.append(("float in any case", f"{len(found.others)} layers, {why}: {names}"))
    return lines


def _row(layer: LayerReport) -> tuple[str, ...]:
    parts = layer.noise, layer.read_noise, layer.through
    cells = (f"{decibels(part):.1f}" for part in parts)
    return layer.name, layer.operator, *cells, "float" if layer.kept else ""


HEAD = ("layer", "operator", "alone, dB", "its input and weights, dB", "in the network, dB", "kept")


def text(found: Quantized, output: str) -> str:
    """Returns the report: the loss, and the layers that lose most."""
    lines = [f"{name}: {value}" for name, value in (*summary(found), ("written", output))]
    rows = [HEAD, *(_row(layer) for layer in found.layers[:SHOWN])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    lines += ["", "signal to noise, the layers that lose most first"]
    lines += [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    if len(found.layers) > SHOWN:
        lines.append(f"  and {len(found.layers) - SHOWN} more (--json, --html)")
    return "\n".join(units.printable(line) for line in lines) + "\n"


def page(found: Quantized, model: str, command: str) -> str:
    """Returns the report as a page."""
    most = max((layer.decibels for layer in found.layers), default=1.0) or 1.0
    return template("page.html", __package__).render(
        title=f"Quantized: {model}", command=command, summary=summary(found),
        layers=[
            {
                "row": _row(layer),
                "name": layer.name,
                "kept": layer.kept,
                "width": 100 * max(layer.decibels, 0) / most,
                "decibels": f"{layer.decibels:.1f} dB",
            }
            for layer in found.layers
        ],
        head=HEAD,
    )  # fmt: skip
