"""The protocol over gRPC, with the messages that ``tritonclient`` has from its definition."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import numpy as np
from google.protobuf import json_format
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc import service_pb2_grpc as services

from .. import __version__
from . import protocol
from .errors import GRPC_STATUS, invalid, not_implemented, refusal
from .http import Served, infer
from .model import ServedModel

#: Type of a tensor -> the field that has its numbers, where they are not bytes.
CONTENTS = {
    "BOOL": "bool_contents", "UINT8": "uint_contents", "UINT16": "uint_contents",
    "UINT32": "uint_contents", "UINT64": "uint64_contents", "INT8": "int_contents",
    "INT16": "int_contents", "INT32": "int_contents", "INT64": "int64_contents",
    "FP32": "fp32_contents", "FP64": "fp64_contents",
}  # fmt: skip


def _answers(method: Callable[[Service, Any], Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Wraps a method, so that what it raises becomes a status and one line."""

    async def answer(self: Service, request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await method(self, request)
        except Exception as error:
            refused = refusal(error)
            await context.abort(grpc.StatusCode[GRPC_STATUS[refused.status]], str(refused))

    return answer


class Service(services.GRPCInferenceServiceServicer):
    """The gRPC service of the Open Inference Protocol."""

    def __init__(self, served: Served) -> None:
        self._served = served

    def _model(self, request: Any) -> ServedModel:
        return self._served.models.get(request.name, request.version)

    @_answers
    async def ServerLive(self, _: Any) -> Any:
        return messages.ServerLiveResponse(live=True)

    @_answers
    async def ServerReady(self, _: Any) -> Any:
        return messages.ServerReadyResponse(ready=self._served.models.ready())

    @_answers
    async def ServerMetadata(self, _: Any) -> Any:
        return messages.ServerMetadataResponse(
            name="cnn_engine", version=__version__, extensions=protocol.EXTENSIONS
        )

    @_answers
    async def ModelReady(self, request: Any) -> Any:
        try:
            self._model(request)
        except Exception:
            return messages.ModelReadyResponse(ready=False)
        return messages.ModelReadyResponse(ready=True)

    @_answers
    async def ModelMetadata(self, request: Any) -> Any:
        found = self._model(request).metadata()
        return json_format.ParseDict(found, messages.ModelMetadataResponse())

    @_answers
    async def ModelConfig(self, request: Any) -> Any:
        found = self._model(request).config()
        return json_format.ParseDict({"config": found}, messages.ModelConfigResponse())

    @_answers
    async def ModelStatistics(self, request: Any) -> Any:
        found = [self._model(request)] if request.name else self._served.models.models()
        stats = [model.statistics.described(model.name, model.version) for model in found]
        return json_format.ParseDict({"model_stats": stats}, messages.ModelStatisticsResponse())

    @_answers
    async def RepositoryIndex(self, request: Any) -> Any:
        found = self._served.models.index(request.ready)
        return json_format.ParseDict({"models": found}, messages.RepositoryIndexResponse())

    @_answers
    async def RepositoryModelLoad(self, request: Any) -> Any:
        if request.parameters:
            raise invalid("parameters", "none: files come from the server's folder", "some")
        await asyncio.to_thread(self._served.models.load, request.model_name)
        return messages.RepositoryModelLoadResponse()

    @_answers
    async def RepositoryModelUnload(self, request: Any) -> Any:
        await asyncio.to_thread(self._served.models.unload, request.model_name)
        return messages.RepositoryModelUnloadResponse()

    @_answers
    async def SystemSharedMemoryStatus(self, request: Any) -> Any:
        found = {region["name"]: region for region in self._served.regions.status(request.name)}
        return json_format.ParseDict(
            {"regions": found}, messages.SystemSharedMemoryStatusResponse()
        )

    @_answers
    async def SystemSharedMemoryRegister(self, request: Any) -> Any:
        self._served.regions.register(request.name, request.key, request.offset, request.byte_size)
        return messages.SystemSharedMemoryRegisterResponse()

    @_answers
    async def SystemSharedMemoryUnregister(self, request: Any) -> Any:
        self._served.regions.unregister(request.name)
        return messages.SystemSharedMemoryUnregisterResponse()

    @_answers
    async def CudaSharedMemoryStatus(self, _: Any) -> Any:
        return messages.CudaSharedMemoryStatusResponse()

    @_answers
    async def CudaSharedMemoryRegister(self, _: Any) -> Any:
        raise not_implemented(protocol.CUDA_MEMORY)

    @_answers
    async def CudaSharedMemoryUnregister(self, _: Any) -> Any:
        return messages.CudaSharedMemoryUnregisterResponse()

    @_answers
    async def TraceSetting(self, _: Any) -> Any:
        raise not_implemented(protocol.TRACING)

    @_answers
    async def LogSettings(self, _: Any) -> Any:
        raise not_implemented(protocol.LOGGING)

    @_answers
    async def ModelInfer(self, request: Any) -> Any:
        return await self._infer(request)

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], _: Any) -> AsyncIterator[Any]:
        """Answers a stream of requests, each in its turn; a wrong one is answered with its error."""
        async for request in requests:
            answer = messages.ModelStreamInferResponse()
            try:
                answer.infer_response.CopyFrom(await self._infer(request))
            except Exception as error:
                answer.error_message = str(refusal(error))
                answer.infer_response.id = request.id
            yield answer

    async def _infer(self, message: Any) -> Any:
        self._served.arrived(None)
        model = self._served.models.get(message.model_name, message.model_version)
        request = self._asked(message, model.reads_in_place)
        model, answers = await infer(self._served, model, request)
        response = messages.ModelInferResponse(
            model_name=model.name, model_version=model.version, id=request.id
        )
        for answer in answers:
            output = response.outputs.add(
                name=answer.name, datatype=answer.datatype, shape=answer.shape
            )
            shared = answer.wanted.shared
            if shared is None:
                response.raw_output_contents.append(bytes(protocol.raw(answer)))
            else:
                output.parameters["shared_memory_region"].string_param = shared.region
                output.parameters["shared_memory_offset"].int64_param = shared.offset
                output.parameters["shared_memory_byte_size"].int64_param = shared.byte_size
        return response

    def _asked(self, message: Any, in_place: bool) -> protocol.Request:
        """Returns the request of a message.

        Args:
            in_place: of :func:`.protocol.shared_bytes`.

        Raises:
            Refused: it is at fault.
        """
        outputs = [protocol.wanted_output(o.name, _parameters(o), True) for o in message.outputs]
        request = protocol.Request({}, outputs, message.id, binary=True)
        protocol.options(request, _parameters(message))
        inputs = request.inputs
        raw = iter(message.raw_input_contents)
        for one in message.inputs:
            if one.name in inputs:
                raise invalid("inputs", "each once", one.name)
            dtype = protocol.dtype_of(one.name, one.datatype)
            shape = protocol.shape_of(one.name, one.shape)
            part = protocol.shared_part(one.name, _parameters(one))
            if part is not None:
                data = protocol.shared_bytes(request, part, self._served.regions, in_place)
                inputs[one.name] = protocol.from_bytes(one.name, dtype, shape, data)
            elif message.raw_input_contents:
                data = next(raw, None)
                if data is None:
                    raise invalid("raw_input_contents", "bytes of each input", "fewer")
                inputs[one.name] = protocol.from_bytes(one.name, dtype, shape, data)
            else:
                field = CONTENTS.get(one.datatype)
                if field is None:
                    raise invalid(one.name, f"raw_input_contents for {one.datatype}", "contents")
                numbers = np.array(getattr(one.contents, field))
                inputs[one.name] = protocol.from_list(one.name, dtype, shape, numbers)
        if next(raw, None) is not None:
            raise invalid("raw_input_contents", "bytes of each input", "more")
        return request


def _parameters(message: Any) -> dict[str, Any]:
    """Returns a message's parameters, each as the number, text or truth value that it has."""
    found = {}
    for name, parameter in message.parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        found[name] = None if kind is None else getattr(parameter, kind)
    return found


async def start(
    served: Served, address: str, certificate: tuple[bytes, bytes] | None
) -> tuple[grpc.aio.Server, int]:
    """Starts to serve; returns the server and its port.

    Args:
        address: host and port; port 0 is any that is free.
        certificate: of TLS: the private key and the chain of certificates, in PEM's format.

    Raises:
        RuntimeError: the address is taken.
    """
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", served.largest),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),  # an address that another server has is an error
        ]
    )
    services.add_GRPCInferenceServiceServicer_to_server(Service(served), server)
    if certificate is None:
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, grpc.ssl_server_credentials([certificate]))
    await server.start()
    return server, port
