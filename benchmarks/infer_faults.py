"""Checks infer's output after crashes and faults: ``python -m benchmarks.infer_faults --work FOLDER``.

Each fault strikes a run at a random moment. Then what can be mended is, the same command is run once more,
and every file is compared with those of an undisturbed run, byte by byte. What was tried is written after
each try; ``--add`` goes on from there. Needs psutil; faults of Ray need Ray, and a full disk is a small file
system that only root can mount.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from cnn_engine import cli, devices
from cnn_engine.measure import environment
from cnn_engine.workload import get

from . import result_file

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 300

CORRUPT = "corrupt JPEG"


@dataclass
class Stand:
    """A data set, an undisturbed run of it, and how to run it again.

    Attributes:
        inputs: a folder of tars.
        device: of the workers.
        seconds: that a run takes.
        wanted: file -> bytes of the undisturbed run.
    """

    inputs: Path
    folder: Path
    random: random.Random
    device: str = "cpu"
    seconds: float = 0.0
    wanted: dict[str, bytes] = field(default_factory=dict)

    def command(self, output: Path, *more: str) -> list[str]:
        return [
            sys.executable, "-m", "cnn_engine.infer", str(self.inputs), "--output", str(output),
            "--device", self.device, "--workers", "2", "--no-ceilings", "--quiet",
            "--shard-size", str(max(path.stat().st_size for path in self.inputs.iterdir())), *more,
        ]  # fmt: skip

    def start(self, output: Path, *more: str, **options: object) -> subprocess.Popen:
        with open(self.said, "ab") as errors:
            return subprocess.Popen(
                self.command(output, *more), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=errors,
                # A shell lets what it runs in the background ignore Ctrl-C.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **options,
            )  # fmt: skip

    @property
    def said(self) -> Path:
        """The file of what commands wrote to standard error."""
        return self.folder / "said"

    def wait_a_while(self, share: float = 1.0) -> None:
        """Sleeps for a random part of what a run takes."""
        time.sleep(self.random.uniform(0, share * self.seconds))


def contents(folder: Path) -> dict[str, bytes]:
    """Returns the bytes of every shard's file."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.parquet"))}


def make_inputs(folder: Path, images: int, tars: int) -> None:
    """Writes images of CIFAR-10's size as JPEGs in tars."""
    import io
    import tarfile

    from PIL import Image

    pixels = get("cifar10").load_data("synthetic", images).images
    folder.mkdir(parents=True)
    for part, some in enumerate(np.array_split(np.arange(images), tars)):
        with tarfile.open(folder / f"part-{part:03d}.tar", "w") as archive:
            for at in some:
                file = io.BytesIO()
                Image.fromarray(pixels[at].transpose(1, 2, 0)).save(file, "JPEG")
                member = tarfile.TarInfo(f"{at:06d}.jpg")
                member.size = file.tell()
                file.seek(0)
                archive.addfile(member, file)


def end(process: subprocess.Popen) -> int:
    """Waits for a process; returns its exit code."""
    try:
        return process.wait(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return -999


def children(process: subprocess.Popen, name: str) -> list[psutil.Process]:
    """Returns what a command started whose command line has ``name`` in it."""
    found = []
    with suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.Error):
                if name in " ".join(child.cmdline()):
                    found.append(child)
    return found


# ---- the faults: each disturbs a run that writes to `output`, and returns its exit code ----


def kill_worker(stand: Stand, output: Path) -> int:
    process = stand.start(output)
    stand.wait_a_while()
    _kill_one(stand, children(process, "cnn_engine.infer.worker"))
    return end(process)


def kill_parent(stand: Stand, output: Path) -> int:
    process = stand.start(output)
    stand.wait_a_while()
    process.kill()
    return end(process)


def interrupt(stand: Stand, output: Path) -> int:
    process = stand.start(output)
    stand.wait_a_while()
    process.send_signal(signal.SIGINT)
    return end(process)


def terminate(stand: Stand, output: Path) -> int:
    process = stand.start(output)
    stand.wait_a_while()
    process.send_signal(signal.SIGTERM)
    return end(process)


def kill_actor(stand: Stand, output: Path) -> int:
    process = stand.start(output, "--engine", "ray")
    _when_there(process, "ray::Actor")
    stand.wait_a_while()
    _kill_one(stand, children(process, "ray::Actor"))
    return end(process)


