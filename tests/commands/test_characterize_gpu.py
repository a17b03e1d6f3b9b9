"""Characterisation on a GPU."""

from __future__ import annotations

import time

import pytest
from characterize_points import point, rows

from cnn_engine import characterize
from cnn_engine.characterize import measure
from cnn_engine.characterize.measure import Meters, Settings
from cnn_engine.characterize.subjects import Load

GPU = [
    "--device",
    "cuda",
    "--data",
    "synthetic",
    "--images",
    "200",
    "--settle",
    "1",
    "--duration",
    "0.5",
]


@pytest.mark.gpu
class TestOnAGpu:
    def test_variants(self, tmp_path, capsys):
        code = characterize.main(
            [*GPU, "--variant", "if,pad,tiled,fused", "--batch", "1,20", "--output", str(tmp_path)]
        )
        assert code == 0, capsys.readouterr().err
        recorded_ = measure.activity.unavailable() is None
        for row in rows(tmp_path / "summary.csv"):
            assert row["status"] == "ok"
            assert row["kernel_source"] == ("activity" if recorded_ else "events")
            if recorded_ or row["gpu_utilization"]:
                assert 0 < float(row["gpu_utilization"]) <= 1
            # A pass in host memory has copies and a wait: its kernels never fill it.
            assert float(row["kernel_s_per_pass"]) < float(row["latency_max_s"])
            if row["variant"] != "fused":  # whose memory is its own
                assert int(row["allocated_bytes"]) > 0
            if recorded_:
                assert row["records_dropped"] == "0"
                assert float(row["kernels_per_pass"]) >= 1
                assert 0 < float(row["gpu_utilization_profiled"]) <= 1
            if row["power_mean_w"]:
                assert 10 < float(row["power_mean_w"]) < 2000
                assert float(row["sm_clock_mean_mhz"]) > 100
                assert int(row["device_memory_used_bytes"]) > 2**20
                assert 0 <= float(row["nvml_gpu_utilization_mean"]) <= 1
            for name in ("sm_utilization", "sm_occupancy", "dram_utilization"):
                assert row[name] == "" or 0 <= float(row[name]) <= 1
        iterations = rows(tmp_path / "iteration.csv")
        if recorded_:
            profiled = [row for row in iterations if row["window"] == "profiled"]
            assert profiled
            for row in profiled:
                assert 0 < float(row["kernel_s"]) <= float(row["wall_s"])

    @pytest.mark.alone
    def test_a_kernel_that_fills_the_time_is_seen(self):
        """Passes of one kernel of 5 ms are busy nearly all of the time; with 5 ms of nothing, half of it."""
        from cnn_engine.devices import select

        if reason := measure.activity.unavailable():
            pytest.skip(reason)
        device = select("cuda:0")

        def busy():
            device.delay(5e-3)
            device.synchronize()

        def half():
            device.delay(5e-3)
            device.synchronize()
            end = time.perf_counter() + 5e-3
            while time.perf_counter() < end:
                pass

        for run_, low, high in ((busy, 0.9, 1.0), (half, 0.4, 0.6)):
            found = point()
            load = Load(1, lambda run_=run_: run_, 1)
            settings = Settings(1, 0.1, 0.3, 0.3, 0.05)
            measure.time_point(found, load, Meters(), settings)
            measure.profile_point(found, load, settings, on_gpu=True)
            assert low <= found.gpu_utilization <= high
            assert low - 0.05 <= found.gpu_utilization_profiled <= high

    def test_memory_is_that_of_one_batch_alone(self, tmp_path):
        assert (
            characterize.main(
                [*GPU, "--variant", "if", "--batch", "200,1,200", "--duration", "0.05", "--no-plot",
                 "--quiet", "--output", str(tmp_path)]
            )
            == 0
        )  # fmt: skip
        one, many = rows(tmp_path / "summary.csv")
        assert int(many["allocated_bytes"]) > 20 * int(one["allocated_bytes"]) > 0

    def test_events_where_there_are_no_records(self, tmp_path, monkeypatch):
        monkeypatch.setattr(measure.activity, "unavailable", lambda: "activity records: none")
        assert characterize.main(
            [*GPU, "--variant", "pad", "--batch", "4", "--quiet", "--output", str(tmp_path)]
        ) == 0  # fmt: skip
        [row] = rows(tmp_path / "summary.csv")
        assert row["kernel_source"] == "events"
        if row["gpu_utilization"]:
            assert 0 < float(row["gpu_utilization"]) <= 1
        else:
            assert "events around kernels add up to more than a pass" in row["note"]
        assert {k["source"] for k in rows(tmp_path / "kernel.csv")} == {"events"}
