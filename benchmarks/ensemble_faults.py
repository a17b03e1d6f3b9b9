"""Breaks ensembles on purpose, many times, and looks how they end: ``python -m benchmarks.ensemble_faults``.

Each try starts ``mpirun -n R`` on synthetic JPEGs and lets one thing happen to one rank in mid-run. All
processes have to end within :data:`LIMIT_S` of it, with a code other than 0 and one line that names the rank,
and nothing half-written may be left. ``python -m benchmarks.ensemble_faults worker ...`` is what ranks run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import result_file

#: Seconds within which everybody has ended.
LIMIT_S = 10.0

#: Images a step, and classes of the network.
BATCH, CLASSES = 20, 10

#: What happens to a rank at its step :data:`STEP`.
STEP = 6
FAULTS = {
    "kill": "kill -9 of a rank",
    "stop": "a rank is stopped (SIGSTOP), as a host that is gone",
    "raise": "a member raises",
    "hang": "a member hangs",
    "exit": "a rank ends without a word",
    "start": "a rank cannot make its members",
    "corrupt": "an image cannot be decoded",
    "interrupt": "Ctrl-C",
}
#: What must end well all the same.
SOUND = {
    "slow": "a member is slow, all queues are full",
    "skip": "an image is corrupt, and skipped",
}

DESIGNS = ("none", "all-shared", "single-bcast", "multi-bcast")

TWO = ("--preprocessors", "2")

#: What a rank of three does -> design, rank, options of the command.
ROLES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "none: decodes for its own member": ("none", 1, ()),
    "all-shared: decodes a part, has a member": ("all-shared", 1, ()),
    "single-bcast: merges and broadcasts, has a member": ("single-bcast", 0, TWO),
    "single-bcast: decodes a part, has a member": ("single-bcast", 1, TWO),
    "single-bcast: has a member alone": ("single-bcast", 2, TWO),
    "single-bcast: merges and broadcasts, has no member": ("single-bcast", 0, ("--dedicated",)),
    "multi-bcast: decodes and broadcasts, has a member": ("multi-bcast", 0, TWO),
    "multi-bcast: has a member alone": ("multi-bcast", 2, TWO),
}
#: Seconds in the command lines below after which a rank hangs: shorter than the default, to try more often.
STALL_S = 3.0


# ---- what the ranks run ----


def worker(arguments: list[str]) -> int:
    """``FAULT RANK OPTION ...``: the command with ``OPTION ...``, of which RANK does FAULT."""
    from cnn_engine.ensemble import command, members, pipeline
    from cnn_engine.ensemble.source import SyntheticJpegs
    from cnn_engine.ensemble.transport import launched_rank

    fault, rank = arguments[0], int(arguments[1])
    mine = launched_rank() == rank
    steps = 0

    def happen() -> None:
        nonlocal steps
        steps += 1
        if steps == STEP:
            print(f"fault at {time.time()} by process {os.getpid()}", file=sys.stderr, flush=True)
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif fault == "raise":
                raise ValueError("the member failed on purpose")
            elif fault == "hang":
                time.sleep(10**6)
            elif fault == "exit":
                os._exit(0)
            elif fault == "interrupt":
                os.kill(os.getppid(), signal.SIGINT)
        if fault == "slow":
            time.sleep(0.02)

    step = members.InferMember.step
    take = pipeline.Pipeline.take

    def stepped(self, *rest):
        happen()
        return step(self, *rest)

    def taken(self):
        happen()
        return take(self)

    if fault == "start" and mine:

        def refuse(self, *rest, **more):
            print(f"fault at {time.time()} by process {os.getpid()}", file=sys.stderr, flush=True)
            raise ValueError("the member cannot start on purpose")

        members.InferMember.__init__ = refuse
    elif fault in ("corrupt", "skip"):
        read = SyntheticJpegs.read

        def broken(self, sample):
            return b"no JPEG" if sample == 70 else read(self, sample)

        SyntheticJpegs.read = broken
    elif mine:
        dedicated = "--dedicated" in arguments
        if dedicated and rank == 0:
            pipeline.Pipeline.take = taken
        else:
            members.InferMember.step = stepped
    return command.main(arguments[2:])


# ---- one try ----


@dataclass
class Outcome:
    """How one try ended.

    Attributes:
        code: of mpirun.
        seconds: from the fault to the end of mpirun; of the whole run where no time was said.
        wrong: what was not as it has to be, or None.
    """

    code: int
    seconds: float
    wrong: str | None
    error: str


def environment() -> dict[str, str]:
    """Returns the variables with which Open MPI starts as root, on fewer cores than ranks, bound to none."""
    return {
        **os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none", "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def mpirun() -> str | None:
    """Returns the launcher beside this Python, or of the path, or None."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.is_file() else shutil.which("mpirun")


