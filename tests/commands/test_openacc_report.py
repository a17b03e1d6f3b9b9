"""What the compiler made of the directives, what ran of them, and what doctor says of each kind of build."""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

import fake_cupti
import numpy as np
import pytest
from test_openacc import FakeModule, built

from cnn_engine import Engine, UnsupportedError, doctor, inspect
from cnn_engine.devices import openacc_mapping, openacc_module
from cnn_engine.measure import openacc_profile, profile
from cnn_engine.measure.cupti import activity
from cnn_engine.measure.openacc_events import Row, Timing
from cnn_engine.measure.profile_tables import Profile
from cnn_engine.measure.result import Result
from cnn_engine.report import html, openacc
from cnn_engine.report import profile as profile_report

SOURCE = """\
void conv2d_if(const float* input) {
#pragma acc parallel loop gang \\
    present(input[0 : in])
  for (int n = 0; n < images; ++n) {
#pragma acc loop vector reduction(+ : sum)
    for (int c = 0; c < channels; ++c) {
    }
  }
}

void enter(const float* input) {
#pragma acc enter data copyin(input[0 : n])
}
"""
GCC = """\
openacc/x.cpp:2:9: optimized: assigned OpenACC gang loop parallelism
openacc/x.cpp:5:9: optimized: assigned OpenACC vector loop parallelism
openacc/x.cpp:2:9: directive: omp target oacc_parallel map(force_present:*input [len: _2]) \
map(firstprivate:input [pointer assign, bias: 0]) firstprivate(channels) firstprivate(images)
openacc/x.cpp:5:9: directive: acc loop reduction(+:sum) vector private(c)
openacc/x.cpp:12:9: directive: omp target oacc_enter_data map(to:*input [len: n.1_1])
"""
NVC = """\
conv2d_if(float const*):
      2, Generating present(input[:in])
         Generating NVIDIA GPU code
          4, #pragma acc loop gang /* blockIdx.x */
          6, #pragma acc loop vector(128) /* threadIdx.x */
             Generating reduction(+:sum)
enter(float const*):
     12, Generating enter data copyin(input[:n])
"""


def module(mapping, offload="", offload_mapping="", compiler="GNU 12.2.0"):
    listing = {
        "file": "openacc/x.cpp", "source": SOURCE, "mapping": mapping,
        "offload_mapping": offload_mapping,
    }  # fmt: skip
    return SimpleNamespace(
        compiler=compiler, offload=offload, shape="0:4:32", listings=lambda: [listing]
    )


def test_mapping_of_gcc():
    found = openacc_mapping.of(module(GCC))
    assert [(d.function, d.line) for d in found.directives] == [
        ("conv2d_if", 2), ("conv2d_if", 5), ("enter", 12),
    ]  # fmt: skip
    first, second, third = found.directives
    assert first.source == "#pragma acc parallel loop gang present(input[0 : in])"
    assert first.loops == "for (int n = 0; n < images; ++n) {"
    assert first.said == ["loop: gang", "present: input", "firstprivate: 2 scalars"]
    assert second.said == ["loop: vector", "reduction(+:sum)"]
    assert (third.loops, third.said) == ("", ["copyin: input"])
    assert "openacc/x.cpp: conv2d_if" in openacc.text(found)
    assert "-> loop: vector, reduction(+:sum)" in openacc.text(found)
    assert "gangs:workers:vector 0:4:32" in openacc.text(found)


def test_mapping_of_the_gpus_compiler_is_shown_where_it_differs():
    said = "openacc/x.cpp:5:9: optimized: assigned OpenACC worker vector loop parallelism\n"
    found = openacc_mapping.of(module(GCC, "nvptx", said))
    assert found.directives[1].offload == ["loop: worker vector"]
    assert "-> nvptx: loop: worker vector" in openacc.text(found)
    same = openacc_mapping.of(module(GCC, "nvptx", GCC.splitlines()[1] + "\n"))
    assert "nvptx: loop" not in openacc.text(same)


def test_mapping_of_nvc():
    """Its -Minfo=accel names loops, where GCC names directives: they are told of the directive above."""
    found = openacc_mapping.of(module(NVC, "nvidia", compiler="nvc++ 25.1"))
    first, second, third = (directive.said for directive in found.directives)
    assert first == [
        "Generating present(input[:in])", "Generating NVIDIA GPU code",
        "#pragma acc loop gang /* blockIdx.x */",
    ]  # fmt: skip
    assert second == [
        "#pragma acc loop vector(128) /* threadIdx.x */", "Generating reduction(+:sum)",
    ]  # fmt: skip
    assert third == ["Generating enter data copyin(input[:n])"]


