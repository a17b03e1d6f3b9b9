"""OpenACC: operators against the reference, networks on the host, and what is said where it is missing.

``CNN_ENGINE_OPENACC=on`` in the environment, as in CI, makes a missing module a failure instead of a skip.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import test_conv2d
import tolerances

from cnn_engine import Engine, UnsupportedError, devices, workload
from cnn_engine.devices import openacc_module
from cnn_engine.graph import reference
from cnn_engine.graph.graph import Graph, Node, Value
from cnn_engine.kernels.select import Choice
from cnn_engine.lower.lowering import Program
from cnn_engine.lower.placement import Placement
from cnn_engine.operators import KINDS
from cnn_engine.operators.conv2d import Conv2d
from cnn_engine.plan.builder import build

try:
    openacc_module.load()
    missing = ""
except UnsupportedError as error:
    missing = str(error)
if missing and os.environ.get("CNN_ENGINE_OPENACC", "").lower() in ("on", "1"):
    pytest.fail(f"CNN_ENGINE_OPENACC is on: {missing}", pytrace=False)
built = pytest.mark.skipif(bool(missing), reason=missing)

VARIANTS = [("if", False), ("if", True), ("pad", False), ("pad", True)]
MODES = ["resident", "transfer"]


@pytest.fixture(
    params=["openacc:host", *(["openacc"] if "CNN_ENGINE_OPENACC_GPU" in os.environ else [])]
)
def place(request):
    """The host; with ``CNN_ENGINE_OPENACC_GPU`` in the environment a GPU too, which must be there then."""
    return request.param


def run(place, op, *arrays, variant="if", reduction=False, mode="resident"):
    """Runs ``op`` through OpenACC; every node must have a kernel of its own."""
    names = [f"x{i}" for i in range(len(arrays))]
    values = [Value(n, a.shape, a.dtype.name) for n, a in zip(names, arrays, strict=True)]
    graph = Graph(
        "test", (values[0],), ("y",), (Node("node", op, tuple(names), ("y",)),),
        dict(zip(names[1:], arrays[1:], strict=True)),
    )  # fmt: skip
    device = devices.select(place)
    program = Program(
        lambda batch, pixels: graph, Placement(device, mode, 1), Choice(variant, reduction, None)
    )
    plan = build(program, 1, False)
    assert not plan.fallbacks
    assert {step.place for step in plan.steps if step.kind == op.kind} <= {"openacc"}
    guard = 64
    y = graph.values["y"]
    memory = np.full(y.size + 2 * guard, -7.25e22, np.float32)
    out = memory[guard : guard + y.size].reshape(y.shape)
    x = np.ascontiguousarray(arrays[0])
    plan.bind(x.ctypes.data, out.ctypes.data)
    plan.run()
    assert (memory[:guard] == -7.25e22).all()
    assert (memory[guard + y.size :] == -7.25e22).all()
    return out


def floats(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


@built
@pytest.mark.parametrize(("variant", "reduction"), VARIANTS)
@pytest.mark.parametrize("shape", test_conv2d.SHAPES + test_conv2d.GENERAL[:10], ids=str)
def test_conv2d_against_reference(place, rng, shape, variant, reduction):
    mode = MODES[len(str(shape)) % 2]
    n, c, h, w, k, r, s, stride, padding, *more = shape
    dilation, groups = more or (1, 1)
    both, four = test_conv2d.both, test_conv2d.four
    op = Conv2d(both(stride), four(padding), both(dilation), groups)
    x, weight = floats(rng, n, c, h, w), floats(rng, k, c // groups, r, s)
    for bias in ((floats(rng, k),), ()):
        found = run(place, op, x, weight, *bias, variant=variant, reduction=reduction, mode=mode)
        wanted = op.reference(x, weight, *bias)
        magnitude = op.reference(np.abs(x), np.abs(weight), *map(np.abs, bias))
        bound = tolerances.sum_of_products(c // groups * r * s + 1, magnitude)
        tolerances.assert_close(found, wanted, bound, shape=shape)


@built
@pytest.mark.parametrize("reduction", [False, True])
@pytest.mark.parametrize("shape", [(1, 320, 10), (7, 33, 5), (0, 4, 3)], ids=str)
def test_linear_against_reference(place, rng, shape, reduction):
    n, features, outputs = shape
    op = KINDS["linear"]()
    x, weight = floats(rng, n, features), floats(rng, outputs, features)
    for bias in ((floats(rng, outputs),), ()):
        found = run(place, op, x, weight, *bias, reduction=reduction)
        magnitude = op.reference(np.abs(x), np.abs(weight), *map(np.abs, bias))
        bound = tolerances.sum_of_products(features + 1, magnitude)
        tolerances.assert_close(found, op.reference(x, weight, *bias), bound, shape=shape)


@built
@pytest.mark.parametrize("reduction", [False, True])
def test_softmax_against_reference(place, rng, reduction):
    x = floats(rng, 9, 13) * 30
    x[1, 2], x[2, 3], x[3] = np.nan, np.inf, -np.inf
    x[4, 5:] = -np.inf
    op = KINDS["softmax"](1)
    with np.errstate(all="ignore"):
        wanted = op.reference(x)
    found = run(place, op, x, reduction=reduction)
    plain = np.isfinite(x).all(1)
    tolerances.assert_close(found[plain], wanted[plain], tolerances.softmax(x[plain]))
    assert np.isnan(found[1:4]).all()
    assert (found[4, 5:] == 0).all()
    assert found[4].sum() == pytest.approx(1)


@built
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [((2, 2), (2, 2), (0, 0, 0, 0), (1, 1)), ((3, 2), (1, 2), (1, 0, 2, 1), (2, 1))],
)
def test_max_pool2d_against_reference(place, rng, kernel, stride, padding, dilation):
    x = floats(rng, 2, 3, 9, 8)
    x[0, 0, 4, 4], x[1, 2] = np.nan, -np.inf
    op = KINDS["max_pool2d"](kernel, stride, padding, dilation)
    np.testing.assert_array_equal(run(place, op, x), op.reference(x).astype(np.float32))


@built
def test_elementwise_against_reference(place, rng):
    x = floats(rng, 2, 3, 5, 7) * 4
    x[0, 0, 0, 0] = np.nan
    np.testing.assert_array_equal(run(place, KINDS["relu"](), x), KINDS["relu"]().reference(x))
    op = KINDS["tanh"]()
    bound = tolerances.unary("tanh", x, op.reference(x), 0, 0)
    tolerances.assert_close(run(place, op, x)[1:], op.reference(x)[1:], bound[1:])
    op = KINDS["pad2d"]((1, 2, 3, 0))
    np.testing.assert_array_equal(run(place, op, x), op.reference(x))
    pixels = rng.integers(0, 256, (2, 3, 4, 5), np.uint8)
    op = KINDS["normalize"]((1 / 255,), (-0.5,))
    wanted = op.reference(pixels)
    tolerances.assert_close(
        run(place, op, pixels), wanted, tolerances.functions(np.abs(wanted) + 1)
    )


@built
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("variant", "reduction"), VARIANTS)
@pytest.mark.parametrize("name", ["cifar10", "ece408"])
def test_networks_against_reference(place, rng, name, variant, reduction, mode):
    options = {"variant": variant, "reduction": reduction, "data_mode": mode}
    with Engine(name, weights="random", device=place, **options) as engine:
        images = rng.integers(0, 256, (5, *engine.network.input_shape), np.uint8)
        wanted = reference.forward(engine.network, engine.weights, images)
        bound = tolerances.PROBABILITY * np.maximum(1, np.abs(wanted))
        for batch in (2, 5):
            tolerances.assert_close(engine.predict(images, batch), wanted, bound, batch=batch)
        assert not engine.plan(2, images.dtype).fallbacks
        floats_in = (images / 128 - 1).astype(np.float32)
        wanted = reference.forward(engine.network, engine.weights, floats_in)
        bound = tolerances.PROBABILITY * np.maximum(1, np.abs(wanted))
        tolerances.assert_close(engine.predict(floats_in), wanted, bound)


@built
def test_real_images_and_weights(place, test_data):
    """865 of 1,102, as the thesis' weights get, by every variant and data mode; on a host the first agree."""
    dataset = workload.get("cifar10").load_data(str(test_data("cifar-10-batches-bin")), 1102)
    weights = test_data("convnetjs-cifar10")
    with Engine("cifar10", weights=weights, device=place, variant="pad") as engine:
        wanted = engine.predict(dataset.images)
    assert int((wanted.argmax(1) == dataset.labels).sum()) == 865
    for mode in MODES:
        for variant, reduction in VARIANTS:
            options = {"variant": variant, "reduction": reduction, "data_mode": mode}
            count = 24 if place == "openacc:host" else 1102  # with reduction 18 s there
            with Engine("cifar10", weights=weights, device=place, **options) as engine:
                found = engine.predict(dataset.images[:count])
            tolerances.assert_close(found, wanted[:count], 2 * tolerances.PROBABILITY, **options)
            if count == 1102:
                assert int((found.argmax(1) == dataset.labels).sum()) == 865, options