def attempt(
    fault: str,
    rank: int,
    ranks: int,
    design: str,
    extra: tuple[str, ...] = (),
    timeout_s: float = 90,
) -> Outcome:
    """Runs one try; see the module."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output")
        words = [
            mpirun(), "-n", str(ranks), sys.executable, "-m", "benchmarks.ensemble_faults", "worker",
            fault, str(rank), "--design", design, "--members", str(ranks), "--data", "jpeg:32x32",
            "--images", "20000" if fault in FAULTS else "600", "--batch", str(BATCH), "--no-ceilings",
            "--device", "cpu", "--threads", "1", "--output", str(output), "--stall", str(STALL_S),
            "--digest", *(("--corrupt", "skip") if fault == "skip" else ()), *extra,
        ]  # fmt: skip
        begin = time.time()
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
            start_new_session=True, cwd=Path(__file__).resolve().parents[1],
        )  # fmt: skip
        try:
            _, error = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            _, error = process.communicate()
            return Outcome(-1, timeout_s, f"still there after {timeout_s:g} s", error)
        end = time.time()
        happened = re.search(r"fault at ([0-9.]+)", error)
        seconds = end - (float(happened[1]) if happened else begin)
        dedicated = "--dedicated" in extra
        wrong = judge(fault, rank, process.returncode, seconds, error, output, dedicated)
        return Outcome(process.returncode, seconds, wrong, error)


def judge(
    fault: str,
    rank: int,
    code: int,
    seconds: float,
    error: str,
    output: Path,
    dedicated: bool = False,
) -> str | None:
    """Returns what is wrong with how a try ended, or None."""
    named = [line for line in error.splitlines() if line.startswith("error: ")]
    if fault in SOUND:
        if code or named:
            return f"code {code}, {named}"
        document = json.loads((output / "report.json").read_text())
        skipped = document["corrupt"]["samples"]
        return None if skipped == ([70] if fault == "skip" else []) else f"corrupt: {skipped}"
    if code == 0:
        return "code 0"
    if fault != "corrupt" and seconds > LIMIT_S:
        return f"{seconds:.1f} s"
    if fault == "interrupt":
        if named:
            return f"an error after Ctrl-C: {named}"
    elif len(named) != 1:
        return f"{len(named)} lines that begin with error: {named}"
    elif fault == "corrupt":
        if "synthetic JPEG 70" not in named[0]:
            return f"the image is not named: {named[0]}"
    elif f"rank {rank} " not in named[0]:
        return f"another rank is named: {named[0]}"
    left = [path.name for path in output.iterdir()] if output.is_dir() else []
    odd = [name for name in left if not re.fullmatch(r"member-\d+\.(part|npy)|report\.json", name)]
    if odd:
        return f"left behind: {odd}"
    for path in output.glob("*.json") if output.is_dir() else ():
        json.loads(path.read_text())
    for path in output.glob("*.npy") if output.is_dir() else ():
        np.load(path)
    if fault not in ("start", "corrupt"):
        # A rank that preprocesses alone has no member; others have the one of their number, and its steps.
        from cnn_engine.ensemble.members import read_part

        kept = {path.name: len(read_part(path, CLASSES)) for path in output.glob("member-*.part")}
        own = kept.get(f"member-{rank}.part", 0)
        if not (any(kept.values()) if dedicated else own >= (STEP - 1) * BATCH):
            return f"what was done is not kept: {kept} images"
    return None


def main(arguments: list[str] | None = None) -> int:
    """Runs all tries; returns 1 if one ended as it must not."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["worker"]:
        return worker(words[1:])
    parser = result_file.parser("ensemble_faults", __doc__)
    parser.add_argument("--tries", type=int, default=50, help="of each fault")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--faults", nargs="+", default=[*FAULTS, *SOUND], choices=[*FAULTS, *SOUND])
    parser.add_argument(
        "--roles", action="store_true", help="so many tries for each role of a rank, of three ranks"
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    options = parser.parse_args(words)
    turns = [
        (DESIGNS[number % len(DESIGNS)], number % options.ranks, ())
        for number in range(options.tries)
    ]
    rows: list[dict[str, Any]] = []
    for fault in options.faults:
        if options.roles:
            for role, one in ROLES.items():
                rows.append({"fault": fault, "role": role})
                tried(rows, [one] * options.tries, 3, options.output)
        else:
            rows.append({"fault": fault})
            tried(rows, turns, options.ranks, options.output)
    return int(any(row["wrong"] for row in rows))


def tried(
    rows: list[dict[str, Any]],
    tries: Sequence[tuple[str, int, tuple[str, ...]]],
    ranks: int,
    output: Path | None,
) -> None:
    """Runs tries, each (design, rank, options), of the last row's fault, and adds to it how they end."""
    row = rows[-1]
    fault = row["fault"]
    times, wrong = [], []
    for number, (design, rank, extra) in enumerate(tries, 1):
        found = attempt(fault, rank, ranks, design, extra)
        times.append(found.seconds)
        if found.wrong:
            wrong.append(f"{design}, rank {rank}: {found.wrong}")
            print(f"  {fault}: {wrong[-1]}\n{found.error}", file=sys.stderr, flush=True)
        row |= {
            "what": {**FAULTS, **SOUND}[fault], "tries": number, "as_expected": number - len(wrong),
            "seconds_median": float(np.median(times)), "seconds_most": max(times), "wrong": wrong,
        }  # fmt: skip
        if output:
            output.write_text(json.dumps(rows, indent=1) + "\n")
    print(
        f"{', '.join(filter(None, [row['what'], row.get('role')]))}: {row['as_expected']} of {row['tries']} "
        f"as expected, median {np.median(times):.2f} s, longest {max(times):.2f} s", flush=True,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
