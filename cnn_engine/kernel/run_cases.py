"""Runs some cases of a kernel file in this process, for compute-sanitizer."""

from __future__ import annotations

import json
import sys

import numpy as np

from .. import devices
from ..kernels import Call
from ..kernels.user import rows
from .cases import grid


def main(path: str, device_name: str, labels: str) -> None:
    """Runs the cases called ``labels``, as JSON."""
    device, kernel = devices.select(device_name), rows.from_file(path)
    prepared = kernel.prepare(None, None, device)
    for case in grid(kernel.op):
        if case.label not in json.loads(labels):
            continue
        graph, node = case.graph, case.node
        arrays = case.arrays(np.random.default_rng(0))
        at = tuple(None if n is None else device.upload(arrays[n]) for n in node.inputs)
        y = device.allocate(graph.values["y"].nbytes)
        workspace = device.allocate(kernel.workspace(node, graph, device, 1))
        call = Call(
            node, graph.inputs_of(node), graph.outputs_of(node),
            tuple(0 if b is None else b.address for b in at), (y.address,), workspace.address,
            prepared, device, 1,
        )  # fmt: skip
        with device.context:
            function, arguments = kernel.make(call)
            function(*arguments)
        device.synchronize()


if __name__ == "__main__":
    main(*sys.argv[1:4])
