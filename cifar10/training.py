"""How the weights are trained: the steps, with PyTorch; ``cifar10.train`` is the command.

The network is the one that runs, and nothing else runs with the weights: each convolution is
followed by a batch normalisation while it trains (Ioffe & Szegedy, 2015), which is folded into the
convolution's weights and bias at the end. Images are shifted and mirrored at random, but no longer
shifted in the last epochs; AdamW (Loshchilov & Hutter, 2019) follows a one-cycle schedule (Smith &
Topin, 2018). A larger network may teach the one that is trained (Hinton, Vinyals & Dean, 2015).

The images stay on the device as bytes, and are shuffled and augmented there once an epoch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from cnn_engine.errors import UnsupportedError, expected
from cnn_engine.graph.network import Layer, Network
from cnn_engine.workload import Dataset

from .recipe import Recipe

_EPSILON = 1e-5
_EVALUATION_BATCH = 1000


@dataclass(frozen=True)
class Teacher:
    """A trained network that another one learns from: its weights are as :func:`train` returns."""

    network: Network
    weights: dict[str, np.ndarray]


def initial_parameters(network: Network, seed: int) -> dict[str, torch.Tensor]:
    """Draws the first parameters, on the CPU: He et al. (2015) for weights, zero for biases.

    A convolution with a bias gets a batch normalisation, whose ``<name>.gain``, ``<name>.bias``,
    ``<name>.mean`` and ``<name>.variance`` stand in for the bias until :func:`fold`.

    Returns:
        name -> float32 tensor.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters: dict[str, torch.Tensor] = {}
    x = torch.zeros(1, *network.input_shape)
    for layer in network.layers:
        for name, shape in layer.parameters(tuple(x.shape[1:])).items():
            value = torch.zeros(shape)
            if name.endswith(".weight"):
                value.normal_(0, (2 / value[0].numel()) ** 0.5, generator=generator)
            parameters[name] = value
        if layer.kind == "conv" and layer.bias:
            channels = layer.out_channels
            parameters[f"{layer.name}.gain"] = torch.ones(channels)
            parameters[f"{layer.name}.mean"] = torch.zeros(channels)
            parameters[f"{layer.name}.variance"] = torch.ones(channels)
        x = _apply(layer, parameters, x, training=False)
    return parameters


def _is_statistic(name: str) -> bool:
    return name.endswith((".mean", ".variance"))  # moved by batch_norm, not by the optimiser


def _apply(
    layer: Layer, parameters: dict[str, torch.Tensor], x: torch.Tensor, training: bool
) -> torch.Tensor:
    def of(name: str) -> torch.Tensor | None:
        return parameters.get(f"{layer.name}.{name}")

    if layer.kind == "conv":
        normalised = of("gain") is not None
        bias = None if normalised else of("bias")
        x = F.conv2d(x, of("weight"), bias, layer.stride, layer.padding)
        if normalised:
            x = F.batch_norm(
                x, of("mean"), of("variance"), of("gain"), of("bias"), training, eps=_EPSILON
            )
        return x
    if layer.kind == "relu":
        return F.relu(x)
    if layer.kind == "tanh":
        return torch.tanh(x)
    if layer.kind == "pool":
        return F.max_pool2d(x, layer.kernel, layer.strides, layer.padding)
    if layer.kind == "fc":
        return F.linear(x.flatten(1), of("weight"), of("bias"))
    if layer.kind == "softmax":
        return x  # the loss has it built in, and the best class is the same without it
    raise UnsupportedError(
        f"{layer.name}: expected a layer that can be trained, found {layer.kind}"
    )


def forward(
    network: Network,
    parameters: dict[str, torch.Tensor],
    images: torch.Tensor,
    training: bool = False,
) -> torch.Tensor:
    """Runs the network as PyTorch does.

    Args:
        network: the network; its softmax is left out.
        parameters: of :func:`initial_parameters`, or folded ones.
        images: uint8 [N, C, H, W] on the parameters' device.
        training: whether batch normalisation uses the batch's statistics, and moves its own.

    Returns:
        float32 [N, classes], before the softmax.
    """
    scale, offset = (
        torch.tensor(values, dtype=torch.float32, device=images.device).reshape(-1, 1, 1)
        for values in (network.scale, network.offset)
    )
    x = images.float() * scale + offset
    for layer in network.layers:
        x = _apply(layer, parameters, x, training)
    return x


