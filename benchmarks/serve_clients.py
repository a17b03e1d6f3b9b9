"""Tries every public call of tritonclient's four clients against ``serve``: a page of what passed.

``python -m benchmarks.serve_clients --markdown docs/reference/tritonclient.md`` writes the page. A call
passes where its answer is right; one that is refused is listed with its message.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import queue
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cnn_engine import Engine, cli
from cnn_engine.devices.cpu import CpuDevice
from cnn_engine.measure import environment

from . import result_file
from .serve_process import Server, write_network

#: Its clients, as modules of tritonclient.
KINDS = ("http", "grpc", "http.aio", "grpc.aio")
PASSED, REFUSED, WRONG = "passed", "refused", "wrong"
SIZE = 4096


class Client:
    """A client of one kind, what it asks with, and the right answer.

    Attributes:
        library: the module that the client is of.
        address: host and port of the server.
        asked: the public calls that were made.
    """

    def __init__(self, kind: str, server: Server, images: np.ndarray, wanted: np.ndarray) -> None:
        self.kind, self.images, self.wanted = kind, images, wanted
        self.library = importlib.import_module(f"tritonclient.{kind}")
        self.is_http = kind.startswith("http")
        port = server.http_port if self.is_http else server.grpc_port
        self.address = f"127.0.0.1:{port}"
        self._client = self.library.InferenceServerClient(self.address)
        self._public = public(kind)
        self.asked: set[str] = set()
        self.key = f"/serve-clients-{os.getpid()}-{kind}"

    def has(self, name: str) -> bool:
        """Whether clients of this kind have a call."""
        return name in self._public

    async def __call__(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Returns what a call answers, as JSON has it where gRPC has messages."""
        self.asked.add(name)
        method = getattr(self._client, name)
        if "as_json" in inspect.signature(method).parameters:
            options["as_json"] = True
        found = method(*arguments, **options)
        return await found if inspect.isawaitable(found) else found

    def inputs(self, datatype: str = "FP32", **options: Any) -> list[Any]:
        """Returns the inputs of a request; ``options`` are of ``set_data_from_numpy``."""
        tensor = self.library.InferInput("x", self.images.shape, datatype)
        if datatype == "BYTES":
            tensor.set_data_from_numpy(np.full(self.images.shape, b"a", np.object_))
        else:
            tensor.set_data_from_numpy(self.images, **options)
        return [tensor]

    def is_right(self, found: Any) -> bool:
        """Whether a result has the rows of ``predict``, to the bit."""
        return np.array_equal(found.as_numpy("y"), self.wanted)


def public(kind: str) -> list[str]:
    """Returns the names of the public calls of a kind of client."""
    client = importlib.import_module(f"tritonclient.{kind}").InferenceServerClient
    names = [name for name, _ in inspect.getmembers(client, inspect.isfunction)]
    return [name for name in names if not name.startswith("_")]


# ---- what is tried: each returns whether the answer was right ----


async def _done(name: str, client: Client, *arguments: Any, **options: Any) -> bool:
    await client(name, *arguments, **options)
    return True


async def _true(name: str, client: Client, *arguments: Any) -> bool:
    return bool(await client(name, *arguments))


async def _named(name: str, client: Client, *arguments: Any) -> bool:
    found = await client(name, *arguments)
    return found.get("config", found)["name"] == (arguments[0] if arguments else "cnn_engine")


async def _index(client: Client) -> bool:
    found = await client("get_model_repository_index")
    rows = found["models"] if isinstance(found, dict) else found
    return [(row["name"], row["state"]) for row in rows] == [("m", "READY")]


async def _statistics(client: Client) -> bool:
    (found,) = (await client("get_inference_statistics", "m"))["model_stats"]
    return found["name"] == "m" and int(found.get("execution_count", 0)) >= 0


async def _unload(client: Client) -> bool:
    await client("unload_model", "m")
    gone = not await client("is_model_ready", "m")
    await client("load_model", "m")
    return gone and await client("is_model_ready", "m")


async def _regions(client: Client) -> bool:
    """Registers, lists and forgets a region; the file is there already."""
    await client("register_system_shared_memory", "r", client.key, SIZE)
    found = await client("get_system_shared_memory_status")
    names = list(found["regions"]) if isinstance(found, dict) else [one["name"] for one in found]
    await client("unregister_system_shared_memory", "r")
    return names == ["r"] and not await _region_names(client)


async def _region_names(client: Client) -> list[str]:
    found = await client("get_system_shared_memory_status")
    return list(found.get("regions", {})) if isinstance(found, dict) else list(found)


async def _shared(client: Client) -> bool:
    """Asks with images and outputs in shared memory."""
    path, rows = Path("/dev/shm") / client.key[1:], client.wanted
    await client("register_system_shared_memory", "r", client.key, SIZE)
    with open(path, "r+b") as file:
        file.write(client.images.tobytes())
    tensor = client.library.InferInput("x", client.images.shape, "FP32")
    tensor.set_shared_memory("r", client.images.nbytes)
    output = client.library.InferRequestedOutput("y")
    output.set_shared_memory("r", rows.nbytes, SIZE - rows.nbytes)
    await client("infer", "m", [tensor], outputs=[output])
    await client("unregister_system_shared_memory", "r")
    found = np.fromfile(path, np.float32, rows.size, offset=SIZE - rows.nbytes)
    return np.array_equal(found.reshape(rows.shape), rows)


