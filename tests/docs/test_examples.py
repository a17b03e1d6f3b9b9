"""The example programs do what their texts say."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cnn_engine import Engine
from cnn_engine.serve.command import parser

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
IMAGES = np.random.default_rng(1).integers(0, 256, (3, 3, 32, 32), np.uint8)


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    for name in ("processes", "threads", "serve_fastapi"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def wanted() -> np.ndarray:
    with Engine("cifar10", device="cpu", threads=1) as engine:
        return engine.predict(IMAGES)


def test_processes_give_the_engines_classes_in_order(wanted):
    import processes

    rate, classes = processes.measure(2, 1, [IMAGES[:2], IMAGES[2:]])
    assert rate > 0
    np.testing.assert_array_equal(classes, wanted.argmax(axis=1))


def test_threads_give_the_engines_classes_in_order(wanted):
    import threads

    rate, seconds, classes = threads.measure(2, 1, [IMAGES[:2], IMAGES[2:]])
    assert rate > 0
    assert seconds > 0
    np.testing.assert_array_equal(classes, wanted.argmax(axis=1))


def test_dockerfile_has_no_fault():
    hadolint = shutil.which("hadolint") or pytest.skip("hadolint is not installed: the extra lint")
    done = subprocess.run([hadolint, EXAMPLES / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_dockerfile_installs_extras_and_calls_a_command_that_there_are():
    text = (EXAMPLES / "Dockerfile").read_text("utf-8")
    (extras,) = re.findall(r"cnn_engine-\*\.whl\)\[([\w,]+)\]", text)
    project = (EXAMPLES.parent / "pyproject.toml").read_text("utf-8")
    assert all(f"\n{extra} = [" in project for extra in extras.split(","))
    entry, words = (
        json.loads(found) for found in re.findall(r"^(?:ENTRYPOINT|CMD) (.*)$", text, re.MULTILINE)
    )
    assert entry == ["cnn-engine", "serve"]
    assert parser().parse_args(words).host == "0.0.0.0"


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.fixture
def client():
    pytest.importorskip("fastapi")
    testing = pytest.importorskip("fastapi.testclient")
    import serve_fastapi

    with testing.TestClient(serve_fastapi.app) as client:
        yield client


def test_served_probabilities_are_the_engines(client, wanted):
    assert client.get("/health").json() == {"status": "ready"}
    found = client.post("/predict", content=npy(IMAGES)).json()
    np.testing.assert_array_equal(np.float32(found["probabilities"]), wanted)
    assert found["classes"] == wanted.argmax(axis=1).tolist()


@pytest.mark.parametrize(
    ("content", "status", "text"),
    [
        (b"no array", 400, ""),
        (b"", 400, ""),
        (npy(IMAGES[:, :1]), 400, "images: expected"),
        (npy(np.array([{}], object)), 400, "allow_pickle"),
        (b"\0" * (2**26 + 1), 413, "expected at most"),
    ],
    ids=["text", "nothing", "shape", "objects", "large"],
)
def test_bad_requests_are_answered(client, content, status, text):
    answer = client.post("/predict", content=content)
    assert answer.status_code == status
    assert text in answer.json()["detail"]
    assert client.post("/predict", content=npy(IMAGES[:1])).status_code == 200
