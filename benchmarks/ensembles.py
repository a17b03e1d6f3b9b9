"""The designs of ensembles side by side: bits, images/s, core-seconds: ``python -m benchmarks.ensembles``.

Runs ``mpirun -n R python -m cnn_engine.ensemble`` for every design and number of members, compares what each
member was given with the design ``none``, and writes the table and the chart of ``ensemble --collect`` with a
README.md beside them. Needs the extra ``ensemble``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cnn_engine import cli
from cnn_engine.ensemble import collect, roles
from cnn_engine.measure import environment

from . import result_file
from .ensemble_faults import environment as mpi_environment
from .ensemble_faults import mpirun

MODULE = "cnn_engine.ensemble"


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs all; returns 1 if a design gave a member other bits than ``none``."""
    parser = result_file.parser("ensembles", __doc__)
    parser.add_argument("--data", required=True, metavar="PATH")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--members", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    different = []
    with tempfile.TemporaryDirectory() as folder:
        for count in options.members:
            given: dict[str, Any] = {}
            for design in roles.DESIGNS:
                for repeat in range(options.repeats):
                    path = Path(folder, f"{design}-{count}-{repeat}.json")
                    document = run(options, design, count, path)
                    digests = {
                        member: digest
                        for rank in document["rank_reports"]
                        for member, digest in rank["digests"].items()
                    }
                    if digests != given.setdefault(str(count), digests):
                        different.append(f"{design}, {count} members")
                    rate = document["throughput_images_per_s"]
                    core_s = document["core_s"]["preprocessing"]
                    print(
                        f"{design}, {count} members: {rate:.0f} images/s, {core_s:.2f} core-s",
                        flush=True,
                    )
        rows = collect.table(collect.read(Path(folder)))
        print("\n".join(collect.collect(Path(folder), options.output)))
        environment_of = document["environment"]
    text = page(options, rows, different, environment_of, load)
    (options.output / "README.md").write_text(text, "utf-8")
    return cli.CHECK_FAILED if different else cli.DONE


def run(options: argparse.Namespace, design: str, members: int, path: Path) -> dict[str, Any]:
    """Returns the report of one run."""
    words = [
        mpirun(), "-n", str(options.ranks), sys.executable, "-m", MODULE, "--design", design, "--members",
        str(members), "--data", options.data, "--images", str(options.images), "--device", "cpu",
        "--threads", "1", "--augment", "full", "--shuffle", "--digest", "--ceilings", "1", "--stall", "60",
        "--quiet", "--json", str(path),
    ]  # fmt: skip
    subprocess.run(words, check=True, env=mpi_environment(), timeout=600)
    return json.loads(path.read_text("utf-8"))


def page(
    options: argparse.Namespace,
    rows: list[dict[str, Any]],
    different: list[str],
    about: dict[str, Any],
    load: float,
) -> str:
    """Returns the record as Markdown."""
    same = "equal those of `none`" if not different else f"DIFFER from those of `none`: {different}"
    lines = [
        "# Ensembles: the designs side by side",
        "",
        f"`mpirun -n {options.ranks}`, {options.images:,} images of {Path(options.data).name}, batch 256, "
        f"augmentation `full`, one thread a member; {about.get('cpu')}, {rows[0]['cpus']} CPUs; commit "
        f"{about.get('commit')}; {environment.now()}; a load average of {load:.1f} before the first run and "
        f"{os.getloadavg()[0]:.1f} after the last.",
        "",
        f"What every member was given (BLAKE2 of all batches, augmented): {same}, in all {len(rows)} rows.",
        "Core-seconds are CPU time of the threads that read and decode; `of none` is their share of what",
        "`none` takes for as many members.",
        "",
        "| members | design | runs | images/s | core-seconds of decoding | of none | core-seconds, all | "
        "start-up, s | bound by |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    base = {
        one["members"]: one["preprocessing_core_s"] for one in rows if one["design"] == roles.NONE
    }
    for one in sorted(
        rows, key=lambda row: (row["members"], list(roles.DESIGNS).index(row["design"]))
    ):
        share = one["preprocessing_core_s"] / base[one["members"]]
        lines.append(
            f"| {one['members']} | {one['design']} | {one['count']} | {one['images_per_s']:.0f} | "
            f"{one['preprocessing_core_s']:.2f} | {share:.2f} | {one['processes_core_s']:.1f} | "
            f"{one['start_up_s']:.1f} | {one['bound_by']} |"
        )
    lines += ["", "![images/s and core-seconds](ensembles.png)", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