async def _cuda_regions(client: Client) -> bool:
    found = await client("get_cuda_shared_memory_status")
    return not (found.get("regions") if isinstance(found, dict) else found)


async def _infer(client: Client, **options: Any) -> bool:
    return client.is_right(await client("infer", "m", client.inputs(), **options))


async def _infer_json(client: Client) -> bool | None:
    if not client.is_http:
        return None
    return client.is_right(await client("infer", "m", client.inputs(binary_data=False)))


async def _infer_gzip(client: Client) -> bool:
    name = ("request_" if client.is_http else "") + "compression_algorithm"
    return await _infer(client, **{name: "gzip"})


async def _infer_classes(client: Client) -> bool:
    """Asks for the best two classes, which come as texts."""
    outputs = [client.library.InferRequestedOutput("y", class_count=2)]
    found = await client("infer", "m", client.inputs(), outputs=outputs)
    texts = [[int(text.decode().split(":")[1]) for text in row] for row in found.as_numpy("y")]
    return texts == np.argsort(-client.wanted, axis=1)[:, :2].tolist()


async def _infer_texts(client: Client) -> bool:
    await client("infer", "m", client.inputs("BYTES"))
    return True


async def _async_infer(client: Client) -> bool:
    if client.is_http:
        found = await client("async_infer", "m", client.inputs())
        return client.is_right(found.get_result())
    results: queue.Queue[Any] = queue.Queue()
    await client("async_infer", "m", client.inputs(), lambda result, error: results.put(result))
    return client.is_right(results.get(timeout=60))


async def _stream(client: Client) -> bool:
    results: queue.Queue[Any] = queue.Queue()
    await client("start_stream", lambda result, error: results.put((result, error)))
    await client("async_stream_infer", "m", client.inputs())
    await client("async_stream_infer", "none", client.inputs())
    right, wrong = results.get(timeout=60), results.get(timeout=60)
    await client("stop_stream")
    return client.is_right(right[0]) and "none" in str(wrong[1])


async def _stream_infer(client: Client) -> bool:
    async def asked() -> AsyncIterator[dict[str, Any]]:
        for name in ("m", "none"):
            yield {"model_name": name, "inputs": client.inputs()}

    answers = [one async for one in await client("stream_infer", asked())]
    return client.is_right(answers[0][0]) and "none" in str(answers[1][1])


async def _bodies(client: Client) -> bool:
    """Makes a request's body, posts it without the client, and has the client read the response's."""
    body, length = await client("generate_request_body", client.inputs())
    url = f"http://{client.address}/v2/models/m/infer"
    headers = {"Inference-Header-Content-Length": str(length)}
    with urllib.request.urlopen(urllib.request.Request(url, bytes(body), headers)) as answer:
        length = answer.headers.get("Inference-Header-Content-Length")
        found = await client(
            "parse_response_body", answer.read(), header_length=length and int(length)
        )
    return client.is_right(found)


async def _plugins(client: Client) -> bool:
    """A plugin is asked before every request."""
    base = importlib.import_module("tritonclient._plugin").InferenceServerClientPlugin
    seen: list[Any] = []
    plugin = type("Plugin", (base,), {"__call__": lambda self, request: seen.append(request)})()
    await client("register_plugin", plugin)
    registered = await client("plugin")
    await client("is_server_live")
    await client("unregister_plugin")
    return registered is plugin and len(seen) == 1


Try = Callable[[Client], Any]

#: What is tried, in this order: the call and what of it, and how. A kind without the call leaves it out.
TRIES: tuple[tuple[str, Try], ...] = (
    ("is_server_live", partial(_true, "is_server_live")),
    ("is_server_ready", partial(_true, "is_server_ready")),
    ("is_model_ready", lambda client: _true("is_model_ready", client, "m")),
    ("get_server_metadata", partial(_named, "get_server_metadata")),
    ("get_model_metadata", lambda client: _named("get_model_metadata", client, "m")),
    ("get_model_config", lambda client: _named("get_model_config", client, "m")),
    ("get_model_repository_index", _index),
    ("get_inference_statistics", _statistics),
    ("load_model, unload_model", _unload),
    (
        "load_model, with a configuration",
        lambda client: _done("load_model", client, "m", config="{}"),
    ),
    ("infer", _infer),
    ("infer, tensors in JSON", _infer_json),
    ("infer, compressed by gzip", _infer_gzip),
    ("infer, priority and timeout", partial(_infer, priority=1, timeout=10**7)),
    ("infer, the best classes as texts", _infer_classes),
    ("infer, system shared memory", _shared),
    ("infer, texts as input", _infer_texts),
    ("infer, a sequence", partial(_infer, sequence_id=7, sequence_start=True)),
    ("async_infer", _async_infer),
    ("start_stream, async_stream_infer, stop_stream", _stream),
    ("stream_infer", _stream_infer),
    ("generate_request_body, parse_response_body", _bodies),
    ("register_system_shared_memory, status, unregister", _regions),
    ("get_cuda_shared_memory_status", _cuda_regions),
    (
        "register_cuda_shared_memory",
        lambda client: _done("register_cuda_shared_memory", client, "c", b"AAAA", 0, SIZE),
    ),
    ("unregister_cuda_shared_memory", partial(_done, "unregister_cuda_shared_memory")),
    ("get_trace_settings", partial(_done, "get_trace_settings")),
    ("get_trace_settings of a model", lambda client: _done("get_trace_settings", client, "m")),
    ("update_trace_settings", partial(_done, "update_trace_settings")),
    ("get_log_settings", partial(_done, "get_log_settings")),
    ("update_log_settings", lambda client: _done("update_log_settings", client, {})),
    ("plugin, register_plugin, unregister_plugin", _plugins),
    ("close", partial(_done, "close")),
)


