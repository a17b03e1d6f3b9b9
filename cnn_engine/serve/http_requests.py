"""Requests over HTTP: their bodies, read within bounds, and their JSON and tensors."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from http import HTTPStatus
from typing import Any

import numpy as np
import orjson
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import protocol
from .errors import Refused, invalid
from .shared_memory import Regions

#: The header that says where JSON ends and tensors begin, in a request and in a response.
JSON_LENGTH = "inference-header-content-length"


#: Bytes of JSON up to which what it says is remembered.
SHORT_JSON = 1 << 10


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


async def read_body(request: HttpRequest, largest: int, seconds: float) -> tuple[int, memoryview]:
    """Returns the bytes of JSON at a body's start, and the body.

    Tensors behind the JSON are aligned, so that they need not be copied once more.

    Args:
        largest: bytes of a body at most.
        seconds: in which it must have come.

    Raises:
        Refused: the body is too large, comes too slowly, is packed wrongly, or its headers are at fault.
    """
    headers = request.headers
    length = _length(headers.get("content-length"), "Content-Length", largest)
    json_length = _length(headers.get(JSON_LENGTH), "Inference-Header-Content-Length", largest)
    encoding = headers.get("content-encoding", "identity")
    if encoding not in ("identity", "gzip", "deflate"):
        raise invalid("Content-Encoding", "gzip or deflate", repr(encoding)[:80])
    pad = -(json_length or 0) % 64
    # Without its length, a body grows as it comes.
    room: Any = bytearray(pad) if length is None else memoryview(np.empty(pad + length, np.uint8))
    filled = pad
    with _deadline(seconds):
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise Refused(HTTPStatus.BAD_REQUEST, "the client went before its request had come")
            part = message.get("body", b"")
            if filled + len(part) - pad > (largest if length is None else length):
                raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, _too_large(largest))
            room[filled : filled + len(part)] = part
            filled += len(part)
            if not message.get("more_body"):
                break
    body = memoryview(room)[pad:filled]
    if encoding != "identity":
        body = memoryview(await asyncio.to_thread(_unpacked, body, largest))
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


async def read_object(request: HttpRequest, largest: int, seconds: float) -> dict[str, Any]:
    """Returns the JSON object of a request that is short; an empty body is an empty object.

    Args:
        largest, seconds: of :func:`read_body`.
    """
    _, body = await read_body(request, largest, seconds)
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


def request_of(
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