@built
def test_mapping_of_this_build():
    """Every nest's loops have a level, and the compiler recognised the reductions and the data."""
    found = openacc_mapping.of(openacc_module.load())
    nests = {
        (d.file.removeprefix("openacc/"), d.function): []
        for d in found.directives
    }  # fmt: skip
    for directive in found.directives:
        file = directive.file.removeprefix("openacc/")
        nests[file, directive.function].append(directive)
        if directive.loops:
            assert any("loop" in said for said in directive.said), directive
    if found.compiler.startswith("GNU"):
        levels = [
            [said.removeprefix("loop: ") for said in d.said if said.startswith("loop:")]
            for d in nests["conv2d_if.cpp", "conv2d_if"]
        ]
        assert levels == [["gang"], ["worker"], ["vector"], ["seq"], ["seq"], ["seq"]]
        sums = nests["conv2d_pad.cpp", "conv2d_pad_reduction"][-1]
        assert {"loop: vector", "reduction(+:sum)", "collapse(3)"} <= set(sums.said)
        assert "present: input, weight, add, output" in nests["conv2d_if.cpp", "conv2d_if"][0].said
        assert nests["data.cpp", "leave"][0].said == ["delete: input", "copyout: output"]


@built
def test_inspect_command(tmp_path, capsys):
    assert inspect.main(["--device", "openacc", "--html", str(tmp_path / "x.html")]) == 0
    said = capsys.readouterr().out
    assert "openacc/conv2d_if.cpp: conv2d_if_reduction" in said
    assert max(map(len, said.splitlines())) <= 110
    page = (tmp_path / "x.html").read_text()
    assert "loop: vector, reduction(+:sum), collapse(3)" in page
    assert "#pragma acc loop vector collapse(3) reduction(+ : sum)" in page
    assert "<script" not in page
    assert inspect.main(["--device", "openacc", "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["device"] == "openacc"
    line = next(d for d in document["directives"] if d["function"] == "conv2d_pad")
    assert document["sources"][line["file"]][line["line"] - 1].startswith("#pragma acc parallel")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "PATH: expected an .onnx file, or --device openacc, found none"),
        (["--device", "cuda"], "--device: expected openacc, found 'cuda'"),
        (
            ["--device", "openacc", "x.onnx"],
            "--device openacc: expected no model with it, found x.onnx",
        ),
    ],
)
def test_inspect_refuses(arguments, message, capsys):
    assert inspect.main(arguments) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def profiled(**options):
    images = np.random.default_rng(1).integers(0, 256, (6, 3, 32, 32), np.uint8)
    probabilities = np.zeros((6, 10), np.float32)
    with Engine("cifar10", device="openacc:host", **options) as engine:
        result = engine.profile(images, batch=1, iterations=1, check=False)
        result.profile = profile.collect(engine, images, probabilities, 1, result)
    return result


@built
def test_profile_counts_what_ran():
    """Three convolutions an image, each with a region's beginning and end around it in transfer."""
    result = profiled(variant="if", data_mode="transfer")
    found = result.profile.openacc
    assert found.count("region") == found.count("region", "conv2d_if") == 18
    assert (found.count("data", "enter"), found.count("data", "leave")) == (18, 18)
    assert (
        found.count("kernel") == found.count("copyin") == 0
    )  # the host launches and copies nothing
    nest = next(row for row in found.rows if row.kind == "region")
    assert nest.source.startswith("#pragma acc parallel loop gang")
    assert nest.min_s <= nest.total_s / nest.count <= nest.max_s
    assert result.profile.passes == result.profile.images == 6
    text = profile_report.render(result.profile)
    assert "compute region reached 18 times" in text
    assert "run on the host 18 times" in text
    whole = sum(row.total_s for row in found.rows if row.kind in ("region", "data"))
    assert sum(row.excl_s for row in found.rows) == pytest.approx(whole)  # each moment once
    assert all(row.excl_min_s * row.count <= row.excl_s <= row.total_s for row in found.rows)
    names = {row.event for row in found.rows}
    assert {"acc_compute_construct", "acc_enter_data", "acc_exit_data"} <= names
    assert f"acc_compute_construct@conv2d_if.cpp:{nest.line}" in text
    read = Result.from_dict(json.loads(json.dumps(result.to_dict())))
    assert read.profile.openacc == found
    assert "OpenACC directives" in html.render([read])

    found = profiled(variant="pad", reduction=True).profile.openacc
    assert found.count("region", "conv2d_pad_reduction") == 18
    assert found.count("region", "pad2d") == 18
    assert found.count("region", "softmax") == 6
    assert found.count("data") == 0  # one region for as long as there are weights


