"""Networks of torchvision and timm, exported by PyTorch and run by the engine: logits, memory, times.

``python -m benchmarks.models --device cuda --networks torchvision --json models.json --markdown models.md``

Each network gets random weights with statistics of batch norm that were run, is exported to ONNX by PyTorch's
exporters, and its logits are compared with those of PyTorch in float64, ONNX Runtime's and PyTorch's float32
on the CPU beside them. Every network is exported and run in processes of its own: one that fails is a row
that says why.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks import result_file
from cnn_engine import cli, devices
from cnn_engine.devices import threads as thread_counts
from cnn_engine.export import EXPORTERS
from cnn_engine.measure import environment
from cnn_engine.report import units

TORCHVISION = (
    "alexnet", "vgg16_bn", "resnet18", "resnet50", "resnet152", "resnext50_32x4d", "wide_resnet50_2",
    "densenet121", "densenet201", "squeezenet1_1", "googlenet", "inception_v3", "mobilenet_v2",
    "mobilenet_v3_large", "shufflenet_v2_x0_5", "mnasnet1_0", "efficientnet_b0", "efficientnet_v2_s",
    "regnet_y_400mf", "convnext_tiny",
)  # fmt: skip
TIMM = (
    "convnextv2_atto", "dla34", "eca_nfnet_l0", "edgenext_xx_small", "ese_vovnet19b_dw", "fastvit_t8",
    "ghostnet_100", "hrnet_w18_small", "inception_v4", "mixnet_s", "mobileone_s0", "mobilevit_xxs",
    "nf_regnet_b0", "poolformer_s12", "regnetz_b16", "repghostnet_100", "repvgg_a0", "res2net50_26w_4s",
    "resnest14d", "rexnet_100", "skresnet18", "xception41",
)  # fmt: skip
#: One network of each of 14 families, and what ``benchmarks.drawn_networks`` draws of timm 1.0.31. Both lists
#: were fixed before any kernel was measured with them.
FAMILIES = (
    "convnextv2_atto", "fastvit_t8", "resnest14d", "cspdarknet53", "hrnet_w18_small", "regnetx_004",
    "rexnet_100", "mixnet_s", "efficientnetv2_rw_t", "eca_nfnet_l0", "mobilenetv4_conv_small",
    "edgenext_xx_small", "inception_next_atto", "levit_128s",
)  # fmt: skip
DRAWN = (
    "caformer_s18", "convnextv2_pico", "cpubone_b1_bfrobust", "dla46x_c", "dpn48b", "edgenext_x_small",
    "ese_vovnet19b_slim_dw", "fastvit_t12", "focalnet_tiny_srf", "ghostnetv2_100", "inception_next_tiny",
    "legacy_seresnet34", "lowformer_b0", "mambaout_femto", "mobilenetv2_035", "mobilenetv3_large_150d",
    "nf_regnet_b1", "regnety_008", "regnetz_d32", "repvit_m2_3", "res2net50_48w_2s", "resnet10t",
    "resnetv2_34d", "shvit_s3", "skresnext50_32x4d", "starnet_s050",
)  # fmt: skip
GROUPS = {"torchvision": TORCHVISION, "timm": TIMM, "strangers": FAMILIES + DRAWN}

#: What logits may be away from float64's, as a part of the largest: this, or so many times ONNX Runtime's.
LIMIT, TIMES = 1e-5, 2.0

#: What a row says of time; None where networks ran beside each other.
TIMES_OF_ROW = ("create_s", "create_cpu_s", "device_start_s", "first_pass_s", "pass_s")

PASSED, WRONG, FAILED = "passed", "wrong", "failed"


def spec_of(name: str) -> str:
    """Returns ``module:function`` of a network's name, which may be one itself."""
    if ":" in name:
        return name
    return f"{'timm' if name in TIMM + FAMILIES + DRAWN else 'torchvision'}.models:{name}"


def networks(text: str) -> list[str]:
    """Returns the networks that a comma-separated list of names and groups names."""
    return [n for word in text.split(",") if word for n in GROUPS.get(word, (word,))]


def child(
    stage: str, task: Mapping[str, Any], limit_s: float, module: str = "models_worker"
) -> dict[str, Any]:
    """Runs a stage of a module of this folder; returns what it found, or the ``reason`` why not."""
    command = [sys.executable, "-m", f"benchmarks.{module}", stage, json.dumps(task)]
    settings = os.environ | {"PYTHONWARNINGS": "ignore"}
    if task.get("threads"):
        settings["OMP_NUM_THREADS"] = str(task["threads"])
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, env=settings
        )
    except subprocess.TimeoutExpired:
        return {"reason": f"{stage}: took more than {limit_s:g} s"}
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    said = done.stderr.strip().splitlines()
    return {
        "reason": f"{stage}: exit {done.returncode}: {said[-1][:300] if said else 'no message'}"
    }


