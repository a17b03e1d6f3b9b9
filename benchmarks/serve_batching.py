"""Compares ``serve`` with and without batching: images per second at the same bound of latency.

    python -m benchmarks.serve_batching --bound 200 --json batching.json --markdown batching.md

Both servers have the same network, asked alternately by 1, 2, 4 ... clients, each with one image under
way. The default network has most of its time in fully connected layers, of which a pass reads the weights
once, however many images it has; ``--model`` takes another with one input and one output. Every answer is
compared with ``predict``, to the bit.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from cnn_engine import Engine, cli
from cnn_engine.devices.cpu import CpuDevice
from cnn_engine.errors import CnnEngineError
from cnn_engine.measure import environment

from . import result_file
from .serve_process import Server

#: Images that are asked for in turn.
IMAGES = 16
SERVERS = {"off": "--max-batch=1", "on": "--max-batch=32"}


def parser() -> cli.ArgumentParser:
    """Returns the command's parser."""
    p = result_file.parser(
        "serve_batching",
        __doc__,
        "json",
        "markdown",
        epilog="exit codes: 0 done; 1 an answer was wrong; 2 an option is at fault",
    )
    p.add_argument(
        "--model", metavar="FILE.onnx", help="default: two layers of --width, and a convolution"
    )
    p.add_argument(
        "--width", type=cli.whole_number(8, 16384), default=4096, metavar="N",
        help="inputs and outputs of the default network's layers (default: 4096)",
    )  # fmt: skip
    p.add_argument(
        "--clients", nargs="+", type=cli.whole_number(1, 256), default=[1, 2, 4, 8, 16], metavar="N",
        help="default: 1 2 4 8 16",
    )  # fmt: skip
    p.add_argument("--threads", type=cli.whole_number(1, 256), default=1, help="default: 1")
    p.add_argument(
        "--seconds", type=cli.number(0.05, 3600), default=2.0, help="of each sample (default: 2)"
    )
    p.add_argument("--rounds", type=cli.whole_number(1, 100), default=3, help="default: 3")
    p.add_argument(
        "--bound", type=cli.number(0, 1e6), default=200.0, metavar="MS",
        help="of the 99th percentile of latency (default: 200)",
    )  # fmt: skip
    return p


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    options = parser().parse_args(arguments)
    found = result_file.ResultFile(
        "serve_batching", options, arguments, environment=environment.describe(CpuDevice()),
        bound_ms=options.bound, threads=options.threads, rows=[], wrong=0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(options.model or Path(folder) / "wide.onnx")
        if options.model is None:
            write_network(path, options.width)
        with Engine(path, device="cpu", threads=options.threads) as engine:
            shape = (IMAGES, *engine.network.input_shape)
            images = np.random.default_rng(0).standard_normal(shape, np.float32)
            wanted = np.concatenate([engine.predict(images[n : n + 1]) for n in range(IMAGES)])
            names = engine.inputs[0].name, engine.outputs[0].name
        servers: dict[str, Server] = {}
        try:
            for name, word in SERVERS.items():
                servers[name] = Server(
                    str(path), "--device=cpu", f"--threads={options.threads}", word
                )
            for count in options.clients:
                ask = Clients(path.stem, names, images, wanted, count)
                samples: dict[str, list[np.ndarray]] = {name: [] for name in servers}
                for _ in range(options.rounds):
                    for name, server in servers.items():
                        samples[name].append(ask(server, options.seconds))
                found.document["wrong"] += ask.wrong
                seconds = options.rounds * options.seconds
                found.document["rows"].append({"clients": count, **_row(samples, seconds)})
                cli.show(table(found.document)[-1])
        finally:
            for server in servers.values():
                server.end()
    found.write(markdown)
    cli.show("\n".join(table(found.document)[:2] + summary(found.document)))
    return cli.CHECK_FAILED if found.document["wrong"] else cli.DONE


class Clients:
    """Clients that each ask for one image after another.

    Attributes:
        wrong: answers that were not ``predict``'s.
    """

    def __init__(
        self, model: str, names: tuple[str, str], images: np.ndarray, wanted: np.ndarray, count: int
    ) -> None:
        self._model, (self._input, self._output) = model, names
        self._images, self._wanted, self._count = images, wanted, count
        self.wrong = 0

    def __call__(self, server: Server, seconds: float) -> np.ndarray:
        """Asks for so long; returns the latencies of all answers, in seconds."""
        latencies: list[list[float]] = [[] for _ in range(self._count)]
        faults: list[Exception] = []
        end = perf_counter() + seconds

        def ask(number: int) -> None:
            try:
                self._ask(server, number, end, latencies[number])
            except Exception as error:
                faults.append(error)

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(self._count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if faults:
            raise CnnEngineError(f"serve: expected answers, found: {faults[0]}")
        return np.concatenate(latencies)

    def _ask(self, server: Server, number: int, end: float, latencies: list[float]) -> None:
        import tritonclient.grpc as library

        with library.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
            while perf_counter() < end:
                image = number % IMAGES
                asked = library.InferInput(self._input, (1, *self._images.shape[1:]), "FP32")
                asked.set_data_from_numpy(self._images[image : image + 1])
                begin = perf_counter()
                found = client.infer(self._model, [asked]).as_numpy(self._output)
                latencies.append(perf_counter() - begin)
                self.wrong += not np.array_equal(found[0], self._wanted[image])
                number += 1


def _row(samples: Mapping[str, list[np.ndarray]], seconds: float) -> dict[str, Any]:
    """Returns images per second and percentiles of both servers."""
    found = {}
    for name, parts in samples.items():
        times = np.concatenate(parts)
        found[name] = {
            "images_per_s": len(times) / seconds,
            "p50_ms": float(np.percentile(times, 50)) * 1e3,
            "p99_ms": float(np.percentile(times, 99)) * 1e3,
        }
    return found


def within(document: Mapping[str, Any], name: str) -> float | None:
    """Returns the most images per second with a 99th percentile within the bound; None: there are none."""
    rates = [
        row[name]["images_per_s"]
        for row in document["rows"]
        if row[name]["p99_ms"] <= document["bound_ms"]
    ]
    return max(rates, default=None)


def summary(document: Mapping[str, Any]) -> list[str]:
    """Returns what batching gains within the bound."""
    off, on = within(document, "off"), within(document, "on")
    bound = f"99th percentile of at most {document['bound_ms']:g} ms"
    shown = ["none" if rate is None else f"{rate:.1f} images/s" for rate in (off, on)]
    gain = f", {on / off:.2f} times as many" if off and on else ""
    return [f"- {bound}: {shown[0]} without batching, {shown[1]} with it{gain}."]


def table(document: Mapping[str, Any]) -> list[str]:
    """Returns the lines of the table."""
    lines = [
        "| clients | off: images/s | p50 | p99 | on: images/s | p50 | p99 | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        cells = [str(row["clients"])]
        for name in SERVERS:
            one = row[name]
            cells += [
                f"{one['images_per_s']:.1f}",
                f"{one['p50_ms']:.1f} ms",
                f"{one['p99_ms']:.1f} ms",
            ]
        ratio = row["on"]["images_per_s"] / row["off"]["images_per_s"]
        lines.append(f"| {' | '.join(cells)} | {ratio:.2f} |")
    return lines


def markdown(document: dict[str, Any]) -> str:
    """Returns the page of a document."""
    lines = [
        "# Batching of serve",
        "",
        f"- Machine: {document['environment']['cpu']}, {document['threads']} threads",
        *result_file.run_lines(document),
        *summary(document),
        f"- Wrong answers: {document['wrong']}.",
        "",
        *table(document),
        "",
    ]
    return "\n".join(lines)


def write_network(path: Path, width: int) -> None:
    """Writes an ONNX network of random weights: a convolution and two fully connected layers of ``width``."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    random = np.random.default_rng(0)

    def weights(name: str, *shape: int) -> Any:
        values = random.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[0]))
        return numpy_helper.from_array(values, name)

    side = 8
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Flatten", ["r"], ["f"]),
        helper.make_node("MatMul", ["f", "first"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "second"], ["d"]),
        helper.make_node("MatMul", ["d", "last"], ["y"]),
    ]
    floats = TensorProto.FLOAT
    graph = helper.make_graph(
        nodes, "wide",
        [helper.make_tensor_value_info("x", floats, ["batch", 3, side, side])],
        [helper.make_tensor_value_info("y", floats, ["batch", 10])],
        [
            weights("w", 4, 3, 3, 3), weights("first", 4 * side * side, width),
            weights("second", width, width), weights("last", width, 10),
        ],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, path)


if __name__ == "__main__":
    sys.exit(main())
