"""Servers in processes of their own, and networks for them: part of the benchmarks of ``serve``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

from cnn_engine.errors import InputError


class Server:
    """``cnn-engine serve`` in a process of its own, ready.

    Args:
        words: of its command line, beside the ports.

    Attributes:
        process: the server's.
        said: its lines up to ``ready:``.
        http_port, grpc_port: of this machine.

    Raises:
        InputError: it ended before it was ready.
    """

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-m", "cnn_engine.serve", *words]
        self.process = subprocess.Popen(
            [*command, "--http-port=0", "--grpc-port=0"], stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        self.said: list[str] = []
        for line in self.process.stdout:
            self.said.append(line.rstrip())
            if line.startswith("ready:"):
                break
        else:
            raise InputError(f"serve: expected it to be ready, found: {self.said[-1:]}")
        found = [line for line in self.said if line.startswith(("http://", "grpc://"))]
        ports = [line.rpartition(":")[2] for line in found]
        self.http_port, self.grpc_port = map(int, ports)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Sends a signal; returns the exit code and what the server printed after it was ready."""
        self.process.send_signal(number)
        said, _ = self.process.communicate(timeout=120)
        return self.process.returncode, said


def write_network(
    path: Path, seed: int, channels: int = 8, layers: int = 1, size: int = 12
) -> None:
    """Writes an ONNX network of random weights: convolutions, a mean and 5 outputs.

    Args:
        channels, layers: of the convolutions of 3x3.
        size: rows and columns of its images, which have three channels: input ``x``, output ``y``.
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    random = np.random.default_rng(seed)
    nodes, weights, before, wide = [], [], "x", 3
    for number in range(layers):
        name = f"w{number}"
        values = random.standard_normal((channels, wide, 3, 3), np.float32) / np.sqrt(9 * wide)
        weights.append(numpy_helper.from_array(values.astype(np.float32), name))
        nodes.append(helper.make_node("Conv", [before, name], [f"c{number}"], pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("Relu", [f"c{number}"], [f"r{number}"]))
        before, wide = f"r{number}", channels
    weights.append(numpy_helper.from_array(random.standard_normal((wide, 5), np.float32), "last"))
    nodes += [
        helper.make_node("GlobalAveragePool", [before], ["mean"]),
        helper.make_node("Flatten", ["mean"], ["flat"]),
        helper.make_node("MatMul", ["flat", "last"], ["y"]),
    ]
    floats = TensorProto.FLOAT
    graph = helper.make_graph(
        nodes, "served",
        [helper.make_tensor_value_info("x", floats, ["batch", 3, size, size])],
        [helper.make_tensor_value_info("y", floats, ["batch", 5])], weights,
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    part = path.with_suffix(".part")
    onnx.save(model, part)
    part.replace(path)  # as a served model is replaced
