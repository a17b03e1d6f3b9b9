"""``characterize --ncu``: an executable that stands for Nsight Compute, in the form of its CSV."""

from __future__ import annotations

import csv
import io
import os
import sys

import pytest
from characterize_points import run

from cnn_engine.characterize import counters
from cnn_engine.errors import UnsupportedError

HEAD = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream",
        "Block Size", "Grid Size", "Device", "CC", "Section Name",
        "Metric Name", "Metric Unit", "Metric Value"]  # fmt: skip


def output(*launches: tuple[str, dict[str, str]]) -> str:
    """What ``ncu --csv`` prints: lines of its own, then a row for each launch and metric."""
    document = io.StringIO()
    writer = csv.writer(document, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow(HEAD)
    for number, (name, metrics) in enumerate(launches):
        for metric, value in metrics.items():
            writer.writerow([number, 7, "python3.11", "127.0.0.1", name, 1, 7, "(256, 1, 1)", "(8, 1, 1)",
                             0, "9.0", "Command line profiler metrics", metric, "%", value])  # fmt: skip
    head = "==PROF== Connected to process 7\n==PROF== Disconnected from process 7\n"
    return head + document.getvalue()


def metrics(time_ns: str, sm: str, dram: str) -> dict[str, str]:
    wanted = counters.METRICS
    return {wanted["time_s"]: time_ns, wanted["sm_throughput"]: sm, wanted["dram_throughput"]: dram,
            wanted["l2_throughput"]: "n/a"}  # fmt: skip


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Makes an ``ncu`` that prints a text, notes how it was called, and ends with a status."""

    def make(text: str, status: int = 0, errors: str = "") -> None:
        path = tmp_path / "ncu"
        path.write_text(
            f"#!{sys.executable}\nimport sys\n"
            f"open({str(tmp_path / 'called')!r}, 'w').write('\\n'.join(sys.argv[1:]))\n"
            f"sys.stdout.write({text!r})\nsys.stderr.write({errors!r})\nsys.exit({status})\n"
        )
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    return make


def test_launches_of_a_kernel_are_summed_and_weighted_by_time(ncu, tmp_path):
    text = output(
        ("void conv<float, 8>(Args)", metrics("1,000", "50.5", "10")),
        ("relu", metrics("5,000.0", "1", "90")),
        ("void conv<float, 8>(Args)", metrics("3,000", "90.5", "30")),
    )
    ncu(text)
    relu, conv = counters.collect("net", 4, ["program", "--option"])
    assert (relu.name, conv.name) == ("relu", "void conv<float, 8>(Args)")
    assert (conv.subject, conv.batch, conv.launches) == ("net", 4, 2)
    assert conv.time_s == pytest.approx(4e-6)
    assert conv.sm_throughput == pytest.approx(0.805)
    assert conv.dram_throughput == pytest.approx(0.25)
    assert conv.l2_throughput is None
    called = (tmp_path / "called").read_text().split("\n")
    assert called[-2:] == ["program", "--option"]
    assert called[called.index("--metrics") + 1].split(",") == list(counters.METRICS.values())


@pytest.mark.parametrize(
    ("text", "errors", "status", "says"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance "
         "Counters on the target device 0.\n", "", 1, "NVreg_RestrictProfilingToAdminUsers=0"),
        ("==ERROR== The application returned an error code (2).\n", "error: x", 2, "an error code (2)"),
        ("==PROF== Connected\n==WARNING== No kernels were profiled.\n", "", 0, "found: no kernel"),
        (output(("k", metrics("1", "2", "3"))), "Traceback\nKilled", 9, "found: Killed"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_one_line(ncu, text, errors, status, says):
    ncu(text, status, errors)
    with pytest.raises(UnsupportedError) as found:
        counters.collect("net", 4, ["program"])
    assert says in str(found.value)
    assert str(found.value).startswith("--ncu: expected")
    assert "\n" not in str(found.value)


def test_refused_before_anything_is_measured(ncu, tmp_path, monkeypatch, capsys):
    ncu("")
    assert run(tmp_path / "found", "--ncu") == 2
    assert capsys.readouterr().err == "error: --ncu: expected a CUDA device, found cpu\n"
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert run(tmp_path / "found", "--ncu") == 2
    assert "--ncu: expected Nsight Compute's ncu on PATH, found none" in capsys.readouterr().err
    assert not (tmp_path / "found").exists()
