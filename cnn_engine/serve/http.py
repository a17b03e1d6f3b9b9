"""The protocol over HTTP: an ASGI application of Starlette's, which uvicorn serves."""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from http import HTTPStatus
from typing import Any

import numpy as np
import orjson
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import __version__
from . import metrics, protocol
from .errors import Closed, Refused, invalid, not_found, not_implemented, refusal
from .model import ServedModel
from .repository import Repository
from .shared_memory import Regions

#: The header that says where JSON ends and tensors begin, in a request and in a response.
JSON_LENGTH = "inference-header-content-length"

#: Bytes of JSON from which it is read on another thread, so that other requests are answered meanwhile.
LONG_JSON = 1 << 17

#: Bytes of JSON up to which what it says is remembered.
SHORT_JSON = 1 << 10

#: Requests in a row by one connection from which on its next ones run on the event loop: nobody else waits.
ALONE = 64


@dataclass
class Served:
    """An answer of the server.

    Attributes:
        largest: bytes of a request at most.
        upload_s: seconds in which a request's body must have come.
        row: requests for tensors that have come by one connection, one after the other.
    """

    models: Repository
    regions: Regions
    largest: int = 64 << 20
    upload_s: float = 30.0
    row: int = 0
    _connection: object = None

    def arrived(self, connection: object) -> None:
        """Notes that a request for tensors has come; None: nobody knows by which connection."""
        known = connection is not None and connection == self._connection
        self.row = self.row + 1 if known else 0
        self._connection = connection


async def infer(
    served: Served, model: ServedModel, request: protocol.Request
) -> tuple[ServedModel, list[protocol.Answer]]:
    """Runs one request on its model; returns its outputs, and the model that gave them.

    That is another where the model was replaced while the request came.

    Raises:
        Refused: the request is at fault, or the queue is full.
        InputError: the network does not take it.
    """
    loop, here = asyncio.get_running_loop(), threading.get_ident()
    answer: asyncio.Future[Any] = loop.create_future()

    def deliver(found: Any) -> None:
        if not answer.done():  # else its client has gone
            answer.set_result(found)

    def done(found: Any) -> None:
        if threading.get_ident() == here:
            deliver(found)
            return
        with suppress(RuntimeError):  # the server has ended
            loop.call_soon_threadsafe(deliver, found)

    try:
        model.submit(request, done, here=served.row >= ALONE)
    except Closed:
        newer = served.models.get(model.name, "")
        if newer is model:
            raise
        return await infer(served, newer, request)
    found = await answer
    if isinstance(found, BaseException):
        raise found
    request.check_mapped()
    return model, protocol.answers(request, found, model.labels, served.regions)


