"""PyTorch models as ONNX files: what is written computes what PyTorch does."""

from __future__ import annotations

import sys

import pytest

import cnn_engine
from cnn_engine import export
from cnn_engine.errors import InputError
from cnn_engine.graph.onnx import load

torch = pytest.importorskip("torch")

MODELS = """
import torch
from torch import nn

class Tiny(nn.Module):
    def __init__(self, width=4, weights=None):
        super().__init__()
        self.trained = weights
        self.conv = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.fc = nn.Linear(width, 5)

    def forward(self, images):
        x = torch.relu(self.norm(self.conv(images)))
        return {"logits": self.fc(x.mean((2, 3)))}

class Plain(Tiny):
    def forward(self, images):
        return super().forward(images)["logits"]

class Deep(nn.Module):
    # No sum keeps the signal as it is: each block makes a difference a little larger.

    def __init__(self, blocks=25, width=8):
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
            )
            for _ in range(blocks)
        )
        self.fc = nn.Linear(width, 5)

    def forward(self, images):
        x = self.first(images)
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.fc(x.mean((2, 3)))

def pretrained(pretrained=False):
    model = Plain()
    model.trained = pretrained
    return model

def number():
    return 3

def fails():
    raise RuntimeError("as it must")

class Branches(nn.Module):
    def forward(self, images):
        return images if images.sum() > 0 else -images
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    (tmp_path / "exported_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "exported_models"
    sys.modules.pop("exported_models", None)


@pytest.mark.parametrize("exporter", export.EXPORTERS)
@pytest.mark.parametrize("batch", [None, 2])
def test_both_exporters_and_an_open_batch(models, tmp_path, capsys, exporter, batch):
    if exporter == "dynamo":
        pytest.importorskip("onnxscript")
    path = tmp_path / "net.onnx"
    words = [f"{models}:Plain,width=6", "--output", str(path), "--exporter", exporter]
    words += ["--input-shape", "3,8,9"] + ([] if batch is None else ["--batch", str(batch)])
    assert export.main(words) == 0
    assert "check: passed" in capsys.readouterr().out
    graph = load(path)
    assert graph.inputs[0].shape == (batch or 1, 3, 8, 9)
    assert bool(graph.batched) == (batch is None)
    assert [p.name for p in tmp_path.glob("*.onnx*")] == ["net.onnx"]


def test_another_computation_is_seen(models, tmp_path, capsys, monkeypatch):
    """The check is PyTorch's: here it is run after the weights have changed."""
    run = export.check

    def changed(module, *arguments):
        with torch.no_grad():
            module.fc.bias += 0.01
        return run(module, *arguments)

    monkeypatch.setattr(export, "check", changed)
    words = [f"{models}:Plain", "--output", str(tmp_path / "net.onnx"), "--input-shape", "3,8,8"]
    assert export.main([*words, "--exporter", "torchscript"]) == 1
    assert "check: FAILED" in capsys.readouterr().out


@pytest.mark.parametrize("exporter", export.EXPORTERS)
def test_a_deep_network_passes_and_one_wrong_weight_does_not(models, tmp_path, exporter):
    """Batch norm folded in float32 takes the outputs of such a network 1e-5 and more from the exact ones."""
    if exporter == "dynamo":
        pytest.importorskip("onnxscript")
    module, _ = export.build(f"{models}:Deep", "random")
    export.run_statistics(module, (3, 8, 8))
    path = str(tmp_path / "net.onnx")
    export.write(module, (3, 8, 8), path, exporter, None, 18)
    difference, limit = export.check(module, (3, 8, 8), path, None)
    assert difference < 1e-6 < limit < 0.01
    assert sum(node.op.kind == "batch_norm" for node in load(path).nodes) == 50
    with torch.no_grad():
        module.blocks[10][0].weight[0, 0, 0, 0] = 0
    difference, limit = export.check(module, (3, 8, 8), path, None)
    assert difference > limit