@built
def test_course_network(place, test_data):
    """84 of the first 100, as the course published."""
    found = workload.get("ece408")
    dataset = found.load_data(str(test_data("fashion-mnist")), 100)
    weights = test_data("ece408") / "ece408-0002.params"
    with Engine(found, weights=weights, device=place, variant="if") as engine:
        classes = engine.predict(dataset.images).argmax(1)
    assert int((classes == dataset.labels).sum()) == 84


@built
def test_convolutions_alone_are_on_the_device_in_transfer(rng):
    """Each has its data region around it: copyin of its input before, copyout of its output after."""
    with Engine(
        "cifar10", weights="random", device="openacc:host", variant="pad", data_mode="transfer"
    ) as engine:
        steps = [s for s in engine.plan(2, np.dtype(np.uint8)).steps if s.kind != "sync"]
    on_device = [(step.name, step.direction) for step in steps if step.place == "openacc"]
    assert on_device == [
        pair
        for name in ("conv1", "conv2", "conv3")
        for pair in ((f"{name} input", "h2d"), (name, None), (f"{name} output", "d2h"))
    ]
    with Engine("cifar10", weights="random", device="openacc:host", variant="pad") as engine:
        steps = engine.plan(2, np.dtype(np.uint8)).steps
    assert {step.place for step in steps if step.kind != "sync"} == {"openacc"}


