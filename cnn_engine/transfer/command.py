"""The command line, and the order of its work: measure or organise, then write, then predict."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import cli, devices, shared_options, workload
from ..errors import CnnEngineError, DeviceError, InputError, UnsupportedError, expected
from ..io.progress import Progress
from ..measure import environment
from . import analysis, files, overlap, plot, regression, subjects, text
from .analysis import Analysis
from .files import RawNetwork
from .measure import (
    PEAK_BYTES,
    Group,
    Settings,
    TransferMismatch,
    device_source,
    measure,
    measure_device,
    peak_times,
    plan,
    plan_device,
    weights_times,
)
from .subjects import Mode, Subject

DEFAULT_BATCHES = "1-256"
DEFAULT_REPEATS = 100
MOST_WEIGHTS_COPIES = 20


def parser() -> argparse.ArgumentParser:
    """Returns the command's parser."""
    p = cli.ArgumentParser(
        prog="cnn-engine transfer",
        description="Measures how long a batch of images takes to copy between host and GPU, or between "
        "GPUs, and fits the time against the batch size. Sizes in --output are not measured again.",
        epilog="exit codes: 0 done; 1 what arrived was not what was sent; 2 the input is at fault; 130 "
        "interrupted, what was measured is still written",
    )
    shared_options.add_list(p)
    count = cli.whole_number
    p.add_argument(
        "--network", nargs="+", default=[], metavar="NAME",
        help=f"of {', '.join(workload.names())} (default: all of them, unless --model or --shape is given)",
    )  # fmt: skip
    p.add_argument(
        "--model", action="append", default=[], metavar="FILE.onnx",
        help="the images, or bytes of other inputs, and the weights of an ONNX model; repeated for more",
    )  # fmt: skip
    shared_options.add_model_inputs(p)
    p.add_argument(
        "--shape", action="append", default=[], metavar="C,H,W",
        help="images of this shape, such as 3,224,224; repeated for more",
    )  # fmt: skip
    shared_options.add_batch_sizes(p, DEFAULT_BATCHES)
    p.add_argument(
        "--direction", choices=(*subjects.DIRECTIONS, "both", subjects.BETWEEN), default="h2d",
        help="host to device (default), device to host, or both; d2d: to another GPU, --peer",
    )  # fmt: skip
    p.add_argument(
        "--memory", choices=("peer", *subjects.MEMORIES, "both"),
        help="of the host: pageable (default), pinned (page-locked), or both; graph: pinned, the copy "
        "launched as a CUDA graph; managed: of host and GPU, its pages prefetched; of d2d: peer (none: from "
        "GPU to GPU), pinned, or both (default)",
    )  # fmt: skip
    p.add_argument("--peer", metavar="cuda:N", help="the GPU that d2d copies to")
    p.add_argument(
        "--dtype", choices=subjects.DTYPES,
        help="of the images: uint8 pixels or float32 (default: as run moves them: a model's input as it is, "
        "others as uint8)",
    )  # fmt: skip
    p.add_argument(
        "--repeats", type=count(2, 1_000_000), default=DEFAULT_REPEATS,
        help=f"samples of each batch size, those that exist included (default: {DEFAULT_REPEATS})",
    )  # fmt: skip
    p.add_argument(
        "--warmup", type=count(0, 10_000), default=Settings.warmup,
        help=f"copies before each group of samples that do not count (default: {Settings.warmup})",
    )  # fmt: skip
    p.add_argument("--device", default="cuda", help="cuda (default) or cuda:N")
    p.add_argument(
        "--seed", type=count(0, 2**32 - 1), default=0,
        help="of the order, the contents and the sizes held out (default: 0)",
    )  # fmt: skip
    p.add_argument(
        "--fresh", action="store_true", help="measure again what is there already, and replace it"
    )
    p.add_argument(
        "--hold-out", type=count(1, subjects.MOST_BATCHES), metavar="K",
        help="also fit without K batch sizes drawn at random, and say how far off they are predicted",
    )  # fmt: skip
    p.add_argument(
        "--output", default="transfer", metavar="DIR",
        help="for raw_data/ and the results by GPU and network (default: transfer)",
    )  # fmt: skip
    p.add_argument(
        "--organize", metavar="RAW_DIR",
        help="measure nothing: make CSV files, regression.json and plots in --output from raw files of "
        "RAW_DIR/<gpu>/transfer/<network>/<batch>/, or of RAW_DIR/raw_data/; needs no GPU",
    )  # fmt: skip
    p.add_argument(
        "--predict", nargs="+", metavar="N",
        help="print the seconds that batches of N images take; without --batch and --organize from the "
        "regression.json that exist in --output, without measuring",
    )  # fmt: skip
    p.add_argument(
        "--plot",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="draw the charts (default: yes)",
    )
    p.add_argument(
        "--quiet", action="store_true", help="print nothing but the seconds of --predict"
    )
    overlap.add_options(p)
    return p


