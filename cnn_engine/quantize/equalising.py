"""Cross-layer equalisation: channels between two layers are scaled to one range, which 8 bits then hold.

A positive factor of a channel goes through a relu: s * relu(x) is relu(s * x). So a layer's outputs may be
scaled where the next layer's weights are scaled back, and the network computes the same (Nagel et al., 2019,
Data-Free Quantization through Weight Equalization and Bias Correction). It is done beside depthwise
convolutions: each of their channels has one filter, and a range of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .network import FloatModel, Layer
from .ranges import Numbers

#: Channels are scaled by at most so much.
MOST = 1e3


def pairs(model: FloatModel) -> list[tuple[Layer, str, Layer]]:
    """Returns (layer, tensor between, next layer) where one is depthwise and a relu at most lies between."""
    readers, by_x, found = model.readers(), {}, []
    for layer in model.layers.values():
        by_x.setdefault(layer.x, []).append(layer)
    for layer in model.layers.values():
        name = layer.y
        if layer.operator != "Conv" or len(readers.get(name, ())) != 1:
            continue
        (only,) = readers[name]
        if only is not None and only.op_type == "Relu":
            name = only.output[0]
        following = by_x.get(name, [])
        if len(following) != 1 or len(readers[name]) != 1 or following[0].operator != "Conv":
            continue
        if _is_plain(model, following[0]) and (layer.depthwise or following[0].depthwise):
            found.append((layer, name, following[0]))
    return found


def _is_plain(model: FloatModel, layer: Layer) -> bool:
    """Whether each input channel of a layer has weights of its own in a known place."""
    node = next(node for node in model.nodes if node.name == layer.name)
    groups = next((a.i for a in node.attribute if a.name == "group"), 1)
    shape = model.constants[layer.weight].shape
    return groups == 1 or (layer.depthwise and shape[0] == groups)


def equalise(model: FloatModel, seen: Mapping[str, Numbers]) -> int:
    """Scales channels between layers so that their ranges and their weights' agree; returns how many pairs.

    Args:
        seen: what calibration saw of the tensors between.
    """
    shared = [n for layer in model.layers.values() for n in (layer.weight, layer.bias) if n]
    count = 0
    for layer, name, after in pairs(model):
        own = (layer.weight, layer.bias, after.weight)
        if any(shared.count(n) > 1 for n in own) or name not in seen:
            continue
        reach = np.maximum(np.abs(seen[name].channel_low), np.abs(seen[name].channel_high))
        weight = np.array(model.constants[after.weight], np.float64)
        others = tuple(i for i in range(weight.ndim) if i != (0 if after.depthwise else 1))
        taken = np.abs(weight).max(axis=others)
        usable = (reach > 1e-6 * reach.max()) & (taken > 0)
        factor = np.ones(len(reach))
        # The geometric mean of a channel's range and of the weights that read it, which both then have.
        factor[usable] = np.sqrt(reach[usable] * taken[usable]) / reach[usable]
        if after.depthwise:  # its weights have a scale for each channel: the range alone counts
            factor[usable] = np.exp(np.log(reach[usable]).mean()) / reach[usable]
        factor = np.clip(factor, 1 / MOST, MOST)
        first = np.array(model.constants[layer.weight], np.float64)
        first *= factor.reshape(-1, *[1] * (first.ndim - 1))
        back = [1] * weight.ndim
        back[0 if after.depthwise else 1] = -1
        model.set_constant(layer.weight, first.astype(np.float32))
        model.set_constant(after.weight, (weight / factor.reshape(back)).astype(np.float32))
        if layer.bias:
            bias = model.constants[layer.bias] * factor
            model.set_constant(layer.bias, bias.astype(np.float32))
        count += 1
    return count