@built
def test_records_of_cupti_stand_beside_it(monkeypatch):
    """What the driver did in passes of their own; where there are no records, the reason."""
    cupti = fake_cupti.install(monkeypatch)
    images = np.zeros((3, 3, 32, 32), np.uint8)
    probabilities = np.zeros((3, 10), np.float32)
    found = Profile("events", 90.0, 3, 3, 1.0)
    with Engine("cifar10", device="openacc:host", variant="if") as engine:
        plan, run = type(engine.plan(1, images.dtype)), type(engine.plan(1, images.dtype)).run

        def launch(self):
            run(self)
            cupti.launch(1e-4, name="conv2d_if$_omp_fn$0")

        monkeypatch.setattr(plan, "run", launch)
        openacc_profile._record(found, engine, images, probabilities, 1)
        assert [(row.name, row.calls) for row in found.gpu] == [("conv2d_if$_omp_fn$0", 3)]
        assert [(row.name, row.calls) for row in found.api] == [("cudaLaunchKernel", 3)]
        found = Profile("events", 90.0, 3, 3, 1.0)
        fake_cupti.install(monkeypatch, refuse="everything")
        openacc_profile._record(found, engine, images, probabilities, 1)
    assert (found.gpu, found.api) == ([], [])
    assert "INSUFFICIENT_PRIVILEGES" in found.notes[0]


@built
@pytest.mark.skipif("CNN_ENGINE_OPENACC_GPU" not in os.environ, reason="needs a GPU for OpenACC")
def test_records_of_a_gpu():
    """Each launch that OpenACC tells of is a kernel of CUPTI's, where there are records."""
    if reason := activity.unavailable():
        pytest.skip(reason)
    images = np.random.default_rng(0).integers(0, 256, (6, 3, 32, 32), np.uint8)
    with Engine("cifar10", device="openacc", variant="if", data_mode="transfer") as engine:
        result = engine.profile(images, batch=1, iterations=1, check=False)
        found = profile.collect(engine, images, np.zeros((6, 10), np.float32), 1, result)
    kernels = [row for row in found.gpu if row.kind == "kernel"]
    assert sum(row.calls for row in kernels) == found.openacc.count("kernel") == 18
    assert any(row.name == "cuLaunchKernel" for row in found.api)
    assert found.openacc.count("implicit") + found.openacc.count("region") > 0
    text = profile_report.render(found)
    assert "GPU activities\n" in text
    assert "acc_enqueue_launch@conv2d_if.cpp" in text


@built
def test_nothing_is_counted_outside_of_a_profile():
    kernels = openacc_module.load()
    with Engine("cifar10", device="openacc:host", variant="if") as engine:
        kernels.start_profile()
        kernels.stop_profile()
        engine.predict(np.zeros((1, 3, 32, 32), np.uint8))
    assert kernels.stop_profile() == []


def test_layout_of_a_gpus_profile():
    """As NV_ACC_TIME has it: grid and block of the launches, transfers with their time, by line."""

    def row(line, function, kind, **options):
        numbers = {"gangs": 0, "workers": 0, "vector": 0, "bytes": 0, "kernel": "", "variable": ""}
        numbers.update(count=3600, total_s=0.036, min_s=8e-6, max_s=2e-5)
        return Row(
            "openacc/conv2d_if.cpp",
            line,
            function,
            "#pragma acc",
            [],
            kind,
            **{**numbers, **options},
        )

    found = Timing("NVIDIA", 0, False, "GNU 12.2.0", [
        row(26, "conv2d_if", "region"),
        row(26, "conv2d_if", "kernel", gangs=16, workers=32, vector=32),
        row(51, "enter", "data"),
        row(51, "enter", "copyin", bytes=3600 * 4096, total_s=1e-6 * 3600, min_s=5e-7, max_s=5e-6),
    ])  # fmt: skip
    found.rows.append(row(26, "conv2d_if", "implicit", event="acc_enter_data", excl_s=1e-3))
    assert openacc.timing(found).splitlines() == [
        "Accelerator Kernel Timing data",
        "openacc/conv2d_if.cpp",
        "  conv2d_if  NVIDIA  devicenum=0",
        "    time(us): 36,000",
        "    26: compute region reached 3,600 times",
        "            elapsed time(us): total=36,000 max=20 min=8 avg=10",
        "        26: kernel launched 3,600 times",
        "            grid: [16]  block: [32x32]",
        "             elapsed time(us): total=36,000 max=20 min=8 avg=10",
        "  enter  NVIDIA  devicenum=0",
        "    time(us): 39,600",
        "    51: data region reached 3,600 times",
        "        51: data copyin transfers: 3,600 (14.75 MB)",
        "             device time(us): total=3,600 max=5 min=0.5 avg=1",
    ]


