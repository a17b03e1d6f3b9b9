"""The network of the thesis, as data: 22,466 parameters, 3.9 million multiplications per image.

It is the network of the ConvNetJS CIFAR-10 demo (https://cs.stanford.edu/people/karpathy/convnetjs).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from cnn_engine.graph.network import Conv2d, Linear, MaxPool2d, Network, Relu, Softmax
from cnn_engine.workload import Workload

from . import dataset

NETWORK = Network(
    name="cifar10",
    input_shape=dataset.IMAGE_SHAPE,
    layers=(
        Conv2d("conv1", out_channels=16, kernel=5, padding=2),
        Relu("relu1"),
        MaxPool2d("pool1", kernel=2, stride=2),
        Conv2d("conv2", out_channels=20, kernel=5, padding=2),
        Relu("relu2"),
        MaxPool2d("pool2", kernel=2, stride=2),
        Conv2d("conv3", out_channels=20, kernel=5, padding=2),
        Relu("relu3"),
        MaxPool2d("pool3", kernel=2, stride=2),
        Linear("fc", out_features=len(dataset.CLASSES)),
        Softmax("softmax"),
    ),
    scale=1 / 255,
    offset=-0.5,
)

WORKLOAD = Workload(
    network=NETWORK,
    load_data=dataset.load,
    default_weights=Path(__file__).with_name("weights.safetensors"),
    preprocess="resize=32,crop=32",
    classes=dataset.CLASSES,
    load_training=partial(dataset.load, training=True),
)
