"""The protocol over HTTP: an ASGI application of Starlette's, which uvicorn serves."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from .. import __version__
from . import metrics, protocol
from .errors import Closed, invalid, not_found, not_implemented, refusal
from .http_requests import ReadToTheEnd, read_body, read_object, request_of
from .model import ServedModel
from .repository import Repository
from .shared_memory import Regions

#: Bytes of JSON from which it is read on another thread, so that other requests are answered meanwhile.
LONG_JSON = 1 << 17

#: Requests in a row by one connection from which on its next ones run on the event loop: nobody else waits.
ALONE = 64


@dataclass
class Served:
    """The models of a server, and the bounds of requests.

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
        """Counts inference requests in a row of one connection; None where it is unknown."""
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


class _Endpoints:
    """The answers to requests: each method takes one and returns JSON, or a response."""

    def __init__(self, served: Served) -> None:
        self._served, self._bounds = served, (served.largest, served.upload_s)

    def _model_of(self, request: HttpRequest) -> ServedModel:
        asked = request.path_params
        return self._served.models.get(asked["name"], asked.get("version", ""))

    async def live(self, _: HttpRequest) -> Response:
        return Response()

    async def ready(self, _: HttpRequest) -> Response:
        return Response(
            status_code=200 if self._served.models.ready() else HTTPStatus.SERVICE_UNAVAILABLE
        )

    async def server_metadata(self, _: HttpRequest) -> Any:
        return {"name": "cnn_engine", "version": __version__, "extensions": protocol.EXTENSIONS}

    async def model_metadata(self, request: HttpRequest) -> Any:
        return self._model_of(request).metadata()

    async def model_ready(self, request: HttpRequest) -> Response:
        self._model_of(request)
        return Response()

    async def model_config(self, request: HttpRequest) -> Any:
        return self._model_of(request).config()

    async def statistics(self, request: HttpRequest) -> Any:
        found = (
            [self._model_of(request)]
            if "name" in request.path_params
            else self._served.models.models()
        )
        return {"model_stats": [m.statistics.described(m.name, m.version) for m in found]}

    async def model_infer(self, request: HttpRequest) -> Response:
        self._served.arrived(request.scope["client"])
        model = self._model_of(request)
        json_length, body = await read_body(request, *self._bounds)
        parts = body[:json_length], body[json_length:], self._served.regions, model.reads_in_place
        if json_length > LONG_JSON:
            asked = await asyncio.to_thread(request_of, *parts)
        else:
            asked = request_of(*parts)
        return _answered(asked, *await infer(self._served, model, asked))

    async def index(self, request: HttpRequest) -> Any:
        asked = await read_object(request, *self._bounds)
        return self._served.models.index(asked.get("ready") is True)

    async def load(self, request: HttpRequest) -> Response:
        asked = await read_object(request, *self._bounds)
        if asked.get("parameters"):
            raise invalid("parameters", "none: files come from the server's folder", "some")
        await asyncio.to_thread(self._served.models.load, request.path_params["name"])
        return Response()

    async def unload(self, request: HttpRequest) -> Response:
        await asyncio.to_thread(self._served.models.unload, request.path_params["name"])
        return Response()

    async def region_status(self, request: HttpRequest) -> Any:
        return self._served.regions.status(request.path_params.get("name", ""))

    async def region_register(self, request: HttpRequest) -> Response:
        asked = await read_object(request, *self._bounds)
        key, offset, size = asked.get("key"), asked.get("offset", 0), asked.get("byte_size")
        if not isinstance(key, str) or type(offset) is not int or type(size) is not int:
            raise invalid("body", "key, offset and byte_size", str(asked)[:200])
        self._served.regions.register(request.path_params["name"], key, offset, size)
        return Response()

    async def region_unregister(self, request: HttpRequest) -> Response:
        self._served.regions.unregister(request.path_params.get("name", ""))
        return Response()

    async def nothing_to_unregister(self, _: HttpRequest) -> Response:
        return Response()

    async def no_regions(self, _: HttpRequest) -> Any:
        return []

    async def read_metrics(self, _: HttpRequest) -> Response:
        return Response(metrics.text(self._served.models), media_type=metrics.CONTENT_TYPE)


#: What answers a request: JSON, or a response.
_Handle = Callable[[HttpRequest], Awaitable[Any]]