def application(served: Served) -> Starlette:
    """Returns the ASGI application."""
    models, regions = served.models, served.regions

    def endpoint(
        handle: Callable[[HttpRequest], Awaitable[Any]],
    ) -> Callable[[HttpRequest], Awaitable[Response]]:
        async def answer(request: HttpRequest) -> Response:
            try:
                found = await handle(request)
            except Exception as error:
                refused = refusal(error)
                return _json({"error": str(refused)}, refused.status)
            return found if isinstance(found, Response) else _json(found)

        return answer

    def model_of(request: HttpRequest) -> ServedModel:
        return models.get(request.path_params["name"], request.path_params.get("version", ""))

    async def live(_: HttpRequest) -> Response:
        return Response()

    async def ready(_: HttpRequest) -> Response:
        return Response(status_code=200 if models.ready() else HTTPStatus.SERVICE_UNAVAILABLE)

    async def server_metadata(_: HttpRequest) -> Any:
        return {"name": "cnn_engine", "version": __version__, "extensions": protocol.EXTENSIONS}

    async def model_metadata(request: HttpRequest) -> Any:
        return model_of(request).metadata()

    async def model_ready(request: HttpRequest) -> Response:
        model_of(request)
        return Response()

    async def model_config(request: HttpRequest) -> Any:
        return model_of(request).config()

    async def statistics(request: HttpRequest) -> Any:
        found = [model_of(request)] if "name" in request.path_params else models.models()
        return {"model_stats": [m.statistics.described(m.name, m.version) for m in found]}

    async def model_infer(request: HttpRequest) -> Response:
        served.arrived(request.scope["client"])
        model = model_of(request)
        json_length, body = await _body(request, served)
        parts = body[:json_length], body[json_length:], regions, model.reads_in_place
        if json_length > LONG_JSON:
            asked = await asyncio.to_thread(_asked, *parts)
        else:
            asked = _asked(*parts)
        return _answered(asked, *await infer(served, model, asked))

    async def index(request: HttpRequest) -> Any:
        asked = await _object(request, served)
        return models.index(asked.get("ready") is True)

    async def load(request: HttpRequest) -> Response:
        asked = await _object(request, served)
        if asked.get("parameters"):
            raise invalid("parameters", "none: files come from the server's folder", "some")
        await asyncio.to_thread(models.load, request.path_params["name"])
        return Response()

    async def unload(request: HttpRequest) -> Response:
        await asyncio.to_thread(models.unload, request.path_params["name"])
        return Response()

    async def region_status(request: HttpRequest) -> Any:
        return regions.status(request.path_params.get("name", ""))

    async def region_register(request: HttpRequest) -> Response:
        asked = await _object(request, served)
        key, offset, size = asked.get("key"), asked.get("offset", 0), asked.get("byte_size")
        if not isinstance(key, str) or type(offset) is not int or type(size) is not int:
            raise invalid("body", "key, offset and byte_size", str(asked)[:200])
        regions.register(request.path_params["name"], key, offset, size)
        return Response()

    async def region_unregister(request: HttpRequest) -> Response:
        regions.unregister(request.path_params.get("name", ""))
        return Response()

    def unsupported(name: str) -> Callable[[HttpRequest], Awaitable[Response]]:
        async def refuse(_: HttpRequest) -> Response:
            raise not_implemented(name)

        return refuse

    async def nothing_to_unregister(_: HttpRequest) -> Response:
        return Response()

    async def no_regions(_: HttpRequest) -> Any:
        return []

    async def read_metrics(_: HttpRequest) -> Response:
        return Response(metrics.text(models), media_type=metrics.CONTENT_TYPE)

    async def missing(request: HttpRequest, _: Exception) -> Response:
        refused = not_found(f"{request.url.path}: not found; /v2 says what this server is")
        return _json({"error": str(refused)}, refused.status)

    def routes(
        method: str, handle: Callable[[HttpRequest], Awaitable[Any]], *paths: str
    ) -> list[Route]:
        return [Route(path, endpoint(handle), methods=[method]) for path in paths]

    def of_model(
        method: str, handle: Callable[[HttpRequest], Awaitable[Any]], end: str
    ) -> list[Route]:
        base = "/v2/models/{name}"
        return routes(method, handle, f"{base}{end}", f"{base}/versions/{{version}}{end}")

    shared, region = "/v2/systemsharedmemory", "/v2/systemsharedmemory/region/{name}"
    cuda, cuda_region = "/v2/cudasharedmemory", "/v2/cudasharedmemory/region/{name}"
    return Starlette(
        routes=[
            *of_model("POST", model_infer, "/infer"),
            *routes("GET", live, "/v2/health/live"),
            *routes("GET", ready, "/v2/health/ready"),
            *routes("GET", server_metadata, "/v2", "/v2/"),
            *routes("GET", statistics, "/v2/models/stats"),
            *of_model("GET", model_metadata, ""),
            *of_model("GET", model_ready, "/ready"),
            *of_model("GET", model_config, "/config"),
            *of_model("GET", statistics, "/stats"),
            *routes("POST", index, "/v2/repository/index"),
            *routes("POST", load, "/v2/repository/models/{name}/load"),
            *routes("POST", unload, "/v2/repository/models/{name}/unload"),
            *routes("GET", region_status, f"{shared}/status", f"{region}/status"),
            *routes("POST", region_register, f"{region}/register"),
            *routes("POST", region_unregister, f"{shared}/unregister", f"{region}/unregister"),
            *routes("GET", no_regions, f"{cuda}/status", f"{cuda_region}/status"),
            *routes(
                "POST", nothing_to_unregister, f"{cuda}/unregister", f"{cuda_region}/unregister"
            ),
            *routes("POST", unsupported(protocol.CUDA_MEMORY), f"{cuda_region}/register"),
            *(
                route
                for method in ("GET", "POST")
                for route in (
                    *routes(method, unsupported(protocol.LOGGING), "/v2/logging"),
                    *routes(method, unsupported(protocol.TRACING), "/v2/trace/setting"),
                    *of_model(method, unsupported(protocol.TRACING), "/trace/setting"),
                )
            ),
            *routes("GET", read_metrics, "/metrics"),
        ],
        exception_handlers={404: missing},
        middleware=[Middleware(ReadToTheEnd, served.upload_s)],
    )


# ---- requests ----


