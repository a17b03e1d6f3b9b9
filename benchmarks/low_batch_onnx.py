"""Libraries that run the ONNX file itself on a GPU, in :mod:`benchmarks.low_batch`: they may be absent.

ONNX Runtime falls back to the CPU, and TensorRT builds what it likes, unless they are asked otherwise: a
library that is not there, or would not compute in the data type, raises UnsupportedError and takes no part.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cnn_engine.errors import UnsupportedError

from .low_batch_contestants import Contestant, Model

#: Peer -> its name in tables, and the provider of ONNX Runtime.
PROVIDERS = {
    "ort-cuda": ("ONNX Runtime CUDA", "CUDAExecutionProvider"),
    "ort-tensorrt": ("ONNX Runtime TensorRT", "TensorrtExecutionProvider"),
}
TENSORRT = "TensorRT"


def _library(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnsupportedError(
            f"{name}: expected the package {module}, not found: {error}"
        ) from None


def _file(model: Model, dtype: str) -> Path:
    """Returns the network's file with its weights in a data type; images and logits stay float32."""
    if dtype in ("float32", "tf32"):
        return model.path
    if dtype != "float16":
        raise UnsupportedError(f"expected float16, tf32 or float32, found {dtype}")
    path = model.path.with_suffix(".float16.onnx")
    if not path.exists():
        import onnx

        convert = _library("onnxruntime.transformers.float16", "float16")
        made = convert.convert_float_to_float16(onnx.load(model.path), keep_io_types=True)
        part = path.with_suffix(".part")
        onnx.save(made, part)
        part.replace(path)
    return path


class OnnxRuntime:
    """ONNX Runtime with a provider of GPUs, a session for each batch. Images and logits stay on the GPU.

    Args:
        peer: of :data:`PROVIDERS`.

    Raises:
        UnsupportedError: it is not installed, or has not the provider.
    """

    def __init__(self, model: Model, dtype: str, peer: str) -> None:
        self.name, self._provider = PROVIDERS[peer]
        self._library = _library("onnxruntime", self.name)
        there = self._library.get_available_providers()
        if self._provider not in there:
            raise UnsupportedError(
                f"{self.name}: expected {self._provider}, not found: {', '.join(there)}"
            )
        if self._provider.startswith("Tensorrt") and dtype == "float32":
            raise UnsupportedError(
                f"{self.name}: expected float16 or tf32, which it uses for float32"
            )
        self._file, self._dtype = _file(model, dtype), dtype
        self._sessions: dict[int, Any] = {}

    def compile(self, images: np.ndarray) -> None:
        """Makes the session of a batch.

        Raises:
            UnsupportedError: it would run on another provider.
        """
        options = self._library.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        settings = {"trt_cuda_graph_enable": "1"}
        if self._provider.startswith("CUDA"):
            settings = {
                "enable_cuda_graph": "1", "cudnn_conv_algo_search": "EXHAUSTIVE",
                "use_tf32": str(int(self._dtype == "tf32")),
            }  # fmt: skip
        session = self._library.InferenceSession(
            str(self._file), options, providers=[(self._provider, settings)]
        )
        if session.get_providers()[0] != self._provider:
            raise UnsupportedError(
                f"{self.name}: expected {self._provider}, found {session.get_providers()[0]}"
            )
        self._sessions[len(images)] = session

    def contestant(self, images: np.ndarray) -> Contestant:
        """Returns the network with these images, which were compiled for."""
        import cupy

        session = self._sessions[len(images)]
        given, wanted = session.get_inputs()[0], session.get_outputs()[0]
        there = cupy.asarray(images)
        out = cupy.empty((len(images), wanted.shape[1]), np.float32)
        binding = session.io_binding()
        for bind, value, array in (
            (binding.bind_input, given, there), (binding.bind_output, wanted, out),
        ):  # fmt: skip
            bind(value.name, "cuda", 0, np.float32, array.shape, array.data.ptr)

        def queue() -> None:
            session.run_with_iobinding(binding)

        return _contestant(self.name, queue, binding.synchronize_outputs, images, there, out)


class TensorRT:
    """TensorRT, an engine for each batch, of a network that has its types in the file.

    Raises:
        UnsupportedError: it is not installed.
    """

    name = TENSORRT

    def __init__(self, model: Model, dtype: str) -> None:
        self._library = _library("tensorrt", self.name)
        self._file, self._dtype = _file(model, dtype), dtype
        self._engines: dict[int, Any] = {}
        self._logger = self._library.Logger(self._library.Logger.ERROR)

    def compile(self, images: np.ndarray) -> None:
        """Builds the engine of a batch.

        Raises:
            UnsupportedError: it cannot read the file, or build it.
        """
        library = self._library
        builder = library.Builder(self._logger)
        flags = 1 << int(library.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        network = builder.create_network(flags)
        parser = library.OnnxParser(network, self._logger)
        if not parser.parse_from_file(str(self._file)):
            raise UnsupportedError(
                f"{self.name}: expected to read the file, found: {parser.get_error(0)}"
            )
        config, profile = builder.create_builder_config(), builder.create_optimization_profile()
        profile.set_shape(network.get_input(0).name, *[images.shape] * 3)
        config.add_optimization_profile(profile)
        set_flag: Callable[[Any], None] = (
            config.set_flag if self._dtype == "tf32" else config.clear_flag
        )
        set_flag(library.BuilderFlag.TF32)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise UnsupportedError(f"{self.name}: expected an engine, found none")
        engine = library.Runtime(self._logger).deserialize_cuda_engine(plan)
        self._engines[len(images)] = engine

    def contestant(self, images: np.ndarray) -> Contestant:
        """Returns the network with these images, which were compiled for, in a CUDA graph."""
        import cupy

        engine = self._engines[len(images)]
        context = engine.create_execution_context()
        given, wanted = engine.get_tensor_name(0), engine.get_tensor_name(1)
        there = cupy.asarray(images)
        context.set_input_shape(given, images.shape)
        out = cupy.empty(tuple(context.get_tensor_shape(wanted)), np.float32)
        for name, array in ((given, there), (wanted, out)):
            context.set_tensor_address(name, array.data.ptr)
        stream = cupy.cuda.Stream(non_blocking=True)
        context.execute_async_v3(stream.ptr)
        stream.synchronize()
        with stream:
            stream.begin_capture()
            context.execute_async_v3(stream.ptr)
            graph = stream.end_capture()
        return _contestant(self.name, graph.launch, None, images, there, out, (context, graph))


def _contestant(
    name: str, queue: Callable[[], None], wait: Callable[[], object] | None, images: np.ndarray, there: Any,
    out: Any, keep: object = None,
) -> Contestant:  # fmt: skip
    def whole() -> np.ndarray:
        there.set(images)
        queue()
        if wait is not None:
            wait()
        return out.get()

    whole()  # what cannot run is found here
    return Contestant(name, False, queue, whole, lambda: out, wait=wait, keep=(keep, there, out))
