"""Refusals of requests, each with its HTTP status and its gRPC status."""

from __future__ import annotations

from http import HTTPStatus

from ..errors import CnnEngineError, InputError

#: Status of HTTP -> the name of gRPC's.
GRPC_STATUS = {
    HTTPStatus.BAD_REQUEST: "INVALID_ARGUMENT",
    HTTPStatus.NOT_FOUND: "NOT_FOUND",
    HTTPStatus.REQUEST_TIMEOUT: "DEADLINE_EXCEEDED",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "RESOURCE_EXHAUSTED",
    HTTPStatus.INTERNAL_SERVER_ERROR: "INTERNAL",
    HTTPStatus.NOT_IMPLEMENTED: "UNIMPLEMENTED",
    HTTPStatus.SERVICE_UNAVAILABLE: "UNAVAILABLE",
    HTTPStatus.GATEWAY_TIMEOUT: "DEADLINE_EXCEEDED",
}


class Refused(CnnEngineError):
    """A request that is not answered with tensors.

    Attributes:
        status: of HTTP; :data:`GRPC_STATUS` has gRPC's.
    """

    def __init__(self, status: HTTPStatus, message: object) -> None:
        super().__init__(str(message))
        self.status = status


class Closed(Refused):
    """A request that came to a model which takes no more: it has been unloaded or replaced."""

    def __init__(self) -> None:
        super().__init__(HTTPStatus.SERVICE_UNAVAILABLE, "the model is being unloaded")


def invalid(name: str, wanted: object, found: object) -> Refused:
    """Returns the refusal ``<name>: expected <wanted>, found <found>``."""
    return Refused(HTTPStatus.BAD_REQUEST, f"{name}: expected {wanted}, found {found}")


def not_found(message: str) -> Refused:
    """Returns the refusal of a model, a version or a region that is not there."""
    return Refused(HTTPStatus.NOT_FOUND, message)


def not_implemented(name: str) -> Refused:
    """Returns the refusal of a part of the protocol that the server does not have."""
    return Refused(HTTPStatus.NOT_IMPLEMENTED, f"{name}: not part of this server")


def refusal(error: BaseException) -> Refused:
    """Returns the message to a client on any error: its own fault, or the server's."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, InputError):
        return Refused(HTTPStatus.BAD_REQUEST, error)
    return Refused(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}")
