"""What ``serve`` adds to ``predict``: its latency, less an empty handler's on the same bodies.

    python -m benchmarks.serve_overhead --model resnet50.onnx --threads 2 --json overhead.json

The empty handler reads the same request with the same settings of uvicorn, and answers with bytes that
``serve`` has answered with. tritonclient asks both, over HTTP with tensors as bytes and in shared memory, in
turns with ``predict`` in this process. What is added is p50 of serve, less p50 of the empty handler and of
``predict``, in each round; the median of rounds counts. The first and the last answer are compared with
``predict``, to the bit.

UINT8 needs a file that states its preprocessing: ``cnn-engine export torchvision.models:resnet50 --preprocess
imagenet --output resnet50.onnx``.
"""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from cnn_engine import Engine, cli
from cnn_engine.devices.cpu import CpuDevice
from cnn_engine.errors import InputError
from cnn_engine.io.model_metadata import preprocess_of
from cnn_engine.measure import environment

from . import result_file
from .serve_process import Server

#: Transport -> microseconds that may be added at p50.
BOUNDS_US = {"shared memory": 60, "HTTP, binary": 250}
DTYPES = {"FP32": np.float32, "UINT8": np.uint8}
#: Requests in a row before any is timed: serve then knows that the client is alone.
WARMUP = 80


def parser() -> cli.ArgumentParser:
    """Returns the command's parser."""
    p = result_file.parser(
        "serve_overhead",
        __doc__,
        "json",
        "markdown",
        epilog="exit codes: 0 done; 1 an answer was wrong; 2 an option is at fault",
    )
    p.add_argument("--model", metavar="FILE.onnx", help="with one input of images and one output")
    p.add_argument("--threads", type=cli.whole_number(1, 256), default=2, help="default: 2")
    p.add_argument("--rounds", type=cli.whole_number(1, 1000), default=15, help="default: 15")
    p.add_argument(
        "--requests", type=cli.whole_number(1, 10**6), default=20, metavar="N",
        help="of each kind in a round (default: 20)",
    )  # fmt: skip
    p.add_argument(
        "--empty", action="store_true", help="serves the empty handler, and nothing else"
    )
    return p


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    p = parser()
    options = p.parse_args(arguments)
    if options.empty:
        serve_empty()
        return cli.DONE
    if options.model is None:
        p.error("--model: expected a file, found none")
    found = result_file.ResultFile(
        "serve_overhead", options, arguments, environment=environment.describe(CpuDevice()),
        threads=options.threads, rows=[], wrong=0,
    )  # fmt: skip
    path = Path(options.model)
    with Engine(path, device="cpu", threads=options.threads) as engine:
        server = Server(str(path), "--device=cpu", f"--threads={options.threads}")
        empty = _Empty()
        try:
            for datatype in DTYPES:
                for transport in BOUNDS_US:
                    row = _measured(engine, server, empty, path.stem, datatype, transport, options)
                    found.document["wrong"] += row.pop("wrong", 0)
                    found.document["rows"].append(row)
                    cli.show(_line(row))
                    found.write(markdown)
        finally:
            empty.end()
            server.end()
    found.write(markdown)
    return cli.CHECK_FAILED if found.document["wrong"] else cli.DONE


# ---- the empty handler ----


def serve_empty() -> None:
    """Serves on a free port of this machine, which it prints, until it is killed.

    ``/answer`` takes what every other request is answered with from then on.
    """
    import socket

    import uvicorn
    import uvloop

    kept: dict[str, Any] = {"body": b"", "headers": []}

    async def application(scope: Any, receive: Any, send: Any) -> None:
        parts = []
        while True:
            message = await receive()
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                break
        if scope["path"] == "/answer":
            headers = dict(scope["headers"])
            length = headers.get(b"inference-header-content-length")
            kept["body"] = b"".join(parts)
            kept["headers"] = [(b"content-length", str(len(kept["body"])).encode())]
            if length is not None:
                kept["headers"].append((b"inference-header-content-length", length))
        await send({"type": "http.response.start", "status": 200, "headers": kept["headers"]})
        await send({"type": "http.response.body", "body": kept["body"]})

    config = uvicorn.Config(
        application, log_config=None, log_level="warning", access_log=False, lifespan="off",
        server_header=False,
    )  # fmt: skip
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        print(listener.getsockname()[1], flush=True)
        uvloop.run(uvicorn.Server(config).serve([listener]))


