"""``cnn-engine export``: a PyTorch model as an ONNX file, checked against PyTorch's own numbers."""

from __future__ import annotations

import argparse
import inspect
import io
import logging
import math
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

from . import callables, cli, shared_options
from .engine.check import tolerance_of_constants
from .errors import InputError, did_you_mean, expected
from .graph.onnx import load
from .graph.reference import reference
from .io import model_metadata
from .io.files import atomic_write
from .io.image_files import Classes
from .io.preprocess import INTERPOLATIONS, Preprocess

EXPORTERS = ("dynamo", "torchscript")
OPSET = 18

#: Images that random weights' batch norm sees before the export, so that activations stay of one size.
STATISTICS_IMAGES = 4

#: The images' names in the file.
INPUT, OUTPUT = "images", "outputs"


def build(spec: str, weights: str, option: str = "model") -> tuple[Any, str]:
    """Returns (module in evaluation mode, name) of ``module:callable[,key=value...]``.

    Args:
        weights: ``DEFAULT`` (the model's own trained ones), ``random``, or a path to a state dictionary
            (``.safetensors``, or what ``torch.save`` writes).

    Raises:
        InputError: there is no such callable, it does not give a module, or the weights do not fit it.
    """
    torch = _torch()
    function, arguments, name = _resolve(option, spec)
    trained = weights == "DEFAULT"
    taken = _parameters(function)
    if "weights" in taken:  # torchvision
        arguments.setdefault("weights", "DEFAULT" if trained else None)
    elif "pretrained" in taken or _from_timm(function):
        arguments.setdefault("pretrained", trained)
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of models' constructors
            module = function(**arguments)
    except Exception as error:  # a module of the user's may fail in any way
        raise expected(
            f"{option}: {spec}", "a model", f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(module, torch.nn.Module):
        raise expected(f"{option}: {spec}", "a torch.nn.Module", type(module).__name__)
    if weights not in ("DEFAULT", "random"):
        _read_weights(torch, module, Path(weights))
    return module.eval(), name


def _resolve(option: str, spec: str) -> tuple[Callable[..., Any], dict[str, Any], str]:
    """Returns what ``spec`` names, as :func:`.callables.resolve`; ``timm:NAME`` is any model of timm."""
    module, _, rest = spec.partition(":")
    if module != "timm" or not rest:
        return callables.resolve(option, spec)
    function, arguments, _ = callables.resolve(option, f"timm:create_model,model_name={rest}")
    import timm

    name = rest.partition(",")[0]
    if not timm.is_model(name.partition(".")[0]):
        hint = did_you_mean(name, timm.list_models())
        raise expected(f"{option}: {spec}", "a model that timm has", f"{name!r}{hint}")
    return function, {**arguments, "model_name": name}, spec


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise InputError(
            f"expected the package torch to export models, found none ({error}): "
            "pip install 'cnn-engine[torch]'"
        ) from None
    return torch


def _parameters(function: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except ValueError:
        return set()


def _from_timm(function: Callable[..., Any]) -> bool:
    return getattr(function, "__module__", "").partition(".")[0] == "timm"


def _read_weights(torch: Any, module: Any, path: Path) -> None:
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
        module.load_state_dict(state)
    except Exception as error:  # torch's many ways to say that a file does not fit
        reason = " ".join(str(error).split())[:300]
        raise expected(
            "--weights", "a state dictionary of the model", f"{path}: {reason}"
        ) from error


def images_shape(module: Any, given: tuple[int, ...] | None) -> tuple[int, ...]:
    """Returns the shape of one image: as given, as timm's model says, or 3 x 224 x 224."""
    if given is not None:
        return given
    settings = getattr(module, "default_cfg", None)
    if isinstance(settings, dict) and settings.get("input_size"):
        return tuple(settings["input_size"])
    return (3, 299, 299) if type(module).__name__ == "Inception3" else (3, 224, 224)


def run_statistics(module: Any, shape: tuple[int, ...]) -> None:
    """Lets batch norm see random images, as training would, so that random weights give sensible numbers."""
    torch = _torch()
    norms = [m for m in module.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    if not norms:
        return
    for norm in norms:
        norm.train()
        norm.momentum = None  # the mean over what was seen
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        module(torch.randn(STATISTICS_IMAGES, *shape, generator=generator))
    module.eval()


def of_module(module: Any, example: Any) -> bytes:
    """Returns the bytes of an ONNX file of a module in evaluation mode, for any number of images.

    Args:
        module: a ``torch.nn.Module`` with one input; its mode and its parameters stay as they are.
        example: a tensor that it takes, of which the shape counts.

    Raises:
        InputError: it is no module, or PyTorch cannot export it; says why.
    """
    torch = _torch()
    if not isinstance(module, torch.nn.Module):
        raise expected("module", "a torch.nn.Module", type(module).__name__)
    if not isinstance(example, torch.Tensor) or example.ndim < 2:
        found = list(example.shape) if isinstance(example, torch.Tensor) else type(example).__name__
        raise expected("example", "a tensor of at least 2 dimensions, the first the images", found)
    modes = [part for part in module.modules() if part.training]
    module.eval()
    try:
        return exported(module, tuple(example.shape[1:]), EXPORTERS[0], None, OPSET)
    finally:
        for part in modes:
            part.training = True


def write(
    module: Any,
    shape: tuple[int, ...],
    path: str,
    exporter: str,
    batch: int | None,
    opset: int,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes ``module`` to ``path``.

    Args:
        shape: of one image.
        exporter: ``dynamo`` or ``torchscript``: PyTorch's newer and its older one.
        batch: images per pass; None leaves it open.
        metadata: of the file.

    Raises:
        InputError: PyTorch cannot export the model; says why.
    """
    data = exported(module, shape, exporter, batch, opset)
    with atomic_write(path, "wb") as file:
        file.write(model_metadata.added(data, metadata or {}))


def exported(
    module: Any, shape: tuple[int, ...], exporter: str, batch: int | None, opset: int
) -> bytes:
    """Returns ``module`` as the bytes of an ONNX file; see :func:`write`."""
    torch = _torch()
    # An open batch is exported with two images: exporters take a one for a constant.
    place = next(module.parameters(), torch.zeros(())).device
    example = torch.zeros(batch or 2, *shape, device=place)
    options: dict[str, Any] = {
        "input_names": [INPUT],
        "output_names": [OUTPUT],
        "opset_version": opset,
    }
    # Left to themselves both fold batch norm into convolutions, in float32 with several roundings that all
    # of a filter's sums share; the passes of an engine fold it in float64.
    if exporter == "torchscript":
        options |= {"dynamo": False, "training": torch.onnx.TrainingMode.PRESERVE}
        if batch is None:
            options["dynamic_axes"] = {INPUT: {0: "batch"}, OUTPUT: {0: "batch"}}
    else:
        options |= {"dynamo": True, "optimize": False, "verbose": False}
        if batch is None:
            options["dynamic_shapes"] = ({0: torch.export.Dim("batch", min=1)},)
    try:
        with _quiet(), tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "model.onnx"
            if exporter == "torchscript":
                torch.onnx.export(module, (example,), str(made), **options)
            else:
                _without_constants(torch.onnx.export(module, (example,), **options), str(made))
            return made.read_bytes()
    except Exception as error:  # what its exporters raise has no common base
        reason = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())[:400]
        raise InputError(
            f"exporter {exporter}: the model cannot be exported: {type(error).__name__}: {reason}"
        ) from error


def _without_constants(program: Any, path: str) -> None:
    """Writes what the newer exporter made, with nothing in it that is the same in every pass."""
    from onnxscript import optimizer  # which that exporter needs, too

    optimizer.fold_constants(program.model)
    optimizer.remove_unused_nodes(program.model)
    program.save(path, external_data=False)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the exporters' own remarks to themselves: what matters comes as an error."""
    logging.disable(logging.ERROR)
    try:
        with (
            warnings.catch_warnings(),
            redirect_stdout(io.StringIO()),
            redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def check(module: Any, shape: tuple[int, ...], path: str, batch: int | None) -> tuple[float, float]:
    """Returns the largest difference of the file's outputs from PyTorch's, both in float64, and its limit.

    Both as parts of the largest output; for one and for three images where the batch is open. The exporters
    and the reader fold constants, and round what comes out to float32: the limit is what that does.
    """
    torch = _torch()
    graph = load(path)
    generator = np.random.default_rng(0)
    module = module.double()
    name, worst = graph.outputs[0], 0.0
    counts = (batch,) if batch is not None else (1, 3)
    examples = generator.normal(size=(counts[-1], *shape)).astype(np.float32)
    for count in counts:
        x = examples[:count]
        with torch.no_grad():
            wanted = first_output(module(torch.from_numpy(x).double())).numpy()
        made = graph if batch is not None else graph.with_batch(count)
        found = reference(made, {INPUT: x})
        if found[name].shape != wanted.shape:
            raise expected(path, f"an output of {list(wanted.shape)}", list(found[name].shape))
        largest = max(float(np.abs(wanted).max()), 1e-300)
        difference = float(np.abs(found[name] - wanted).max()) / largest
        worst = max(worst, difference if np.isfinite(difference) else np.inf)
    limits = tolerance_of_constants(made, {INPUT: x}, found)  # of all images
    return worst, limits.get(name, 0.0) / largest


def first_output(outputs: Any) -> Any:
    """Returns the first tensor of a module's output: itself, or of a tuple, list or mapping."""
    while not hasattr(outputs, "detach"):
        outputs = next(iter(outputs.values() if hasattr(outputs, "values") else outputs))
    return outputs.detach()


def settings_of_weights(
    spec: str, weights: str, module: Any, option: str = "model"
) -> tuple[Preprocess | None, list[str] | None]:
    """Returns how images are prepared, and the names of the outputs, as torchvision and timm say of weights.

    Random weights stand for the model's default ones. Of weights in a file nothing is known.
    """
    if weights not in ("DEFAULT", "random"):
        return None, None
    function, arguments, _ = _resolve(option, spec)
    if _from_timm(function):
        return _settings_of_timm(module)
    if getattr(function, "__module__", "").startswith("torchvision."):
        return _settings_of_torchvision(function, arguments.get("weights", "DEFAULT"))
    return None, None


def _settings_of_torchvision(
    function: Any, weights: Any
) -> tuple[Preprocess | None, list[str] | None]:
    from torchvision.models import get_model_weights

    try:
        entry = get_model_weights(function)[str(weights).rpartition(".")[2]]
        transforms, names = entry.transforms(), entry.meta.get("categories")
    except (KeyError, ValueError):  # a function that has no weights, or none of that name
        return None, None
    if type(transforms).__name__ != "ImageClassification":
        return None, None
    (resize,), (crop,) = transforms.resize_size, transforms.crop_size
    how = transforms.interpolation.value
    if how not in INTERPOLATIONS:
        return None, names
    mean, std = tuple(transforms.mean), tuple(transforms.std)
    return Preprocess(resize, (crop, crop), mean, std, how), names


def _settings_of_timm(module: Any) -> tuple[Preprocess | None, list[str] | None]:
    from timm.data import ImageNetInfo, infer_imagenet_subset

    config = module.pretrained_cfg
    names = config.get("label_names")
    subset = None if names else infer_imagenet_subset(module)
    if subset:
        info = ImageNetInfo(subset)
        names = [info.index_to_description(number) for number in range(info.num_classes())]
    _, rows, columns = config["input_size"]
    how, mode = config.get("interpolation"), config.get("crop_mode", "center")
    if how not in INTERPOLATIONS or not (
        mode == "squash" or (mode == "center" and rows == columns)
    ):
        return None, names
    larger = tuple(math.floor(side / config["crop_pct"]) for side in (rows, columns))
    resize = larger if mode == "squash" else larger[0]
    mean, std = tuple(config["mean"]), tuple(config["std"])
    return Preprocess(resize, (rows, columns), mean, std, how), names


def _metadata(
    module: Any, shape: tuple[int, ...], options: argparse.Namespace
) -> tuple[dict[str, str], str]:
    """Returns what the file says beside its graph, and the sentence that tells of it."""
    torch = _torch()
    with torch.no_grad():
        rows = first_output(module(torch.zeros(options.batch or 1, *shape)))
    outputs = int(np.prod(rows.shape[1:]))
    preprocess, names = settings_of_weights(options.model, options.weights, module)
    if options.preprocess is not None:
        preprocess = Preprocess.parse(options.preprocess)
        preprocess.check(shape)
    elif preprocess is not None:
        try:
            preprocess.check(shape)
        except InputError:  # images of another size than the weights were trained for
            preprocess = None
    if options.classes is not None:
        names = Classes.read(options.classes, outputs).names
    elif names is not None and len(names) != outputs:
        names = None
    images = "no preprocessing (--preprocess sets it)"
    if preprocess is not None:
        images = f"images are prepared by {preprocess}"
    classes = "no class names (--classes sets them)"
    if names is not None:
        classes = f"names of {len(names):,} classes"
    return model_metadata.entries(preprocess, names), f"{images}; {classes}"


def parser() -> cli.ArgumentParser:
    """Returns the command's parser."""
    p = cli.ArgumentParser(
        prog="cnn-engine export",
        description="Writes a PyTorch model as an ONNX file, and compares what the file computes with "
        "PyTorch's own numbers, both in float64.",
        epilog="exit codes: 0 done; 1 the file computes something else; 2 the input is at fault",
    )
    p.add_argument(
        "model",
        metavar="MODULE:FUNCTION[,KEY=VALUE...]",
        help="what makes the model, such as torchvision.models:resnet50, timm:convnext_tiny (any name that "
        "timm.create_model takes), or a function of yours that returns a module",
    )
    p.add_argument(
        "--weights",
        default="random",
        metavar="NAME",
        help="DEFAULT (the model's own trained weights, which PyTorch may download), random (default; batch "
        "norm sees a few random images), or a path to a state dictionary",
    )
    p.add_argument("--output", required=True, metavar="PATH", help="the .onnx file")
    p.add_argument(
        "--exporter",
        choices=EXPORTERS,
        default="dynamo",
        help="PyTorch's newer exporter (default) or its older one",
    )
    p.add_argument(
        "--batch", type=cli.whole_number(1, 65536), metavar="N",
        help="images per pass, fixed in the file (default: left open)",
    )  # fmt: skip
    p.add_argument(
        "--input-shape", type=_shape, metavar="C,H,W",
        help="shape of one image (default: what the model says, or 3,224,224)",
    )  # fmt: skip
    p.add_argument(
        "--preprocess", metavar="WHAT",
        help="how images are prepared, such as imagenet: written into the file for commands that read images "
        "(default: as torchvision and timm say of the model's trained weights)",
    )  # fmt: skip
    p.add_argument(
        "--classes", metavar="FILE",
        help="names of the outputs, written into the file: JSON, or text with a line per name (default: "
        "as torchvision and timm say of the model's trained weights)",
    )  # fmt: skip
    p.add_argument(
        "--opset",
        type=cli.whole_number(13, 28),
        default=OPSET,
        metavar="N",
        help=f"default: {OPSET}",
    )
    return p


def _shape(text: str) -> tuple[int, ...]:
    convert = cli.whole_number(1, 65536)
    sizes = tuple(convert(word) for word in text.split(","))
    if len(sizes) != 3:
        raise argparse.ArgumentTypeError(f"expected channels, rows and columns, found {text!r}")
    return sizes


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    options = parser().parse_args(arguments)
    cli.check_outputs({"--output": options.output}, shared_options.files_read(options))
    if options.output == "-":
        raise expected("--output", "the path of a file", "-")
    if options.preprocess is not None:
        Preprocess.parse(options.preprocess)
    module, name = build(options.model, options.weights)
    shape = images_shape(module, options.input_shape)
    if options.weights == "random":
        run_statistics(module, shape)
    metadata, stated = _metadata(module, shape, options)
    write(module, shape, options.output, options.exporter, options.batch, options.opset, metadata)
    difference, limit = check(module, shape, options.output, options.batch)
    graph = load(options.output, batch=options.batch)
    parameters = sum(array.size for array in graph.constants.values())
    cli.show(
        f"{options.output}: {name}, {len(graph.nodes)} nodes, {parameters / 1e6:.2f} million parameters, "
        f"images of {' x '.join(map(str, shape))}"
    )
    cli.show(f"metadata: {stated}")
    passed = difference <= limit
    cli.show(
        f"check: {'passed' if passed else 'FAILED'}: at most {difference:.1e} of the largest output from "
        f"PyTorch's (float64, limit {limit:.1e})"
    )
    return cli.DONE if passed else cli.CHECK_FAILED


if __name__ == "__main__":
    sys.exit(main())
