from __future__ import annotations

import subprocess
import sys

from cnn_engine import doctor
from cnn_engine.devices import cuda_module
from cnn_engine.errors import UnsupportedError
from cnn_engine.measure import environment
from cnn_engine.measure.cupti import activity


def test_the_main_job_can_run(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CNN_ENGINE_DATA", raising=False)
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    assert "ok CPU kernels" in out
    assert "network cifar10" in out
    assert "cnn-engine download cifar10" in out
    assert "the main job can run" in out


def test_without_the_cuda_kernels(capsys, monkeypatch):
    def load():
        raise UnsupportedError("not built")

    monkeypatch.setattr(cuda_module, "load", load)
    assert doctor.main([]) == 0
    assert "-- CUDA kernels     not built" in capsys.readouterr().out


def test_a_missing_library_is_a_fault_with_its_remedy(capsys, monkeypatch):
    known = environment.package_version

    def version(name):
        return None if name == "safetensors" else known(name)

    monkeypatch.setattr(environment, "package_version", version)
    assert doctor.main([]) == 2
    out = capsys.readouterr().out
    assert "!! safetensors" in out
    assert "-> pip install safetensors" in out


def test_what_the_laboratory_lacks_is_no_fault(capsys, monkeypatch):
    known = environment.package_version

    def version(name):
        return None if name in ("psutil", "matplotlib") else known(name)

    monkeypatch.setattr(environment, "package_version", version)
    monkeypatch.setattr(activity, "unavailable", lambda: "activity records: CUPTI refused: no")
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    assert "-- psutil           not installed; for CPU utilisation in characterize" in out
    assert "-> pip install 'cnn-engine[lab]'" in out
    assert "-- CUPTI            activity records: CUPTI refused: no" in out


def test_data_at_fault_is_told(capsys, monkeypatch):
    monkeypatch.setenv("CNN_ENGINE_DATA", "/nonexistent")
    assert doctor.main([]) == 2
    assert "!! network cifar10" in capsys.readouterr().out


def test_as_a_module_with_an_unknown_option():
    done = subprocess.run(
        [sys.executable, "-m", "cnn_engine.doctor", "--cure"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == "error: unrecognized arguments: --cure\n"
