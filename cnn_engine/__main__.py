"""``cnn-engine COMMAND ...``: each command is also ``python -m cnn_engine.COMMAND``."""

from __future__ import annotations

import importlib
import sys

from . import cli, environment_variables, shared_options
from .errors import did_you_mean

COMMANDS = {
    "run": "run a network on images, timed layer by layer",
    "compare": "say whether one result is faster than another, layer by layer",
    "characterize": "measure networks at low batch: utilisation, memory, power, latency",
    "transfer": "measure copies to and from a GPU against the batch, and predict others",
    "infer": "predict data sets of any size into Parquet files: one row per image, even if workers die",
    "ensemble": "read and decode images once for many networks, over processes and GPUs",
    "kernel": "write, check and rank kernels of your own, each in one file",
    "inspect": "show an ONNX file's layers, kernels, fusions and what is not supported",
    "export": "write a PyTorch model as an ONNX file, checked against PyTorch's own numbers",
    "quantize": "make an ONNX file of 8-bit integers, and say what each layer loses",
    "serve": "answer requests over HTTP and gRPC, by the protocol of KServe and Triton",
    "loadgen": "measure a network with MLPerf's load generator, next to other libraries",
    "classify": "classify photos: the classes with the highest scores",
    "download": "fetch a data set into the user's cache",
    "completion": "print what completes commands and options in your shell",
    "doctor": "say what was built, what this machine has, and what is missing",
}

#: Former commands, which say what to use now.
FORMER = ("valprep",)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command named first; returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        return cli.run(_help, arguments)
    if arguments[0] in ("--version", "--list"):
        return cli.run(_version_or_list, arguments)
    if arguments[0] not in (*COMMANDS, *FORMER):
        cli.print_error(
            f"expected a command ({', '.join(COMMANDS)}), found {arguments[0]!r}"
            f"{did_you_mean(arguments[0], COMMANDS)}"
        )
        return cli.INPUT_AT_FAULT
    command = importlib.import_module(f".{arguments[0]}", __package__)
    return command.main(arguments[1:])


def _version_or_list(arguments: list[str] | None) -> int:
    parser = cli.ArgumentParser(prog="cnn-engine")
    shared_options.add_list(parser)
    parser.parse_args(arguments)
    return cli.DONE


def _help(arguments: list[str] | None) -> int:
    print("usage: cnn-engine COMMAND [OPTION ...]\n")
    for name, summary in COMMANDS.items():
        print(f"  {name:<12} {summary}")
    print("\nenvironment variables")
    for name, variable in environment_variables.PROGRAM.items():
        if variable.values != environment_variables.INTERNAL:
            print(f"  {name:<24} {variable.meaning} Default: {variable.default}")
    print("\ncnn-engine COMMAND --help lists a command's options")
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