def test_weights_by_the_models_own_way(models):
    assert export.build(f"{models}:Plain", "DEFAULT")[0].trained == "DEFAULT"
    assert export.build(f"{models}:Plain", "random")[0].trained is None
    assert export.build(f"{models}:pretrained", "DEFAULT")[0].trained is True
    assert export.build(f"{models}:pretrained", "random")[0].trained is False


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_weights_from_a_file(models, tmp_path, suffix):
    from safetensors.torch import save_file

    module, _ = export.build(f"{models}:Plain", "random")
    state = {name: torch.full_like(value, 2) for name, value in module.state_dict().items()}
    path = tmp_path / f"weights{suffix}"
    (torch.save if suffix == ".pt" else save_file)(state, path)
    found, _ = export.build(f"{models}:Plain", str(path))
    assert found.fc.bias.detach().tolist() == [2] * 5
    with pytest.raises(InputError, match="--weights: expected a state dictionary of the model"):
        export.build(f"{models}:Plain,width=7", str(path))
    content = path.read_bytes()
    assert export.main([f"{models}:Plain", "--weights", str(path), "--output", str(path)]) == 2
    assert path.read_bytes() == content


def test_random_weights_see_images_first(models):
    module, _ = export.build(f"{models}:Plain", "random")
    before = module.norm.running_var.clone()
    export.run_statistics(module, (3, 8, 8))
    assert not torch.equal(module.norm.running_var, before)
    assert not module.training
    assert not module.norm.training


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{m}:number", "expected a torch.nn.Module, found int"),
        ("{m}:fails", "expected a model, found RuntimeError: as it must"),
        ("{m}:missing", "'missing' in {m}"),
        ("nothing", "module:callable[,key=value...]"),
    ],
)
def test_what_is_no_model(models, capsys, tmp_path, spec, message):
    output = tmp_path / "net.onnx"
    assert export.main([spec.format(m=models), "--output", str(output)]) == 2
    assert message.format(m=models) in capsys.readouterr().err
    assert not output.exists()


def test_an_input_shape_of_two_sizes(capsys, tmp_path):
    words = ["nothing:at_all", "--output", str(tmp_path / "net.onnx"), "--input-shape", "3,64"]
    assert export.main(words) == 2
    message = "error: --input-shape: expected channels, rows and columns, found '3,64'\n"
    assert capsys.readouterr().err == message


def test_what_cannot_be_exported(models, capsys, tmp_path):
    pytest.importorskip("onnxscript")
    output = tmp_path / "net.onnx"
    assert export.main([f"{models}:Branches", "--output", str(output)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --exporter dynamo: the model cannot be exported")
    assert error.count("\n") == 1
    assert not output.exists()


def test_sizes_of_images(models):
    module, _ = export.build(f"{models}:Plain", "random")
    assert export.images_shape(module, None) == (3, 224, 224)
    assert export.images_shape(module, (1, 2, 3)) == (1, 2, 3)
    module.default_cfg = {"input_size": (3, 32, 32)}
    assert export.images_shape(module, None) == (3, 32, 32)


def test_differences_are_of_the_largest_output(models, tmp_path):
    module, _ = export.build(f"{models}:Tiny", "random")
    path = str(tmp_path / "net.onnx")
    export.write(module, (3, 8, 8), path, "torchscript", 1, 18)
    difference, limit = export.check(module, (3, 8, 8), path, 1)
    assert difference <= limit < 1e-5


def test_torch_that_is_not_there_is_named(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert export.main(["a:b", "--output", str(tmp_path / "net.onnx")]) == 2
    assert "pip install 'cnn-engine[torch]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spec", "wanted", "names"),
    [
        ("torchvision.models:squeezenet1_1", "imagenet", "tench"),
        ("torchvision.models:vit_b_16,weights='IMAGENET1K_SWAG_E2E_V1'",
         "resize=384,crop=384x384,mean=0.485/0.456/0.406,std=0.229/0.224/0.225,interpolation=bicubic",
         "tench"),
        ("torchvision.models.segmentation:fcn_resnet50", None, None),
        ("timm:mobilenetv3_small_050",
         "resize=256,crop=224x224,mean=0.485/0.456/0.406,std=0.229/0.224/0.225,interpolation=bicubic",
         "tench, Tinca tinca"),
    ],
)  # fmt: skip
def test_what_trained_weights_say_of_images_and_classes(spec, wanted, names):
    pytest.importorskip(spec.partition(".")[0].partition(":")[0])
    module = None
    if spec.startswith("timm"):
        module = export.build(spec, "random")[0]
    preprocess, found = export.settings_of_weights(spec, "DEFAULT", module)
    assert (None if preprocess is None else str(preprocess)) == wanted
    assert (found and found[0]) == names
    assert names is None or len(found) == 1000
    assert export.settings_of_weights(spec, "state.pt", module) == (None, None)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"crop_pct": 0.95}, (235, (224, 224))),  # 224 / 0.95 = 235.79
        ({"crop_mode": "squash", "crop_pct": 1.0, "input_size": (3, 160, 224)}, ((160, 224), (160, 224))),
        ({"crop_mode": "border"}, None),
        ({"input_size": (3, 160, 224)}, None),
        ({"interpolation": "lanczos"}, None),
    ],
)  # fmt: skip
def test_what_of_timms_preprocessing_can_be_said(changes, wanted):
    pytest.importorskip("timm")
    module = torch.nn.Identity()
    module.num_classes = 7
    module.pretrained_cfg = {
        "input_size": (3, 224, 224), "interpolation": "bilinear", "crop_pct": 0.875, "mean": (0.5,) * 3,
        "std": (0.25,) * 3, "num_classes": 7, "label_names": list("abcdefg"), **changes,
    }  # fmt: skip
    preprocess, names = export._settings_of_timm(module)
    assert names == list("abcdefg")
    assert (preprocess and (preprocess.resize, preprocess.crop)) == wanted