def rows(
    name: str, made: Mapping[str, Any], options: Any, folder: Path
) -> Iterator[dict[str, Any]]:
    """Yields the rows of one network: an exporter and a batch each."""
    for exporter in options.exporter:
        exported = made if "reason" in made else made["exports"][exporter]
        ran: dict[str, Any] = {"reason": exported["reason"]} if "reason" in exported else {}
        if not ran:
            task = {
                "device": options.device, "threads": options.threads, "files": exported["files"],
                "logits": f"{folder}/logits.npz",
            }  # fmt: skip
            ran = child("run", task, options.limit)
        for batch in options.batch:
            row = {
                "network": name,
                "exporter": exporter,
                "batch": batch,
                "shape": made.get("shape"),
            }
            row |= ran if "reason" in ran else ran[str(batch)]
            if options.together:
                row |= dict.fromkeys(TIMES_OF_ROW)
            if "fixed" in exported:
                row["fixed_batch"] = exported["fixed"]
            if "float32" in made:
                row["torch_float32_error"] = made["float32"][str(batch)]
            if "runtime" in exported:
                row["onnxruntime_error"] = exported["runtime"][str(batch)]
            yield row | {"verdict": verdict(row)}


def verdict(row: Mapping[str, Any]) -> str:
    """Returns whether a row's logits are right: see ``LIMIT``."""
    if "error" not in row:
        return FAILED
    peer = row.get("onnxruntime_error")
    limit = max(LIMIT, TIMES * peer) if isinstance(peer, float) else LIMIT
    return PASSED if row["error"] <= limit and row["same_again"] else WRONG


def _key(row: Mapping[str, Any]) -> tuple:
    """Returns what a row is of; rows are in this order: torchvision's networks, timm's, any other."""
    names = TORCHVISION + TIMM
    name = row["network"]
    place = names.index(name) if name in names else len(names)
    return place, name, -EXPORTERS.index(row["exporter"]), row["batch"]


def markdown(record: Mapping[str, Any]) -> str:
    """Returns the page."""
    found = record["environment"]
    versions = ", ".join(f"{name} {value}" for name, value in found["versions"].items() if value)
    count = {state: sum(r["verdict"] == state for r in record["rows"]) for state in (PASSED, WRONG)}
    lines = [
        f"# Networks of torchvision and timm, {record['device']}",
        "",
        f"- Machine: {found['gpu'] or found['cpu']}; {record['threads']} threads, "
        f"{found['cpu_instruction_set']} kernels"
        + (f"; load {record['load']:.1f} at the start" if record["load"] is not None else ""),
        f"- Versions: {versions}",
        *(
            f"- `{ran['command']}`: commit {ran['commit'] or 'not known'}, {ran['started']}"
            for ran in record["commands"]
        ),
        f"- {count[PASSED]} of {len(record['rows'])} passed, {count[WRONG]} wrong, "
        f"{len(record['rows']) - count[PASSED] - count[WRONG]} failed",
        "",
        "Random weights, batch norm's statistics from a pass over random images. Errors are the largest",
        "difference from PyTorch's float64 logits, as a part of the largest logit; a row passes where the",
        f"engine's is at most {TIMES:g} times ONNX Runtime's or {LIMIT:g}, and a second pass gives the same",
        "bits. Create: from the file to an engine, beyond the driver's start; first: the first pass, which",
        "plans; pass: a median, from host memory to host memory. Memory: of activations at its peak (with",
        "kernels' scratch), and as a multiple of the largest set of values alive at once if none shared any.",
        "",
        "| network | image | exporter | batch | error | ONNX Runtime's | PyTorch float32's | verdict "
        "| create, s | first, s | pass, ms | memory, MiB | of alive | not on own kernels |",
        "|---|---|---|--:|--:|--:|--:|---|--:|--:|--:|--:|--:|---|",
    ]
    lines += [_line(row) for row in record["rows"]]
    for row in record["rows"]:
        for node in row.get("unsupported", ()):
            lines += [
                "",
                f"- {row['network']}, {row['exporter']}, batch {row['batch']}: {units.printable(node)}",
            ]
    return "\n".join(lines) + "\n"


