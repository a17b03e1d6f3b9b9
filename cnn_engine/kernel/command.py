"""``cnn-engine kernel new | check | rank | grade | board``: kernels of your own."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import cli, devices, shared_options
from ..devices import threads as thread_counts
from ..engine.loading import read_weights
from ..errors import expected
from ..graph import onnx, passes
from ..graph.graph import Graph
from ..graph.model import Model
from ..io.files import write_text
from ..kernels.user import CONTRACTS
from ..kernels.user.source import COMPUTES
from ..measure import environment, roofline
from ..progress import teller
from ..report import plot
from ..report import roofline as roofline_report
from . import check, grade, history, leaderboard, packs, rank, templates, text
from .process import Limits


def parser() -> argparse.ArgumentParser:
    """Returns the command's parser."""
    p = cli.ArgumentParser(
        prog="cnn-engine kernel",
        description="Writes, checks and ranks kernels of your own, each in one file. NVRTC compiles CUDA, "
        "the machine's compiler C++: nothing has to be built. They run in networks with `run --kernel FILE`.",
        epilog="exit codes: 0 done; 1 the kernel is wrong; 2 the input is at fault; 130 interrupted",
    )
    commands = p.add_subparsers(dest="action", required=True, parser_class=cli.ArgumentParser)
    new = commands.add_parser(
        "new", help="print a commented file that already works: the plain loop",
        description="Prints a commented kernel file that already works, with its operator's contract.",
    )  # fmt: skip
    which = new.add_mutually_exclusive_group(required=True)
    which.add_argument("operator", nargs="?", help=", ".join(CONTRACTS))
    which.add_argument(
        "--pack", metavar="PACK",
        help=f"what an assignment starts from: {', '.join(packs.names())}, or a folder",
    )  # fmt: skip
    new.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="default: cuda")
    new.add_argument(
        "--output", metavar="FILE", help="write it there, where there is none (default: standard output)"
    )  # fmt: skip
    new.add_argument("--force", action="store_true", help="replace the file that --output names")
    checks = commands.add_parser(
        "check", help="compare it with the float64 reference over a grid of shapes, and time it",
        description="Compares a kernel with the float64 reference over a grid of shapes, in a process of its "
        "own with guards around all memory, then times it on the largest.",
        epilog="exit codes: 0 it is right; 1 it is wrong: one line says how; 2 the input is at fault",
    )  # fmt: skip
    checks.add_argument("file", metavar="FILE", help="a kernel file: .cu, or .cpp")
    _add_common(checks)
    checks.add_argument(
        "--sanitize", action="store_true",
        help="CUDA: again under compute-sanitizer's memcheck, racecheck, initcheck and synccheck; C++: "
        "compiled with AddressSanitizer and UndefinedBehaviorSanitizer, not timed",
    )  # fmt: skip
    grades = commands.add_parser(
        "grade", help="mark a class's kernels by a problem pack: points as CSV",
        description="Checks and times submissions for an assignment, each in a process of its own, against "
        "the assignment's baseline. Whatever a submission does, the others are marked.",
    )  # fmt: skip
    grades.add_argument("files", metavar="SUBMISSION", nargs="+", help="kernel files")
    grades.add_argument(
        "--pack", required=True, metavar="PACK", help=f"{', '.join(packs.names())}, or a folder"
    )
    _add_common(grades)
    _add_rounds(grades, 20, 3)
    grades.set_defaults(roofline=None)
    grades.add_argument(
        "--csv", metavar="PATH", help="write the marks as CSV; - for standard output"
    )
    ranks = commands.add_parser(
        "rank", help="check and time many on a network's nodes: a board",
        description="Checks and times kernels on the nodes of a network, each in a process of its own, on "
        "inputs and weights that are new in every call. Wrong ones come last, with the reason.",
    )  # fmt: skip
    ranks.add_argument(
        "files", metavar="SUBMISSION", nargs="+", help="kernel files of one operator"
    )
    shared_options.add_network(ranks)
    _add_common(ranks)
    ranks.add_argument(
        "--batch", type=cli.whole_number(1, 65536), default=16, metavar="N",
        help="images per call (default: 16)",
    )  # fmt: skip
    _add_rounds(ranks, 60, rank.ROUNDS)
    ranks.add_argument(
        "--beside", default="", metavar="NAME,...",
        help="the engine's own kernels that are timed too, such as if,tiled,blocked, and torch",
    )  # fmt: skip
    ranks.add_argument(
        "--computes", default="float32", metavar="TYPE,...",
        help=f"what products may be rounded to: {', '.join(COMPUTES)} (default: float32)",
    )  # fmt: skip
    ranks.add_argument(
        "--html", metavar="PATH", help="write the board as one page; - for standard output"
    )
    ranks.add_argument(
        "--roofline", nargs="?", const="", metavar="FILE.png",
        help="measure the CPU's limits, and say for each kernel which one binds it; with a file, draw it",
    )  # fmt: skip
    boards = commands.add_parser(
        "board", help="show what rank and grade --board have kept",
        description="Shows the best run of each kernel, from a file that `kernel rank --board` or `kernel "
        "grade --board` keeps.",
    )  # fmt: skip
    boards.add_argument("file", metavar="FILE", help="the board")
    boards.add_argument(
        "--html", metavar="PATH", help="write the boards as one page; - for standard output"
    )
    boards.add_argument("--json", metavar="PATH", help="write them as JSON; - for standard output")
    boards.add_argument("--quiet", action="store_true", help="print nothing but errors")
    return p


