"""``cnn-engine inspect x.onnx``: describes a model, and how the engine would run it."""

from __future__ import annotations

import argparse
import sys

from . import cli, shared_options
from .devices import openacc_mapping, openacc_module
from .engine import inspection
from .errors import expected
from .graph.onnx import UnsupportedNodesError, load
from .io.files import write_text
from .kernels.select import DTYPES
from .lower.user_kernels import own_kernels
from .report import graph_page, openacc
from .report import inspection as report
from .target import NAMES, Target


def parser() -> cli.ArgumentParser:
    """Returns the command's parser."""
    p = cli.ArgumentParser(
        prog="cnn-engine inspect",
        description="Describes what an ONNX model computes: its nodes with shapes, parameters, FLOPs and "
        "bytes; what is folded and fused into what, and why; which kernel runs each node on each device; "
        "the memory that a pass needs; and every node that is not supported.",
        epilog="exit codes: 0 the engine can run it; 2 the file is at fault, or some nodes are not supported",
    )
    p.add_argument("model", metavar="PATH", nargs="?", help="an .onnx file")
    p.add_argument(
        "--device", metavar="openacc",
        help="in the place of PATH: what the compiler made of every OpenACC directive",
    )  # fmt: skip
    p.add_argument(
        "--batch", type=cli.whole_number(1, 65536), metavar="N",
        help="images per pass, where the file leaves it open (default: 1)",
    )  # fmt: skip
    p.add_argument(
        "--target", metavar="NAME",
        help="a GPU or CPU in the place of this machine's, which need not be here: "
        f"{', '.join(NAMES)}",
    )  # fmt: skip
    shared_options.add_model_inputs(p)
    shared_options.add_kernels(p)
    p.add_argument(
        "--dtype", choices=DTYPES, default="float32",
        help="what the GPU, or the target, may round to what it multiplies (default: float32)",
    )  # fmt: skip
    shared_options.add_reports(p, "a picture of the graph")
    return p


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    options = parser().parse_args(arguments)
    read = [] if options.model is None else [options.model]
    cli.check_outputs({"--json": options.json, "--html": options.html}, read)
    show = not options.quiet and "-" not in (options.json, options.html)
    target = None if options.target is None else Target.named(options.target, "--target")
    if options.device is not None:
        return _directives(options, show)
    if options.model is None:
        raise expected("PATH", "an .onnx file, or --device openacc", "none")
    try:
        graph = load(options.model, batch=options.batch, **shared_options.model_inputs(options))
    except UnsupportedNodesError as error:
        if options.json:
            content = report.unsupported_dict(options.model, error.nodes)
            write_text(options.json, report.dumps(content))
        if show:
            cli.show(report.unsupported_text(error.nodes), end="")
        raise
    found = inspection.inspect(graph, own_kernels(options.kernel), target, options.dtype)
    if options.json:
        write_text(options.json, report.dumps(report.to_dict(found)))
    if options.html:
        write_text(options.html, graph_page.render(found))
    if show:
        cli.show(report.text(found), end="")
    return cli.DONE


def _directives(options: argparse.Namespace, show: bool) -> int:
    """Says what is kept in the OpenACC module; needs no GPU."""
    if options.device not in ("openacc", "openacc:host"):
        raise expected("--device", "openacc", repr(options.device))
    if options.model is not None:
        raise expected("--device openacc", "no model with it", options.model)
    found = openacc_mapping.of(openacc_module.load())
    if options.json:
        write_text(options.json, report.dumps(openacc.to_dict(found)))
    if options.html:
        write_text(options.html, openacc.page(found))
    if show:
        cli.show(openacc.text(found), end="")
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
