"""Weights as ConvNetJS' CIFAR-10 demo's text files: ``layer1_conv.txt``, ..., ``layer10_fc.txt``.

A convolution's file begins with ``kernel_width kernel_height channels filters``; the weights follow, one
number a line, in the order filter, kernel column, kernel row, channel; then the biases. A fully connected
layer's begins with ``inputs outputs``; then, for each output, its weights in the order row, column, channel
of the input image; then the biases. Files are matched with the network's layers in their numbers' order.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from ...errors import InputError
from ...graph.network import LayerInfo, Network


def read(folder: Path, network: Network) -> dict[str, np.ndarray]:
    """Reads the weights of ``network`` from the text files in ``folder``.

    Raises:
        InputError: files are missing or too many, or one is not as the network needs it; names the file.
    """
    files = sorted(
        (int(match[1]), match[2], path)
        for path in folder.iterdir()
        if (match := re.fullmatch(r"layer(\d+)_(conv|fc)\.txt", path.name))
    )
    layers = [info for info in network.infos if info.operator.kind in ("conv2d", "linear")]
    if [kind for _, kind, _ in files] != [info.layer.kind for info in layers]:
        wanted = ", ".join(f"layer*_{info.layer.kind}.txt" for info in layers)
        found = ", ".join(path.name for *_, path in files) or "none"
        raise InputError(f"{folder}: expected the files {wanted} for {network.name}, found {found}")
    weights: dict[str, np.ndarray] = {}
    for (*_, path), info in zip(files, layers, strict=True):
        weights.update(_read_layer(path, info, network))
    return weights


def _read_layer(path: Path, info: LayerInfo, network: Network) -> dict[str, np.ndarray]:
    layer = info.layer
    try:
        header, _, body = path.read_text(encoding="ascii").partition("\n")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: expected text, found byte {error.object[error.start]:#04x}"
        ) from error
    outputs, *sizes = info.parameters[f"{layer.name}.weight"]
    if info.operator.kind == "conv2d":
        channels, rows, columns = sizes
        wanted = (columns, rows, channels, outputs)
        file_shape = (outputs, columns, rows, channels)
        axes = (0, 3, 2, 1)  # filter, column, row, channel -> filter, channel, row, column
    else:
        inputs = int(np.prod(info.input_shape))
        wanted = (inputs, outputs)
        image = info.input_shape if len(info.input_shape) == 3 else (inputs, 1, 1)
        file_shape = (outputs, image[1], image[2], image[0])
        axes = (0, 3, 1, 2)  # output, row, column, channel -> output, channel, row, column
    if header.split() != [str(number) for number in wanted]:
        raise InputError(
            f"{path}: expected the header {' '.join(map(str, wanted))} for {layer.name} of "
            f"{network.name}, found {header.strip()[:60]!r}"
        )
    words = body.split()
    count = int(np.prod(file_shape))
    outputs = file_shape[0]
    if len(words) != count + outputs:
        raise InputError(
            f"{path}: expected {count} weights and {outputs} biases, found {len(words)} numbers"
        )
    try:
        numbers = np.array(words, dtype=np.float64)
    except ValueError:
        place, word = next((i, w) for i, w in enumerate(words) if not _is_number(w))
        raise InputError(
            f"{path}: line {place + 2}: expected a number, found {word[:40]!r}"
        ) from None
    if not np.isfinite(numbers).all():
        place = int(np.argmin(np.isfinite(numbers)))
        raise InputError(
            f"{path}: line {place + 2}: expected a finite number, found {words[place][:40]!r}"
        )
    weight = numbers[:count].reshape(file_shape).transpose(axes)
    named = {
        f"{layer.name}.weight": weight.reshape(info.parameters[f"{layer.name}.weight"]),
        f"{layer.name}.bias": numbers[count:],
    }
    return {name: np.ascontiguousarray(value, np.float32) for name, value in named.items()}


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
