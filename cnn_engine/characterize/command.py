"""The command line, and the order in which points are measured."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from .. import cli, devices, shared_options
from ..devices import threads
from ..errors import CnnEngineError, InputError, UnsupportedError, expected
from ..graph.form import form_of
from ..graph.model import Model
from ..kernels import select
from ..measure import environment, roofline
from ..measure.result import LayerTime
from ..report import roofline as roofline_report
from ..workload import Dataset, Workload
from . import counters, files, measure, plot, text
from .measure import Meters, Settings
from .points import FAILED, INTERRUPTED, OK, Point
from .subjects import TORCH_DTYPES, EngineSubject, Load, TorchSubject, check_images

DEFAULT_BATCHES = "1,5,10,15,20"
DEFAULT_IMAGES = 1000
MOST_BATCHES = 1000
LARGEST_BATCH = 10**6
LONGEST_LAYERS = 20  # of the roofline that is printed; files have all
LONGEST_S = 300.0  # a point; every pass's time is kept

Subject = EngineSubject | TorchSubject


def parser() -> argparse.ArgumentParser:
    """Returns the command's parser."""
    p = cli.ArgumentParser(
        prog="cnn-engine characterize",
        description="Characterises networks at low batch: latency, images/s, GPU or CPU utilisation, "
        "memory, power, clocks and accuracy, for each batch size and variant.",
        epilog="exit codes: 0 done; 1 a point could not be measured, or a check against the reference "
        "failed (the others are measured); 2 the input is at fault; 130 interrupted, what was measured "
        "is still written",
    )
    shared_options.add_network(p)
    p.add_argument(
        "--variant",
        action="append",
        help="variants with commas between, or repeated: "
        f"auto, {', '.join(select.VARIANTS)} (default: auto)",
    )
    shared_options.add_kernels(p)
    shared_options.add_tune(p)
    p.add_argument(
        "--reduction",
        action=argparse.BooleanOptionalAction,
        help="let several lanes share one output's sum (default: no; auto: what is fastest)",
    )
    p.add_argument(
        "--dtype", default="float32", help=f"one of {', '.join(select.DTYPES)} (default: float32)"
    )
    p.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    p.add_argument("--data", default="auto", help="auto (default), synthetic, or a path; see run")
    shared_options.add_images(p)
    p.add_argument(
        "--weights", default="default", help="default (default), random, or a path; see run"
    )
    p.add_argument(
        "--images",
        type=cli.whole_number(1, 10**7),
        help=f"how many the passes go through, and the accuracy is of (default: {DEFAULT_IMAGES:,})",
    )
    p.add_argument(
        "--torch",
        action="append",
        default=[],
        metavar="MODULE:CALLABLE[,KEY=VALUE...]",
        help="a PyTorch model with random weights, such as torchvision.models:resnet50; repeated for more",
    )
    p.add_argument(
        "--shape", default="3,224,224", metavar="C,H,W", help="its input (default: 3,224,224)"
    )
    p.add_argument(
        "--torch-dtype",
        default="float32",
        help=f"one of {', '.join(TORCH_DTYPES)} (default: float32)",
    )
    shared_options.add_batch_sizes(p, DEFAULT_BATCHES)
    p.add_argument(
        "--threads",
        type=cli.whole_number(1, threads.MOST),
        help="CPU threads (default: the CPUs granted)",
    )
    defaults = Settings()
    p.add_argument(
        "--warmup",
        type=cli.whole_number(0, 10**6),
        default=defaults.warmup,
        help=f"passes before those that count (default: {defaults.warmup})",
    )
    for option, default, most, what in (
        ("settle", defaults.settle_s, LONGEST_S, "passes after --warmup and before those that count; "
         "NVML's utilisation reaches up to 1 s back"),
        ("duration", defaults.duration_s, LONGEST_S, "timed passes of a point"),
        ("sample-period", defaults.sample_period_s, 60.0, "between two readings of the meters"),
    ):  # fmt: skip
        p.add_argument(
            f"--{option}",
            type=cli.number(0.0 if option != "sample-period" else 0.001, most),
            default=default,
            metavar="S",
            help=f"seconds: {what} (default: {default:g})",
        )
    p.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare our variants with the float64 reference before they are timed (default: yes)",
    )
    p.add_argument(
        "--output",
        default="characterize",
        metavar="DIR",
        help="folder for the files (default: characterize)",
    )
    p.add_argument(
        "--plot",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="draw the chart (default: yes)",
    )
    p.add_argument(
        "--roofline",
        action="store_true",
        help="measure the CPU's limits, and say for each layer of each point which one binds it; with the "
        "plot, draw it",
    )
    p.add_argument(
        "--ncu",
        action="store_true",
        help="also run a pass of each point under Nsight Compute, for how busy each kernel keeps the GPU",
    )
    p.add_argument("--quiet", action="store_true", help="print no table and no progress")
    return p


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the command with ``arguments`` (None: the process's); returns its exit code."""
    options = parser().parse_args(arguments)
    words = sys.argv[1:] if arguments is None else arguments
    batches = _batches(options.batch)
    device = devices.select(options.device)
    if options.roofline:
        roofline.check_device(device)
    if options.ncu:
        counters.find()
        if device.kind != "cuda":
            raise UnsupportedError(f"--ncu: expected a CUDA device, found {device.name}")
    subjects, about = subjects_of(options, device, batches)
    folder = files.prepare(options.output)
    load_average = environment.host_load()
    for subject in subjects:
        subject.prepare(options.check)
    settings = Settings(
        warmup=options.warmup,
        settle_s=options.settle,
        duration_s=options.duration,
        profile_s=min(options.duration, Settings().profile_s),
        sample_period_s=options.sample_period,
    )
    run = _Run(subjects, batches, device, settings, folder, options.quiet)
    run.report.header = {
        "command": shlex.join(["cnn-engine", "characterize", *words]),
        **run.watch.stamp(),
        "environment": _environment(device),
        "options": {**vars(settings), **about},
    }
    if device.note:
        run.report.notes.append(device.note)
    run.run(options.roofline)
    if options.ncu and not run.report.interrupted:
        run.read_counters(words)
    _finish(run, options.plot, device, load_average)
    if not options.quiet:
        cli.show(text.render(run.report))
        if run.report.roofline is not None:
            cli.show(f"\n{roofline_report.render(run.report.roofline, LONGEST_LAYERS)}")
        if run.report.counters:
            cli.show(f"\n{text.counted(run.report.counters)}")
    if run.report.interrupted:
        return cli.INTERRUPTED
    failed = [point for point in run.report.points if point.status == FAILED]
    if failed:
        cli.print_error(
            f"{len(failed)} of {len(run.report.points)} points failed, first {text.line(failed[0])}"
        )
        return cli.CHECK_FAILED
    return cli.DONE


def _finish(run: _Run, wants_plot: bool, device: Any, load_average: float | None) -> None:
    """Adds the machine's state and the plot, and writes all files a last time."""
    report = run.report
    report.header |= run.watch.stamp()
    report.header["environment"].update(environment.state(device, load_average))
    report.notes += report.header["environment"]["warnings"]
    if wants_plot and any(point.throughput_images_per_s for point in report.points):
        if reason := plot.unavailable():
            report.notes.append(reason)
        else:
            commit = report.header["environment"]["commit"] or "not known"
            title = f"{device.model}, commit {commit}"
            plot.draw(report.points, title, report.folder / files.PLOT)
            if report.roofline is not None:
                roofline_report.draw(report.roofline, title, report.folder / files.ROOFLINE)
    report.save()


class _Run:
    """Goes through all points twice: once to time them, once to look inside."""

    def __init__(
        self,
        subjects: list[Subject],
        batches: list[int],
        device: Any,
        settings: Settings,
        folder: Any,
        quiet: bool,
    ) -> None:
        self.subjects, self.settings, self.quiet = subjects, settings, quiet
        self.device = device
        self.points = {
            (subject.name, batch): _point(subject, device, batch)
            for subject in subjects
            for batch in batches
        }
        self.watch = environment.Stopwatch()
        self.report = files.Report(folder, {}, list(self.points.values()))
        self.meters: Meters | None = None
        self.layers: list[LayerTime] = []  # of all points, named by their point
        self.threads, self.dtype = 1, "float32"

    def run(self, with_roofline: bool) -> None:
        """Measures every point, then the ceilings for the roofline.

        Ctrl-C ends it and is noted in the report.
        """
        self.meters = Meters.open(self.device)
        self.report.notes += self.meters.notes
        if self.meters.gpu is not None:
            self.report.header["device_memory"] = {
                "total_bytes": self.meters.gpu.memory_total,
                "used_before_bytes": self.meters.gpu.memory_used(),
            }
        try:
            self.report.save()
            for step in (self._time, self._profile):
                if step == self._profile and not self.quiet:
                    cli.show("all passes are timed; now their inside", sys.stderr)
                for subject in self.subjects:
                    for point in self._of(subject):
                        step(subject, point)
                        self.report.save()
                    subject.close()
            if with_roofline and self.layers:
                self.report.roofline = roofline.measure(self.threads, self.layers, self.dtype)
        except KeyboardInterrupt:
            self.report.interrupted = True
        finally:
            self.meters.close()

    def read_counters(self, words: Sequence[str]) -> None:
        """Adds each kernel's metrics, point by point; what cannot be had is a note."""
        for index, subject in enumerate(self.subjects):
            for point in self._of(subject):
                if point.status != OK:
                    continue
                command = [sys.executable, "-m", f"{__package__}.one_pass"]
                command += [str(index), str(point.batch), *words]
                try:
                    self.report.counters += counters.collect(subject.name, point.batch, command)
                except UnsupportedError as error:
                    self.report.notes.append(str(error))
                    return
                except KeyboardInterrupt:
                    self.report.interrupted = True
                    return

    def _of(self, subject: Subject) -> Iterator[Point]:
        return (point for (name, _), point in self.points.items() if name == subject.name)

    def _time(self, subject: Subject, point: Point) -> None:
        if subject.check is not None:
            point.check_max_abs_diff = subject.check.max_abs_diff
            if not subject.check.passed:
                point.status = FAILED
                point.add_note(
                    f"not timed: the check expected outputs within {subject.check.tolerance:g} of "
                    f"the float64 reference, found {subject.check.max_abs_diff:g}"
                )
                return
        point.status = INTERRUPTED  # unless it comes to its end
        with self._failures(point), subject.load(point.batch) as load:
            point.status = OK
            if load.settings:
                self.report.header["options"]["torch"] = load.settings
            for note in load.notes:
                point.add_note(note)
            try:
                rows = measure.time_point(point, load, self.meters, self.settings)
            except KeyboardInterrupt:
                point.status = INTERRUPTED
                raise
            self.report.iterations.extend(rows)
            if point.status == INTERRUPTED:
                raise KeyboardInterrupt
        self._say(point)

    def _profile(self, subject: Subject, point: Point) -> None:
        if point.status != OK:
            return
        try:
            with subject.load(point.batch) as load:
                kernels, iterations = self._inside(point, load)
                head = f"{point.subject}, batch {point.batch}"
                self.layers += [replace(one, name=f"{head}: {one.name}") for one in load.layers]
                self.threads = max(self.threads, load.threads)
                self.dtype = subject.dtype
        except Exception as error:  # the times stay; what is inside is missing
            point.add_note(f"inside of passes: {_describe(error)}")
            return
        self.report.kernels.extend(kernels)
        self.report.iterations.extend(iterations)

    def _inside(self, point: Point, load: Load) -> Any:
        on_gpu = self.device.kind == "cuda"
        return measure.profile_point(point, load, self.settings, on_gpu)

    @contextmanager
    def _failures(self, point: Point) -> Iterator[None]:
        """Makes an error of a point its note; the others go on."""
        try:
            yield
        except (
            Exception
        ) as error:  # out of memory, a shape that a model does not take, a lost device
            point.status = FAILED
            point.add_note(_describe(error))

    def _say(self, point: Point) -> None:
        if not self.quiet:
            cli.show(text.line(point), sys.stderr)


def _describe(error: Exception) -> str:
    words = " ".join(str(error).split()) or "no message"
    if isinstance(error, CnnEngineError):
        return words
    return f"{type(error).__name__}: {words}"[:500]


def _point(subject: Subject, device: Any, batch: int) -> Point:
    return Point(
        subject=subject.name,
        kind=subject.kind,
        model=subject.model,
        variant=subject.variant,
        reduction=subject.reduction,
        dtype=subject.dtype,
        device=device.name,
        boundary=subject.boundary,
        batch=batch,
    )


def _environment(device: Any) -> dict[str, Any]:
    found = environment.describe(device)
    for package in ("torch", "torchvision", "nvidia-ml-py", "psutil", "cupti-python", "matplotlib"):
        if version := environment.package_version(package):
            found["versions"][package] = version
    return found


# ---- options ----


def _batches(texts: list[str] | None) -> list[int]:
    return shared_options.batch_sizes(
        texts or [DEFAULT_BATCHES], "--batch", MOST_BATCHES, LARGEST_BATCH
    )


def _shape(words: str) -> tuple[int, ...]:
    convert = cli.whole_number(1, 10**5)
    try:
        shape = tuple(convert(word) for word in words.split(","))
    except argparse.ArgumentTypeError:
        shape = ()
    if len(shape) != 3:
        raise expected("--shape", "C,H,W", repr(words))
    return shape


def subjects_of(
    options: argparse.Namespace, device: Any, batches: list[int]
) -> tuple[list[Subject], dict[str, Any]]:
    """Returns the subjects of the options, and their part of the JSON document."""
    if options.torch_dtype not in TORCH_DTYPES:
        raise expected("--torch-dtype", f"one of {', '.join(TORCH_DTYPES)}", options.torch_dtype)
    shape = _shape(options.shape)
    ours = options.network or options.model or options.variant or not options.torch
    subjects: list[Subject] = []
    about: dict[str, Any] = {"batches": batches}
    if ours:
        found = shared_options.workload_of(options)
        dataset = _load_data(found, options, batches)
        weights = shared_options.weights_of(options, found)
        about |= {
            "weights": weights,
            "dataset": {
                "name": dataset.name, "source": dataset.source, "images": len(dataset),
                "labels": dataset.labels is not None,
            },
        }  # fmt: skip
        words = ",".join(options.variant or ["auto"]).split(",")
        for variant in dict.fromkeys(words):
            subjects.append(
                EngineSubject(
                    found, dataset, variant=variant, reduction=options.reduction,
                    dtype=options.dtype, weights=weights, device=device.name,
                    threads=options.threads, kernels=options.kernel, tune=options.tune,
                )
            )  # fmt: skip
    for spec in dict.fromkeys(options.torch):
        subjects.append(TorchSubject(spec, shape, options.torch_dtype, device, options.threads))
    if options.torch:
        about["shape"] = list(shape)
    _tell_apart(subjects)
    return subjects, about


def _tell_apart(subjects: list[Subject]) -> None:
    """Gives PyTorch models of one name, from several modules, their full names."""
    names = [subject.name for subject in subjects]
    for subject in subjects:
        if names.count(subject.name) > 1 and isinstance(subject, TorchSubject):
            subject.name = subject.spec


def _images_for(found: Workload, batches: list[int]) -> int | None:
    """Returns how many images the passes go through: of large outputs, what the largest batch takes."""
    network = found.network
    form = form_of(network, network.base) if isinstance(network, Model) else None
    if form is None or form.is_images_to_rows:
        return max(DEFAULT_IMAGES, *batches)
    return max(batches) if form.rows else None


def _load_data(found: Workload, options: argparse.Namespace, batches: list[int]) -> Dataset:
    wanted = options.images or _images_for(found, batches)
    try:
        dataset = shared_options.dataset_of(options, found, wanted, held_bytes=None)
    except InputError as error:
        if options.images is not None or not str(error).startswith("images:"):
            raise
        dataset = shared_options.dataset_of(
            options, found, None, held_bytes=None
        )  # fewer: all there are
    check_images(dataset, batches)
    return dataset
