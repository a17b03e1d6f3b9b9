"""What filled the time: tables from records, and the report."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from samples import HOSTILE, make, make_cuda, make_taken_apart

from cnn_engine.errors import InputError
from cnn_engine.measure import profile_tables
from cnn_engine.measure.cupti.activity import ApiCall, Copy, Kernel, Migration, Set, Trace
from cnn_engine.measure.profile_tables import Profile, Row
from cnn_engine.measure.result import Result
from cnn_engine.plan.plan import Step
from cnn_engine.report import csv as csv_report
from cnn_engine.report import json as json_report
from cnn_engine.report import profile as text

GRID, BLOCK = (4, 1, 1), (128, 1, 1)


def step(name: str, kind: str, place: str = "cuda", **options) -> Step:
    return Step(name, kind, place, lambda: None, [], **options)


COPY_IN = step("images", "copy", bytes=1000, direction="h2d")
CONV = step("conv1", "conv")
RELU = step("relu1", "relu", "cpu")
COPY_OUT = step("probabilities", "copy", bytes=40, direction="d2h")
RAN = [COPY_IN, CONV, RELU, COPY_OUT] * 2


def make_trace() -> Trace:
    """The records of :data:`RAN`, of a kernel that nobody marked, and of calls between the passes."""
    trace = Trace()
    for index, ran in enumerate(RAN):
        begin, number = index * 100e-6, index + 10
        if ran.place == "cpu":
            continue
        name = "cudaMemcpyAsync" if ran.kind == "copy" else "cudaLaunchKernel"
        trace.api.append(ApiCall(name, begin, begin + 5e-6, number, 1))
        trace.marks[number] = index
        if ran.kind == "copy":
            end = begin + 5e-6 + ran.bytes * 1e-9
            pinned = index > 3
            trace.copies.append(
                Copy(ran.direction, ran.bytes, begin + 5e-6, end, 7, number, pinned)
            )
        else:
            trace.kernels.append(
                Kernel("ns::conv<1>", begin + 5e-6, begin + 45e-6, 7, number, GRID, BLOCK, 32, 256)
            )
    trace.api.append(ApiCall("cudaPointerGetAttributes", 1e-3, 1.001e-3, 98, 1))
    trace.kernels.append(Kernel("other", 1e-3, 1.02e-3, 9, 99, GRID, BLOCK, 32, 0))
    trace.sets.append(Set(64, 1.03e-3, 1.031e-3, 9, 97))
    return trace


def tables(trace: Trace, **changes) -> Profile:
    given = {"top": 90, "passes": 2, "images": 20, "wall_s": 2e-3} | changes
    return profile_tables.from_trace(trace, RAN, [(RELU, 3e-6), (RELU, 5e-6)], **given)


def test_rows_are_sorted_and_their_shares_add_up():
    calls = [
        (("a", "kernel"), 1.0),
        (("b", "kernel"), 4.0),
        (("a", "kernel"), 2.0),
        (("c", "set"), 3.0),
    ]
    table = profile_tables.rows(calls)
    assert [(r.name, r.kind, r.calls, r.total_s, r.average_s, r.min_s, r.max_s) for r in table] == [
        ("b", "kernel", 1, 4.0, 4.0, 4.0, 4.0),
        ("a", "kernel", 2, 3.0, 1.5, 1.0, 2.0),
        ("c", "set", 1, 3.0, 3.0, 3.0, 3.0),
    ]
    assert [r.share for r in table] == pytest.approx([0.4, 0.3, 0.3])
    assert [r.cumulative for r in table] == pytest.approx([0.4, 0.7, 1.0])
    assert profile_tables.rows([]) == []
    assert profile_tables.rows([(("nothing", "set"), 0.0)])[0].share is None


@pytest.mark.parametrize(
    ("top", "rows"),
    [(0.001, 1), (49, 1), (50, 1), (51, 2), (90, 2), (90.1, 3), (99.9, 3), (100, 3)],
)
def test_the_line_is_drawn_where_the_time_is_reached(top, rows):
    table = profile_tables.rows([(("a", ""), 50.0), (("b", ""), 40.0), (("c", ""), 10.0)])
    assert profile_tables.line_after(table, top) == rows


def test_tables_of_a_trace():
    found = tables(make_trace())
    assert [(r.name, r.kind, r.calls) for r in found.gpu] == [
        ("ns::conv<1>", "kernel", 2),
        ("other", "kernel", 1),
        ("[CUDA memcpy HtoD]", "copy", 2),
        ("[CUDA memset]", "set", 1),
        ("[CUDA memcpy DtoH]", "copy", 2),
    ]
    assert [(r.name, r.calls) for r in found.api] == [
        ("cudaMemcpyAsync", 4),
        ("cudaLaunchKernel", 2),
    ]
    assert [(r.name, r.calls, r.max_s) for r in found.cpu] == [("relu1", 2, 5e-6)]
    assert found.kernel_s == pytest.approx(100e-6)
    assert found.copy_s == pytest.approx(2.08e-6)
    assert found.gpu_s == pytest.approx(103.08e-6)
    assert found.api_s == pytest.approx(30e-6)
    assert found.cpu_s == pytest.approx(8e-6)
    assert found.source == profile_tables.RECORDS
    assert found.notes == []


def test_kernels_lead_back_to_their_layers():
    conv, other = tables(make_trace()).layers
    assert (conv.layer, conv.kind, conv.kernel, conv.calls) == ("conv1", "conv", "ns::conv<1>", 2)
    assert (conv.grid, conv.block, conv.registers, conv.shared_bytes) == (
        [4, 1, 1],
        [128, 1, 1],
        32,
        256,
    )
    assert conv.share == pytest.approx(0.8)
    assert (other.layer, other.kernel) == ("-", "other")


def test_a_layer_shows_the_shape_of_most_of_its_launches():
    trace = make_trace()
    trace.kernels += [
        Kernel(
            "ns::conv<1>", 2e-3 + i * 1e-6, 2e-3 + i * 1e-6 + 1e-7, 7, 11, (9, 1, 1), BLOCK, 32, 256
        )
        for i in range(5)
    ]
    assert tables(trace).layers[0].grid == [9, 1, 1]
    assert tables(trace).layers[0].calls == 7


def test_copies_by_what_they_move():
    found = [
        (c.what, c.direction, c.memory, c.calls, c.bytes, c.bytes_per_second)
        for c in tables(make_trace()).copies
    ]
    assert sorted(found, key=lambda row: row[:3]) == [
        ("images", "h2d", "pageable", 1, 1000, pytest.approx(1e9)),
        ("images", "h2d", "pinned", 1, 1000, pytest.approx(1e9)),
        ("probabilities", "d2h", "pageable", 1, 40, pytest.approx(1e9)),
        ("probabilities", "d2h", "pinned", 1, 40, pytest.approx(1e9)),
    ]


def test_managed_memory_by_event_and_cause():
    trace = make_trace()
    trace.managed = [
        Migration("h2d", 0, 2e-6, 4096, 0, "coherence"),
        Migration("h2d", 3e-6, 5e-6, 4096, 0, "coherence"),
        Migration("gpu page fault", 0, 9e-6, 0, 12, ""),
        Migration("cpu page fault", 1e-6, 1e-6, 0, 1, ""),
    ]
    found = [
        (m.kind, m.cause, m.calls, m.bytes, m.faults, m.bytes_per_second)
        for m in tables(trace).managed
    ]
    assert found == [
        ("gpu page fault", "", 1, 0, 12, None),
        ("h2d", "coherence", 2, 8192, 0, pytest.approx(2.048e9)),
        ("cpu page fault", "", 1, 0, 1, None),
    ]
    trace.managed_error = "managed memory: refused"
    assert tables(trace).notes == ["managed memory: refused"]


def test_capture_is_counted_from_the_plan_and_from_the_calls():
    trace = make_trace()
    whole = tables(trace).capture
    assert (whole.launches, whole.launches_captured, whole.kernels) == (2, 2, 3)
    assert (whole.steps, whole.steps_captured) == (2, 2)
    assert (whole.copies, whole.copies_captured) == (4, 4)
    assert (whole.bytes, whole.bytes_captured) == (2080, 2080)
    assert (whole.kernels_outside, whole.calls_outside, whole.dropped) == (1, 1, 0)
    assert whole.complete

    del trace.kernels[0], trace.copies[1]
    part = tables(trace).capture
    assert (part.launches, part.launches_captured) == (2, 1)
    assert (part.steps, part.steps_captured) == (2, 1)
    assert (part.copies_captured, part.bytes_captured) == (3, 2040)
    assert not part.complete
    assert "INCOMPLETE" in text.render(tables(trace))


def test_one_step_may_launch_many_kernels_and_dropped_records_show():
    trace = make_trace()
    trace.kernels += [trace.kernels[0]._replace(start_s=4e-3, end_s=5e-3)] * 3
    assert tables(trace).capture.complete
    trace.dropped = 7
    assert not tables(trace).capture.complete
    assert "7 records dropped" in text.render(tables(trace))


def test_without_marks_calls_stay_and_the_loss_is_said():
    trace = make_trace()
    trace.marks = {}
    found = tables(trace)
    assert sum(row.calls for row in found.api) == 7
    assert [row.layer for row in found.layers] == ["-", "-"]
    assert any("no correlation ids" in note for note in found.notes)


def test_without_records_timed_steps_stand_in():
    result = make_taken_apart(batch=7)
    result.whole_pass.source, result.whole_pass.sampled_s = profile_tables.EVENTS, 1e-4
    stand_in = partial(profile_tables.from_steps, result, top=90, notes=["why"])
    found = stand_in()
    assert found.source == profile_tables.EVENTS
    assert (found.passes, found.images, found.wall_s) == (2, 14, 1e-4)
    # All columns are of the two sampled passes.
    network, copy = found.gpu
    assert (network.name, network.calls) == ("network", 2)
    assert (network.total_s, network.average_s) == pytest.approx((25e-6, 12.5e-6))
    assert (network.min_s, network.max_s) == (12e-6, 13e-6)
    assert (copy.name, copy.calls) == ("images h2d", 2)
    (row,) = found.copies
    assert (row.what, row.memory, row.bytes) == ("images", "-", 2 * 10**6)
    assert row.bytes_per_second == pytest.approx(2e6 / 16e-6)
    assert found.capture is found.cost is None
    assert "why" in text.render(found)
    result.layers[0].calls = 3  # the samples are of passes, each of several calls
    chunked = stand_in().gpu[0]
    assert (chunked.calls, chunked.min_s, chunked.max_s) == (6, None, None)


def test_without_samples_the_totals_stand_in():
    """As where a run was interrupted, or of a version without samples."""
    found = profile_tables.from_steps(make_cuda(), top=90, notes=[])
    assert found.source == profile_tables.EVENTS
    assert [row.name for row in found.gpu] == ["conv1", "conv1 input h2d", "conv1 output d2h"]
    assert found.gpu[0].average_s == pytest.approx(0.006 / 551)
    assert found.gpu[0].min_s is None
    assert [row.name for row in found.cpu] == ["relu1", "tanh1"]


# ---- the report ----


def test_the_report_shows_every_table_and_sums_what_is_below_the_line():
    found = tables(make_trace(), top=50)
    found.managed = [
        profile_tables.ManagedRow("h2d", "coherence", 1, 4096, 0, 1e-6, 1e-6, 1e-6, 1e-6, 4e9)
    ]
    found.cost = profile_tables.Cost(1e-3, 1.1e-3, 1.1, [1.05, 1.15], 50, 0.99e-3)
    report = text.render(found)
    for title in (
        "What filled the time", "GPU activities", "CUDA API calls", "Layers on the CPU",
        "Kernels by layer", "Copies by what they move", "Managed memory",
    ):  # fmt: skip
        assert title in report.splitlines()
    assert "2 of 2 launches (3 kernels recorded)" in report
    assert "1.100 ms profiled, 1.000 ms plain" in report
    assert any(line.split()[:4] == ["-----", "50", "%", "-----"] for line in report.splitlines())
    assert "(4 others)" in report
    assert "[CUDA memset]" not in report
    assert "[CUDA memset]" in text.render(tables(make_trace(), top=100))
    assert "others)" not in text.render(tables(make_trace(), top=100))


def test_one_row_below_the_line_is_shown_as_itself():
    found = Profile(profile_tables.RECORDS, 50, 1, 1, 1.0)
    found.gpu = profile_tables.rows([(("most", "kernel"), 9.0), (("least", "kernel"), 1.0)])
    report = text.render(found)
    assert "least" in report
    assert "others)" not in report


@pytest.mark.parametrize("seconds", [3e-10, 1e-7, 0.4, 4e4])
def test_the_report_fits_its_width_and_never_prints_a_rounded_zero(seconds):
    trace = make_trace()
    trace.kernels = [
        kernel._replace(end_s=kernel.start_s + seconds, name=f"n::k<{'x::y, ' * 40}>")
        for kernel in trace.kernels
    ]
    report = text.render(tables(trace, wall_s=1e6, images=10**8))
    assert max(map(len, report.splitlines())) <= 100
    assert " 0.00 " not in report
    assert "k<y, y" in report


def test_names_from_outside_cannot_move_the_cursor():
    trace = make_trace()
    trace.kernels = [kernel._replace(name=HOSTILE) for kernel in trace.kernels]
    report = text.render(tables(trace))
    assert "\x1b" not in report
    report.encode("utf-8")


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("cnn_engine::(anonymous namespace)::conv_kernel<float, a::b>", "conv_kernel<float, b>"),
        ("plain", "plain"),
        (
            "n::k<" + "m::Long<1>, " * 20 + ">",
            "k<" + "Long<1>, " * 3 + "..." + "Long<1>, " * 3 + ">",
        ),
        ("<odd", "<odd"),
        ("[CUDA memcpy HtoD]", "[CUDA memcpy HtoD]"),
    ],
)
def test_namespaces_are_left_out_of_names(name, short):
    assert text.short(name) == short


def test_an_empty_profile_says_where_its_times_come_from():
    empty = Profile(profile_tables.HOST_CLOCK, 90, 0, 0, None, notes=["nothing ran"])
    assert "nothing ran" in text.render(empty)


def test_a_profile_survives_json():
    found = tables(make_trace())
    found.cost = profile_tables.Cost(1e-3, 1.1e-3, 1.1, None, 50)
    found.events = [["a", "kernel", "s", 0.0, 1.0, 0]]
    document = json.loads(json_report.dumps(make(profile=found)))
    assert "events" not in document["profile"]
    again = Result.from_dict(document).profile
    found.events = []
    assert again == found
    assert json.loads(json_report.dumps(make()))["profile"] is None
    document["profile"]["gpu"][0]["calls"] = "many"
    with pytest.raises(InputError, match="calls"):
        Result.from_dict(document)


def test_a_row_can_be_without_single_times():
    found = Profile(profile_tables.EVENTS, 50, 1, 1, 1.0)
    found.gpu = [
        Row(name, "conv", 1, 1.0, 1.0, None, None, 0.25, 0.25 * (index + 1))
        for index, name in enumerate("abcd")
    ]
    assert "(2 others)" in text.render(found)


def test_every_column_is_explained():
    document = (Path(__file__).parents[2] / "docs" / "reference" / "report_columns.md").read_text(
        "utf-8"
    )
    found = tables(make_trace())
    found.managed = [profile_tables.ManagedRow("h2d", "", 1, 1, 0, 1.0, 1.0, 1.0, 1.0, 1.0)]
    found.cost = profile_tables.Cost(1.0, 1.0, 1.0, None, 1)
    found.notes = ["something"]
    blocks = text.render(found).split("\n\n")[1:]
    columns = {column for block in blocks for column in block.splitlines()[1].split()}
    assert {"share", "sum", "total", "regs", "memory", "faults"} <= columns
    labels = {label for label, _ in text.summary(found) if label}
    assert len(labels) == 11
    for name in {*columns, *labels, *csv_report.COLUMNS}:
        assert f"`{name}`" in document, name
