"""Contestants of a measurement: the engine, and other libraries on the same file and threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import cli
from ..errors import InputError, expected

Run = Callable[[np.ndarray], np.ndarray]
Empty = Callable[[tuple[int, ...], np.dtype], np.ndarray]


class Contestant:
    """A library with a network.

    Args:
        name, version: of the library.
        run: images [N, C, H, W] -> outputs float32 [N, classes].
        close: frees it.
        empty: returns host memory for images of a shape and type, from which the library reads them fastest.
    """

    def __init__(
        self, name: str, version: str, run: Run, close: Callable[[], None], empty: Empty = np.empty
    ) -> None:
        self.name, self.version, self.run, self.close = name, version, run, close
        self.empty = empty


def cnn_engine(model: Any, options: Any) -> Contestant:
    """Returns this engine."""
    from .. import __version__
    from ..engine.engine import Engine

    engine = Engine(model, device=options.device, dtype=options.dtype, threads=options.threads)
    return Contestant(
        "cnn_engine", __version__, engine.predict, engine.close,
        lambda shape, dtype: engine.empty_images(shape[0], dtype),
    )  # fmt: skip


def onnxruntime(model: Any, options: Any) -> Contestant:
    """Returns ONNX Runtime on the CPU."""
    library = _library("onnxruntime", "onnxruntime")
    path = _file(model, options, "onnxruntime")
    settings = library.SessionOptions()
    settings.intra_op_num_threads, settings.inter_op_num_threads = options.threads, 1
    settings.log_severity_level = 3
    session = library.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
    name, output = session.get_inputs()[0].name, session.get_outputs()[0].name

    def run(images: np.ndarray) -> np.ndarray:
        return session.run([output], {name: images})[0]

    return Contestant("ONNX Runtime", library.__version__, run, lambda: None)


def openvino(model: Any, options: Any) -> Contestant:
    """Returns OpenVINO on the CPU, compiled for each batch that comes."""
    library = _library("openvino", "openvino")
    path = _file(model, options, "openvino")
    core = library.Core()
    settings = {
        "INFERENCE_NUM_THREADS": options.threads,
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
    }
    requests: dict[tuple[int, ...], Any] = {}

    def run(images: np.ndarray) -> np.ndarray:
        request = requests.get(images.shape)
        if request is None:
            read = core.read_model(path)
            read.reshape(list(images.shape))
            request = core.compile_model(read, "CPU", settings).create_infer_request()
            requests[images.shape] = request
        request.set_input_tensor(library.Tensor(images, shared_memory=True))
        request.infer()
        return request.get_output_tensor().data

    return Contestant("OpenVINO", library.__version__.split("-")[0], run, requests.clear)


def torch(model: Any, options: Any) -> Contestant:
    """Returns PyTorch on ``--torch-model``, with random weights: its times count, not its outputs."""
    from .. import callables

    library = _library("torch", "torch")
    if options.torch_model is None:
        raise expected("--contestant", "--torch-model MODULE:CALLABLE beside torch", "none")
    build, arguments, _ = callables.resolve("--torch-model", options.torch_model)
    library.set_num_threads(options.threads)
    module = build(**arguments).eval()

    def run(images: np.ndarray) -> np.ndarray:
        with library.inference_mode():
            return module(library.from_numpy(images)).numpy()

    return Contestant("PyTorch", library.__version__, run, lambda: None)


def server(model: Any, options: Any) -> Contestant:
    """Returns a server of the Open Inference Protocol, such as ``cnn-engine serve``, asked over gRPC.

    Each thread has a connection of its own.
    """
    client = _library("tritonclient.grpc", "tritonclient[grpc]")
    if options.address is None:
        raise expected("--contestant", "--address HOST:PORT/MODEL beside server", "none")
    where, _, name = options.address.partition("/")
    first = client.InferenceServerClient(where)
    opened, mine = [first], threading.local()
    try:
        metadata = first.get_model_metadata(name)
    except client.InferenceServerException as error:
        raise InputError(
            f"--address: expected a server at {options.address}, found: {error}"
        ) from error
    tensor, output = metadata.inputs[0], metadata.outputs[0].name

    def run(images: np.ndarray) -> np.ndarray:
        if not hasattr(mine, "client"):
            mine.client = client.InferenceServerClient(where)
            opened.append(mine.client)
        asked = client.InferInput(tensor.name, images.shape, tensor.datatype)
        asked.set_data_from_numpy(images)
        return mine.client.infer(name, [asked]).as_numpy(output)

    def close() -> None:
        for one in opened:
            one.close()

    return Contestant(f"server {where}", "", run, close)


MAKERS = {
    "cnn_engine": cnn_engine, "onnxruntime": onnxruntime, "openvino": openvino, "torch": torch,
    "server": server,
}  # fmt: skip


def _library(module: str, distribution: str) -> Any:
    return cli.need("--contestant", module, distribution, "that takes part", distribution)


def _file(model: Any, options: Any, name: str) -> str:
    if options.model is None:
        raise expected("--contestant", f"--model FILE.onnx beside {name}", "none")
    return options.model