def _line(row: Mapping[str, Any]) -> str:
    def error(key: str) -> str:
        value = row.get(key)
        return f"{value:.1e}" if isinstance(value, float) else units.UNKNOWN

    shape = "x".join(map(str, row["shape"])) if row["shape"] else units.UNKNOWN
    cells = [row["network"], shape, row["exporter"] + (" (fixed)" if "fixed_batch" in row else "")]
    cells += [str(row["batch"]), error("error"), error("onnxruntime_error")]
    cells += [error("torch_float32_error"), row["verdict"]]
    if "error" in row:
        kinds = "; ".join(f"{n} {kind}" for kind, n in sorted(row["stand_ins"].items()))
        cells += [
            *(
                units.UNKNOWN if row[key] is None else text.format(row[key] * scale)
                for key, text, scale in (
                    ("create_s", "{:.2f}", 1), ("first_pass_s", "{:.2f}", 1), ("pass_s", "{:.3g}", 1e3)
                )
            ),
            f"{row['peak_bytes'] / 2**20:.2f} ({row['memory_bytes'] / 2**20:.2f})",
            f"{row['peak_ratio'] or 0:.2f}", kinds,
        ]  # fmt: skip
    else:
        cells += [units.UNKNOWN] * 5 + [row["reason"]]
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def parser() -> cli.ArgumentParser:
    """Returns the command's parser."""
    p = result_file.parser("models", __doc__, "json", "markdown")
    p.add_argument("--device", default="auto", help="cpu, cuda or cuda:N; default: auto")
    p.add_argument(
        "--networks", type=networks, default=list(TORCHVISION + TIMM), metavar="A,B",
        help="names, torchvision, timm, strangers (groups), or module:function; default: the first two",
    )  # fmt: skip
    p.add_argument("--exporter", nargs="+", choices=EXPORTERS, default=list(EXPORTERS))
    p.add_argument(
        "--batch", nargs="+", type=cli.whole_number(1, 1024), default=[1, 3], metavar="N"
    )
    p.add_argument(
        "--size", type=cli.whole_number(1, 4096), metavar="N",
        help="rows and columns of an image; default: the network's own",
    )  # fmt: skip
    p.add_argument(
        "--jobs", type=cli.whole_number(1, 64), default=1, metavar="N",
        help="networks that are exported at once, while others run; default: 1, nothing beside a pass",
    )  # fmt: skip
    p.add_argument(
        "--together", action="store_true",
        help="run networks beside each other, too, --jobs at once: sooner done, without times",
    )  # fmt: skip
    p.add_argument("--threads", type=int, help="of the engine; default: all")
    p.add_argument(
        "--limit", type=float, default=600, metavar="SECONDS", help="of one process; default: 600"
    )
    p.add_argument(
        "--add", action="store_true", help="to the rows of --json's file, same rows replaced"
    )
    result_file.add_shards(p, "networks", "row")
    return p


def _rows(options: Any, top: Path, pool: ThreadPoolExecutor) -> Iterator[dict[str, Any]]:
    """Yields the rows of all networks, which are exported in ``pool`` and, where told so, run there."""

    def make(folder: Path, name: str) -> dict[str, Any]:
        folder.mkdir()
        task = {
            "spec": spec_of(name), "size": options.size, "exporters": options.exporter,
            "batches": options.batch, "folder": str(folder),
            "threads": max(1, thread_counts.default() // options.jobs),
        }  # fmt: skip
        return child("make", task, options.limit)

    def all_of(folder: Path, name: str) -> list[dict[str, Any]]:
        found = list(rows(name, make(folder, name), options, folder))
        shutil.rmtree(folder)
        return found

    positions = [(top / str(index), name) for index, name in enumerate(options.networks)]
    if options.together:
        for done in as_completed([pool.submit(all_of, *place) for place in positions]):
            yield from done.result()
        return
    begun = ((*place, pool.submit(make, *place)) for place in positions)
    # One job at a time: nothing is exported beside a pass that is timed.
    for folder, name, future in begun if options.jobs == 1 else list(begun):
        yield from rows(name, future.result(), options, folder)
        shutil.rmtree(folder)


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code: 1 where a row has not passed."""
    options = parser().parse_args(arguments)
    device = devices.select(options.device)
    options.threads = thread_counts.check(options.threads, "--threads")
    described = environment.describe(device)
    for package in ("onnx", "onnxruntime", "torch", "torchvision", "timm"):
        described["versions"][package] = environment.package_version(package)
    found = result_file.ResultFile(
        "models", options, arguments, device=device.name, threads=options.threads,
        environment=described, load=environment.host_load(), commands=[], rows=[],
    )  # fmt: skip
    document = found.document
    if options.merge:
        return _merge(found, options.merge)
    found.begin(described["commit"])
    if options.add and options.json and Path(options.json).exists():
        found.take_in(options.json, "--add", _key)
    options.networks = options.networks[options.shard[0] - 1 :: options.shard[1]]
    ours: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as top, ThreadPoolExecutor(options.jobs) as pool:
        for row in _rows(options, Path(top), pool):
            others = [r for r in document["rows"] if _key(r) != _key(row)]
            document["rows"] = sorted([*others, row], key=_key)
            ours.append(row)
            print(_line(row), flush=True)
            found.write(markdown)
    passed = sum(row["verdict"] == PASSED for row in ours)
    print(f"{passed} of {len(ours)} passed in {found.watch.seconds:.0f} s")
    return cli.DONE if passed == len(ours) else cli.CHECK_FAILED


def _merge(found: result_file.ResultFile, paths: list[str]) -> int:
    """Makes one record of several: see ``--merge``."""
    document = found.document
    found.begin_merge(paths[0], "device", "threads", "environment", "load")
    for path in paths:
        found.take_in(path, "--merge", _key, lambda one: one["environment"]["gpu"] or one["device"])
    document["rows"].sort(key=_key)
    found.write(markdown)
    wrong = sum(row["verdict"] != PASSED for row in document["rows"])
    print(f"{len(document['rows']) - wrong} of {len(document['rows'])} passed")
    return cli.DONE if not wrong else cli.CHECK_FAILED


if __name__ == "__main__":
    sys.exit(main())