def fold(network: Network, parameters: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Folds each batch normalisation into its convolution.

    ``gain * (conv(x) - mean) / sqrt(variance + epsilon) + bias`` is a convolution too: the weights
    times ``gain / sqrt(...)``, and the bias less ``mean`` times that.

    Returns:
        name -> float32 array: the parameters of the network, and no others.
    """
    values = {name: value.detach().cpu().double().numpy() for name, value in parameters.items()}
    for name in [layer.name for layer in network.layers if f"{layer.name}.gain" in values]:
        factor = values.pop(f"{name}.gain") / np.sqrt(values.pop(f"{name}.variance") + _EPSILON)
        values[f"{name}.weight"] *= factor[:, None, None, None]
        values[f"{name}.bias"] -= values.pop(f"{name}.mean") * factor
    return {name: np.ascontiguousarray(value, np.float32) for name, value in values.items()}


def _augmented(
    images: torch.Tensor, order: torch.Tensor, shift: int, generator: torch.Generator
) -> torch.Tensor:
    """Returns ``images`` (uint8 [N, C, H, W]) in ``order``, mirrored and shifted at random.

    Numbers are drawn on the CPU, so that every device sees the same images.
    """
    _, channels, height, width = images.shape
    count = len(order)

    def draw(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (count, 1, 1, 1), generator=generator).to(images.device)

    def reflected(position: torch.Tensor, size: int) -> torch.Tensor:
        return size - 1 - (size - 1 - position.abs()).abs()

    def span(size: int, *shape: int) -> torch.Tensor:
        return torch.arange(size, device=images.device).view(shape)

    row = span(height, 1, 1, -1, 1) + draw(-shift, shift + 1)
    column = span(width, 1, 1, 1, -1)
    column = torch.where(draw(0, 2) == 1, width - 1 - column, column) + draw(-shift, shift + 1)
    channel = span(channels, 1, -1, 1, 1)
    image = order.to(images.device).view(-1, 1, 1, 1)
    return images[image, channel, reflected(row, height), reflected(column, width)]


def _accuracy(
    network: Network,
    parameters: dict[str, torch.Tensor],
    images: torch.Tensor,
    labels: torch.Tensor,
) -> float:
    """Returns the part of ``images`` whose best class is their label."""
    with torch.no_grad():
        correct = sum(
            (forward(network, parameters, some).argmax(1) == wanted).sum()
            for some, wanted in zip(
                images.split(_EVALUATION_BATCH), labels.split(_EVALUATION_BATCH), strict=True
            )
        )
    return correct.item() / len(labels)


def accuracy(network: Network, weights: dict[str, np.ndarray], data: Dataset) -> float:
    """Returns the part of ``data`` that the folded ``weights`` get right, in float32 on the CPU."""
    return _accuracy(network, _to_tensors(weights, "cpu"), *_tensors(data, "cpu"))


def _to_tensors(weights: dict[str, np.ndarray], device: str) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value).to(device) for name, value in weights.items()}


def _tensors(data: Dataset, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.from_numpy(data.images).to(device)
    return images, torch.from_numpy(data.labels.astype(np.int64)).to(device)


def _divergence(scores: torch.Tensor, example: torch.Tensor, temperature: float) -> torch.Tensor:
    """Returns how far the probabilities of ``scores`` are from those of ``example``, both [N, C].

    It is the Kullback-Leibler divergence, times the temperature's square, which keeps gradients of
    the size that they have without a temperature.
    """
    softened = (F.log_softmax(x / temperature, dim=1) for x in (scores, example))
    return F.kl_div(*softened, reduction="batchmean", log_target=True) * temperature**2


@contextmanager
def deterministic() -> Iterator[None]:
    """Asks PyTorch for algorithms that give the same sums every time, within the block."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


class Trainee:
    """A network while it is trained, one batch after the other.

    Args:
        network: as for :func:`train`.
        recipe: as for :func:`train`; of it, the steps depend on the rates and the teacher's part.
        steps: of the whole schedule.
        device: of PyTorch.
        teacher: as for :func:`train`.

    Attributes:
        parameters: name -> tensor; see :func:`initial_parameters`.
        scores: the forward pass in training, of uint8 [N, C, H, W]; may be replaced by one that does more,
            such as one that averages gradients over processes.
    """

    def __init__(
        self,
        network: Network,
        recipe: Recipe,
        steps: int,
        device: str | torch.device = "cpu",
        teacher: Teacher | None = None,
    ) -> None:
        self.network, self.recipe, self._teacher = network, recipe, teacher
        initial = initial_parameters(network, recipe.seed)
        self.parameters = {
            name: value.to(device) if _is_statistic(name) else torch.nn.Parameter(value.to(device))
            for name, value in initial.items()
        }
        self.trained = {k: v for k, v in self.parameters.items() if not _is_statistic(k)}
        self._taught = teacher and _to_tensors(teacher.weights, device)
        decayed = [value for value in self.trained.values() if value.ndim > 1]
        undecayed = [value for value in self.trained.values() if value.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed}, {"params": undecayed, "weight_decay": 0.0}],
            lr=recipe.learning_rate,
            weight_decay=recipe.weight_decay,
            fused=True,
        )
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer,
            recipe.learning_rate,
            total_steps=steps + 1,  # one more, as it steps after the last one too
            pct_start=0.1,
            cycle_momentum=False,
        )
        self.scores: Callable[[torch.Tensor], torch.Tensor] = lambda images: forward(
            network, self.parameters, images, training=True
        )

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return self.schedule.get_last_lr()[0]

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Learns from one batch: uint8 [N, C, H, W] and int64 [N].

        Returns:
            the mean loss, and how many were right, before the step.
        """
        scores = self.scores(images)
        loss = F.cross_entropy(scores, labels)
        if self._teacher:
            with torch.no_grad():
                example = forward(self._teacher.network, self._taught, images)
            part = self.recipe.teacher_weight
            divergence = _divergence(scores, example, self.recipe.temperature)
            loss = (1 - part) * loss + part * divergence
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.detach(), (scores.detach().argmax(1) == labels).sum()

    def state(self) -> dict:
        """Returns all that :meth:`restore` needs to go on from here."""
        return {
            "parameters": {name: value.detach().clone() for name, value in self.parameters.items()},
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
        }

    def restore(self, state: dict) -> None:
        """Goes on from what :meth:`state` returned."""
        with torch.no_grad():
            for name, value in self.parameters.items():
                value.copy_(state["parameters"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])


def train(
    network: Network,
    data: Dataset,
    recipe: Recipe,
    device: str = "cpu",
    evaluate: dict[str, Dataset] | None = None,
    log: Callable[[dict], None] = lambda entry: None,
    teacher: Teacher | None = None,
) -> dict[str, np.ndarray]:
    """Trains ``network`` on ``data``: the same numbers give the same weights on the same machine.

    Args:
        network: convolutions, activations and poolings, then fully connected layers and a softmax.
        data: images with labels.
        recipe: see :class:`Recipe`.
        device: ``"cpu"`` or ``"cuda"``.
        evaluate: name -> images with labels, whose accuracy each entry of the log has.
        log: called after each epoch with ``network`` (its name), ``epoch``, ``learning_rate`` (of its
            last step), ``loss`` and ``train_accuracy`` (means over the epoch's augmented images, as
            the weights change), ``<name>_accuracy`` and ``seconds`` (since training began).
        teacher: a network whose scores for each augmented image are learnt besides the label.

    Returns:
        name -> float32 array, ready for :meth:`Network.check_weights`.

    Raises:
        InputError: the recipe does not fit the images, or training diverged.
    """
    with deterministic():
        return _train(network, data, recipe, device, evaluate or {}, log, teacher)


def _train(
    network: Network,
    data: Dataset,
    recipe: Recipe,
    device: str,
    evaluate: dict[str, Dataset],
    log: Callable[[dict], None],
    teacher: Teacher | None,
) -> dict[str, np.ndarray]:
    steps = len(data) // recipe.batch_size
    if steps == 0:
        raise expected("--batch-size", f"at most {len(data)} (images)", recipe.batch_size)
    images, labels = _tensors(data, device)
    others = {name: _tensors(other, device) for name, other in evaluate.items()}
    generator = torch.Generator().manual_seed(recipe.seed)
    trainee = Trainee(network, recipe, recipe.epochs * steps, device, teacher)
    parameters = trainee.parameters
    settled = recipe.epochs - int(recipe.epochs * recipe.settle)
    begin = time.monotonic()
    for epoch in range(1, recipe.epochs + 1):
        shift = recipe.shift if epoch <= settled else 0
        order = torch.randperm(len(images), generator=generator)[: steps * recipe.batch_size]
        epoch_images = _augmented(images, order, shift, generator)
        epoch_labels = labels[order.to(device)]
        loss_sum = torch.zeros((), device=device)
        correct = torch.zeros((), device=device)
        batches = epoch_images.split(recipe.batch_size), epoch_labels.split(recipe.batch_size)
        for some, wanted in zip(*batches, strict=True):
            rate = trainee.learning_rate
            loss, right = trainee.step(some, wanted)
            loss_sum += loss
            correct += right
        entry = {
            "network": network.name,
            "epoch": epoch,
            "learning_rate": rate,
            "loss": loss_sum.item() / steps,
            "train_accuracy": correct.item() / len(order),
        }
        for name, tensors in others.items():
            entry[f"{name}_accuracy"] = _accuracy(network, parameters, *tensors)
        entry["seconds"] = round(time.monotonic() - begin, 2)
        if not np.isfinite(entry["loss"]):
            raise expected("--learning-rate", "one that converges", f"a loss of {entry['loss']}")
        log(entry)
    return fold(network, parameters)
