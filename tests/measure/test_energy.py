"""Energy per image: counters of files that stand for RAPL's, of a GPU that stands for NVML's."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from characterize_points import rows
from characterize_points import run as characterize

from cnn_engine import run
from cnn_engine.devices import energy
from cnn_engine.devices.cpu import CpuDevice
from cnn_engine.devices.energy import Energy

RANGE = 262_143_328_850


class Counter:
    """A package in ``folder``, whose counter moves on by ``step`` microjoules at each reading."""

    def __init__(self, folder, value=0, step=0, name="package-0"):
        self.folder, self.value, self.step = folder, value, step
        folder.mkdir(parents=True)
        (folder / "name").write_text(f"{name}\n")
        (folder / "max_energy_range_uj").write_text(f"{RANGE}\n")
        (folder / "energy_uj").write_text(f"{value}\n")


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Two packages, a part of one, and the whole machine: these are counted in the packages."""
    monkeypatch.setattr(energy, "POWERCAP", tmp_path / "powercap")
    made = [Counter(energy.POWERCAP / f"intel-rapl:{n}", step=3_000_000) for n in (0, 1)]
    Counter(energy.POWERCAP / "intel-rapl:0:0", step=10**9, name="core")
    Counter(energy.POWERCAP / "intel-rapl:2", step=10**9, name="psys")

    def moved(self):
        counter = next((c for c in made if self._counter.parent == c.folder), None)
        found = counter.value
        counter.value = (found + counter.step) % RANGE
        return found

    monkeypatch.setattr(energy._Package, "_now", moved)
    return made


def test_packages_add_up_and_wrap_around(packages):
    packages[0].value, packages[1].value = RANGE - 1_000_000, 5
    found = Energy(CpuDevice())
    found.start()
    assert found.read() == pytest.approx({"cpu": 6.0})
    assert found.read() == pytest.approx({"cpu": 12.0})
    found.start()
    assert found.read() == pytest.approx({"cpu": 6.0})


def test_a_counter_that_may_have_wrapped_twice_says_nothing(packages, monkeypatch):
    found = Energy(CpuDevice())
    now = iter([0.0, 0.0, 1e4, 1e4, 1e4, 1e4])
    monkeypatch.setattr(energy, "perf_counter", lambda: next(now))
    found.start()
    assert found.read() == {}
    assert found.read() == {}


def test_a_machine_without_counters_says_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(energy, "POWERCAP", tmp_path / "none")
    found = Energy(CpuDevice())
    assert (found.notes, found.read()) == ([], {})


@pytest.mark.parametrize("fault", [PermissionError(13, "Permission denied"), ValueError("text")])
def test_counters_that_cannot_be_read_are_a_note(packages, monkeypatch, fault):
    def refused(self):
        raise fault

    monkeypatch.setattr(energy._Package, "_now", refused)
    (note,) = Energy(CpuDevice()).notes
    assert "RAPL's counters in" in note
    assert note.endswith(fault.strerror if isinstance(fault, OSError) else "text")


def test_a_gpu_counts_millijoules(monkeypatch, tmp_path):
    monkeypatch.setattr(energy, "POWERCAP", tmp_path / "none")
    readings = iter([5_000, 5_000, 7_500])
    gpu = SimpleNamespace(query=lambda what: {"TotalEnergyConsumption": next(readings)}[what])
    monkeypatch.setattr(energy.nvml, "Gpu", lambda bus: gpu)
    found = Energy(SimpleNamespace(kind="cuda", pci_bus_id="0"))
    found.start()
    assert found.read() == {"gpu": 2.5}


def test_run_and_characterize_give_joules_per_image(packages, tmp_path, capsys):
    result = tmp_path / "run.json"
    words = [
        "--device=cpu",
        "--images=4",
        "--batch=2",
        "--iterations=3",
        "--variant=if",
        "--no-check",
    ]
    assert run.main([*words, "--data=synthetic", "--weights=random", f"--json={result}"]) == 0
    # Two packages, read after each of three iterations over four images.
    assert json.loads(result.read_text())["energy_j_per_image"] == {"cpu": pytest.approx(18 / 12)}
    assert "Energy per image" in (said := capsys.readouterr().out)
    assert "CPU 1.500 J" in said
    assert characterize(tmp_path / "found", "--variant=if", "--batch=2", "--no-check") == 0
    (row,) = rows(tmp_path / "found" / "summary.csv")
    spent = float(row["cpu_energy_j_per_image"]) * int(row["passes"]) * 2
    assert spent == pytest.approx(6.0 * round(spent / 6.0))
    assert spent >= 6.0
    assert row["gpu_energy_j_per_image"] == ""
    assert "Energy per image" in capsys.readouterr().out
