"""Members that train with PyTorch, by the recipe of CIFAR-10; alone or one model over several processes."""

from __future__ import annotations

import datetime
import json
import os
import re
import socket
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from .. import devices
from ..errors import InputError, UnsupportedError, expected
from ..graph.network import Network
from ..io.files import atomic_write
from .members import Spec
from .order import Batch, Order
from .transport import EXTRA, Transport

#: Checkpoints of a member that are kept: one that all members have must be among them.
KEPT = 2


def torch_modules() -> tuple[Any, Any]:
    """Returns ``torch`` and the module of the CIFAR-10 recipe.

    Raises:
        UnsupportedError: PyTorch is not installed.
    """
    try:
        import torch

        from ..workloads.cifar10 import training
    except ImportError as error:
        raise UnsupportedError(
            f"--work train: expected PyTorch, found: {error}; {EXTRA}"
        ) from error
    return torch, training


@dataclass(frozen=True)
class Settings:
    """Settings of members' training.

    Attributes:
        order: of the samples; its ``start`` is where an earlier run is continued.
        folder: for weights, logs and checkpoints.
        seed: of the first weights, to which the member's number is added.
        checkpoint_every: steps.
        threads: of PyTorch.
        learning_rate, weight_decay: of the recipe, or None for its own.
        replicas: processes that train one model; each has its part of every batch.
    """

    order: Order
    folder: Path
    seed: int
    checkpoint_every: int
    threads: int
    learning_rate: float | None = None
    weight_decay: float | None = None
    replicas: int = 1

    def kind(self, spec: Spec) -> dict[str, Any]:
        """Settings that a checkpoint and a run that continues it must share."""
        order = self.order
        return {
            "network": spec.network, "samples": order.samples, "batch": order.batch,
            "epochs": order.epochs, "shuffle": order.shuffle, "steps": order.end,
            "seed": self.seed, "learning_rate": self.learning_rate,
            "weight_decay": self.weight_decay,
        }  # fmt: skip


def checkpoints(folder: Path, spec: Spec) -> dict[int, Path]:
    """Returns the checkpoints of a member: how many steps were done -> its file."""
    pattern = re.compile(rf"{re.escape(spec.file_stem)}\.(\d+)\.checkpoint")
    names = sorted(folder.iterdir()) if folder.is_dir() else []
    found = ((pattern.fullmatch(path.name), path) for path in names)
    return {int(match[1]): path for match, path in found if match}


def common_start(steps: Iterable[Iterable[int]]) -> int:
    """Returns the most steps that all members have a checkpoint of; 0: there is none."""
    common = set.intersection(*({0, *some} for some in steps))
    return max(common)