@built
def test_several_threads_and_our_own_pool_beside_it(rng):
    """The runtime keeps its state by thread; the CPU's thread pool goes on beside it."""
    images = rng.integers(0, 256, (6, 3, 32, 32), np.uint8)
    found: dict[int, np.ndarray] = {}
    with (
        Engine("cifar10", device="openacc:host", variant="if") as ours,
        Engine("cifar10", device="cpu", threads=2, variant="if") as cpu,
    ):
        wanted, on_cpu = ours.predict(images), cpu.predict(images)

        def work(index: int) -> None:
            for _ in range(3):
                found[index] = (ours if index % 2 else cpu).predict(images)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for index, one in found.items():
        np.testing.assert_array_equal(one, wanted if index % 2 else on_cpu)
    tolerances.assert_close(wanted, on_cpu, 2 * tolerances.PROBABILITY)


def test_nothing_of_it_is_loaded_unless_asked_for():
    code = (
        "import cnn_engine, numpy as np, sys\n"
        "e = cnn_engine.Engine('cifar10', device='cpu')\n"
        "e.predict(np.zeros((1, 3, 32, 32), np.uint8))\n"
        "print('_openacc' in ' '.join(sys.modules), 'libgomp' in open('/proc/self/maps').read())"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert found.stdout.split() == ["False", "False"]


@built
def test_managed_is_refused_with_a_reason():
    with pytest.raises(UnsupportedError, match="managed: expected an OpenACC build with managed"):
        Engine("cifar10", device="openacc:host", data_mode="managed")


@built
def test_variants_that_it_has_not():
    with pytest.raises(UnsupportedError, match="blocked: expected a device of kind cpu or cuda"):
        Engine("cifar10", device="openacc:host", variant="blocked")
    with pytest.raises(UnsupportedError, match="expected resident or transfer or managed"):
        Engine("cifar10", device="openacc:host", data_mode="stream")


class FakeModule(SimpleNamespace):
    """A build that offloads, or does not, on a machine with so many GPUs."""

    compiler = "GNU 12.2.0"
    offload = "nvptx"
    devices = 0
    HOST = -1
    __file__ = "/nowhere/_openacc.so"

    def device_count(self):
        return self.devices


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(openacc_module, "_ran", False)

    def put(**facts):
        monkeypatch.setattr(openacc_module, "load", lambda: FakeModule(**facts))

    return put


def test_a_build_for_the_host_alone_says_so(fake):
    fake(offload="")
    with pytest.raises(UnsupportedError) as error:
        devices.select("openacc")
    assert str(error.value) == (
        "device openacc: expected a build that offloads to a GPU, found one for the host alone "
        "(GNU 12.2.0); install GCC's offload compiler (Debian: gcc-12-offload-nvptx) and build again, or "
        "take --device openacc:host"
    )
    assert devices.select("openacc:host").name == "openacc:host"


def test_no_gpu_is_one_line_and_never_the_host(fake, monkeypatch):
    fake()
    monkeypatch.setattr(openacc_module, "PLUGIN", "libgomp-plugin-none-such.so.1")
    with pytest.raises(
        UnsupportedError, match="libgomp-plugin-none-such.so.1 cannot be loaded: install it"
    ):
        devices.select("openacc")
    monkeypatch.setattr(openacc_module, "_loads", lambda library, folder: True)
    monkeypatch.setattr(openacc_module.ctypes, "CDLL", raises(OSError("no such file")))
    with pytest.raises(
        UnsupportedError, match="found none .no NVIDIA driver: libcuda.so.1 cannot be"
    ):
        devices.select("openacc")
    driver = SimpleNamespace(cuInit=lambda flags: 100, cuGetErrorString=lambda code, to: None)
    monkeypatch.setattr(openacc_module.ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(openacc_module.ctypes, "byref", lambda text: text)
    with pytest.raises(UnsupportedError, match="found none .the driver says: 100."):
        devices.select("openacc")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "libgomp: cuLinkAddData error: no kernel image; exiting",
            "found: libgomp: cuLinkAddData error",
        ),
        ("ran there: False", "found: ran there: False"),
    ],
)
def test_a_gpu_that_does_not_run_a_loop_is_refused(fake, monkeypatch, code, said):
    """The runtime ends a process that it cannot run in, so a loop is tried in another one."""
    fake(devices=1)
    died = SimpleNamespace(stdout=code if code.startswith("ran") else "", stderr=code, returncode=1)
    monkeypatch.setattr(openacc_module.subprocess, "run", lambda *a, **k: died)
    with pytest.raises(UnsupportedError, match=said) as error:
        devices.select("openacc")
    assert "\n" not in str(error.value)


