"""A small network in PyTorch, to be exported as an ONNX file: docs/tutorials/onnx_model.md."""

from __future__ import annotations

from torch import nn


def block(inputs: int, outputs: int) -> nn.Sequential:
    """Returns a convolution that halves the image, with what usually follows it."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


def small_cnn(classes: int = 10) -> nn.Module:
    """Returns a network of float32 images [N, 3, H, W]."""
    return nn.Sequential(
        block(3, 16),
        block(16, 32),
        block(32, 64),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, classes),
    )
