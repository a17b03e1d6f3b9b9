"""``cnn-engine serve``: the command line."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import signal
import socket
from typing import Any

from .. import cli
from ..devices import threads as thread_counts
from ..errors import InputError, UnsupportedError, expected
from ..io.files import describe_os_error
from ..kernels import select
from .replicas import Settings
from .repository import Repository
from .shared_memory import Regions

#: Seconds that requests in progress have when the server ends.
GRACE_S = 30


def parser() -> cli.ArgumentParser:
    """Returns the command's parser."""
    count = cli.whole_number
    p = cli.ArgumentParser(
        prog="cnn-engine serve",
        description="Serves networks over HTTP and gRPC, by the Open Inference Protocol (KServe v2) that the "
        "clients of Triton and KServe speak. Requests that wait share a pass. Ctrl-C and SIGTERM end it when "
        "the requests in progress are answered.",
        epilog="exit codes: 2 a model or an option is at fault; 130 ended by Ctrl-C, 143 by SIGTERM",
    )
    p.add_argument(
        "models", nargs="+", metavar="MODELS",
        help="folders of NAME.onnx, of saved engines NAME.safetensors and of NAME/VERSION/model.onnx; such "
        "files; or networks such as cifar10",
    )  # fmt: skip
    p.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine alone")
    p.add_argument(
        "--http-port", type=count(0, 65535), default=8000, help="default: 8000; 0: any free"
    )
    p.add_argument(
        "--grpc-port", type=count(-1, 65535), default=8001,
        help="default: 8001; 0: any free; -1: no gRPC",
    )  # fmt: skip
    p.add_argument(
        "--device", default="auto", metavar="DEVICE,...",
        help="auto (default), cpu, cuda, cuda:N; of several, each has the models and takes requests",
    )  # fmt: skip
    p.add_argument(
        "--dtype", default="float32", help=f"one of {', '.join(select.DTYPES)} (default: float32)"
    )
    p.add_argument(
        "--instances", type=count(1, 1024),
        help="passes at once on each device (default: 1); of --engine ray, replicas of each model (default: "
        "one per GPU of the cluster, else one per CPU)",
    )  # fmt: skip
    p.add_argument(
        "--engine", choices=("local", "ray"), default="local",
        help="ray: passes run on replicas on the machines of a Ray cluster, each with a GPU of its own or on "
        "--threads CPUs; a replica that is lost is started again, and its passes run on others",
    )  # fmt: skip
    p.add_argument(
        "--address", help="of the Ray cluster (default: an instance of Ray on this machine alone)"
    )
    p.add_argument(
        "--threads", type=count(1, thread_counts.MOST),
        help="CPU threads of each pass (default: the CPUs granted, over the instances)",
    )  # fmt: skip
    p.add_argument(
        "--max-batch", type=count(1, 4096), default=32, metavar="N",
        help="images of a pass that requests share at most (default: 32); 1: a pass for each request",
    )  # fmt: skip
    p.add_argument(
        "--max-delay", type=count(0, 10**7), default=0, metavar="US",
        help="microseconds that a request waits for others (default: 0; it shares a pass with those that "
        "wait while all instances are busy)",
    )  # fmt: skip
    p.add_argument(
        "--queue", type=count(1, 1 << 20), default=512, metavar="N",
        help="requests of a model that may wait; more are refused with 503 (default: 512)",
    )  # fmt: skip
    p.add_argument(
        "--max-request", type=count(1, 4096), default=64, metavar="MIB",
        help="size of a request at most, else 413 (default: 64 MiB)",
    )  # fmt: skip
    p.add_argument(
        "--upload-timeout", type=cli.number(0.1, 86400), default=30.0, metavar="S",
        help="seconds in which a request must have come, else 408 (default: 30)",
    )  # fmt: skip
    p.add_argument(
        "--connections", type=count(1, 1 << 20), default=1024, metavar="N",
        help="of HTTP at once; more are refused with 503 (default: 1024)",
    )  # fmt: skip
    p.add_argument(
        "--shared-memory", action=argparse.BooleanOptionalAction, default=None,
        help="whether clients may pass tensors in this machine's shared memory (default: if --host is "
        "this machine alone)",
    )  # fmt: skip
    p.add_argument(
        "--tls-certificate", metavar="PEM", help="chain of certificates: HTTPS, and gRPC over TLS"
    )
    p.add_argument(
        "--tls-key", metavar="PEM", help="the certificate's private key, without a password"
    )
    p.add_argument("--quiet", action="store_true", help="print nothing but warnings and errors")
    return p


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    options = parser().parse_args(arguments)
    devices = tuple(options.device.split(","))
    if len(set(devices)) != len(devices):
        raise expected("--device", "each device once", options.device)
    settings = _settings(options, devices)
    certificate = _certificate(options)
    try:
        import uvloop

        from ..ray_cluster import disconnect
        from . import http, server  # and the packages that they stand on
    except ImportError as error:
        raise UnsupportedError(
            f"serve: expected Starlette, uvicorn, uvloop, orjson, prometheus-client and tritonclient, found: "
            f"{error}; pip install 'cnn-engine[serve]'"
        ) from error
    shared = (
        _is_this_machine(options.host) if options.shared_memory is None else options.shared_memory
    )
    served = http.Served(
        Repository(options.models, settings), Regions(shared), options.max_request << 20,
        options.upload_timeout,
    )  # fmt: skip
    logging.getLogger("cnn_engine.serve").addHandler(_Shown(options.quiet))
    logging.getLogger("cnn_engine.serve").setLevel(logging.INFO)
    with _socket(options.host, options.http_port) as listener:
        address = None if options.grpc_port < 0 else (options.host, options.grpc_port)
        try:
            ended_by = uvloop.run(
                server.serve(served, listener, address, certificate, options.connections, GRACE_S),
            )
        finally:
            if settings.ray:
                disconnect()
    if ended_by is not None:
        signal.raise_signal(ended_by)  # all is answered: now as every command ends on a signal
    return cli.DONE