class TrainMember:
    """Trains one network, one step per batch; continues from a checkpoint at the same batch.

    Raises:
        UnsupportedError: PyTorch is missing, or the network has layers that cannot be trained.
        InputError: the checkpoint is of another run.
    """

    def __init__(self, spec: Spec, settings: Settings, transport: Transport | None = None):
        self._torch, self._training = torch, training = torch_modules()
        self.spec, self._settings = spec, settings
        network = spec.workload().network
        if spec.model is not None or not isinstance(network, Network):
            raise expected("--member", "a network of layers to train", spec.model or spec.network)
        self.network, self.shape = network, network.input_shape
        cuda = torch.cuda.is_available()
        self.device = devices.select("cpu" if spec.device == "auto" and not cuda else spec.device)
        self._on = torch.device(self.device.name)
        if self._on.type == "cuda" and not cuda:
            raise UnsupportedError(f"--device {self.device.name}: PyTorch has no CUDA here")
        self._stack = ExitStack()
        self._stack.enter_context(training.deterministic())
        torch.set_num_threads(settings.threads)
        given = {
            key: value
            for key in ("learning_rate", "weight_decay")
            if (value := getattr(settings, key)) is not None
        }
        order = settings.order
        self._recipe = training.Recipe(
            epochs=order.epochs, batch_size=order.batch, seed=settings.seed + spec.index, **given
        )
        self._trainee = training.Trainee(network, self._recipe, order.end, self._on)
        self._probe: Any = None
        self._log: list[dict[str, Any]] = []
        self._sums = np.zeros(3)  # loss times images, right, images of this epoch
        self._last: tuple[Any, Any, int] | None = (
            None  # what the last step gave, not yet among them
        )
        self._begin = time.monotonic()
        if order.start:
            self._restore(checkpoints(settings.folder, spec)[order.start])
        self._first = True  # of the processes that train this model: it writes
        if settings.replicas > 1:
            assert transport is not None
            self._first = transport.rank == 0
            _join(torch, transport, self._on.type)
            self._stack.callback(torch.distributed.destroy_process_group)
            self._trainee.scores = _parallel(torch, training, network, self._trainee)

    def step(self, batch: Batch, images: Any, labels: np.ndarray) -> None:
        torch = self._torch
        images = self._tensor(images)
        known = labels >= 0
        if not known.all():
            labels = labels[known]
            images = images[torch.from_numpy(known).to(self._on)]
        if not known.any():
            raise expected("--data", "images with labels to train on", "a step without any")
        if len(labels) < 2:
            raise expected("--batch", "at least 2 images with labels in every step", len(labels))
        wanted = torch.from_numpy(labels.astype(np.int64)).to(self._on)
        rate, every = self._trainee.learning_rate, self._settings.checkpoint_every
        before, self._last = self._last, (*self._trainee.step(images, wanted), len(labels))
        self._add(before)
        order, done = self._settings.order, batch.number + 1
        if done % order.batches_per_epoch == 0 or done % every == 0 or done == order.end:
            self._add(self._last)
            self._last = None
        if done % order.batches_per_epoch == 0 or done == order.end:
            loss_sum, right_sum, seen = self._sums.tolist()
            self._log.append({
                "network": self.spec.name, "epoch": batch.epoch + 1, "steps": done,
                "learning_rate": rate, "loss": loss_sum / seen,
                "train_accuracy": right_sum / seen,
                "seconds": round(time.monotonic() - self._begin, 2),
            })  # fmt: skip
            self._sums[:] = 0
            self._write_log()
        if done % every == 0 or done == order.end:
            self._save(done)

    def _add(self, step: tuple[Any, Any, int] | None) -> None:
        """Waits for a step, and counts it: after the next was begun, so that the device goes on."""
        if step is None:
            return
        loss, right, count = step
        self._sums += loss.item() * count, right.item(), count
        if not np.isfinite(self._sums[0]):
            raise expected("--learning-rate", "one that converges", f"a loss of {loss.item()}")

    def _tensor(self, images: Any) -> Any:
        """Returns pixels of NumPy or CuPy as PyTorch's, on this member's device."""
        if isinstance(images, np.ndarray):
            images = self._torch.from_numpy(np.ascontiguousarray(images))
        return self._torch.as_tensor(images, device=self._on)

    def probe(self, images: Any) -> None:
        """Does a step's work on one batch with a network of its own, to be timed."""
        torch = self._torch
        if self._probe is None:
            self._probe = self._training.Trainee(self.network, self._recipe, 10**6, self._on)
        images = self._tensor(images)
        loss, _ = self._probe.step(images, torch.zeros(len(images), dtype=torch.int64).to(self._on))
        loss.item()

    def _path(self, suffix: str) -> Path:
        return self._settings.folder / f"{self.spec.file_stem}{suffix}"

    def _write_log(self) -> None:
        if self._first:
            with atomic_write(self._path(".jsonl")) as file:
                file.writelines(json.dumps(entry) + "\n" for entry in self._log)

    def _save(self, done: int) -> None:
        if not self._first:
            return
        state = {
            "kind": self._settings.kind(self.spec), "state": self._trainee.state(),
            "log": self._log, "sums": self._sums.tolist(),
        }  # fmt: skip
        with atomic_write(self._path(f".{done}.checkpoint"), "wb") as file:
            self._torch.save(state, file)
        older = sorted(step for step in checkpoints(self._settings.folder, self.spec))
        for step in older[:-KEPT]:
            self._path(f".{step}.checkpoint").unlink(missing_ok=True)

    def _restore(self, path: Path) -> None:
        try:
            found = self._torch.load(path, map_location=self._on, weights_only=True)
            kind = found["kind"]
        except Exception as error:  # pickle, zip and torch have many kinds for broken bytes
            reason = " ".join(str(error).split())[:200]
            raise expected(str(path), "a checkpoint", reason) from error
        if kind != self._settings.kind(self.spec):
            own = self._settings.kind(self.spec)
            odd = [f"{key} {kind.get(key)}" for key in own if own[key] != kind.get(key)]
            raise InputError(f"--resume: {path}: expected the same options, found {', '.join(odd)}")
        self._trainee.restore(found["state"])
        self._log, self._sums = found["log"], np.array(found["sums"])
        if self._log:
            self._begin -= self._log[-1]["seconds"]

    def finish(self) -> dict[str, Any]:
        """Writes the weights, folded as the engine runs them; returns the log."""
        weights = self._training.fold(self.network, self._trainee.parameters)
        path = self._path(".safetensors")
        if self._first:
            about = {"network": self.network.name, "log": json.dumps(self._log[-1:])}
            with atomic_write(path, "wb") as file:
                file.write(safetensors.numpy.save(weights, about))
        return {"log": self._log, "weights": str(path)}

    def close(self) -> None:
        self._stack.close()


def _join(torch: Any, transport: Transport, device: str) -> None:
    """Makes the processes of a model find each other: rank 0 says where."""
    hosts = [host for host, _ in transport.all((socket.gethostname(), None))]
    with socket.socket() as free:
        free.bind(("", 0))
        port = transport.all(free.getsockname()[1])[0]
    if len({*hosts}) == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    address = "127.0.0.1" if len({*hosts}) == 1 else hosts[0]
    torch.distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"tcp://{address}:{port}",
        rank=transport.rank,
        world_size=transport.size,
        timeout=datetime.timedelta(seconds=120),
    )


def _parallel(torch: Any, training: Any, network: Network, trainee: Any) -> Any:
    """Returns the forward pass whose backward pass averages gradients over the processes."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, value in trainee.parameters.items():
                key = name.replace(".", "__")
                if name in trainee.trained:
                    self.register_parameter(key, value)
                else:
                    self.register_buffer(key, value)

        def forward(self, images: Any) -> Any:
            return training.forward(network, trainee.parameters, images, training=True)

    return torch.nn.parallel.DistributedDataParallel(Model(), gradient_as_bucket_view=True)
