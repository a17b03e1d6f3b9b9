"""``cnn-engine run``: runs a network on images, checks it, and times every layer and copy."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from dataclasses import asdict
from time import perf_counter

import numpy as np

from . import cli, report, shared_options
from .devices import threads
from .engine.engine import Engine
from .errors import expected
from .io import image_files
from .io.files import atomic_write
from .io.progress import Progress
from .kernel import preflight
from .kernels import select
from .measure import profile, roofline, timing
from .measure.result import Result
from .report import grouping, plot
from .report import profile as profile_report
from .report import roofline as roofline_report
from .vision import heads, pictures, viewer
from .workload import Dataset, Samples, Workload

MOST_IMAGES = 100_000_000


def parser() -> argparse.ArgumentParser:
    """Returns the command's parser."""
    p = cli.ArgumentParser(
        prog="cnn-engine run",
        description="Runs a network on images: compares it with a float64 reference, then times whole "
        "passes, every layer and every copy.",
        epilog="exit codes: 0 done; 1 the check against the reference failed, nothing is timed; 2 the "
        "input is at fault; 130 interrupted, what was measured is still written",
    )
    count = cli.whole_number
    shared_options.add_network(p)
    rows = "; ".join(f"{row.name}: {row.summary}" for row in select.VARIANTS.values())
    p.add_argument("--variant", default="auto", help=f"{rows}; auto (default): the fastest")
    shared_options.add_kernels(p)
    shared_options.add_tune(p)
    p.add_argument(
        "--reduction",
        action=argparse.BooleanOptionalAction,
        help="let several lanes share one output's sum (default: no; auto: what is fastest)",
    )
    p.add_argument(
        "--device",
        default="auto",
        help="auto (default), cpu, cuda, cuda:N, openacc or openacc:host",
    )
    p.add_argument(
        "--data-mode",
        default="auto",
        help="where data lives on CUDA: resident; auto (default): resident, as stream where a pass has "
        "several chunks; transfer: each convolution copies its input "
        "in and its output out, the other layers run on the CPU; managed: the same over managed memory; "
        "stream: page-locked chunks, copies overlapped with kernels",
    )
    p.add_argument(
        "--chunk",
        type=count(1, MOST_IMAGES),
        help="images that move at a time with --data-mode stream (default: by rule)",
    )
    p.add_argument(
        "--dtype", default="float32", help=f"one of {', '.join(select.DTYPES)} (default: float32)"
    )
    p.add_argument(
        "--batch",
        type=count(1, MOST_IMAGES),
        help="images per pass, or all when fewer (default: by rule, as many as are fast; the report says "
        "how many)",
    )
    p.add_argument("--images", type=count(1, MOST_IMAGES), help="how many of them (default: all)")
    p.add_argument(
        "--data",
        default="auto",
        help="auto (default): $CNN_ENGINE_DATA, else the user's cache, else synthetic images; synthetic; "
        "a path that the network's data set understands; or files of images: a folder with one folder "
        "per class, a list of them (.txt: a path and a label per line), one image",
    )
    shared_options.add_images(p)
    p.add_argument(
        "--weights",
        default="default",
        help="default (default): the network's own; random; a .safetensors file, a ConvNetJS folder, or an "
        "MXNet .params file",
    )
    p.add_argument(
        "--threads", type=count(1, threads.MOST), help="CPU threads (default: the CPUs granted)"
    )
    p.add_argument(
        "--warmup",
        type=count(0, 10**6),
        default=1,
        help="passes before those that count (default: 1)",
    )
    until = p.add_mutually_exclusive_group()
    until.add_argument(
        "--iterations",
        type=count(1, 10**9),
        help="passes over all images (default: until the median pass of this run is known within 1 %%, for "
        f"at most {timing.CAP_S:g} seconds)",
    )
    until.add_argument(
        "--duration",
        type=cli.number(0, 10**7),
        metavar="S",
        help="instead of --iterations: repeat for so many seconds",
    )
    p.add_argument(
        "--percentiles", default="50,90,99", help="percentiles of the latency (default: 50,90,99)"
    )
    p.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare with the float64 reference before anything is timed (default: yes)",
    )
    p.add_argument(
        "--profile",
        action="store_true",
        help="run the passes once more and show what filled the time: kernels, copies and CUDA API calls, "
        "from activity records",
    )
    p.add_argument(
        "--top",
        type=count(1, 10**6),
        metavar="N",
        help="layers, or groups of them, that the report shows, the longest first (default: all)",
    )
    p.add_argument(
        "--profile-percent",
        type=cli.number(0, 100),
        metavar="P",
        help="percent of the time that the tables of --profile have above their line (default: "
        f"{profile.TOP:g})",
    )
    p.add_argument(
        "--group-by",
        choices=grouping.WAYS,
        help="sum up the report's layers by operator, or by block: the module with a number in its name, "
        "such as layer1.0 (default: a row per layer)",
    )
    for option, what in (
        ("json", "the result as JSON (schema 1)"),
        ("csv", "layers and copies as CSV"),
        ("trace", "a timeline that Perfetto and chrome://tracing open"),
        ("html", "the report as one page"),
    ):
        p.add_argument(f"--{option}", metavar="PATH", help=f"write {what}; - for standard output")
    p.add_argument(
        "--plot",
        metavar="FILE.png",
        help="draw the time of each layer as a picture (.png, .svg or .pdf); needs matplotlib",
    )
    p.add_argument(
        "--roofline",
        nargs="?",
        const="",
        metavar="FILE.png",
        help="measure the CPU's limits, and say for each layer which one binds it; with a file, draw it",
    )
    p.add_argument(
        "--save-probabilities",
        metavar="PATH.npy",
        help="write what the network gives, float32 [N, classes]: probabilities where it ends in a softmax, "
        "else logits as they are",
    )
    p.add_argument(
        "--save-outputs",
        metavar="PATH.npz",
        help="write all outputs by name, dimension 0 being the images",
    )
    add_drawing(p)
    p.add_argument("--quiet", action="store_true", help="print no report and no progress bar")
    return p