class ReadToTheEnd:
    """Middleware that reads the rest of a request, and drops it, before the answer begins.

    Where a connection is closed on bytes that were not read, the client may lose the answer (RFC 9112, 9.6).
    A client that waits to be asked for its body (Expect) is answered at once, and so is one that is too slow.
    """

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        self._app, self._seconds = app, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or any(name == b"expect" for name, _ in scope["headers"]):
            await self._app(scope, receive, send)
            return
        clock = asyncio.get_running_loop().time
        end, more = clock() + self._seconds, True

        async def reading() -> Message:
            nonlocal more
            message = await receive()
            more = message.get("more_body", False)  # a client that went sends no more
            return message

        async def sending(message: Message) -> None:
            starts = message["type"] == "http.response.start"
            if starts and message["status"] != HTTPStatus.REQUEST_TIMEOUT:
                while more and (left := end - clock()) > 0:
                    with suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(reading(), left)
            await send(message)

        await self._app(scope, reading, sending)


async def _body(request: HttpRequest, served: Served) -> tuple[int, memoryview]:
    """Returns the bytes of JSON at a body's start, and the body.

    Tensors behind the JSON are aligned, so that they need not be copied once more.

    Raises:
        Refused: the body is too large, comes too slowly, is packed wrongly, or its headers are at fault.
    """
    headers = request.headers
    length = _length(headers.get("content-length"), "Content-Length", served.largest)
    json_length = _length(
        headers.get(JSON_LENGTH), "Inference-Header-Content-Length", served.largest
    )
    encoding = headers.get("content-encoding", "identity")
    if encoding not in ("identity", "gzip", "deflate"):
        raise invalid("Content-Encoding", "gzip or deflate", repr(encoding)[:80])
    pad = -(json_length or 0) % 64
    # Without its length, a body grows as it comes.
    room: Any = bytearray(pad) if length is None else memoryview(np.empty(pad + length, np.uint8))
    filled = pad
    with _deadline(served.upload_s):
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise Refused(HTTPStatus.BAD_REQUEST, "the client went before its request had come")
            part = message.get("body", b"")
            if filled + len(part) - pad > (served.largest if length is None else length):
                raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, _too_large(served.largest))
            room[filled : filled + len(part)] = part
            filled += len(part)
            if not message.get("more_body"):
                break
    body = memoryview(room)[pad:filled]
    if encoding != "identity":
        body = memoryview(await asyncio.to_thread(_unpacked, body, served.largest))
    if json_length is None:
        return len(body), body
    if json_length > len(body):
        raise invalid("Inference-Header-Content-Length", f"at most {len(body)}", json_length)
    return json_length, body


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Refuses a request of the current task that has not come after so long.

    It is ``asyncio.timeout`` of Python 3.11; ``wait_for`` would make a task for each part.
    """
    task, late = asyncio.current_task(), False

    def expire() -> None:
        nonlocal late
        late = True
        task.cancel()

    timer = asyncio.get_running_loop().call_later(seconds, expire)
    try:
        yield
    except asyncio.CancelledError:
        if not late:
            raise
        if hasattr(task, "uncancel"):  # from Python 3.11 on
            task.uncancel()
        message = f"expected the request in {seconds:g} s, found a part"
        raise Refused(HTTPStatus.REQUEST_TIMEOUT, message) from None
    finally:
        timer.cancel()


def _length(text: str | None, name: str, largest: int) -> int | None:
    """Returns what a header says a length is."""
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise invalid(name, "a number of bytes", repr(text)[:80])
    if int(text) > largest:
        raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, _too_large(largest))
    return int(text)


def _too_large(largest: int) -> str:
    return f"expected at most {largest} bytes, found more"


def _unpacked(packed: memoryview, largest: int) -> bytes:
    """Returns a packed body, of gzip or deflate."""
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)  # either, as its first bytes say
    try:
        found = unpacker.decompress(packed, largest + 1)
    except zlib.error as error:
        raise invalid("body", "gzip or deflate, as Content-Encoding says", error) from None
    if len(found) > largest:
        raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, _too_large(largest))
    if not unpacker.eof:
        raise invalid("body", "the whole of a packed body", "its start")
    return found


async def _object(request: HttpRequest, served: Served) -> dict[str, Any]:
    """Returns the JSON object of a request that is short; an empty body is an empty object."""
    _, body = await _body(request, served)
    return _parsed(body) if len(body) else {}


def _parsed(json: bytes | memoryview) -> dict[str, Any]:
    try:
        found = orjson.loads(json)
    except orjson.JSONDecodeError as error:
        raise invalid("body", "JSON", error) from None
    if not isinstance(found, dict):
        raise invalid("body", "an object of JSON", type(found).__name__)
    return found


@dataclass(frozen=True)
class _Input:
    """An input as the JSON of a request describes it.

    Attributes:
        part: where it is in shared memory; None: not there.
        size: its bytes behind the JSON; None: not there.
        data: its numbers, where it is in neither.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    part: protocol.SharedPart | None
    size: int | None
    data: Any