class _Empty:
    """The empty handler in a process of its own."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.serve_overhead", "--empty"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        line = self._process.stdout.readline()
        if not line.strip().isdigit():
            raise InputError(f"empty handler: expected a port, found {line!r}")
        self.address = f"127.0.0.1:{line.strip()}"

    def end(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()

    def answer_with(self, body: bytes, json_length: str | None) -> None:
        """Lets it answer with these bytes."""
        headers = {} if json_length is None else {"Inference-Header-Content-Length": json_length}
        asked = urllib.request.Request(f"http://{self.address}/answer", body, headers)
        for attempt in range(100):
            try:
                urllib.request.urlopen(asked, timeout=10).read()
                return
            except OSError:  # it does not listen yet
                if attempt == 99:
                    raise
                time.sleep(0.1)


# ---- what is measured ----


def _measured(
    engine: Engine, server: Server, empty: _Empty, model: str, datatype: str, transport: str,
    options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Returns the row of a type of images and a transport; ``refused``: why there are no times."""
    import tritonclient.http as library
    import tritonclient.utils.shared_memory as memory
    from tritonclient.utils import InferenceServerException

    row = {"datatype": datatype, "transport": transport, "bound_us": BOUNDS_US[transport]}
    random = np.random.default_rng(0)
    images = random.uniform(0, 255, (1, *engine.network.input_shape)).astype(DTYPES[datatype])
    name, output = engine.inputs[0].name, engine.outputs[0].name
    here = f"127.0.0.1:{server.http_port}"
    key, is_shared = "serve-overhead", transport == "shared memory"
    with (
        library.InferenceServerClient(here) as client,
        library.InferenceServerClient(empty.address) as idle,
    ):
        tensor = library.InferInput(name, images.shape, datatype)
        wanted = library.InferRequestedOutput(output, binary_data=True)
        region = None
        if is_shared:
            rows_at = images.nbytes + -images.nbytes % 4096
            size = rows_at + 4 * engine.network.classes
            region = memory.create_shared_memory_region(key, f"/{key}", size)
            memory.set_shared_memory_region(region, [images])
            client.register_system_shared_memory(key, f"/{key}", size)
            tensor.set_shared_memory(key, images.nbytes)
            wanted.set_shared_memory(key, 4 * engine.network.classes, rows_at)
        else:
            tensor.set_data_from_numpy(images, binary_data=True)

        def rows() -> np.ndarray:
            answer = client.infer(model, [tensor], outputs=[wanted])
            if not is_shared:
                return answer.as_numpy(output)
            shape = 1, engine.network.classes
            return memory.get_contents_as_numpy(region, np.float32, shape, rows_at)

        normalise = _normaliser(engine, images)

        def predict() -> np.ndarray:
            return engine.predict(normalise(images))

        try:
            right = rows().copy()
            body, length = client.generate_request_body([tensor], outputs=[wanted])
            empty.answer_with(*_answer(here, model, body, length))
            kinds: dict[str, Callable[[], Any]] = {
                "empty": lambda: idle.infer(model, [tensor], outputs=[wanted]),
                "predict": predict,
                "serve": lambda: client.infer(model, [tensor], outputs=[wanted]),
            }
            row["wrong"] = int(not np.array_equal(right, predict()))
            row |= _times(kinds, options.rounds, options.requests)
            row["wrong"] += int(not np.array_equal(rows(), right))
        except InferenceServerException as error:
            row["refused"] = str(error)[:200]
        finally:
            if is_shared:
                client.unregister_system_shared_memory(key)
                memory.destroy_shared_memory_region(region)
    return row


def _normaliser(engine: Engine, images: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Returns what makes float32 of pixels where the file says how, as serve does; else nothing is done."""
    found = preprocess_of(engine.network) if images.dtype == np.uint8 else None
    return found.normalised if found is not None and found.normalises else lambda images: images


def _answer(here: str, model: str, body: bytes, length: int | None) -> tuple[bytes, str | None]:
    """Returns what serve answers a body with, and where its JSON ends."""
    headers = {} if length is None else {"Inference-Header-Content-Length": str(length)}
    asked = urllib.request.Request(f"http://{here}/v2/models/{model}/infer", bytes(body), headers)
    with urllib.request.urlopen(asked) as answer:
        return answer.read(), answer.headers.get("Inference-Header-Content-Length")


def _times(kinds: dict[str, Callable[[], Any]], rounds: int, requests: int) -> dict[str, Any]:
    """Returns p50 of each kind, and what serve adds: of each round, and their median."""
    for ask in kinds.values():
        for _ in range(WARMUP):
            ask()
    samples: dict[str, list[list[float]]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, ask in kinds.items():
            ask()  # the first after another kind finds caches cold
            times = []
            for _ in range(requests):
                begin = perf_counter()
                ask()
                times.append((perf_counter() - begin) * 1e6)
            samples[name].append(times)
    middle = {name: [median(times) for times in found] for name, found in samples.items()}
    added = [
        serve - empty - predict
        for serve, empty, predict in zip(
            middle["serve"], middle["empty"], middle["predict"], strict=True
        )
    ]
    low, high = np.percentile(added, (25, 75))
    whole = {name: median(np.concatenate(found).tolist()) for name, found in samples.items()}
    return {
        **{f"{name}_us": value for name, value in whole.items()},
        "added_us": median(added), "added_quartiles_us": [float(low), float(high)],
    }  # fmt: skip


# ---- the page ----


def _cells(row: dict[str, Any]) -> list[str]:
    if "refused" in row:
        return [row["datatype"], row["transport"], f"refused: {row['refused']}", *[""] * 5]
    low, high = row["added_quartiles_us"]
    return [
        row["datatype"], row["transport"], f"{row['serve_us']:.0f}", f"{row['empty_us']:.0f}",
        f"{row['predict_us']:.0f}", f"{row['added_us']:.0f} ({low:.0f} to {high:.0f})",
        str(row["bound_us"]), "yes" if row["added_us"] <= row["bound_us"] else "no",
    ]  # fmt: skip


def _line(row: dict[str, Any]) -> str:
    return f"| {' | '.join(_cells(row))} |"


def table(document: dict[str, Any]) -> list[str]:
    """Returns the lines of the table, in us."""
    return [
        "| input | transport | serve | empty handler | predict | added (quartiles) | bound | within |",
        "|---|---|--:|--:|--:|--:|--:|---|",
        *(_line(row) for row in document["rows"]),
    ]


def markdown(document: dict[str, Any]) -> str:
    """Returns the page of a document."""
    lines = [
        "# What serve adds to predict",
        "",
        f"- Machine: {document['environment']['cpu']}, {document['threads']} threads",
        *result_file.run_lines(document),
        f"- Wrong answers: {document['wrong']}.",
        "- p50 in us; added: serve less empty handler and predict, the median of rounds.",
        "- UINT8: predict normalises the pixels first, as serve does.",
        "",
        *table(document),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
