"""Members of an ensemble that train: weights, checkpoints, resumed runs. Needs PyTorch."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cnn_engine import cli
from cnn_engine.ensemble import command, members, train
from cnn_engine.errors import InputError

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install '.[train]'")

EPOCHS, BATCH, IMAGES = 3, 16, 70


def labelled(path):
    """Writes images whose label can be seen: each class has a grey level of its own."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 10, IMAGES).astype(np.uint8)
    noise = generator.integers(0, 20, (IMAGES, 3, 32, 32))
    np.savez(
        path, images=(labels[:, None, None, None] * 22 + noise).astype(np.uint8), labels=labels
    )
    return str(path)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Steps this small gain nothing from threads, which are slow where the cores are busy."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return labelled(tmp_path_factory.mktemp("data") / "images.npz")


def run(data, output, *words):
    options = ["--work", "train", "--data", data, "--batch", str(BATCH), "--epochs", str(EPOCHS)]
    options += ["--output", str(output), "--device", "cpu", "--threads", "1", "--no-ceilings"]
    return command.main([*options, "--quiet", "--stall", "60", *words])


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """An undisturbed run of two members."""
    output = tmp_path_factory.mktemp("whole")
    assert run(data, output, "--members", "2", "--digest") == cli.DONE
    return output


def test_members_learn_and_differ(whole):
    logs = [
        [json.loads(line) for line in (whole / f"member-{k}.jsonl").read_text().splitlines()]
        for k in (0, 1)
    ]
    for log in logs:
        assert [entry["epoch"] for entry in log] == [1, 2, 3]
        assert log[-1]["loss"] < log[0]["loss"]
    weights = [(whole / f"member-{k}.safetensors").read_bytes() for k in (0, 1)]
    assert weights[0] != weights[1]
    report = json.loads((whole / "report.json").read_text())
    assert report["training"]["cifar10-0"]["log"] == logs[0]
    digests = report["rank_reports"][0]["digests"]
    assert digests["0"] == digests["1"]
    assert not list(whole.glob("*.part"))


def test_every_design_trains_the_same_weights(data, whole, tmp_path):
    assert run(data, tmp_path, "--members", "2", "--design", "none") == cli.DONE
    for k in (0, 1):
        name = f"member-{k}.safetensors"
        assert_same_weights(tmp_path / name, whole / name)


def assert_same_weights(found, wanted):
    from safetensors.numpy import load_file

    one, other = load_file(found), load_file(wanted)
    assert one.keys() == other.keys()
    for name in one:
        assert (one[name] == other[name]).all(), name


def test_the_engine_runs_what_was_trained(data, whole, tmp_path):
    words = ["--data", data, "--members", "2", "--weights", str(whole / "member-{}.safetensors")]
    words += ["--device", "cpu", "--quiet", "--no-ceilings", "--json", str(tmp_path / "a.json")]
    assert command.main(words) == cli.DONE
    found = json.loads((tmp_path / "a.json").read_text())["accuracy"]
    assert {*found} == {"cifar10-0", "cifar10-1", "ensemble (mean)"}
    assert all(one["total"] == IMAGES for one in found.values())
    assert found["cifar10-0"]["top1"] > 0.1  # ten classes


def test_a_resumed_run_ends_with_the_same_weights(data, whole, tmp_path, monkeypatch):
    step, calls = train.TrainMember.step, []

    def interrupted(self, batch, *rest):
        calls.append(batch.number)
        if len(calls) == 16:  # two members: the second one's 8th step, after the 2nd checkpoint
            raise KeyboardInterrupt
        return step(self, batch, *rest)

    words = ("--members", "2", "--checkpoint-every", "3")
    monkeypatch.setattr(train.TrainMember, "step", interrupted)
    assert run(data, tmp_path, *words) == cli.INTERRUPTED
    assert not (tmp_path / "member-0.safetensors").exists()
    specs = members.specs(2, None, "cpu", "default")
    assert [sorted(train.checkpoints(tmp_path, spec)) for spec in specs] == [[3, 6], [3, 6]]
    assert json.loads((tmp_path / "report.json").read_text())["interrupted"]
    (tmp_path / "member-1.6.checkpoint").unlink()  # so that both have only the first
    resumed = []
    monkeypatch.setattr(
        train.TrainMember, "step", lambda self, batch, *rest: resumed.append(batch.number)
        or step(self, batch, *rest),
    )  # fmt: skip
    assert run(data, tmp_path, *words, "--resume") == cli.DONE
    assert min(resumed) == 3
    for k in (0, 1):
        name = f"member-{k}.safetensors"
        assert_same_weights(tmp_path / name, whole / name)
    lines = (tmp_path / "member-1.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2, 3]


def test_a_checkpoint_of_another_run_is_refused(data, whole, tmp_path, capsys):
    for path in whole.glob("*.checkpoint"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    words = ("--members", "2", "--resume", "--seed", "9")
    assert run(data, tmp_path, *words) == cli.INPUT_AT_FAULT
    assert "expected the same options, found seed 0" in capsys.readouterr().err
    for path in tmp_path.glob("*.checkpoint"):
        path.write_bytes(path.read_bytes()[:100])
    assert run(data, tmp_path, *words) == cli.INPUT_AT_FAULT
    assert "expected a checkpoint" in capsys.readouterr().err


def test_the_start_is_what_all_members_have():
    assert train.common_start([[3, 6], [6, 9]]) == 6
    assert train.common_start([[3, 6], [9]]) == 0
    assert train.common_start([[]]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--work", "train"], "--output: expected a folder"),
        (["--resume"], "--resume: expected the work train"),
        (["--work", "train", "--output", "x", "--data-parallel", "--members", "2"], "--data-parallel"),
        (["--work", "train", "--output", "x", "--balance"], "--balance: expected the work infer"),
        (["--work", "train", "--output", "x", "--data", "synthetic"], "--data: expected images with labels"),
    ],
)  # fmt: skip
def test_options_at_fault(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command.main([*words, "--no-ceilings", "--threads", "1"]) == cli.INPUT_AT_FAULT
    assert message in capsys.readouterr().err


def test_models_without_layers_are_refused(tmp_path):
    spec = members.Spec(0, network="cifar10", model=str(tmp_path / "none.onnx"))
    with pytest.raises(InputError):
        train.TrainMember(spec, None)