def add_drawing(p: argparse.ArgumentParser) -> None:
    """Adds ``--draw`` and the options for reading outputs."""
    p.add_argument(
        "--draw",
        metavar="DIR",
        help="write a PNG of each image file in --data: boxes of a detector with their classes, a mask in "
        f"colours, or the picture that the network makes; and {pictures.FOUND}",
    )
    p.add_argument(
        "--head",
        metavar="NAME",
        help=f"with --draw, how outputs are read: {', '.join(heads.HEADS)} (default: by their shapes and "
        "what the model's file says)",
    )
    p.add_argument(
        "--confidence",
        type=cli.number(0, 1),
        metavar="SCORE",
        help=f"with --draw, the score above which a box counts (default: {viewer.CONFIDENCE:g})",
    )
    p.add_argument(
        "--iou",
        type=cli.number(0, 1),
        metavar="SHARE",
        help="with --draw, the intersection over union above which the worse of two boxes of a class goes "
        f"(default: {viewer.IOU:g})",
    )


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the command with ``arguments`` (None: the process's); returns its exit code."""
    options = parser().parse_args(arguments)
    percentiles = _percentiles(options.percentiles)
    if options.profile_percent is not None and not options.profile:
        raise expected("--profile-percent", "the option --profile with it", "none")
    outputs = {name: getattr(options, name) for name in ("json", "csv", "trace", "html")}
    _check_outputs(outputs, options)

    found = shared_options.workload_of(options)
    drawing = _drawing(options, found)
    start = perf_counter()
    dataset = shared_options.dataset_of(options, found, options.images)
    load_data_s = perf_counter() - start

    engine = Engine(
        found,
        weights=shared_options.weights_of(options, found),
        device=options.device,
        variant=options.variant,
        reduction=options.reduction,
        dtype=options.dtype,
        data_mode=options.data_mode,
        threads=options.threads,
        chunk=options.chunk,
        kernels=options.kernel,
        tune=options.tune,
    )
    if options.roofline is not None:
        roofline.check_device(engine.device)
    if options.kernel and options.check and (fault := preflight.fault(engine)):
        cli.print_error(f"--kernel: {fault}; nothing was timed")
        return cli.CHECK_FAILED
    engine.phases.load_data_s = load_data_s
    if options.save_probabilities and len(engine.form.outputs) != 1:
        wanted = f"a network with one output; --save-outputs takes all {len(engine.form.outputs)}"
        raise expected("--save-probabilities", wanted, engine.network.name)
    probabilities = _room(engine, dataset, options)
    progress = None if options.quiet else Progress()
    result = engine.profile(
        dataset,
        batch=options.batch,
        warmup=options.warmup,
        iterations=options.iterations,
        duration_s=options.duration,
        percentiles=percentiles,
        check=options.check,
        probabilities=probabilities,
        progress=progress,
    )
    if options.profile:
        rows = probabilities[: len(dataset)]
        _profile(
            engine, dataset.images, rows, result, options.profile_percent or profile.TOP, progress
        )
    checked = result.check is None or result.check.passed
    if drawing is not None and checked and not result.interrupted:
        try:
            result.notes += [f"drawn: {drawing.draw(engine)}", f"drawn: {drawing.sight.stated}"]
        except KeyboardInterrupt:  # what was measured is still written
            result.interrupted = True
            result.notes.append("drawn: not all pictures, for it was interrupted")
    limits = None
    if options.roofline is not None and result.layers:
        limits = roofline.measure(engine.threads, result.layers, engine.dtype)
        result.roofline = asdict(limits)
    start = perf_counter()
    engine.close()
    result.phases.free_memory_s = perf_counter() - start
    if arguments is not None:
        result.command = shlex.join(["cnn-engine", "run", *arguments])

    if result.images_done:
        _save(probabilities, result, options)
    if not options.quiet and "-" not in outputs.values():
        cli.show(report.text.render(result, options.group_by, options.top))
        if result.profile is not None:
            cli.show(f"\n{profile_report.render(result.profile)}")
        if limits is not None:
            cli.show(f"\n{roofline_report.render(limits, options.top)}")
    report.write(result, **outputs)
    if options.plot is not None:
        plot.draw(result, options.plot)
    if options.roofline and limits is not None:
        title = f"{result.network}, batch {result.batch}, on {result.device_name}"
        roofline_report.draw(limits, title, options.roofline)
    if result.check is not None and not result.check.passed:
        cli.print_error(
            f"check: expected outputs within {result.check.tolerance:g} of the float64 reference, "
            f"found {result.check.max_abs_diff:g}; nothing was timed"
        )
        return cli.CHECK_FAILED
    return cli.INTERRUPTED if result.interrupted else cli.DONE


class _Drawing:
    """The pictures of ``--draw``: what is checked before anything runs, and what is written at the end.

    Attributes:
        sight: how images are prepared, and outputs read.
    """

    def __init__(self, options: argparse.Namespace, found: Workload) -> None:
        if not image_files.is_image_files(options.data):
            raise expected("--draw", "files of images in --data with it", options.data)
        self.sight = viewer.sight_of(
            found.network, preprocess=options.preprocess, classes=options.classes, head=options.head,
            confidence=options.confidence or viewer.CONFIDENCE, iou=options.iou or viewer.IOU,
        )  # fmt: skip
        files = image_files.find(options.data, None).spread(options.images)
        self._files = files.files
        self._root = options.data if os.path.isdir(options.data) else os.path.dirname(options.data)
        self._folder = pictures.check_folder(options.draw, options.data, "--draw")

    def draw(self, engine: Engine) -> str:
        """Draws all pictures; returns what was done, in a line."""
        rows = pictures.draw_all(
            engine, self.sight, self._files, self._root or ".", self._folder, "--draw"
        )
        return pictures.summary(rows, self._folder)


def _drawing(options: argparse.Namespace, found: Workload) -> _Drawing | None:
    """Returns what ``--draw`` is to do; its images are prepared alike where they are timed."""
    if options.draw is None:
        for name in ("head", "confidence", "iou"):
            if getattr(options, name) is not None:
                raise expected(f"--{name}", "the option --draw with it", "none")
        return None
    drawing = _Drawing(options, found)
    options.preprocess, options.classes = drawing.sight.preprocess, None
    return drawing


def _room(engine: Engine, dataset: Dataset, options: argparse.Namespace) -> np.ndarray | Samples:
    """Returns memory for what comes out: of all images where somebody wants it."""
    form, images = engine.form, len(dataset)
    if not form.is_images_to_rows:
        batch = engine.batch_size(options.batch, images, dataset.images.dtype)
        return engine.empty_outputs(images, batch)
    if options.save_probabilities and dataset.rest is not None:
        images += dataset.rest.count
    return np.zeros((images, engine.network.classes), np.float32)


def _save(outputs: np.ndarray | Samples, result: Result, options: argparse.Namespace) -> None:
    """Writes what came out, of as many images as were done."""
    done = result.dataset.get("predicted_images", result.images_done)
    found = outputs[:done]
    by_name = found.arrays if isinstance(found, Samples) else {"probabilities": found}
    if options.save_probabilities:
        with atomic_write(options.save_probabilities, "wb") as file:
            np.save(file, next(iter(by_name.values())))
    if options.save_outputs:
        with atomic_write(options.save_outputs, "wb") as file:
            np.savez(file, **by_name)


def _profile(
    engine: Engine,
    images: np.ndarray | Samples,
    probabilities: np.ndarray | Samples,
    result: Result,
    top: float,
    progress: Progress | None,
) -> None:
    """Adds to ``result`` what filled the time; nothing where nothing was timed to the end."""
    if result.interrupted or not result.layers:
        result.notes.append("profile: left out, because the run before it was not completed")
        return
    found = profile.collect(
        engine, images, probabilities, result.batch, result, top=top, progress=progress
    )
    result.profile = found
    result.interrupted = found.interrupted
    result.timeline += profile.timeline_events(found, result.timeline)
    result.timeline_total += found.events_total


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(word) for word in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(0 <= value <= 100 for value in values):
        raise expected("--percentiles", "numbers from 0 to 100 with commas between", repr(text))
    return values


def _check_outputs(outputs: dict[str, str | None], options: argparse.Namespace) -> None:
    """Refuses what cannot be written before any work is done."""
    probabilities = options.save_probabilities
    if probabilities is not None and (probabilities == "-" or not probabilities.endswith(".npy")):
        raise expected("--save-probabilities", "a path that ends in .npy", repr(probabilities))
    every = options.save_outputs
    if every is not None and (every == "-" or not every.endswith(".npz")):
        raise expected("--save-outputs", "a path that ends in .npz", repr(every))
    paths = {f"--{name}": path for name, path in outputs.items()}
    paths |= {"--save-probabilities": probabilities, "--save-outputs": every}
    paths["--plot"] = options.plot
    plot.check("--plot", options.plot)
    if options.roofline:
        paths["--roofline"] = options.roofline
        plot.check("--roofline", options.roofline)
    cli.check_outputs(paths, shared_options.files_read(options))


if __name__ == "__main__":
    sys.exit(main())