@dataclass(frozen=True)
class _Header:
    """What the JSON of a request says."""

    inputs: tuple[_Input, ...]
    request: protocol.Request  # without tensors


def _header(json: bytes | memoryview) -> _Header:
    """Returns what the JSON of a request says.

    Raises:
        Refused: it is at fault.
    """
    found = _parsed(json)
    parameters = _parameters("parameters", found)
    inputs: list[_Input] = []
    for one in _objects("inputs", found):
        name = one.get("name")
        if not isinstance(name, str) or any(name == other.name for other in inputs):
            raise invalid("inputs: name", "a text, each once", repr(name)[:80])
        settings = _parameters(name, one)
        dtype = protocol.dtype_of(name, one.get("datatype"))
        shape = protocol.shape_of(name, one.get("shape"))
        part = protocol.shared_part(name, settings)
        inputs.append(
            _Input(name, dtype, shape, part, settings.get("binary_data_size"), one.get("data"))
        )
    binary = parameters.get("binary_data_output") is True
    request = protocol.Request({}, binary=binary)
    request.outputs = [
        protocol.wanted_output(one.get("name"), _parameters("outputs", one), binary)
        for one in _objects("outputs", found)
    ]
    identity = found.get("id", "")
    if not isinstance(identity, str):
        raise invalid("id", "a text", repr(identity)[:80])
    request.id = identity
    protocol.options(request, parameters)
    return _Header(tuple(inputs), request)


#: Of short JSON, as it stands before tensors in bytes: a client sends the same one with every request.
_known_header = lru_cache(maxsize=256)(_header)


def _asked(
    json: memoryview, tensors: memoryview, regions: Regions, in_place: bool
) -> protocol.Request:
    """Returns the request of a body.

    Args:
        in_place: of :func:`.protocol.shared_bytes`.

    Raises:
        Refused: it is at fault.
    """
    header = _known_header(bytes(json)) if len(json) <= SHORT_JSON else _header(json)
    request = replace(header.request, inputs={}, mapped=[])
    used = 0
    for one in header.inputs:
        name, size = one.name, one.size
        if one.part is None and size is None:
            request.inputs[name] = protocol.from_list(name, one.dtype, one.shape, one.data)
            continue
        if one.part is not None:
            data = protocol.shared_bytes(request, one.part, regions, in_place)
        elif type(size) is not int or not 0 <= size <= len(tensors) - used:
            raise invalid(f"{name}: binary_data_size", f"at most {len(tensors) - used}", size)
        else:
            data = tensors[used : used + size]
            used += size
        request.inputs[name] = protocol.from_bytes(name, one.dtype, one.shape, data)
    if used != len(tensors):
        raise invalid("body", f"{used} bytes behind the JSON, as its inputs say", len(tensors))
    return request


def _parameters(name: str, found: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = found.get("parameters", {})
    if not isinstance(parameters, dict):
        raise invalid(f"{name}: parameters", "an object", type(parameters).__name__)
    return parameters


def _objects(name: str, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    objects = found.get(name, [])
    if not isinstance(objects, list) or not all(isinstance(one, dict) for one in objects):
        raise invalid(name, "a list of objects", type(objects).__name__)
    return objects


# ---- responses ----


def _json(found: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(found), status, media_type="application/json")


def _answered(
    request: protocol.Request, model: ServedModel, answers: list[protocol.Answer]
) -> Response:
    """Returns the response of a request: JSON, and the tensors that are wanted as bytes behind it."""
    outputs, tensors = [], []
    for answer in answers:
        one: dict[str, Any] = {
            "name": answer.name, "datatype": answer.datatype, "shape": answer.shape,
        }  # fmt: skip
        wanted = answer.wanted
        if wanted.shared is not None:
            one["parameters"] = {
                "shared_memory_region": wanted.shared.region,
                "shared_memory_offset": wanted.shared.offset,
                "shared_memory_byte_size": wanted.shared.byte_size,
            }
        elif wanted.binary:
            tensors.append(protocol.raw(answer))
            one["parameters"] = {"binary_data_size": len(tensors[-1])}
        elif answer.datatype == "BYTES":
            one["data"] = [text.decode("utf-8", "replace") for text in answer.array.flat]
        else:
            one["data"] = answer.array.reshape(-1)
        outputs.append(one)
    found = {"model_name": model.name, "model_version": model.version, "outputs": outputs}
    if request.id:
        found["id"] = request.id
    json = orjson.dumps(found, option=orjson.OPT_SERIALIZE_NUMPY)
    if not tensors:
        return Response(json, media_type="application/json")
    headers = {"Inference-Header-Content-Length": str(len(json))}
    body = b"".join([json, *tensors])
    return Response(body, headers=headers, media_type="application/octet-stream")
