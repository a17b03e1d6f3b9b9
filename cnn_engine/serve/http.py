"""The protocol over HTTP: an ASGI application of Starlette's, which uvicorn serves."""

from __future__ import annotations

import asyncio
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
    bounds = served.largest, served.upload_s

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
        json_length, body = await read_body(request, *bounds)
        parts = body[:json_length], body[json_length:], regions, model.reads_in_place
        if json_length > LONG_JSON:
            asked = await asyncio.to_thread(request_of, *parts)
        else:
            asked = request_of(*parts)
        return _answered(asked, *await infer(served, model, asked))

    async def index(request: HttpRequest) -> Any:
        asked = await read_object(request, *bounds)
        return models.index(asked.get("ready") is True)

    async def load(request: HttpRequest) -> Response:
        asked = await read_object(request, *bounds)
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
        asked = await read_object(request, *bounds)
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
