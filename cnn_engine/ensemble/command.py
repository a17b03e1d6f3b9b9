"""The command line, and the order in which ranks come together, run and report."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import cli, devices, shared_options
from ..devices import cuda_module, threads
from ..errors import CnnEngineError, InputError, expected
from ..io.files import lock_folder, make_folder
from ..io.preprocess import Preprocess
from ..measure import environment
from ..report import units
from . import augment, collect, members, meters, outputs, report, train, watchdog
from .order import Order
from .pipeline import FAIL, SKIP
from .roles import ALL_SHARED, DATA_PARALLEL, DESIGNS, IN_PROCESS, NONE, Roles, roles
from .run import Plan, RankRun, make_members
from .source import Source, source
from .transport import Transport, launched_rank, transport
from .watchdog import Watchdog

INFER, TRAIN = "infer", "train"
MOST_RANKS = 65_536

#: Options that are of training alone.
_TRAINING = ("data_parallel", "checkpoint_every", "resume", "learning_rate", "weight_decay")


def parser() -> argparse.ArgumentParser:
    """Returns the command's parser."""
    p = cli.ArgumentParser(
        prog="[mpirun -n R] cnn-engine ensemble",
        description="Reads and decodes images once, and feeds them to many networks: over MPI, each rank "
        "being a process; without mpirun, in one process.",
        epilog="exit codes: 0 done; 1 a rank died, hangs or failed in a way of its own; 2 the input is at "
        "fault; 130 interrupted. Under mpirun the launcher may have its own code, never 0",
    )
    shared_options.add_list(p)
    count = cli.whole_number
    add = p.add_argument
    designs = "; ".join(f"{name}: {what}" for name, what in DESIGNS.items())
    add(
        "--design",
        default=None,
        help=f"{designs} (default: {ALL_SHARED}, of one rank {IN_PROCESS})",
    )
    add("--members", type=count(1, members.MOST_MEMBERS), metavar="N", help="how many (default: 1)")
    add(
        "--member",
        action="append",
        metavar="KEY=VALUE,...",
        help="one member, in the place of --members; may be given again. Keys: network or model (an ONNX "
        "file), weights, device, variant, dtype, name, output (of a model with several: which is kept)",
    )
    add("--work", choices=(INFER, TRAIN), default=INFER, help=f"default: {INFER}")
    add("--data", default="auto", metavar="PATH", help="a .tar of JPEGs or a folder that has train.tar "
        "and test.tar; a folder of images; jpeg:WxH: synthetic JPEGs of that size; or as for run "
        "(default: auto)")  # fmt: skip
    add("--images", type=count(1, 10**8), metavar="N", help="how many of them (default: all)")
    add("--preprocess", metavar="SETTINGS", help="how images are resized and cropped, such as imagenet or "
        "resize=256,crop=224 (default: as the members' files say, else not)")  # fmt: skip
    add(
        "--batch",
        type=count(1, 10**6),
        default=256,
        metavar="N",
        help="images per step (default: 256)",
    )
    add("--epochs", type=count(1, 10**6), default=1, metavar="N", help="default: 1")
    add("--steps", type=count(1, 10**9), metavar="N", help="the most steps in all (default: all)")
    add("--preprocessors", type=count(1, MOST_RANKS), metavar="P", help="ranks that decode in the "
        "broadcasting designs (default: half of them)")  # fmt: skip
    add("--dedicated", action="store_true", help="they have no members")
    add("--balance", action="store_true", help="measure what members cost, place them by it, and give "
        "ranks beyond their number to the costliest (--work infer)")  # fmt: skip
    for option, default, what in (
        ("queue", 4, "batches that are read and decoded ahead, at least one for each decoder"),
        ("prefetch", 4, "batches that are sent ahead"),
        ("readers", 1, "threads that read, for each pipeline"),
        ("decoders", 1, "threads that decode, for each pipeline"),
    ):
        add(f"--{option}", type=count(1, 4096), default=default, metavar="N",
            help=f"{what} (default: {default})")  # fmt: skip
    add("--augment", choices=augment.KINDS, help="mirror (fast), and shift (full), on the member's side "
        f"(default: none; full for {TRAIN})")  # fmt: skip
    add("--shuffle", action=argparse.BooleanOptionalAction, help=f"default: for {TRAIN}")
    add("--seed", type=count(0, 2**63 - 1), default=0, metavar="N", help="default: 0")
    add("--corrupt", choices=(FAIL, SKIP), default=FAIL, help="images that cannot be decoded: end, or "
        f"name them and go on (default: {FAIL})")  # fmt: skip
    add("--combine", default="mean", metavar="HOW", help="the members' probabilities: "
        f"{', '.join(members.COMBINATIONS)}, weights with commas between, or module:callable[,key=value...], "
        "which returns a function of [M, N, C] to [N, C] (default: mean)")  # fmt: skip
    add("--device", default="auto", help="of members that name none: auto (default), cpu, cuda, cuda:N; "
        "rank: the GPU of the rank's number on its host, in turn")  # fmt: skip
    add("--weights", default="default", help="of members that name none: default (default), random, or a "
        "path; {} in it is the member's number")  # fmt: skip
    add("--threads", type=count(1, threads.MOST), metavar="N", help="of a rank's CPU work (default: the "
        "CPUs granted, divided among the ranks of a host)")  # fmt: skip
    add("--data-parallel", action="store_true", help=f"with --work {TRAIN}: one model, every rank with a "
        "part of each batch, by PyTorch's DistributedDataParallel")  # fmt: skip
    add(
        "--checkpoint-every",
        type=count(1, 10**9),
        metavar="N",
        help="steps (default: those of an epoch)",
    )
    add("--resume", action="store_true", help="go on from the last checkpoint in --output that all members "
        "have; from the beginning where there is none")  # fmt: skip
    add(
        "--learning-rate",
        type=cli.number(0, 1000),
        metavar="X",
        help="highest (default: the recipe's)",
    )
    add(
        "--weight-decay",
        type=cli.number(0, 1000),
        metavar="X",
        help="of weights (default: the recipe's)",
    )
    add("--nccl", action="store_true", help="send between GPUs by NCCL, one GPU a rank")
    add("--ceilings", type=cli.number(0, 600), default=1.0, metavar="S", help="seconds for each part alone, "
        "before the run (default: 1)")  # fmt: skip
    add("--no-ceilings", action="store_true", help="leave that out")
    add("--digest", action="store_true", help="hash what each member was given, into the JSON")
    add("--mpstat", metavar="LOG", help="take CPU utilisation from a log of mpstat -P ALL SECONDS")
    add("--stall", type=cli.number(0, 10**6), default=watchdog.STALL_S, metavar="S", help="a rank whose own "
        f"work stops for so long hangs, and ends all (default: {watchdog.STALL_S:g})")  # fmt: skip
    add("--start-timeout", type=cli.number(0, 10**6), default=watchdog.START_S, metavar="S",
        help=f"the same until the first step is done (default: {watchdog.START_S:g})")  # fmt: skip
    add("--output", metavar="DIR", help="for members' probabilities or weights, and report.json")
    for option, what in (
        ("json", "the result as JSON"),
        ("csv", "one row, as --collect makes of a result"),
        ("trace", "a timeline of all ranks that Perfetto and chrome://tracing open"),
        ("html", "the report as one page"),
    ):
        add(f"--{option}", metavar="PATH", help=f"write {what}; - for standard output")
    add("--quiet", action="store_true", help="print no report")
    add("--collect", metavar="DIR", help="put the reports (JSON) of earlier runs in DIR into one table and "
        "chart: ensembles.csv, .parquet, .png, in --output or DIR")  # fmt: skip
    add("--dry-run", action="store_true", help="print every rank's role, and exit")
    add(
        "--ranks",
        type=count(1, MOST_RANKS),
        metavar="R",
        help="with --dry-run: as if there were so many",
    )
    return p


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the command with ``arguments`` (None: the process's); returns its exit code."""
    options = _options(arguments)
    if options.collect is not None:
        output = make_folder(options.output or options.collect, "--output")
        cli.show("\n".join(collect.collect(Path(options.collect), output)))
        return cli.DONE
    if options.dry_run:
        cli.show(_dry_run(options))
        return cli.DONE
    if launched_rank():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - rank 0 speaks for all
    transported = transport()
    watching = Watchdog(transported, options.stall, options.start_timeout)
    words = sys.argv[1:] if arguments is None else arguments
    session = _Session(
        options, shlex.join(["cnn-engine", "ensemble", *words]), transported, watching
    )
    try:
        session.prepare()
        session.run()
    except KeyboardInterrupt:
        return session.interrupted()
    except CnnEngineError as error:
        if transported.size == 1:
            raise
        watching.failed(error, cli.INPUT_AT_FAULT)
    except Exception as error:
        if isinstance(error, OSError) and cli.is_of_output(error):
            transported.close()
            raise
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{os.path.basename(where.filename)}:{where.lineno}"
        line = f"{type(error).__name__}: {error} ({place})"
        watching.failed(line, watchdog.LOST)
    finally:
        session.release()
        watching.stop()  # the process may go on, and must not be ended for a run that has failed
    transported.close()
    return cli.DONE


def _options(arguments: list[str] | None) -> argparse.Namespace:
    """Returns the options; of what is at fault in them, one rank tells."""
    if not launched_rank():
        options = parser().parse_args(arguments)
        _check(options)
        return options
    shown, sys.stderr = sys.stderr, open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        options = parser().parse_args(arguments)
        _check(options)
    except InputError:
        sys.exit(cli.INPUT_AT_FAULT)
    sys.stderr = shown
    return options


def _check(options: argparse.Namespace) -> None:
    if options.ranks is not None and not options.dry_run:
        raise expected("--ranks", "the option --dry-run with it", "none")
    if options.balance and options.work == TRAIN:
        raise expected("--balance", f"the work {INFER}", TRAIN)
    if options.work == INFER:
        for name in _TRAINING:
            if getattr(options, name):
                raise expected(f"--{name.replace('_', '-')}", f"the work {TRAIN}", INFER)
    elif options.output is None:
        raise expected("--output", f"a folder for the weights, with the work {TRAIN}", "none")
    if options.data_parallel and (options.design or len(_specs(options)) > 1):
        raise expected("--data-parallel", "one member, and no --design", "others")
    found = {f"--{name}": getattr(options, name) for name in ("json", "csv", "trace", "html")}
    if not launched_rank():
        cli.check_outputs(found, shared_options.files_read(options))
    _specs(options)
    if options.preprocess is not None:
        preprocess = Preprocess.parse(options.preprocess)
        if options.work == TRAIN and preprocess.normalises:
            wanted = f"no mean or std beside --work {TRAIN}, whose networks scale pixels themselves"
            raise expected("--preprocess", wanted, preprocess)


def _specs(options: argparse.Namespace) -> list[members.Spec]:
    return members.specs(
        options.members, options.member, options.device, options.weights, options.preprocess
    )


def _roles(options: argparse.Namespace, ranks: int, costs: list[float] | None = None) -> Roles:
    if options.data_parallel:
        return roles(DATA_PARALLEL, ranks, 1)
    design = options.design or (IN_PROCESS if ranks == 1 else ALL_SHARED)
    count = len(_specs(options))
    return roles(
        design, ranks, count, options.preprocessors, options.dedicated, costs, costs is not None
    )


def _dry_run(options: argparse.Namespace) -> str:
    ranks = options.ranks or int(os.environ.get("SLURM_NTASKS") or 1)
    found = _roles(options, ranks)
    names = [spec.name for spec in _specs(options)]
    what = DESIGNS.get(found.design, "one model, each rank has its part of every batch")
    lines = [f"{found.design}: {what}"]
    lines += [f"rank {rank}: {found.says(rank, names)}" for rank in range(ranks)]
    return "\n".join(lines)


class _Session:
    """All that one rank does, from the options to the outputs."""

    def __init__(
        self, options: argparse.Namespace, command: str, transported: Transport, watching: Watchdog
    ):
        self.options, self.command = options, command
        self.transport, self.watchdog = transported, watching
        self.rank = transported.rank
        self.first = self.rank == 0
        self.folder: Path | None = None
        self._lock: int | None = None
        self.run_of_rank: RankRun | None = None
        self.plan: Plan | None = None
        self.source: Source | None = None
        self.stopwatch = environment.Stopwatch()
        self.load = environment.host_load()

    def prepare(self) -> None:
        """Reads what the rank needs, and makes its members."""
        options = self.options
        given = self.transport.all((vars(options), os.uname().nodename))
        if any(one != given[0][0] for one, _ in given):
            raise InputError("options: expected the same of all ranks, found different ones")
        hosts = [host for _, host in given]
        here = hosts[: self.rank].count(hosts[self.rank])
        if options.nccl and self.transport.size == 1:
            raise expected("--nccl", "several ranks (mpirun)", "one")
        specs = [self._placed(spec, hosts) for spec in _specs(options)]
        workloads, row = members.check_shapes(specs)
        workload = workloads[0]
        if options.output is not None:
            self.folder = make_folder(options.output, "--output")
            if self.first:
                self._lock = lock_folder(self.folder, "--output")
                self._check_folder(len(specs))
        members.combination(options.combine, len(specs), len(row))
        count = threads.default() if options.threads is None else options.threads
        self.threads = count if options.threads else max(count // hosts.count(hosts[self.rank]), 1)
        preprocess = members.shared_preprocess(options.preprocess, workloads)
        self.normalise = None
        if preprocess is not None and (preprocess.normalises or members.reads_floats(workloads)):
            self.normalise = preprocess
        part = "train" if options.work == TRAIN else "test"
        self.watchdog.doing("main", "reading its data")
        self.source = source(options.data, workload, options.images, preprocess, part)
        self.watchdog.doing("main", None)  # others may be slower
        sizes = self.transport.all(len(self.source))
        if len({*sizes}) > 1:
            raise expected("--data", "as many images on every rank", sizes)
        shuffle = options.work == TRAIN if options.shuffle is None else options.shuffle
        kind = options.augment or ("full" if options.work == TRAIN else "none")
        self.watchdog.doing("main", "making its members")
        costs = self._costs(specs) if options.balance else None
        found = _roles(options, self.transport.size, costs)
        self.watchdog.know([found.says(r, [s.name for s in specs]) for r in range(found.ranks)])
        order = Order(
            len(self.source), options.batch, options.epochs, shuffle, options.seed, options.steps
        )
        maker = None
        if options.work == TRAIN:
            order, maker = self._trainer(order, specs, found)
        self.plan = Plan(
            found, order, tuple(specs), options.work, kind, options.seed, options.queue,
            options.prefetch, options.readers, options.decoders, options.corrupt,
            0.0 if options.no_ceilings else options.ceilings, options.nccl, options.digest,
            self.normalise,
        )  # fmt: skip
        self.members = make_members(
            self.plan, self.rank, len(self.source), self.folder, self.threads, maker
        )
        self.watchdog.doing("main", None)
        self.run_of_rank = RankRun(
            self.plan, self.transport, self.watchdog, self.source, workload.network.input_shape,
            self.members, here,
        )  # fmt: skip

    def _check_folder(self, count: int) -> None:
        """Refuses to train beside weights of more members, which are not to be lost, nor taken for these."""
        stale = members.others(self.folder, count) if self.options.work == TRAIN else []
        stale = [path for path in stale if path.suffix not in (".npy", ".part")]
        if stale:
            wanted = f"a folder without files of more than {units.counted(count, 'member')}"
            raise expected(
                "--output", wanted, f"{stale[0]}; choose another folder, or move it away"
            )

    def release(self) -> None:
        """Gives the output folder free."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _placed(self, spec: members.Spec, hosts: list[str]) -> members.Spec:
        weights = spec.weights.replace("{}", str(spec.index))
        device = spec.device
        if device == "rank":
            here = hosts[: self.rank].count(hosts[self.rank])
            device = f"cuda:{here % max(cuda_module.device_count(), 1)}"
        return replace(spec, weights=weights, device=device)

    def _trainer(
        self, order: Order, specs: list[members.Spec], found: Roles
    ) -> tuple[Order, Callable[[members.Spec], members.Member]]:
        """Returns the order from where training begins, and what makes a member that trains."""
        options = self.options
        every = options.checkpoint_every or order.batches_per_epoch
        if options.resume:
            steps = [sorted(train.checkpoints(self.folder, spec)) for spec in specs]
            known = self.transport.all(steps)
            together = [{s for one in known for s in one[k]} for k in range(len(specs))]
            order = replace(order, start=min(train.common_start(together), order.end))
        replicas = self.transport.size if options.data_parallel else 1
        last = order.samples % order.batch or order.batch
        if min(last, order.batch) < 2 * replicas:
            wanted = f"at least {2 * replicas} images in every step, of {order.samples}"
            raise expected("--batch", wanted, f"{order.batch}, which leaves {last} in the last")
        settings = train.Settings(
            order, self.folder, options.seed, every, self.threads, options.learning_rate,
            options.weight_decay, replicas,
        )  # fmt: skip
        return order, lambda spec: train.TrainMember(spec, settings, self.transport)

    def _costs(self, specs: list[members.Spec]) -> list[float]:
        """Returns the seconds that each member takes for a batch, measured on rank 0."""
        found = None
        if self.first:
            found = []
            batch = min(self.options.batch, len(self.source))
            images = np.zeros((batch, *self.source.shape), np.uint8)
            if self.normalise is not None:
                images = augment.normalised(images, self.normalise)
            for spec in specs:
                member = members.InferMember(spec, batch, None, self.threads)
                member.probe(images)
                begin = time.perf_counter()
                member.probe(images)
                found.append(time.perf_counter() - begin)
                member.close()
        return self.transport.all(found)[0]

    def run(self) -> None:
        """Runs, and on rank 0 writes and prints the report."""
        assert self.run_of_rank is not None
        self.run_of_rank.run()
        self.watchdog.doing("main", "its end")
        found = {member.spec.index: member.finish() for member in self.members}
        results = self.transport.to_first(found)
        reports = self.transport.to_first(self.run_of_rank.report)
        for member in self.members:
            member.close()
        if self.first:
            assert results is not None
            assert reports is not None
            extra = (
                outputs.trained(self.plan, results)
                if self.plan.work == TRAIN
                else outputs.infer(self.plan, results, self.options.combine, self.folder)
            )
            try:
                self._write(reports, extra)
            except OSError:  # standard output is full or gone; the files are written
                self.watchdog.finish()
                raise
        self.watchdog.finish()

    def interrupted(self) -> int:
        """Keeps what there is; returns the exit code, or ends with the other ranks."""
        for number in (signal.SIGINT, signal.SIGTERM):  # the launcher's, as all are ended
            signal.signal(number, signal.SIG_IGN)
        time.sleep(2 * watchdog.ROUND_S)  # a launcher's signal may be because a rank died
        for member in getattr(self, "members", ()):
            member.close()
        fault = self.watchdog.fault
        if self.first and self.run_of_rank is not None and self.folder is not None:
            about = {"interrupted": True, "fault": fault}
            outputs.write_last_words(
                self.folder / "report.json",
                report.document(self.plan, [self.run_of_rank.report], {**self._about(), **about}),
            )
        if fault is None and self.first:
            cli.show("interrupted", sys.stderr)
        if self.transport.size > 1:
            self.watchdog.leave(cli.INTERRUPTED)
        return watchdog.LOST if fault else cli.INTERRUPTED

    def _about(self) -> dict[str, Any]:
        device = self.members[0].device if self.members else devices.select("cpu")
        return {
            "command": self.command,
            **self.stopwatch.stamp(),
            "environment": environment.describe(device) | environment.state(device, self.load),
            "transport": getattr(self.transport, "name", "") + (", NCCL" if self.plan.nccl else ""),
            "data": {"name": self.source.name, "images": len(self.source)},
            "interrupted": False,
            "fault": None,
        }

    def _write(self, reports: list[Any], extra: dict[str, Any]) -> None:
        options = self.options
        notes = list(extra.pop("notes", []))
        if options.mpstat is not None:
            usage = meters.read_mpstat(options.mpstat).to_dict()
            for one in reports:
                one.usage = None
            reports[0].usage = usage
        idle = [str(r) for r, one in enumerate(reports) if one.role == "idle"]
        if idle:
            notes.append(f"idle in this design: rank {', '.join(idle)}")
        if self.plan.roles.design == NONE and self.plan.roles.ranks > len(self.plan.specs):
            notes.append("more ranks than members: some have nothing to do")
        about = self._about()
        about["environment"].setdefault("warnings", [])
        document = report.document(
            self.plan,
            reports,
            {**about, **extra, "notes": notes + about["environment"]["warnings"]},
        )
        if self.folder is not None:
            outputs.write_json(self.folder / "report.json", document)
        paths = {name: getattr(options, name) for name in ("json", "csv", "trace", "html")}
        outputs.write(document, reports, paths)
        if not options.quiet and "-" not in paths.values():
            cli.show(report.text(document))
