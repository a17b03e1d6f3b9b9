"""Runs one rank: sets up its role, feeds its members, measures."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from ..errors import UnsupportedError
from ..io.preprocess import Preprocess
from . import augment, exchange, measure
from .exchange import Exchange, Groups, OwnBatches, own_parts
from .members import InferMember, Member, Spec
from .meters import CpuSampler, GpuSampler
from .order import Batch, Order
from .pipeline import Buffer, Pipeline
from .roles import DATA_PARALLEL, NONE, Roles
from .source import Source
from .transport import NcclGroup, Transport
from .watchdog import Watchdog

#: Part of the epochs of training, at the end, in which images are mirrored alone; see the CIFAR-10 recipe.
SETTLE = 0.1

#: Batches that the ceiling of communication is measured with.
CEILING_BATCHES = 24


@dataclass(frozen=True)
class Plan:
    """The plan of a run, the same on all ranks.

    Attributes:
        roles: who does what.
        order: of the samples.
        specs: the members.
        work: ``infer`` or ``train``.
        augment, seed: see :mod:`augment`.
        queue, prefetch: batches ahead in preprocessing, and in what is sent.
        readers, decoders: threads of each pipeline.
        corrupt: ``skip`` or ``fail``.
        ceilings_s: seconds for each of the three ceilings; 0: they are not measured.
        nccl: send between GPUs.
        digest: hash what each member was given.
        normalise: of the pixels, what their members read; None: the pixels themselves.
    """

    roles: Roles
    order: Order
    specs: tuple[Spec, ...]
    work: str = "infer"
    augment: str = "none"
    seed: int = 0
    queue: int = 4
    prefetch: int = 4
    readers: int = 1
    decoders: int = 1
    corrupt: str = "fail"
    ceilings_s: float = 0.0
    nccl: bool = False
    digest: bool = False
    normalise: Preprocess | None = None

    def augmentation(self, batch: Batch) -> str:
        """Returns how a batch is augmented: in the last epochs of training, images are no longer shifted."""
        last = self.order.epochs - int(self.order.epochs * SETTLE)
        settled = self.work == "train" and batch.epoch >= last
        return "fast" if self.augment == "full" and settled else self.augment


@dataclass
class RankReport:
    """Measurements of one rank: plain values, so that they can be sent.

    Attributes:
        start_up_s: from the process's beginning to its first batch.
        process_core_s: CPU time of the process in the run, all threads, user and system.
        preprocessing: see :class:`cnn_engine.ensemble.pipeline.Work`.
        waits: of the sending thread; see :class:`cnn_engine.ensemble.exchange.Waits`.
        queues: how full they were: ``preprocessed`` and ``delivered``.
        ceilings: images/s of ``preprocessing``, ``members`` and ``communication`` alone, or None.
        usage: CPU utilisation, on one rank of each host.
    """

    rank: int
    role: str
    host: str
    steps: dict[str, Any] = field(default_factory=dict)
    preprocessing: dict[str, Any] = field(default_factory=dict)
    waits: dict[str, float] = field(default_factory=dict)
    queues: dict[str, Any] = field(default_factory=dict)
    ceilings: dict[str, float | None] = field(default_factory=dict)
    start_up_s: float | None = None
    process_core_s: float | None = None
    usage: dict[str, Any] | None = None
    gpu: dict[str, Any] | None = None
    digests: dict[int, str] = field(default_factory=dict)
    timeline: list[Any] = field(default_factory=list)
    events: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            key: value for key, value in asdict(self).items() if key not in ("timeline", "events")
        }


def process_age_s() -> float:
    """Returns the seconds since this process began, its interpreter's start included."""
    with open("/proc/self/stat", encoding="ascii") as file:
        started = int(file.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


@dataclass
class _Feed:
    """A source of batches and the members that see them."""

    batches: Exchange | OwnBatches
    members: list[Member]
    pipeline: Pipeline | None


class RankRun:
    """The run of one rank.

    Args:
        plan: what to do.
        source: of the samples; None on a rank that reads none.
        shape: of an image.
        members: of this rank, made and ready.
        gpu_index: the GPU that NCCL sends from and receives on.

    Attributes:
        report: filled as the run goes on, so that it can be kept when that is interrupted.
    """

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        watchdog: Watchdog,
        source: Source | None,
        shape: tuple[int, ...],
        members: list[Member],
        gpu_index: int = 0,
    ):
        self._gpu_index = gpu_index
        self.plan, self.transport, self.watchdog = plan, transport, watchdog
        self.source, self.shape, self.members = source, shape, members
        self.rank = transport.rank
        self.steps = measure.Steps()
        self.report = RankReport(
            self.rank, plan.roles.says(self.rank, [spec.name for spec in plan.specs]),
            socket.gethostname(),
        )  # fmt: skip
        self._groups = Groups(plan.roles, transport, self._wrap)
        self._feeds: list[_Feed] = []
        self._hashes: dict[int, Any] = {}
        self._begin = perf_counter()

    def _wrap(self, group: Any) -> Any:
        return NcclGroup(group, self._gpu_index) if self.plan.nccl else group

    def _pipeline(self, parts: Iterator[np.ndarray]) -> Pipeline:
        plan = self.plan
        return Pipeline(
            self.source, parts, queue=plan.queue, readers=plan.readers, decoders=plan.decoders,
            corrupt=plan.corrupt, tick=self.watchdog.tick,
        )  # fmt: skip

    def _empty(self) -> Callable[..., Any]:
        if not self.plan.nccl:
            return np.empty
        import cupy

        def empty(shape: Any, dtype: Any) -> Any:
            with cupy.cuda.Device(self._gpu_index):  # of this thread, whichever that is
                return cupy.empty(shape, dtype)

        return empty

    def _open(self, order: Order, canned: bool = False) -> list[_Feed]:
        """Begins to read, decode and send the batches of ``order``; ``canned``: only to send."""
        roles, rank = self.plan.roles, self.rank

        def busy(what: str | None) -> None:
            self.watchdog.doing("exchange", what)

        def pipeline() -> Any:
            parts = own_parts(roles, rank, order)
            if parts is None:
                return None
            return _Canned(parts, self.shape) if canned else self._pipeline(parts)

        if roles.shares:
            own = pipeline()
            delivered = Exchange(
                roles, rank, order, own, self._groups, self.shape,
                prefetch=self.plan.prefetch, empty=self._empty(), busy=busy,
            )  # fmt: skip
            return [_Feed(delivered, self.members, own)]
        if not self.members:
            return []
        if roles.design == NONE:
            feeds = [([member], pipeline()) for member in self.members]
        else:
            feeds = [(self.members, pipeline())]
        return [_Feed(OwnBatches(order, own), members, own) for members, own in feeds]

    def run(self) -> None:
        """Runs all batches; :attr:`report` has the measurements also when this raises."""
        plan = self.plan
        if plan.ceilings_s:
            self._measure_ceilings()
        self._wait(self.transport.barrier())
        with ExitStack() as samplers:
            cpu = self._cpu_sampler(samplers)
            gpu = self._gpu_sampler(samplers)
            self.report.start_up_s = process_age_s()
            core_s = time.process_time()
            self._begin = perf_counter()
            try:
                if not self.members:
                    self.watchdog.started()
                self.watchdog.doing("main", None)
                self._feeds = self._open(plan.order)
                self._go_through()
                self.steps.total_s = perf_counter() - self._begin
                self.watchdog.doing("main", None)
                self.watchdog.doing("exchange", None)
                self._wait(self.transport.barrier())
            finally:
                self.steps.total_s = self.steps.total_s or perf_counter() - self._begin
                self.report.process_core_s = time.process_time() - core_s
                self._fill_report()
                for feed in self._feeds:
                    feed.batches.close()
                    if feed.pipeline is not None:
                        feed.pipeline.close()
        self.report.usage = None if cpu is None else cpu.usage().to_dict()
        self.report.gpu = None if gpu is None else gpu.to_dict()

    def _wait(self, request: Any) -> None:
        self.watchdog.doing("main", None)
        while not request.done():
            time.sleep(exchange.LONGEST_S)

    def _cpu_sampler(self, samplers: ExitStack) -> CpuSampler | None:
        hosts = self.transport.all(socket.gethostname())
        if hosts.index(hosts[self.rank]) != self.rank:
            return None
        return samplers.enter_context(CpuSampler())

    def _gpu_sampler(self, samplers: ExitStack) -> GpuSampler | None:
        device = self._gpu()
        if device is None:
            return None
        try:
            return samplers.enter_context(GpuSampler(device))
        except UnsupportedError:
            return None  # the report has none; the run itself needs no meters

    def _gpu(self) -> Any:
        found = [member.device for member in self.members]
        return next((device for device in found if device.kind == "cuda"), None)

    def _go_through(self) -> None:
        iterators = [iter(feed.batches) for feed in self._feeds]
        if not self.members:  # only sends
            for iterator in iterators:
                for _ in iterator:
                    pass
            return
        steps, event = self.steps, self.steps.event
        for number in self.plan.order.numbers:
            batch = self.plan.order[number]
            if self.plan.roles.design == DATA_PARALLEL:
                batch = batch.part(self.rank, self.plan.roles.ranks)
            first = perf_counter()
            for feed, iterator in zip(self._feeds, iterators, strict=True):
                begin = perf_counter()
                self.watchdog.doing("main", None if self.plan.roles.shares else "its preprocessing")
                found, buffer = next(iterator)
                assert found == number
                waited = perf_counter()
                self.watchdog.doing("main", f"step {number}")
                images = self._prepared(buffer, batch)
                ready = perf_counter()
                for member in feed.members:
                    start = perf_counter()
                    member.step(batch, images, _on_host(buffer.labels))
                    end = perf_counter()
                    index = member.spec.index
                    steps.members_s[index] = steps.members_s.get(index, 0.0) + end - start
                    steps.compute_s += end - start
                    event(
                        member.spec.name, "compute", start - self._begin, end - self._begin, number
                    )
                    self.watchdog.tick()
                    if self.plan.digest:
                        self._hash(index, buffer, images)
                steps.waiting_s += waited - begin
                steps.augment_s += ready - waited
                event("wait", "waiting", begin - self._begin, waited - self._begin, number)
                event("augment", "augment", waited - self._begin, ready - self._begin, number)
            if not steps.steps:
                self.watchdog.started()
            steps.steps += 1
            steps.images += len(batch)
            steps.slowest_s = max(steps.slowest_s, perf_counter() - first)
        self.watchdog.doing("main", None)
        for iterator in iterators:  # what this rank still sends, or who failed at the end
            for _ in iterator:
                pass

    def _prepared(self, buffer: Buffer, batch: Any) -> Any:
        """Returns what the members of this rank read: made once for all of them, where they are."""
        plan, move = self.plan, np.asarray
        with ExitStack() as stack:
            if (device := self._gpu()) is not None:
                import cupy

                stack.enter_context(cupy.cuda.Device(device.index))
                move = cupy.asarray
            kind = plan.augmentation(batch)
            images = augment.augmented(buffer.images, batch, kind, plan.seed, move)
            return images if plan.normalise is None else augment.normalised(images, plan.normalise)

    def _hash(self, member: int, buffer: Buffer, images: Any) -> None:
        import hashlib

        one = self._hashes.setdefault(member, hashlib.blake2b(digest_size=16))
        one.update(np.ascontiguousarray(_on_host(images)).data)
        one.update(np.ascontiguousarray(_on_host(buffer.labels)).data)

    def _fill_report(self) -> None:
        steps, report = self.steps, self.report
        steps.extra_s = steps.total_s - steps.compute_s - steps.waiting_s - steps.augment_s
        report.steps = steps.to_dict()
        report.timeline, report.events = steps.timeline, steps.events
        works = [feed.pipeline.work for feed in self._feeds if feed.pipeline is not None]
        report.preprocessing = {
            "images": sum(work.images for work in works),
            "read_s": sum(work.read_s for work in works),
            "decode_s": sum(work.decode_s for work in works),
            "core_s": sum(work.core_s for work in works),
            "corrupt": sorted({sample for work in works for sample in work.corrupt}),
            "reasons": sorted({reason for work in works for reason in work.reasons}),
        }
        waits = [feed.batches.waits for feed in self._feeds]
        report.waits = {
            key: sum(getattr(one, key) for one in waits)
            for key in ("preprocessing", "peers", "members")
        }
        report.queues = {
            "preprocessed": measure.fill(
                (some for work in works for some in work.fill),
                max(self.plan.queue, self.plan.decoders),
            ),
        }
        if self.plan.roles.shares:
            report.queues["delivered"] = measure.fill(
                (some for feed in self._feeds for some in feed.batches.fill), self.plan.prefetch
            )
        report.digests = {member: one.hexdigest() for member, one in self._hashes.items()}

    # ---- ceilings ----

    def _measure_ceilings(self) -> None:
        """Measures preprocessing, the members and communication, each alone, all ranks at the same time."""
        plan = self.plan
        self._wait(self.transport.barrier())
        self.watchdog.doing("main", "the ceiling of preprocessing")
        self.report.ceilings["preprocessing"] = self._preprocessing_alone(plan.ceilings_s)
        self._wait(self.transport.barrier())
        self.watchdog.doing("main", "the ceiling of its members")
        self.report.ceilings["members"] = self._members_alone(plan.ceilings_s)
        self._wait(self.transport.barrier())
        self.report.ceilings["communication"] = self._communication_alone()
        self._wait(self.transport.barrier())

    def _preprocessing_alone(self, seconds: float) -> float | None:
        """Images/s that this rank's readers and decoders make; for ``none`` those that each member gets."""
        roles, order = self.plan.roles, self.plan.order
        if self.rank not in roles.preprocessors or not len(order):
            return None
        if next(own_parts(roles, self.rank, order), None) is None:
            return None  # fewer batches than ranks that take them in turn

        def endless() -> Iterator[np.ndarray]:
            while True:
                yield from own_parts(roles, self.rank, order)

        many = max(len(self.members), 1) if roles.design == NONE else 1
        pipelines = [self._pipeline(endless()) for _ in range(many)]
        try:
            return measure.rate(
                lambda: min(len(one.take()) for one in pipelines), seconds, self.watchdog.tick
            )
        finally:
            for one in pipelines:
                one.close()

    def _members_alone(self, seconds: float) -> float | None:
        if not self.members or not len(self.plan.order):
            return None
        batch = self.plan.order[self.plan.order.start]
        if self.plan.roles.design == DATA_PARALLEL:
            return None
        buffer = Buffer(len(batch), self.shape)
        buffer.images[...] = 0
        images = self._prepared(buffer, batch)

        def work() -> int:
            for member in self.members:
                member.probe(images)
            return len(batch)

        return measure.rate(work, seconds, self.watchdog.tick)

    def _communication_alone(self) -> float | None:
        """Images/s of batches that are sent as in the run, but come from memory and go nowhere."""
        if not self.plan.roles.shares:
            return None
        whole = self.plan.order
        order = Order(whole.batch * CEILING_BATCHES, whole.batch)
        begin = perf_counter()
        feeds = self._open(order, canned=True)
        for feed in feeds:
            for _ in feed.batches:
                pass
        self._wait(self.transport.barrier())
        passed = perf_counter() - begin
        for feed in feeds:
            feed.batches.close()
        return order.images / passed


def _on_host(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.get()


class _Canned:
    """In the place of a pipeline: buffers that are ready at once, for the ceiling of communication."""

    def __init__(self, parts: Iterator[np.ndarray], shape: tuple[int, ...]):
        self._parts, self._shape = parts, shape

    def ready(self) -> bool:
        return True

    def take(self) -> Buffer:
        return Buffer(len(next(self._parts)), self._shape)


def make_members(
    plan: Plan, rank: int, samples: int, folder: Path | None, threads: int | None,
    train: Callable[[Spec], Member] | None = None,
) -> list[Member]:  # fmt: skip
    """Returns the members of ``rank``, ready."""
    found: list[Member] = []
    for index in plan.roles.members[rank]:
        spec = plan.specs[index]
        if train is not None:
            found.append(train(spec))
            continue
        ranks = plan.roles.replicas(index)
        part = ranks.index(rank), len(ranks)
        found.append(InferMember(spec, samples, folder, threads, part))
    return found
