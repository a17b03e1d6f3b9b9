"""``python -m cifar10.train`` on a few images, on the CPU."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import safetensors
from cnn_engine.workloads.cifar10 import dataset, train
from cnn_engine.workloads.cifar10.network import NETWORK

from cnn_engine.errors import InputError, UnsupportedError
from cnn_engine.graph.network import Conv2d, Linear, MaxPool2d, Network, Softmax, Tanh
from cnn_engine.workload import Dataset

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install '.[train]'")
training = pytest.importorskip("cnn_engine.workloads.cifar10.training")

RECIPE = training.Recipe(epochs=4, batch_size=16, learning_rate=0.01)


def images(count: int, seed: int = 0) -> Dataset:
    """Images whose label can be seen: synthetic ones, tinted by their class."""
    labels = np.random.default_rng(seed).integers(0, 10, count).astype(np.uint8)
    tint = np.stack([labels * 25, 250 - labels * 25, labels % 2 * 250], axis=1)
    pixels = (
        dataset.synthetic(count).images // 4 + (tint // 4 * 3).astype(np.uint8)[..., None, None]
    )
    return Dataset("tinted", "synthetic", pixels, labels)


def write_records(path, data: Dataset) -> None:
    path.write_bytes(
        b"".join(bytes([n]) + p.tobytes() for n, p in zip(data.labels, data.images, strict=True))
    )


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Steps this small gain nothing from threads, which are slow where the cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def folder(tmp_path):
    """A folder of 128 training and 32 test images."""
    path = tmp_path / "data"
    path.mkdir()
    write_records(path / "data_batch_1.bin", images(128))
    write_records(path / "test_batch.bin", images(32, seed=1))
    return path


def test_loss_falls_and_the_same_numbers_give_the_same_weights():
    data, log = images(128), []
    weights = training.train(NETWORK, data, RECIPE, evaluate={"test": data}, log=log.append)
    assert [entry["epoch"] for entry in log] == [1, 2, 3, 4]
    assert log[-1]["loss"] < 0.7 * log[0]["loss"]
    assert log[-1]["test_accuracy"] > 0.3
    again = training.train(NETWORK, data, RECIPE)
    assert all(np.array_equal(weights[name], again[name]) for name in weights)
    other = training.train(NETWORK, data, replace(RECIPE, seed=1, epochs=1))
    assert not np.array_equal(weights["conv1.weight"], other["conv1.weight"])
    assert not torch.are_deterministic_algorithms_enabled()  # as it was before


def test_weights_are_those_of_the_network():
    weights = training.train(NETWORK, images(32), replace(RECIPE, epochs=1))
    shapes = {name: value.shape for name, value in weights.items()}
    assert shapes == {
        "conv1.weight": (16, 3, 5, 5), "conv1.bias": (16,),
        "conv2.weight": (20, 16, 5, 5), "conv2.bias": (20,),
        "conv3.weight": (20, 20, 5, 5), "conv3.bias": (20,),
        "fc.weight": (10, 320), "fc.bias": (10,),
    }  # fmt: skip
    assert all(v.dtype == np.float32 and v.flags.c_contiguous for v in weights.values())


def test_folded_network_is_the_one_that_was_trained():
    generator = torch.Generator().manual_seed(3)
    parameters = training.initial_parameters(NETWORK, seed=3)
    for name, value in parameters.items():
        if not name.endswith(".weight"):
            value.uniform_(0.5, 2, generator=generator)
    pixels = torch.from_numpy(images(8).images)
    before = training.forward(NETWORK, parameters, pixels)
    folded = {k: torch.from_numpy(v) for k, v in training.fold(NETWORK, parameters).items()}
    after = training.forward(NETWORK, folded, pixels)
    # The same sums in another order: a few roundings of the largest score.
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5 * before.abs().max().item())


def test_layers_that_this_network_lacks():
    network = Network(
        name="other",
        input_shape=(3, 32, 32),
        layers=(
            Conv2d("a", out_channels=4, kernel=3, stride=2, bias=False),
            Tanh("t"),
            MaxPool2d("p", kernel=3, stride=2),
            Linear("fc", out_features=10),
            Softmax("s"),
        ),
    )
    weights = training.train(network, images(32), replace(RECIPE, epochs=1))
    shapes = {name: list(value.shape) for name, value in weights.items()}
    assert shapes == {"a.weight": [4, 3, 3, 3], "fc.weight": [10, 196], "fc.bias": [10]}


def test_student_learns_from_its_teacher_alone():
    data, log = images(128), []
    network = replace(NETWORK, name="teacher")
    teacher = training.Teacher(network, training.train(network, data, RECIPE))
    wrong = replace(data, labels=(data.labels + 1) % 10)
    recipe = replace(RECIPE, seed=1, epochs=8, teacher_weight=1.0)
    training.train(NETWORK, wrong, recipe, evaluate={"true": data}, log=log.append, teacher=teacher)
    assert log[-1]["true_accuracy"] > 0.3 > log[-1]["train_accuracy"]


def test_divergence():
    scores = torch.tensor([[1.0, 2.0, 4.0], [0.0, 0.0, 9.0]])
    assert training._divergence(scores, scores + 5, 3.0).abs() < 1e-6  # a shift changes nothing
    p, q = (torch.softmax(x / 2, 1) for x in (scores.flip(1), scores))
    by_hand = 4 * (p * (p / q).log()).sum() / 2
    torch.testing.assert_close(training._divergence(scores, scores.flip(1), 2.0), by_hand)


def test_command_with_a_teacher(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "teacher_network", lambda: replace(NETWORK, name="teacher"))
    log = tmp_path / "log.jsonl"
    arguments = ["--data", str(folder), "--output", str(tmp_path / "w"), "--log", str(log)]
    arguments += ["--epochs", "2", "--batch-size", "16", "--device", "cpu", "--quiet"]
    assert train.main([*arguments, "--teacher-epochs", "1"]) == 0
    _, *epochs, _ = map(json.loads, log.read_text().splitlines())
    assert [e["network"] for e in epochs] == ["teacher", "cifar10", "cifar10"]


def test_the_teacher_is_a_network_for_the_same_images():
    parameters = training.initial_parameters(train.teacher_network(), seed=0)
    pixels = torch.from_numpy(images(2).images)
    assert training.forward(train.teacher_network(), parameters, pixels).shape == (2, 10)
    assert 1_100_000 < sum(value.numel() for value in parameters.values()) < 1_250_000


def test_augmentation_mirrors_and_shifts_and_nothing_else():
    row, column = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    picture = torch.stack([row, column, torch.full_like(row, 7)]).to(torch.uint8)[None]
    order = torch.zeros(200, dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    some = training._augmented(picture, order, 2, generator)
    assert some.shape == (200, 3, 32, 32)
    assert (some[:, 2] == 7).all()
    assert {tuple(p[0, 4:28, 0].tolist()) for p in some} == {
        tuple(range(4 + shift, 28 + shift)) for shift in range(-2, 3)
    }
    assert some[:, 0, 0, 0].max() == 2  # reflected at the border
    mirrored = some[:, 1, 0, 10] > some[:, 1, 0, 20]
    assert 60 < mirrored.sum() < 140
    still = training._augmented(picture, order[:20], 0, generator)
    assert all(torch.equal(p, picture[0]) or torch.equal(p, picture[0].flip(2)) for p in still)


def test_command(folder, tmp_path, capsys):
    output, log = tmp_path / "w.safetensors", tmp_path / "log.jsonl"
    arguments = ["--data", str(folder), "--output", str(output), "--log", str(log)]
    arguments += ["--epochs", "2", "--batch-size", "16", "--hold-out", "28", "--device", "cpu"]
    assert train.main(arguments) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{output}: 100 images, 2 epochs, ")
    header, *epochs, final = map(json.loads, log.read_text().splitlines())
    assert header["torch"] == torch.__version__
    assert header["recipes"]["cifar10"]["epochs"] == len(epochs) == 2
    assert header["images"] == 100
    assert {"loss", "train_accuracy", "held_out_accuracy", "test_accuracy"} < epochs[0].keys()
    with safetensors.safe_open(output, "np") as file:
        metadata = file.metadata()
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert metadata["network"] == "cifar10"
    assert json.loads(metadata["accuracy"]) == final["final"]
    test = dataset.read([folder / "test_batch.bin"])
    assert training.accuracy(NETWORK, weights, test) == final["final"]["test"]
    assert train.main([*arguments, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere"], "nowhere: expected a file or folder"),
        (["--epochs", "0"], "--epochs: expected a whole number from 1 to 1000000"),
        (["--epochs", "many"], "--epochs: expected a whole number .* found 'many'"),
        (["--learning-rate", "nan"], "--learning-rate: expected a number above 0, up to 1000"),
        (["--batch-size", "129"], r"--batch-size: expected at most 128 \(images\), found 129"),
        (["--hold-out", "128"], "--hold-out: expected 0 to 127 images, found 128"),
        (["--seed", "-1"], "--seed: expected a whole number from 0"),
        (["--output", "/nowhere/w.safetensors"], "--output: expected an existing folder"),
        (["--log", "/nowhere/log"], "--log: expected an existing folder"),
        (["--output", "x", "--log", "data/../x"], "--log: expected a path of its own"),
        (["--learning-rate", "1000", "--batch-size", "8"], "--learning-rate: expected one that"),
    ],
)
def test_command_errors(folder, tmp_path, capsys, arguments, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "1000" in arguments:  # a loss that is not finite, as a far too high rate gives
        monkeypatch.setattr(torch.nn.functional, "cross_entropy", lambda s, w: s.sum() * np.inf)
    try:
        code = train.main(["--data", str(folder), "--epochs", "1", "--device", "cpu", *arguments])
    except SystemExit as error:  # as argparse ends
        code = error.code
    assert code == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith("error: ")
    with pytest.raises(InputError, match=message):
        raise InputError(errors.strip())
    assert not (tmp_path / "weights.safetensors").exists()


def test_training_needs_training_images_with_labels(tmp_path):
    write_records(tmp_path / "test_batch.bin", images(2))
    with pytest.raises(InputError, match="expected training images, found test images only"):
        train.load(tmp_path, None, 0)
    np.savez(tmp_path / "a.npz", images=images(2).images)
    with pytest.raises(InputError, match="expected images with labels, found no labels"):
        train.load(tmp_path / "a.npz", None, 0)


def test_test_images_from_elsewhere(folder, tmp_path):
    write_records(tmp_path / "other.bin", images(5))
    data, evaluate = train.load(folder, tmp_path / "other.bin", 0)
    assert (len(data), {k: len(v) for k, v in evaluate.items()}) == (128, {"test": 5})
    data, evaluate = train.load(folder / "data_batch_1.bin", folder, 8)
    sizes = {k: len(v) for k, v in evaluate.items()}
    assert (len(data), sizes) == (120, {"held_out": 8, "test": 32})


def test_interrupted_command_writes_its_log_and_no_weights(folder, tmp_path, capsys, monkeypatch):
    def interrupted(network, data, recipe, device, evaluate, log, teacher):
        log({"network": "cifar10", "epoch": 1, "loss": 2.0, "seconds": 0.5})
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "train", interrupted)
    output, log = tmp_path / "w", tmp_path / "log"
    assert train.main(["--data", str(folder), "--output", str(output), "--log", str(log)]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert not output.exists()
    assert [json.loads(line).get("epoch") for line in log.read_text().splitlines()] == [None, 1]


def test_without_pytorch(folder, capsys, monkeypatch):
    monkeypatch.setattr(train, "torch", None)
    assert train.main(["--data", str(folder)]) == 2
    assert "pip install 'cnn-engine[train]'" in capsys.readouterr().err


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert train._choose_device("auto") == "cpu"
    with pytest.raises(UnsupportedError, match="--device: expected a CUDA device"):
        train._choose_device("cuda")