def test_a_gpu_is_tried_until_it_ran_a_loop_and_not_again(fake, monkeypatch):
    fake(devices=1)
    answers = ["ran there: False", "ran there: True"]
    found = lambda *a, **k: SimpleNamespace(stdout=answers.pop(0), stderr="", returncode=0)  # noqa: E731
    monkeypatch.setattr(openacc_module.subprocess, "run", found)
    with pytest.raises(UnsupportedError, match="ran there: False"):
        devices.select("openacc")
    for _ in range(3):
        assert devices.select("openacc").name == "openacc"
    assert answers == []


def test_a_module_that_does_not_load_is_told_from_one_that_is_missing(monkeypatch):
    """As where PyTorch's older libgomp is in the process already."""
    monkeypatch.setitem(sys.modules, "cnn_engine._openacc", None)
    monkeypatch.setattr(openacc_module.importlib.util, "find_spec", lambda name: object())
    import cnn_engine

    monkeypatch.delattr(cnn_engine, "_openacc", raising=False)
    with pytest.raises(UnsupportedError, match="expected the OpenACC module to load, found: "):
        openacc_module.load()


def test_without_the_module(monkeypatch):
    monkeypatch.setattr(openacc_module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "cnn_engine._openacc", None)
    import cnn_engine

    monkeypatch.delattr(cnn_engine, "_openacc", raising=False)
    with pytest.raises(UnsupportedError, match="found one built without it"):
        openacc_module.load()
    for name in ("openacc", "openacc:host"):
        with pytest.raises(
            UnsupportedError, match="expected an installation with the OpenACC module"
        ):
            devices.select(name)


def raises(error: Exception):
    def call(*arguments, **options):
        raise error

    return call
