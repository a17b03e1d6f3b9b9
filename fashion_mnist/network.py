"""The network of the course ECE 408 / CS 483 (University of Illinois, Spring 2019), as data.

The course gives a trained model for MXNet (``ece408-0002.params``, with the layers in
``ece408-symbol.json``); its users write the convolutions. Pixels enter as they are, 0 to 255.
"""

from __future__ import annotations

from functools import partial

from cnn_engine.graph.network import Conv2d, Linear, MaxPool2d, Network, Softmax, Tanh
from cnn_engine.measure.result import Result
from cnn_engine.workload import Workload

from . import dataset

NETWORK = Network(
    name="ece408",
    input_shape=dataset.IMAGE_SHAPE,
    layers=(
        Conv2d("conv1", out_channels=6, kernel=5, bias=False),
        Tanh("tanh1"),
        MaxPool2d("pool1", kernel=2, stride=2),
        Conv2d("conv2", out_channels=16, kernel=5, bias=False),
        Linear("fc1", out_features=140),
        Tanh("tanh2"),
        Linear("fc2", out_features=len(dataset.CLASSES)),
        Softmax("softmax"),
    ),
    scale=1.0,
    offset=0.0,
)


def report_lines(result: Result) -> list[str]:
    """The lines that the course's program prints: seconds of each convolution, over all images."""
    # Of a fused network, its parts, which are inside of one kernel.
    steps = [step for layer in result.layers for step in layer.inside or [layer]]
    lines = [f"Op Time: {step.seconds:.6f}" for step in steps if "conv" in step.kind.split("+")]
    if not lines and result.layers:
        lines = ["Op Time: not known, since the network's parts were not timed"]
    if result.accuracy is None:
        lines.append("Correctness: not known, since the images have no labels")
    else:
        lines.append(f"Correctness: {result.accuracy.top1:g} Model: {result.network}")
    if result.weights == "random":
        lines.append("The weights are random: correctness means nothing")
    return lines


WORKLOAD = Workload(
    network=NETWORK, load_data=dataset.load, report_lines=report_lines, classes=dataset.CLASSES,
    load_training=partial(dataset.load, training=True),
)  # fmt: skip