def test_times_without_what_is_inside_are_nvprofs_lines():
    def row(line, event, excl_s, **options):
        facts = {
            "kind": "",
            "file": "openacc/conv2d_if.cpp",
            "function": "",
            "source": "",
            "said": [],
        }
        facts |= {"kernel": "", "variable": "", "gangs": 0, "workers": 0, "vector": 0, "bytes": 0}
        facts |= {"count": 3600, "total_s": 1.0, "min_s": 0.0, "max_s": 0.0}
        spread = {"excl_min_s": excl_s / 7200, "excl_max_s": excl_s / 1800}
        return Row(line=line, event=event, excl_s=excl_s, **{**facts, **spread, **options})

    rows = [
        row(26, "acc_compute_construct", 0.036),
        row(26, "acc_enqueue_launch", 0.324, kernel="conv2d_if$_omp_fn"),
    ]
    assert openacc.exclusive(Timing("NVIDIA", 0, False, "GNU 12.2.0", rows)).splitlines() == [
        "OpenACC (excl)     Time(%)       Time      Calls        Avg        Min        Max  Name",
        "                   90.00 %   324.0 ms      3,600   90.00 us   45.00 us   180.0 us  "
        "acc_enqueue_launch@conv2d_if.cpp:26 (conv2d_if$_omp_fn)",
        "                   10.00 %   36.00 ms      3,600   10.00 us   5.000 us   20.00 us  "
        "acc_compute_construct@conv2d_if.cpp:26",
    ]


def lines(monkeypatch, load):
    monkeypatch.setattr(openacc_module, "load", load)
    return [
        f"{found.mark} {found.subject}: {found.text}" + (f" -> {found.remedy}" if found.remedy else "")
        for found in doctor._openacc_findings()
    ]  # fmt: skip


def test_doctor_on_three_builds(monkeypatch):
    def without():
        raise UnsupportedError("built without it")

    assert lines(monkeypatch, without) == [
        "-- OpenACC: not built -> install GCC or nvc++ and build again; only --device openacc needs it"
    ]
    host = FakeModule(offload="", shape="", why_not_offload="could not find mkoffload")
    assert lines(monkeypatch, lambda: host) == [
        "ok OpenACC: built by GNU 12.2.0, for the host alone; openacc:host runs",
        "-- OpenACC GPU: no offload target: could not find mkoffload -> install GCC's offload compiler "
        "(Debian: gcc-12-offload-nvptx) and build again",
    ]
    offloading = FakeModule(shape="0:4:32")
    monkeypatch.setattr(openacc_module, "why_no_gpu", lambda module: "no NVIDIA driver")
    assert lines(monkeypatch, lambda: offloading) == [
        "ok OpenACC: built by GNU 12.2.0, offloads to nvptx, gangs:workers:vector 0:4:32; openacc:host runs",
        "-- OpenACC GPU: expected a GPU through OpenACC, found none (no NVIDIA driver)",
    ]
    monkeypatch.setattr(openacc_module, "_probe", lambda: None)
    there = FakeModule(shape="", devices=1)
    assert lines(monkeypatch, lambda: there)[1] == (
        "ok OpenACC GPU: a loop ran on it: --device openacc"
    )


def test_doctor_where_the_module_is_missing(monkeypatch):
    import cnn_engine

    monkeypatch.setattr(openacc_module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "cnn_engine._openacc", None)
    monkeypatch.delattr(cnn_engine, "_openacc", raising=False)
    assert [found.text for found in doctor._openacc_findings()] == ["not built"]