def _unsupported(name: str) -> _Handle:
    async def refuse(_: HttpRequest) -> Response:
        raise not_implemented(name)

    return refuse


async def _missing(request: HttpRequest, _: Exception) -> Response:
    refused = not_found(f"{request.url.path}: not found; /v2 says what this server is")
    return _json({"error": str(refused)}, refused.status)


def _endpoint(handle: _Handle) -> Callable[[HttpRequest], Awaitable[Response]]:
    """Returns an endpoint that answers with an error of JSON where ``handle`` raises one."""

    async def answer(request: HttpRequest) -> Response:
        try:
            found = await handle(request)
        except Exception as error:
            refused = refusal(error)
            return _json({"error": str(refused)}, refused.status)
        return found if isinstance(found, Response) else _json(found)

    return answer


def _routes(method: str, handle: _Handle, *paths: str) -> list[Route]:
    return [Route(path, _endpoint(handle), methods=[method]) for path in paths]


def _of_model(method: str, handle: _Handle, end: str) -> list[Route]:
    """Returns the routes of a model, with and without its version."""
    base = "/v2/models/{name}"
    return _routes(method, handle, f"{base}{end}", f"{base}/versions/{{version}}{end}")


#: The path of an inference request, as the routes have it.
_INFER = re.compile(r"/v2/models/(?P<name>[^/]+)(?:/versions/(?P<version>[^/]+))?/infer")


class _InferFirst:
    """Middleware that answers inference requests itself: Starlette's routing takes a fifth of a short one."""

    def __init__(self, app: ASGIApp, infer: Callable[[HttpRequest], Awaitable[Response]]) -> None:
        self._app, self._infer = app, infer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        found = _INFER.fullmatch(scope["path"]) if is_post else None
        if found is None:
            await self._app(scope, receive, send)
            return
        scope["path_params"] = found.groupdict(default="")
        response = await self._infer(HttpRequest(scope, receive, send))
        await response(scope, receive, send)


def application(served: Served) -> Starlette:
    """Returns the ASGI application."""
    on = _Endpoints(served)
    shared, region = "/v2/systemsharedmemory", "/v2/systemsharedmemory/region/{name}"
    cuda, cuda_region = "/v2/cudasharedmemory", "/v2/cudasharedmemory/region/{name}"
    return Starlette(
        routes=[
            *_of_model("POST", on.model_infer, "/infer"),  # of other methods: 405
            *_routes("GET", on.live, "/v2/health/live"),
            *_routes("GET", on.ready, "/v2/health/ready"),
            *_routes("GET", on.server_metadata, "/v2", "/v2/"),
            *_routes("GET", on.statistics, "/v2/models/stats"),
            *_of_model("GET", on.model_metadata, ""),
            *_of_model("GET", on.model_ready, "/ready"),
            *_of_model("GET", on.model_config, "/config"),
            *_of_model("GET", on.statistics, "/stats"),
            *_routes("POST", on.index, "/v2/repository/index"),
            *_routes("POST", on.load, "/v2/repository/models/{name}/load"),
            *_routes("POST", on.unload, "/v2/repository/models/{name}/unload"),
            *_routes("GET", on.region_status, f"{shared}/status", f"{region}/status"),
            *_routes("POST", on.region_register, f"{region}/register"),
            *_routes("POST", on.region_unregister, f"{shared}/unregister", f"{region}/unregister"),
            *_routes("GET", on.no_regions, f"{cuda}/status", f"{cuda_region}/status"),
            *_routes(
                "POST", on.nothing_to_unregister, f"{cuda}/unregister", f"{cuda_region}/unregister"
            ),
            *_routes("POST", _unsupported(protocol.CUDA_MEMORY), f"{cuda_region}/register"),
            *(
                route
                for method in ("GET", "POST")
                for route in (
                    *_routes(method, _unsupported(protocol.LOGGING), "/v2/logging"),
                    *_routes(method, _unsupported(protocol.TRACING), "/v2/trace/setting"),
                    *_of_model(method, _unsupported(protocol.TRACING), "/trace/setting"),
                )
            ),
            *_routes("GET", on.read_metrics, "/metrics"),
        ],
        exception_handlers={404: _missing},
        middleware=[
            Middleware(ReadToTheEnd, served.upload_s),
            Middleware(_InferFirst, _endpoint(on.model_infer)),
        ],
    )


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
