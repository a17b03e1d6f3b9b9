"""The server: HTTP and gRPC on one event loop, and models that are loaded in the background."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from ..errors import InputError
from .http import Served, application

log = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """uvicorn's server; it records the signal that stops it, and the caller acts on that.

    Attributes:
        ended_by: the signal, or None.
    """

    ended_by: int | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ends the server on SIGINT and SIGTERM: gracefully, and at once on the second."""
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in before:
            loop.add_signal_handler(number, self._end, number)
        try:
            yield
        finally:
            for number, handler in before.items():  # removing leaves the system's own
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

    def _end(self, number: int) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        self.ended_by = self.ended_by or number


async def serve(
    served: Served,
    listener: socket.socket,
    grpc_address: tuple[str, int] | None,
    certificate: tuple[str, str] | None,
    connections: int,
    grace_s: int,
) -> int | None:
    """Serves until the process is told to end, and answers what is in progress then.

    Args:
        listener: of HTTP, bound.
        grpc_address: host and port; None: no gRPC.
        certificate: paths of a private key and a chain of certificates.
        connections: of HTTP at once.
        grace_s: seconds that requests in progress have in the end.

    Returns:
        the signal that ended it; None: no model could be loaded.

    Raises:
        InputError: an address is taken, a certificate is at fault, or no model could be loaded.
    """
    key, chain = certificate or (None, None)
    config = uvicorn.Config(
        application(served), log_config=None, log_level="warning", access_log=False, lifespan="off",
        limit_concurrency=connections, timeout_graceful_shutdown=grace_s, ssl_keyfile=key,
        ssl_certfile=chain, server_header=False,
    )  # fmt: skip
    try:
        config.load()
    except (ssl.SSLError, OSError) as error:
        raise InputError(
            f"{chain}: expected a certificate and its key in PEM, found: {error}"
        ) from None
    rpc_server = None
    scheme, port = "http" if certificate is None else "https", listener.getsockname()[1]
    host = listener.getsockname()[0]
    host = f"[{host}]" if ":" in host else host
    log.info("%s://%s:%d", scheme, host, port)
    if grpc_address is not None:
        from . import rpc

        pair = None if certificate is None else (Path(key).read_bytes(), Path(chain).read_bytes())
        wanted = f"{host}:{grpc_address[1]}"
        try:
            rpc_server, rpc_port = await rpc.start(served, wanted, pair)
        except RuntimeError as error:
            raise InputError(
                f"--grpc-port: expected a free address, found {wanted}: {error}"
            ) from None
        log.info("grpc://%s:%d", host, rpc_port)
    server = Server(config)
    loading = asyncio.create_task(_load(served, server))
    try:
        await server.serve([listener])
        log.info("ending: requests in progress are answered")
        if rpc_server is not None:
            await rpc_server.stop(grace_s)
        await loading
        return server.ended_by
    finally:
        loading.cancel()
        await asyncio.to_thread(served.models.close)
        served.regions.unregister()


async def _load(served: Served, server: uvicorn.Server) -> None:
    """Loads all models on another thread; ends the server where none can be."""
    try:
        await asyncio.to_thread(served.models.load_all)
    except BaseException:
        server.should_exit = True
        raise
    if not served.models.models():
        server.should_exit = True
        raise InputError("MODELS: expected a model that can be loaded, found none")
    log.info("ready: %s", ", ".join(sorted(model.name for model in served.models.models())))