def kill_raylet(stand: Stand, output: Path) -> int:
    process = stand.start(output, "--engine", "ray")
    _when_there(process, "ray::Actor")
    stand.wait_a_while()
    for child in children(process, "raylet/raylet"):
        child.kill()
    return end(process)


def full_disk(stand: Stand, output: Path) -> int:
    """Runs on a file system that a random part of the rows fits into."""
    # Of whole pages; what a run keeps beside the rows is some of it.
    need = sum(-(-len(data) // 4096) * 4096 for data in stand.wanted.values())
    size = int(need * stand.random.uniform(0.02, 0.95)) // 4096 * 4096
    output.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(output)]
    subprocess.run(mount, check=True)
    try:
        code = end(stand.start(output))
        left = list(output.glob("_run/temporary/*/*"))
        code = code if not left else -998
    finally:
        _release(output)
    return code


def _release(output: Path) -> None:
    """Moves what a small file system has to the disk below it."""
    kept = output.with_name(f"{output.name}-kept")
    shutil.copytree(output, kept)
    subprocess.run(["umount", str(output)], check=True)
    output.rmdir()
    kept.rename(output)


def unreadable_shard(stand: Stand, output: Path) -> int:
    """Cuts off a tar of a run that has begun, and gives it back for the next."""
    path = stand.random.choice(sorted(stand.inputs.glob("*.tar")))
    whole, times = path.read_bytes(), path.stat()
    process = stand.start(output)
    while not (output / "_run/run.json").exists() and process.poll() is None:  # planned
        time.sleep(0.01)
    stand.wait_a_while(0.3)
    path.write_bytes(whole[: stand.random.randrange(len(whole))])
    code = end(process)
    path.write_bytes(whole)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as another file it would be refused
    return code


def two_commands(stand: Stand, output: Path) -> int:
    """Runs the command twice at once; returns the code of the one that was not refused."""
    first = stand.start(output)
    stand.wait_a_while()
    second = stand.start(output)
    codes = sorted((end(first), end(second)))
    return codes[0] if codes in ([0, 0], [0, 2]) else -997


FAULTS: dict[str, tuple[Callable[[Stand, Path], int], tuple[int, ...]]] = {
    "kill -9 a worker": (kill_worker, (0,)),
    "kill -9 the parent": (kill_parent, (-signal.SIGKILL, 0)),
    "Ctrl-C": (interrupt, (130, -signal.SIGINT, 0)),
    "SIGTERM": (
        terminate,
        (143, -signal.SIGTERM, 0),
    ),  # before the command has begun, as any program
    "full disk": (full_disk, (2,)),
    "unreadable shard": (unreadable_shard, (1, 0)),
    "two commands on one folder": (two_commands, (0,)),
    "kill -9 a Ray actor": (kill_actor, (0,)),
    "kill -9 the raylet": (kill_raylet, (-1,)),  # whatever Ray makes of it, but not forever
}


def _kill_one(stand: Stand, found: list[psutil.Process]) -> None:
    if found:
        with suppress(psutil.Error):
            stand.random.choice(found).kill()


def _when_there(process: subprocess.Popen, name: str) -> None:
    """Waits until a command has started a process of that name."""
    begin = time.monotonic()
    while not children(process, name) and process.poll() is None:
        if time.monotonic() - begin > 60:
            return
        time.sleep(0.1)


def corrupt_jpeg(stand: Stand, output: Path) -> tuple[int, bool]:
    """Breaks a random image; returns the exit code and whether its row alone differs, in two runs."""
    import pyarrow.parquet as pq

    path = stand.random.choice(sorted(stand.inputs.glob("*.tar")))
    whole = path.read_bytes()
    broken = bytearray(whole)
    starts = [at for at in range(0, len(whole), 512) if whole[at : at + 3] == b"\xff\xd8\xff"]
    at = stand.random.choice(starts)
    broken[at : at + 3] = b"bad"
    path.write_bytes(broken)
    try:
        codes = [end(stand.start(output)), end(stand.start(output))]
    finally:
        path.write_bytes(whole)
    differ = [name for name, data in contents(output).items() if data != stand.wanted.get(name)]
    rows, reference = (
        pq.read_table(folder).to_pylist() for folder in (output, stand.folder / "undisturbed")
    )
    wrong = [row for row, wanted in zip(rows, reference, strict=True) if row != wanted]
    good = (
        codes == [0, 0]
        and len(differ) == len(wrong) == 1
        and wrong[0]["probabilities"] is None
        and wrong[0]["error"].startswith("expected an image")
    )
    return codes[0], good


def mended(stand: Stand, name: str, output: Path) -> tuple[int, bool]:
    """Lets a fault strike; returns the exit code and whether one more run gives what none had disturbed."""
    fault, allowed = FAULTS[name]
    stand.said.write_bytes(b"")
    code = fault(stand, output)
    again = end(stand.start(output))
    same = contents(output) == stand.wanted and not list(output.glob("_run/temporary/*/*"))
    good = again == 0 and same and (code in allowed or allowed == (-1,))
    if not good:
        print(f"{name}: exit codes {code} and {again}, identical: {same}", flush=True)
        print(stand.said.read_text("utf-8", "replace")[-2000:], flush=True)
    return code, good


def stand_in(folder: Path, images: int, tars: int, seed: int, device: str) -> Stand:
    """Returns a data set in ``folder`` with an undisturbed run."""
    stand = Stand(folder / "in", folder, random.Random(seed), device)
    make_inputs(stand.inputs, images, tars)
    begin = time.monotonic()
    code = end(stand.start(folder / "undisturbed"))
    stand.seconds = time.monotonic() - begin
    stand.wanted = contents(folder / "undisturbed")
    if code or not stand.wanted:
        raise RuntimeError(f"the undisturbed run ended with {code}")
    return stand


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the faults; returns 0 if one more run mended each."""
    names = (*FAULTS, CORRUPT)
    p = result_file.parser("infer_faults", __doc__, "json", "markdown")
    p.add_argument("--work", required=True, help="a new folder for the runs")
    p.add_argument("--repeats", type=int, default=20)
    p.add_argument("--images", type=int, default=12_000)
    p.add_argument("--tars", type=int, default=40)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument(
        "--device",
        default="cpu",
        help="of the two workers (default: cpu; cuda: a GPU each in turn)",
    )
    p.add_argument("--only", action="append", choices=names, help="may be given again")
    p.add_argument("--add", action="store_true", help="to the tries in --json's file")
    options = p.parse_args(arguments)
    found = result_file.ResultFile(
        "infer_faults", options, arguments,
        environment=environment.describe(devices.select(options.device)),
        commands=[], faults=[],
    )  # fmt: skip
    document = found.document
    document["environment"].pop("host", None)
    if options.add and options.json and Path(options.json).exists():
        known = json.loads(Path(options.json).read_text())
        document |= {key: known[key] for key in ("commands", "faults")}
    stand = stand_in(Path(options.work), options.images, options.tars, options.seed, options.device)
    ran: dict[str, Any] = {
        "command": document.pop("command"),
        "commit": document["environment"]["commit"],
        "started": found.watch.started,
        "run_s": stand.seconds,
        "load_average": [environment.host_load()] * 2,
    }
    document["commands"].append(ran)
    rows = {row["fault"]: row for row in document["faults"]}
    good = True
    for name in (name for name in names if name in (options.only or names)):
        row = rows.setdefault(
            name, {"fault": name, "times": 0, "exit_codes": {}, "as_undisturbed": 0}
        )
        for number in range(options.repeats):
            output = stand.folder / f"fault-{number}"
            if name == CORRUPT:
                code, same = corrupt_jpeg(stand, output)
            else:
                code, same = mended(stand, name, output)
            shutil.rmtree(output)
            row["times"] += 1
            row["exit_codes"][str(code)] = row["exit_codes"].get(str(code), 0) + 1
            row["as_undisturbed"] += same
            good = good and same
            ran["load_average"] = [ran["load_average"][0], environment.host_load()]
            document["faults"] = list(rows.values())
            found.write(page)
        print(row, flush=True)
    return cli.DONE if good else cli.CHECK_FAILED


def page(document: dict[str, Any]) -> str:
    """Returns the tries as a table."""
    lines = ["| fault | times | exit codes of the disturbed run | one more run: files identical |",
             "|---|---|---|---|"]  # fmt: skip
    for row in document["faults"]:
        codes = ", ".join(f"{code}: {count}" for code, count in sorted(row["exit_codes"].items()))
        lines.append(f"| {row['fault']} | {row['times']} | {codes} | {row['as_undisturbed']} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