def _sizes(texts: list[str], option: str) -> list[int]:
    return shared_options.batch_sizes(texts, option, subjects.MOST_BATCHES, subjects.LARGEST_BATCH)


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the command with ``arguments`` (None: the process's); returns its exit code."""
    options = parser().parse_args(arguments)
    models = _models(options)
    dtype = _dtype(options, models)
    if options.plan is not None or options.check_infer is not None:
        return overlap.main(options, _named(options) + models + _shapes(options), dtype)
    for name in ("json", "compute", "compute_from", "bandwidth", "buffers"):
        if getattr(options, name) is not None:
            raise expected(f"--{name.replace('_', '-')}", "--plan with it", "none")
    modes = _modes(options, dtype)
    asked = _sizes(options.predict, "--predict") if options.predict else None
    if not options.output:
        raise expected("--output", "a folder", "no name")
    output = Path(options.output)
    names = [subjects.path_safe(name) for name in options.network]
    names += [subject.folder for subject in models]
    names += [subject.folder for subject in _shapes(options)]
    code = cli.DONE
    if options.organize is not None:
        if options.batch:
            raise InputError("--organize: expected no --batch beside it: all raw files are read")
        regression.check_available()
        raws = files.networks(Path(options.organize), set(names) or None)
        files.prepare(output)
        _write(_analyse(raws, options), options, output)
    elif asked is None or options.batch:
        code = _measure(options, models, modes, output)
    if asked is not None and code == cli.DONE:
        found = analysis.predict(output, names or None, modes, asked)
        cli.show(text.predictions(found, options.quiet))
    return code


def _modes(options: argparse.Namespace, dtype: str) -> list[Mode]:
    between = options.direction == subjects.BETWEEN
    known = subjects.WAYS if between else subjects.MEMORIES
    memory = options.memory or ("both" if between else "pageable")
    if memory not in (*known, "both"):
        wanted = f"{', '.join(known)} or both with --direction {options.direction}"
        raise expected("--memory", wanted, memory)
    if options.peer is not None and not between:
        raise InputError("--peer: expected --direction d2d with it")
    return [
        Mode(direction, one, dtype)
        for direction in _each(options.direction, subjects.DIRECTIONS)
        for one in _each(memory, known[:2])
    ]


def _each(choice: str, all_of_them: tuple[str, ...]) -> tuple[str, ...]:
    return all_of_them if choice == "both" else (choice,)


# ---- measuring ----


def _models(options: argparse.Namespace) -> list[Subject]:
    given = shared_options.model_inputs(options)
    return [subjects.of_model(path, **given) for path in options.model]


def _named(options: argparse.Namespace) -> list[Subject]:
    return [subjects.find(name) for name in options.network]


def _shapes(options: argparse.Namespace) -> list[Subject]:
    return [subjects.from_shape(shape) for shape in options.shape]


def _dtype(options: argparse.Namespace, models: list[Subject]) -> str:
    """Returns the type of all images that are moved."""
    found = {subject.dtype for subject in models}
    if options.network or not models:
        found.add("uint8")
    if options.dtype is None and len(found) > 1:
        raise expected("--dtype", "uint8 or float32, for the networks read both", "none")
    if options.dtype not in (None, "uint8") and (some := [m for m in models if m.is_bytes]):
        wanted = f"uint8, for the inputs of {some[0].name} are moved as bytes"
        raise expected("--dtype", wanted, options.dtype)
    return options.dtype or found.pop()


def _measure(
    options: argparse.Namespace, models: list[Subject], modes: list[Mode], output: Path
) -> int:
    names = options.network or ([] if options.shape or models else workload.names())
    wanted = [*map(subjects.find, names), *models]
    wanted += _shapes(options)
    wanted = subjects.distinct(wanted)
    batches = _sizes(options.batch or [DEFAULT_BATCHES], "--batch")
    regression.check_available()
    device = _cuda(options.device)
    peer = _peer(device, options.peer, modes) if modes[0].direction == subjects.BETWEEN else None
    section = output / files.RAW / subjects.path_safe(device.model) / files.SECTION
    files.prepare(section)
    settings = Settings(
        modes=tuple(modes), batches=tuple(batches), repeats=options.repeats,
        warmup=options.warmup, seed=options.seed, peer=peer,
    )  # fmt: skip
    raws = [_open(section, subject, settings, options) for subject in wanted]
    interrupted = False
    try:
        with device.context:
            _measure_all(device, section, list(zip(wanted, raws, strict=True)), settings, options)
    except KeyboardInterrupt:
        interrupted = True
        cli.show("interrupted; writing what was measured", sys.stderr)
    except TransferMismatch as error:
        cli.print_error(error)
        return cli.CHECK_FAILED
    except CnnEngineError:
        raise
    except RuntimeError as error:  # CuPy's: the driver refused
        raise DeviceError(f"{device.name}: {error}") from error
    if interrupted:  # perhaps before there was anything, or enough to hold some out
        raws = [raw for raw in raws if raw.points()]
        options.hold_out = None
    _write(_analyse(raws, options), options, output)
    return cli.INTERRUPTED if interrupted else cli.DONE


def _peer(device: Any, name: str | None, modes: list[Mode]) -> Any:
    """Returns the device that ``d2d`` copies to."""
    if name is None:
        raise expected("--peer", "the GPU that d2d copies to, such as cuda:1", "none")
    peer = _cuda(name, "--peer")
    if peer.name == device.name:
        raise expected("--peer", f"another GPU than --device {device.name}", peer.name)
    if any(mode.memory == "peer" for mode in modes) and not device.reaches(peer):
        raise UnsupportedError(
            f"--memory peer: expected GPUs that reach each other's memory, found {device.name} and "
            f"{peer.name}, which do not; --memory pinned copies through the host"
        )
    return peer


def _cuda(name: str, option: str = "--device") -> Any:
    """Returns the CUDA device called ``name``."""
    if name == "cpu":
        raise InputError(
            f"{option}: expected cuda or cuda:N (the CPU needs no transfer), found cpu"
        )
    device = devices.select(name)
    if device.kind == "openacc":
        raise InputError(f"{option}: expected cuda or cuda:N, found {name}")
    if device.kind != "cuda":
        raise UnsupportedError(device.note)
    return device


def _open(
    section: Path, subject: Subject, settings: Settings, options: argparse.Namespace
) -> RawNetwork:
    """Returns the raw data of ``subject``, read and checked before anything is measured."""
    raw = RawNetwork(files.prepare(section / subject.folder))
    about = raw.describe()
    if about is not None and tuple(about["shape"]) != subject.shape:
        raise expected(
            f"{raw.folder / files.NETWORK}: shape", f"{list(subject.shape)}, as {subject.name} has it; "
            "measure into another --output", about["shape"],
        )  # fmt: skip
    if options.fresh:
        for mode in settings.modes:
            for batch in settings.batches:
                raw.forget(mode, batch)
    existing = raw.points()
    for mode in settings.modes:
        if (path := raw.weights_path(mode)).exists() and not options.fresh:
            files.read_times(path)
    for mode in settings.modes:
        sizes = {point.batch_size for point in existing.get(mode, [])} | set(settings.batches)
        if options.hold_out is not None:
            regression.check_hold_out(len(sizes), options.hold_out)
    files.write_document(
        raw.folder / files.NETWORK,
        {"network": subject.name, "shape": subject.shape, "weights": subject.weights},
    )
    return raw


def _measure_all(
    device: Any,
    section: Path,
    wanted: list[tuple[Subject, RawNetwork]],
    settings: Settings,
    options: argparse.Namespace,
) -> None:
    machine = files.read_machine(section)
    peak = machine.get("peak", {})
    directions = {mode.direction for mode in settings.modes}
    if directions <= set(peak) and not any(
        plan(raw, settings)
        or plan_device(raw, settings)
        or _weights_missing(subject, raw, settings, options.fresh)
        for subject, raw in wanted
    ):
        return
    watch = environment.Stopwatch()
    load_average = environment.host_load()
    for direction in sorted(directions):
        peak[direction] = {
            "bytes": PEAK_BYTES,
            "seconds": peak_times(device, direction, settings.peer),
        }
    described = environment.describe(device)
    machine = files.machine_document(machine, described, peak)
    files.write_document(section / files.MACHINE, machine)
    progress = None if options.quiet else Progress()
    try:
        for subject, raw in wanted:
            _measure_weights(device, subject, raw, settings, options.fresh)
            advance = _started(progress, f"transfers of {subject.name}", plan(raw, settings))
            measure(device, subject, raw, settings, advance)
        for subject, raw in wanted:
            groups = plan_device(raw, settings)
            advance = _started(progress, f"device times of {subject.name}", groups)
            measure_device(device, subject, raw, settings, advance)
    finally:
        if progress is not None:
            progress.stop()
        machine["environment"] = {
            **described,
            **environment.state(device, load_average),
            **watch.stamp(),
            "device_times": device_source(),
            **({} if settings.peer is None else {"peer": settings.peer.name}),
        }
        files.write_document(section / files.MACHINE, machine)


def _started(progress: Progress | None, what: str, groups: list[Group]) -> Callable[[int], None]:
    """Starts ``progress`` on the images of ``groups`` and returns what advances it."""
    if progress is None:
        return lambda images: None
    progress.start(what, sum(group.batch * group.copies for group in groups))
    return progress.advance


def _weights_missing(
    subject: Subject, raw: RawNetwork, settings: Settings, fresh: bool
) -> list[Mode]:
    """Returns the modes in which the weights are to be moved."""
    if subject.parameters is None:
        return []
    towards = (
        mode for mode in settings.modes
        if mode.direction == "h2d" and mode.memory in subjects.COPIED
    )  # fmt: skip
    return [mode for mode in towards if fresh or not raw.weights_path(mode).exists()]


def _measure_weights(
    device: Any, subject: Subject, raw: RawNetwork, settings: Settings, fresh: bool
) -> None:
    copies = min(settings.repeats, MOST_WEIGHTS_COPIES)
    for mode in _weights_missing(subject, raw, settings, fresh):
        times = weights_times(device, subject.make_weights(), mode.memory, copies)
        files.write_times(raw.weights_path(mode), times)


# ---- writing ----


def _analyse(raws: list[RawNetwork], options: argparse.Namespace) -> list[Analysis]:
    """Reads and fits everything, so that nothing is written where a file is malformed."""
    return [
        one for raw in raws for one in analysis.analyse(raw, options.hold_out or 0, options.seed)
    ]


def _write(analyses: list[Analysis], options: argparse.Namespace, output: Path) -> None:
    reason = plot.unavailable() if options.plot else None
    for one in analyses:
        folder = analysis.write(one, output)
        if options.plot and reason is None and one.line is not None:
            plot.draw(one, folder / f"{analysis.PLOT}{one.mode.suffix}.png")
        if not options.quiet:
            cli.show(f"{text.render(one)}\n  {'files':<12}: {folder}\n")
    if reason and not options.quiet:
        cli.show(reason, sys.stderr)
