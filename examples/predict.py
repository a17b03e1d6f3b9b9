"""Classifies images with a network, from a program of one's own: ``python examples/predict.py``."""

from __future__ import annotations

import numpy as np

import cnn_engine


def main() -> None:
    engine = cnn_engine.Engine("cifar10", device="cpu", threads=2)
    images = np.random.default_rng(0).integers(0, 256, (8, 3, 32, 32), np.uint8)
    probabilities: np.ndarray = engine.predict(images)
    for row in probabilities:
        best = int(row.argmax())
        print(f"class {best}: {row[best]:.3f}")

    network = cnn_engine.Network(
        "small",
        (3, 32, 32),
        (
            cnn_engine.Conv2d("conv1", 8, kernel=3, padding=1),
            cnn_engine.Relu("relu1"),
            cnn_engine.MaxPool2d("pool1", 2),
            cnn_engine.Linear("fc", 10),
            cnn_engine.Softmax("softmax"),
        ),
    )
    result = cnn_engine.Engine(network, weights="random", device="cpu").profile(images)
    print(f"{result.throughput_images_per_s:.0f} images/s, checked: {result.check}")
    rectified = cnn_engine.ops.relu(np.linspace(-1, 1, 5, dtype=np.float32))
    print(rectified, cnn_engine.__version__)


if __name__ == "__main__":
    main()