def test_the_file_says_how_images_are_prepared(models, tmp_path, capsys):
    names = tmp_path / "names.txt"
    names.write_text("\n".join("abcde"))
    path = tmp_path / "net.onnx"
    words = [
        f"{models}:Plain",
        "--output",
        str(path),
        "--input-shape",
        "3,8,9",
        "--exporter",
        "torchscript",
    ]
    assert export.main(words) == 0
    assert "metadata: no preprocessing" in capsys.readouterr().out
    assert load(path).metadata == {}
    more = ["--preprocess", "resize=8x9,mean=0.5,std=0.25", "--classes", str(names)]
    assert export.main([*words, *more[:2]]) == 2  # one mean for three channels
    more[1] = "resize=8x9,mean=0.5/0.4/0.3"
    assert export.main([*words, *more]) == 0
    assert load(path).metadata == {
        "cnn_engine.preprocess": more[1], "cnn_engine.classes": '["a", "b", "c", "d", "e"]',
    }  # fmt: skip
    content = path.read_bytes()
    names.write_text("a\nb\n")
    assert export.main([*words, *more]) == 2
    assert "names.txt: expected 5 names" in capsys.readouterr().err
    assert path.read_bytes() == content


def test_names_of_timm_are_short_and_near_ones_are_named():
    pytest.importorskip("timm")
    with pytest.raises(InputError, match=r"did you mean mobilenetv3_small_050\?"):
        export.build("timm:mobilenetv3_smal_050", "random")


def test_a_package_is_named_only_where_it_is_missing(monkeypatch):
    pytest.importorskip("torchvision")
    with pytest.raises(InputError) as error:
        export.build("torchvision.modelz:resnet50", "random")
    assert "pip install" not in str(error.value)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(InputError, match=r"\(pip install 'cnn-engine\[torch\]'\)"):
        export.build("torchvision:resnet50", "random")


def test_an_engine_of_a_module(models):
    pytest.importorskip("onnxscript")
    module = export.build(f"{models}:Plain", "random")[0].train()
    module.norm.eval()
    export.run_statistics(module.eval(), (3, 8, 9))
    module.train()
    module.norm.eval()
    modes = [part.training for part in module.modules()]
    with cnn_engine.Engine.from_torch(module, torch.zeros(1, 3, 8, 9), device="cpu") as engine:
        images = torch.randn(5, 3, 8, 9, generator=torch.Generator().manual_seed(3))
        found = engine.predict(images.numpy())
        assert engine.predict(images.double()).tobytes() == found.tobytes()  # a tensor of the CPU
    assert [part.training for part in module.modules()] == modes
    with torch.no_grad():
        wanted = module.eval().double()(images.double())
    assert abs(found - wanted.numpy()).max() < 1e-5 * wanted.abs().max()
    for given, words in (
        ((len, images), "module: expected a torch.nn.Module, found builtin"),
        (
            (module, [1, 3, 8, 8]),
            "example: expected a tensor of at least 2 dimensions, the first the images",
        ),
    ):
        with pytest.raises(InputError, match=words):
            cnn_engine.Engine.from_torch(*given)
    branches = export.build(f"{models}:Branches", "random")[0]
    with pytest.raises(InputError, match="exporter dynamo: the model cannot be exported"):
        cnn_engine.Engine.from_torch(branches, images)