def _settings(options: argparse.Namespace, devices: tuple[str, ...]) -> Settings:
    """Returns how all models are run.

    Raises:
        InputError: an option is at fault, or there is no cluster.
    """
    granted, ray = thread_counts.check(None, "--threads"), options.engine == "ray"
    if options.address is not None and not ray:
        raise expected("--address", "--engine ray with it", options.engine)
    instances, threads = options.instances, options.threads
    if ray:
        if len(devices) > 1 or ":" in devices[0]:
            raise expected("--device", "auto, cpu or cuda with --engine ray", options.device)
        threads = threads or 1
        from ..ray_cluster import cluster_workers, connect

        connect(options.address, instances)  # on this thread: it keeps what signals do
        if instances is None:
            cuda = devices[0].startswith("cuda")
            instances = max(cluster_workers(options.address, cuda) // (1 if cuda else threads), 1)
    instances = instances or 1
    return Settings(
        devices=devices, dtype=options.dtype, instances=instances,
        threads=threads or max(1, granted // instances), largest=options.max_batch,
        delay_s=options.max_delay / 1e6, queue=options.queue, ray=ray, address=options.address,
    )  # fmt: skip


class _Shown(logging.Handler):
    """Shows what the server says: on standard output, warnings on standard error."""

    def __init__(self, quiet: bool) -> None:
        super().__init__()
        self._quiet = quiet

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            cli.print_error(record.getMessage(), "warning")
        elif not self._quiet:
            cli.show(record.getMessage())


def _certificate(options: argparse.Namespace) -> tuple[str, str] | None:
    """Returns the paths of the key and the certificate."""
    given = (options.tls_key, options.tls_certificate)
    if given == (None, None):
        return None
    if None in given:
        raise expected("--tls-certificate", "a certificate and its --tls-key", "one of them")
    for path in given:
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise InputError(f"{path}: {describe_os_error(error)}") from None
    return given


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _socket(host: str, port: int) -> Any:
    """Returns a socket that listens.

    Raises:
        InputError: the address is taken, or none of this machine.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = error.strerror or str(error)
        raise expected(
            "--host", "a free address of this machine", f"{host}:{port}: {reason}"
        ) from None
    # Connections inherit it: headers and body of an answer are two writes, and the second must not wait.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