async def _outcome(attempt: Try, client: Client) -> str:
    """Returns ``passed``, ``refused: `` and the message, ``wrong: `` and why, or ``-``."""
    from tritonclient.utils import InferenceServerException

    try:
        right = await attempt(client)
    except InferenceServerException as error:
        return f"{REFUSED}: {error.message()}"
    except Exception as error:
        return f"{WRONG}: {type(error).__name__}: {error}"
    if right is None:
        return "-"
    return PASSED if right is True else f"{WRONG}: {str(right)[:100]}"


async def _tried(
    kind: str, server: Server, images: np.ndarray, wanted: np.ndarray
) -> dict[str, Any]:
    client = Client(kind, server, images, wanted)
    path, found = Path("/dev/shm") / client.key[1:], {}
    path.write_bytes(bytes(SIZE))
    try:
        for name, attempt in TRIES:
            if client.has(name.replace(" ", ",").partition(",")[0]):
                found[name] = await _outcome(attempt, client)
    finally:
        path.unlink()
    return {"outcomes": found, "not_tried": sorted({*public(kind)} - client.asked)}


def try_all() -> dict[str, dict[str, Any]]:
    """Returns kind of client -> ``outcomes`` of :data:`TRIES`, and public calls that were ``not_tried``."""
    with tempfile.TemporaryDirectory() as folder:
        write_network(Path(folder) / "m.onnx", 0)
        images = np.random.default_rng(0).standard_normal((2, 3, 12, 12), np.float32)
        with Engine(Path(folder) / "m.onnx", device="cpu", threads=1) as engine:
            wanted = engine.predict(images)
        server = Server(folder, "--threads=1")
        try:
            return {kind: asyncio.run(_tried(kind, server, images, wanted)) for kind in KINDS}
        finally:
            server.end()


def parser() -> cli.ArgumentParser:
    """Returns the command's parser."""
    return result_file.parser(
        "serve_clients",
        __doc__,
        "json",
        "markdown",
        epilog="exit codes: 0 done; 1 an answer was wrong, or a call was not tried",
    )


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    options = parser().parse_args(arguments)
    found = result_file.ResultFile(
        "serve_clients", options, arguments, environment=environment.describe(CpuDevice()),
        tritonclient=environment.package_version("tritonclient"),
    )  # fmt: skip
    found.document["clients"] = clients = try_all()
    found.write(markdown)
    cli.show("\n".join(table(clients)))
    bad = [one for one in clients.values() if one["not_tried"] or wrong(one["outcomes"])]
    return cli.CHECK_FAILED if bad else cli.DONE


def wrong(outcomes: dict[str, str]) -> list[str]:
    """Returns the calls whose answers were wrong."""
    return [name for name, outcome in outcomes.items() if outcome.startswith(WRONG)]


def table(clients: dict[str, dict[str, Any]]) -> list[str]:
    """Returns the lines of a table: a row for each try, a column for each kind of client."""
    lines = [
        f"| call | {' | '.join(clients)} | message |",
        f"|---|{'---|' * (len(clients) + 1)}",
    ]
    for name, _ in TRIES:
        found = [one["outcomes"].get(name, "-").partition(": ") for one in clients.values()]
        reasons = dict.fromkeys(text.replace("|", "\\|") for _, _, text in found if text)
        cells = [name, *(outcome for outcome, _, _ in found), "; ".join(reasons)]
        lines.append(f"| {' | '.join(cells)} |")
    left = {kind: one["not_tried"] for kind, one in clients.items() if one["not_tried"]}
    return [
        *lines,
        *(f"\nNot tried of {kind}: {', '.join(names)}." for kind, names in left.items()),
    ]


def markdown(document: dict[str, Any]) -> str:
    """Returns the page of a document."""
    lines = [
        "# Calls of tritonclient",
        "",
        f"Every public call of the four clients of tritonclient {document['tritonclient']} against",
        "`cnn-engine serve`: `passed` where the answer is right, `refused` with a message."
        " `-`: no such call.",
        "`python -m benchmarks.serve_clients --markdown docs/reference/tritonclient.md` writes this page.",
        "",
        *table(document["clients"]),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
