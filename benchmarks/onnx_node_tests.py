"""ONNX's own backend tests, run through the engine: every test with its status, as a page.

``python -m benchmarks.onnx_node_tests --markdown docs/reference/onnx_node_tests.md`` runs them on this
machine's devices; ``--json`` keeps what was found, ``--read`` adds what another machine found.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner

from cnn_engine import cli, devices
from cnn_engine.engine import inspection
from cnn_engine.errors import CnnEngineError, InputError, UnsupportedError
from cnn_engine.graph.graph import Graph
from cnn_engine.graph.reference import reference
from cnn_engine.measure import environment
from cnn_engine.onnx_backend import CnnEngineBackend

from . import result_file

GROUPS = ("node", "simple", "pytorch-converted", "pytorch-operator", "light")
PASSED, NOT_SUPPORTED, WRONG = "passed", "not supported", "wrong"


class ReferenceBackend(CnnEngineBackend):
    """The operators' float64 references behind the same interface: what kernels are compared with."""

    @staticmethod
    def build(graph: Graph, device: str):
        types = {name: graph.values[name].dtype for name in graph.outputs}

        def run(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            found = reference(graph, inputs)
            return {name: array.astype(types[name]) for name, array in found.items()}

        return run


def _array(proto) -> object:
    return onnx.numpy_helper.to_array(proto) if isinstance(proto, onnx.TensorProto) else proto


def _stored(path: Path, kind) -> object:
    """Reads a ``.pb`` file of test data."""
    if kind.HasField("sequence_type"):
        message = onnx.SequenceProto()
        message.ParseFromString(path.read_bytes())
        return onnx.numpy_helper.to_list(message)
    message = onnx.TensorProto()
    message.ParseFromString(path.read_bytes())
    return _array(message)


def _light(path: Path) -> Iterator[tuple]:
    """A network of the group ``light``: its input is made as ONNX's runner makes it, its output is stored."""
    model = onnx.load(path)
    initialized = {tensor.name for tensor in model.graph.initializer}
    inputs = [
        Runner.generate_dummy_data(value)
        for value in model.graph.input
        if value.name not in initialized
    ]
    outputs = [
        _stored(path.with_name(f"{path.stem}_output_{index}.pb"), value.type)
        for index, value in enumerate(model.graph.output)
    ]
    yield inputs, outputs


def cases(group: str) -> Iterator[tuple[str, onnx.ModelProto, list[tuple], float, float]]:
    """Yields (name, model, [(inputs, outputs)], rtol, atol) of every test of ``group``."""
    if group == "light":
        folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
        for path in sorted(folder.glob("*.onnx")):
            yield f"test_{path.stem}", onnx.load(path), list(_light(path)), 1e-3, 1e-7
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # making some expected outputs overflows on purpose
        found = load_model_tests(kind=group)
    for case in sorted(found, key=lambda case: case.name):
        if case.model is not None and case.data_sets is not None:
            sets = [([_array(a) for a in i], [_array(a) for a in o]) for i, o in case.data_sets]
            yield case.name, case.model, sets, case.rtol, case.atol
            continue
        model = onnx.load(Path(case.model_dir) / "model.onnx")
        sets = []
        for folder in sorted(Path(case.model_dir).glob("test_data_set*")):
            parts = []
            for name, values in (("input", model.graph.input), ("output", model.graph.output)):
                count = len(list(folder.glob(f"{name}_*.pb")))
                parts.append(
                    [_stored(folder / f"{name}_{i}.pb", values[i].type) for i in range(count)]
                )
            sets.append(tuple(parts))
        yield case.name, model, sets, case.rtol, case.atol


def status(backend: type[CnnEngineBackend], device: str, case) -> tuple[str, str]:
    """Runs one test; returns its status, and why it has not passed, or what ran it beside our kernels."""
    _, model, sets, rtol, atol = case
    try:
        prepared = backend.prepare(model, device)
        for inputs, outputs in sets:
            found = list(prepared.run(inputs))
            Runner.assert_similar_outputs(outputs, found, rtol, atol)
    except UnsupportedError as error:
        return NOT_SUPPORTED, _reason(error)
    except (AssertionError, CnnEngineError) as error:
        return WRONG, _reason(error)
    if backend is not CnnEngineBackend:
        return PASSED, ""
    nodes = inspection.inspect(prepared.graph).nodes
    others = {
        f"{n.kind} by {n.kernels[k]}" for n in nodes for k in n.reasons if k == device.lower()
    }
    return PASSED, ", ".join(sorted(others))


def _reason(error: Exception) -> str:
    """Returns the message without the model's name and the node's, which every line would repeat."""
    text = " ".join(str(error).split())
    text = re.sub(
        r"^[^ ]+: expected operators that the engine has, found \d+ nodes? without: ", "", text
    )
    text = re.sub(r"^(\w+) '[^']*'(, [^:]*)?: ", r"\1\2: ", text)
    return text[:160]


def run(backend: type[CnnEngineBackend], device: str, pattern: str = "") -> dict:
    """Returns group -> test -> [status, reason] of all tests whose name matches ``pattern``."""
    found: dict[str, dict] = {}
    for group in GROUPS:
        found[group] = {}
        for case in cases(group):
            if re.search(pattern, case[0]):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", RuntimeWarning)
                    found[group][case[0]] = list(status(backend, device, case))
    return found


def markdown(records: Mapping[str, Mapping]) -> str:
    """Returns the page.

    Args:
        records: device -> what :func:`run` found there, and ``environment`` beside it.
    """
    names = list(records)
    lines = [
        "# ONNX's backend tests",
        "",
        "Every test of ONNX's own suite for backends, as `cnn_engine.onnx_backend` does it: passed, or why",
        "not. `python -m benchmarks.onnx_node_tests --markdown docs/reference/onnx_node_tests.md` writes "
        "this page.",
        "A test passes where shape and type are right and every element is within rtol 1e-3 and atol 1e-7,",
        "or what the test itself asks. What has no kernel for its type or shape is run by its",
        "reference in NumPy, or instead of CUDA by the CPU: passed tests name it. `kernels alone` have none.",
        "",
    ]
    for device, found in records.items():
        lines.append(
            f"- **{device}**: {found['machine']}; onnx {found['onnx']}; commit {found['commit']}"
        )
    heads = [f"{d}: passed | kernels alone | not supported | wrong" for d in names]
    lines += ["", f"| group | tests | {' | '.join(heads)} |"]
    lines.append("|---|--:|" + "--:|" * (4 * len(names)))
    for group in GROUPS:
        cells = [str(len(records[names[0]]["tests"].get(group, {})))]
        for name in names:
            found = records[name]["tests"].get(group, {}).values()
            counts = Counter(state for state, _ in found)
            alone = sum(state == PASSED and not others for state, others in found)
            cells += map(str, (counts[PASSED], alone, counts[NOT_SUPPORTED], counts[WRONG]))
        lines.append(f"| {group} | {' | '.join(cells)} |")
    for group in GROUPS:
        lines += ["", f"## {group}", "", f"| test | {' | '.join(names)} |"]
        lines.append("|---|" + "---|" * len(names))
        for name in records[names[0]]["tests"].get(group, {}):
            cells = []
            for device in names:
                state, why = records[device]["tests"].get(group, {}).get(name, ("not run", ""))
                cells.append(f"{state}: {why}".replace("|", "\\|") if why else state)
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code: 1 where a test's output is wrong."""
    parser = result_file.parser("onnx_node_tests", __doc__, "json", "markdown")
    parser.add_argument(
        "--device", action="append", choices=("CPU", "CUDA", "reference"), metavar="NAME",
        help="CPU, CUDA or reference (the operators' float64 references); may be given again; "
        "default: CPU, and CUDA where there is one",
    )  # fmt: skip
    parser.add_argument("--only", default="", metavar="REGEX", help="tests whose name matches")
    parser.add_argument(
        "--read",
        action="append",
        default=[],
        metavar="PATH",
        help="adds what --json wrote elsewhere",
    )
    options = parser.parse_args(arguments)
    records: dict[str, dict] = {}
    whole = result_file.ResultFile("onnx_node_tests", options, arguments, devices=records)
    for path in options.read:
        try:
            records.update(json.loads(Path(path).read_text())["devices"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise InputError(
                f"--read: {path}: expected what --json wrote, found: {error}"
            ) from None
    asked = options.device
    if asked is None:
        here = [d for d in ("CPU", "CUDA") if CnnEngineBackend.supports_device(d)]
        asked = [d for d in here if d not in records]
    for device in asked:
        backend = ReferenceBackend if device == "reference" else CnnEngineBackend
        tests = run(backend, "CPU" if device == "reference" else device, options.only)
        found = environment.describe(devices.select("cuda" if device == "CUDA" else "cpu"))
        machine = found["gpu"] or found["cpu"]
        records[device] = {
            "machine": machine, "onnx": onnx.__version__, "commit": found["commit"] or "unknown",
            "tests": tests,
        }  # fmt: skip
    wrong = 0
    for device, found in records.items():
        for group, tests in found["tests"].items():
            counts = Counter(state for state, _ in tests.values())
            print(f"{device} {group}: " + ", ".join(f"{n} {state}" for state, n in counts.items()))
            for name, (state, why) in tests.items():
                if state == WRONG:
                    wrong += 1
                    print(f"  wrong: {name}: {why}")
    whole.write(lambda document: markdown(document["devices"]))
    return cli.CHECK_FAILED if wrong else cli.DONE


if __name__ == "__main__":
    sys.exit(main())
