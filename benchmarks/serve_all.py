"""Everything that ``serve`` is to show, one benchmark after another: 15 minutes on a quiet machine.

    python -m benchmarks.serve_all --model resnet50.onnx --folder serve --json serve.json --markdown serve.md

What is added to ``predict`` (``serve_overhead``), images/s with and without batching at one bound of latency
(``serve_batching``), calls of tritonclient (``serve_clients``), and ten minutes of load and faults
(``serve_faults``). One that fails ends no other; the exit code is 1 then.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from cnn_engine import cli
from cnn_engine.devices.cpu import CpuDevice
from cnn_engine.measure import environment
from cnn_engine.report import units

from . import result_file


def parser() -> cli.ArgumentParser:
    """Returns the command's parser."""
    p = result_file.parser("serve_all", __doc__, "json", "markdown")
    p.add_argument("--model", required=True, metavar="FILE.onnx", help="of serve_overhead")
    p.add_argument(
        "--folder", default="serve", metavar="PATH", help="for each benchmark's own files (default: serve)"
    )  # fmt: skip
    p.add_argument("--threads", type=cli.whole_number(1, 256), default=2, help="default: 2")
    p.add_argument(
        "--seconds", type=cli.number(1, 86400), default=600.0, help="of faults (default: 600)"
    )
    p.add_argument(
        "--rounds", type=cli.whole_number(1, 1000), default=15, help="of overhead (default: 15)"
    )
    return p


def parts(options: Any) -> dict[str, list[str]]:
    """Returns benchmark -> its options."""
    return {
        "serve_overhead": [
            f"--model={options.model}", f"--threads={options.threads}", f"--rounds={options.rounds}",
        ],
        "serve_batching": [],
        "serve_clients": [],
        "serve_faults": [f"--seconds={options.seconds:g}"],
    }  # fmt: skip


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    options = parser().parse_args(arguments)
    found = result_file.ResultFile(
        "serve_all", options, arguments, environment=environment.describe(CpuDevice()), parts={},
    )  # fmt: skip
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, words in parts(options).items():
        made, page = folder / f"{name}.json", folder / f"{name}.md"
        for path in (made, page):
            path.unlink(missing_ok=True)
        command = [
            sys.executable,
            "-m",
            f"benchmarks.{name}",
            *words,
            f"--json={made}",
            f"--markdown={page}",
        ]
        ended = subprocess.run(command, capture_output=True, text=True)
        part: dict[str, Any] = {"exit_code": ended.returncode, "page": None, "result": None}
        if made.exists():
            part |= {"result": json.loads(made.read_text()), "page": page.read_text()}
        if ended.returncode:
            part["said"] = (ended.stderr or ended.stdout).strip().splitlines()[-5:]
        found.document["parts"][name] = part
        cli.show(_line(name, part))
        found.write(markdown)
    failed = any(part["exit_code"] for part in found.document["parts"].values())
    return cli.CHECK_FAILED if failed else cli.DONE


def _line(name: str, part: dict[str, Any]) -> str:
    took = units.seconds(part["result"]["duration_s"]) if part["result"] else "no result"
    said = f": {' '.join(part['said'])}"[:300] if part.get("said") else ""
    return f"{name}: exit code {part['exit_code']}, {took}{said}"


def markdown(document: dict[str, Any]) -> str:
    """Returns the pages of all parts as one."""
    lines = [
        "# Everything that serve is to show",
        "",
        f"- Machine: {document['environment']['cpu']}",
        *result_file.run_lines(document),
        *(f"- {_line(name, part)}" for name, part in document["parts"].items()),
    ]
    for part in document["parts"].values():
        if part["page"]:
            lines += ["", part["page"].replace("\n# ", "\n## ").replace("# ", "## ", 1).strip()]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