def _add_rounds(p: argparse.ArgumentParser, calls: int, rounds: int) -> None:
    p.add_argument(
        "--calls", type=cli.whole_number(2, 10_000), default=calls, metavar="N",
        help=f"timed calls of each node (default: {calls})",
    )  # fmt: skip
    p.add_argument(
        "--rounds", type=cli.whole_number(1, 100), default=rounds, metavar="N",
        help="times through all kernels, each kernel in a new process, in random order, with the calls "
        f"shared among them; kernels are compared by these processes (default: {rounds})",
    )  # fmt: skip
    p.add_argument(
        "--board", metavar="FILE",
        help="append the result to this SQLite file, which `kernel board` shows; many may write to it",
    )  # fmt: skip


def _add_common(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--device", metavar="NAME", help="cpu, cuda or cuda:N (default: as the file's ending says)"
    )
    p.add_argument(
        "--threads", type=cli.whole_number(1, thread_counts.MOST),
        help="CPU threads (default: the CPUs granted)",
    )  # fmt: skip
    p.add_argument(
        "--limit", type=cli.number(0.0, 3600.0), default=Limits.seconds, metavar="S",
        help=f"seconds that one call may take (default: {Limits.seconds:g})",
    )  # fmt: skip
    p.add_argument(
        "--memory", type=cli.whole_number(1 << 10, 1 << 20), default=Limits.memory >> 20,
        metavar="MIB", help=f"of a kernel on the CPU, MiB (default: {Limits.memory >> 20})",
    )  # fmt: skip
    p.add_argument("--json", metavar="PATH", help="write the result as JSON; - for standard output")
    p.add_argument("--quiet", action="store_true", help="print nothing but errors")


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    options = parser().parse_args(arguments)
    options.words = sys.argv[1:] if arguments is None else arguments
    actions = {"new": _new, "check": _check, "rank": _rank, "grade": _grade, "board": _board}
    return actions[options.action](options)


def _new(options: argparse.Namespace) -> int:
    pack = None if options.pack is None else packs.find(options.pack)
    operator = options.operator if pack is None else pack.operator
    name = options.output or f"my_{operator}.{templates.ENDINGS[options.device]}"
    if pack is None:
        content = templates.text(operator, options.device, name)
    else:
        content = pack.starter(options.device, name)
    if options.output is None:
        print(content, end="")
    else:
        cli.check_outputs({"--output": options.output})
        if os.path.lexists(options.output) and not options.force:
            raise expected(
                "--output", "a name that is free, or --force to replace the file", options.output
            )
        write_text(options.output, content)
    return cli.DONE


def _check(options: argparse.Namespace) -> int:
    cli.check_outputs({"--json": options.json}, [options.file])
    show = not options.quiet and options.json != "-"
    found = check.check(
        options.file, options.device, thread_counts.check(options.threads, "--threads"),
        _limits(options), options.sanitize, progress=teller(show),
    )  # fmt: skip
    teller(show)("")
    if options.json:
        write_text(options.json, json.dumps(found.to_dict(), indent=1) + "\n")
    if show:
        cli.show(text.checked(found))
    if found.fault is not None:
        cli.print_error(f"{options.file}: {found.fault}")
        return cli.CHECK_FAILED
    return cli.DONE


def _board(options: argparse.Namespace) -> int:
    outputs = {"--html": options.html, "--json": options.json}
    cli.check_outputs(outputs, [options.file])
    found = history.read(options.file)
    if options.json:
        write_text(options.json, history.to_json(found))
    if options.html:
        write_text(options.html, history.page(found, os.path.basename(options.file)))
    if not options.quiet and "-" not in outputs.values():
        cli.show(history.text(found))
    return cli.DONE


def _check_outputs(options: argparse.Namespace, outputs: dict[str, str | None]) -> None:
    """Refuses outputs that cannot be written, before anything is timed; makes the file of --board."""
    cli.check_outputs({**outputs, "--board": options.board}, options.files)
    if options.board:
        history.prepare(options.board)


def _grade(options: argparse.Namespace) -> int:
    outputs = {"--json": options.json, "--csv": options.csv}
    _check_outputs(options, outputs)
    pack = packs.find(options.pack)
    kind = (options.device or grade.device_of(options.files)).partition(":")[0]
    device = devices.select(options.device or kind)
    options.network, options.model, options.batch = pack.network, pack.model, pack.batch
    options.input_shape, options.constant = [], []
    show = not options.quiet and "-" not in outputs.values()
    with tempfile.TemporaryDirectory() as room:
        entries = grade.entries_of(options.files, pack, device.kind, Path(room))

        def keep(found: rank.Board) -> None:
            baseline = next(entry for entry in found.entries if entry.name == grade.BASELINE)
            if found.complete or baseline.processes:  # marks so far are kept, whatever comes next
                _write_marks(outputs, found, pack)

        found = _ranked(options, pack.operator, device, entries, keep, teller(show))
    marks = grade.grades(found.entries, pack)
    if options.board:
        history.append(options.board, found, pack.name, marks)
    if show:
        baseline = next(entry for entry in found.entries if entry.name == grade.BASELINE)
        cli.show(grade.text(marks, pack, baseline))
    return cli.DONE


def _write_marks(outputs: dict[str, str | None], found: rank.Board, pack: packs.Pack) -> None:
    """Writes a class's marks where --json and --csv say; to standard output once they are complete."""
    marks = grade.grades(found.entries, pack)
    content = {**found.to_dict(), "pack": pack.name, "grades": [mark.to_dict() for mark in marks]}
    for path, text_of in (
        (outputs["--json"], lambda: json.dumps(content, indent=1) + "\n"),
        (outputs["--csv"], lambda: grade.table(marks)),
    ):
        if path and (found.complete or path != "-"):
            write_text(path, text_of())


def _rank(options: argparse.Namespace) -> int:
    outputs = {"--json": options.json, "--html": options.html}
    _check_outputs(options, outputs)
    if options.roofline:
        plot.check("--roofline", options.roofline)
    show = not options.quiet and "-" not in outputs.values()
    allowed = [word for word in options.computes.split(",") if word]
    for word in allowed:
        if word not in COMPUTES:
            raise expected("--computes", f"of {', '.join(COMPUTES)}", repr(word))
    beside = [word for word in options.beside.split(",") if word]
    op, kind, entries = rank.entries_of(options.files, beside, allowed)
    if options.device is not None and options.device.partition(":")[0] != kind:
        raise expected("--device", f"{kind}, for which the files are", options.device)
    device = devices.select(options.device or kind)
    if options.roofline is not None:
        roofline.check_device(device)

    def keep(found: rank.Board) -> None:
        if options.json and (found.complete or options.json != "-"):
            write_text(options.json, json.dumps(found.to_dict(), indent=1) + "\n")

    found = _ranked(options, op, device, entries, keep, teller(show))
    if options.board:
        history.append(options.board, found)
    if options.html:
        write_text(options.html, leaderboard.page(found))
    if options.roofline and found.roofline:
        title = f"{found.operator} of {found.network}, batch {found.batch}, {found.threads} threads"
        roofline_report.draw(found.roofline, title, options.roofline)
    if show:
        cli.show(text.board(found))
        if found.roofline:
            cli.show(f"\n{roofline_report.render(found.roofline, what='kernel')}")
    return cli.DONE if any(e.fault is None for e in found.entries) else cli.CHECK_FAILED


def _ranked(
    options: argparse.Namespace, op: str, device: Any, entries: list[rank.Entry],
    keep: Callable[[rank.Board], None], progress: Callable[[str], None],
) -> rank.Board:  # fmt: skip
    """Checks and times entries on a network's nodes; ``keep`` is called with the board after each process."""
    name, batch, graph = _graph(options)
    cases = rank.nodes_of(graph, op)
    found = rank.Board(
        name, op, device.name, batch, thread_counts.check(options.threads, "--threads"),
        options.calls, options.rounds, sum(case.graph.cost_of(case.node).flops for case in cases),
        [case.label for case in cases], entries, environment.describe(device),
        shlex.join(["cnn-engine", "kernel", *options.words]), complete=False,
    )  # fmt: skip

    def kept(entries: list[rank.Entry]) -> None:
        found.entries = entries
        keep(found)

    entries = rank.rank(
        entries, cases, device.name, found.threads, options.calls, options.rounds,
        _limits(options), progress, kept,
    )  # fmt: skip
    if options.roofline is not None:
        progress("roofline")
        found.roofline = roofline.Roofline(roofline.ceilings(found.threads))
        for entry in entries:
            layers = rank.layers_of([entry], cases)
            found.roofline.points += roofline.points(
                layers, found.roofline.ceilings, entry.computes
            )
    progress("")
    found.complete = True
    kept(entries)
    return found


def _graph(options: argparse.Namespace) -> tuple[str, int, Graph]:
    """Returns a network's name, a batch and the graph for it; only shapes matter: weights are random."""
    if options.model is not None:  # any graph: that of no classifier too
        model = Model(onnx.load(options.model, **shared_options.model_inputs(options)))
        size = options.batch if model.any_batch else model.batch
        return model.name, size, passes.simplify(model.graph(size, False, {}))
    workload = shared_options.workload_of(options)
    weights, _ = read_weights("random", workload.network, workload.default_weights)
    batch = options.batch
    return workload.name, batch, workload.network.graph(batch, False, weights)


def _limits(options: argparse.Namespace) -> Limits:
    return Limits(options.limit, options.memory << 20)
