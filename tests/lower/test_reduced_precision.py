"""Values that lie in memory in 16 bits: which do, what that takes, and results that do not fit."""

from __future__ import annotations

import pickle
from dataclasses import replace

import fake_cuda
import numpy as np
import pytest
from graphs import Builder
from test_low_batch import images, network

from cnn_engine import Engine, _cpu, kernels
from cnn_engine.errors import UnsupportedError
from cnn_engine.graph.graph import Graph, Node, Value
from cnn_engine.kernels.cuda import channels_last
from cnn_engine.lower import reduced_precision
from cnn_engine.operators.binary import Add, Div, Max, Mul, Pow, Sub
from cnn_engine.operators.conv2d import Conv2d
from cnn_engine.operators.mathematics import Log, Sqrt
from cnn_engine.operators.reduce import ReduceMean
from cnn_engine.operators.resize import Resize
from cnn_engine.operators.shaping import Concat
from cnn_engine.operators.softmax import Softmax
from cnn_engine.operators.unary import Clip, LeakyRelu, Relu, Sigmoid


@pytest.fixture
def fake(monkeypatch):
    fake_cuda.install(monkeypatch, tensor_cores=True, stores=True)


def placed(graph: Graph, dtype: str):
    with Engine(graph, device="cuda", dtype=dtype) as engine:
        return engine._plans.open().placed(1, False)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_kernels_hand_on_is_stored_rounded(fake, dtype):
    graph = placed(network(), dtype).graph
    whole = {value.name for value in graph.inputs} | set(graph.outputs)
    for node in graph.nodes:
        if node.op.kind == "copy":  # of what comes in, and what goes out
            whole |= {*node.inputs, *node.outputs}
        if (
            node.op.kind == "conv2d_nhwc"
        ):  # numbers that images are multiplied with as they are read
            whole |= set(node.inputs[4:5])
        if node.op.kind == "squeeze_excite" and not node.op["scale"]:  # which makes such numbers
            whole |= set(node.outputs)
    for node in reversed(graph.nodes):
        if node.op.kind == "reshape" and node.outputs[0] in whole:
            whole |= set(node.inputs)
    made = {name: graph.values[name] for node in graph.nodes for name in node.outputs}
    assert len(made.keys() - whole) > 10
    for name, value in made.items():
        assert value.storage_dtype == ("" if name in whole else dtype), name
        assert value.nbytes == (4 if name in whole else 2) * value.size


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_first_layer_reads_float32_behind_other_nodes_too(fake, dtype):
    """Its kernels read [N, C, H, W], which they round themselves."""
    small = network()
    nodes = tuple(
        replace(node, inputs=tuple("a" if name == "images" else name for name in node.inputs))
        for node in small.nodes
    )
    first = Node("first", Sigmoid(), ("images",), ("a",))
    graph = placed(replace(small, nodes=(first, *nodes)), dtype).graph
    planar = [node for node in graph.nodes if node.op.kind == "conv2d_nhwc" and node.op.planar]
    assert [graph.values[node.inputs[0]].storage_dtype for node in planar] == [""]


def test_hoppers_functions_run_what_they_take(fake, monkeypatch):
    """Of images as they are multiplied, and of first layers without a residual.

    Never with a bias that is computed, nor on what may lie in the caller's memory.
    """
    dtypes = ("float16", "bfloat16", "tf32", "float32")
    graphs = {dtype: placed(network(), dtype).graph for dtype in dtypes}
    halves = _cpu.ElementType.float16, _cpu.ElementType.bfloat16
    for name in ("conv2d_nhwc_wgmma_takes", "conv2d_nhwc_wgmma_planar_takes"):
        first = "planar" in name
        taken = staticmethod(
            lambda shape, compute_dtype, _, h=first: not h or compute_dtype in halves
        )
        monkeypatch.setattr(fake_cuda.FakeTensorCores, name, taken)
    device, found = fake_cuda.FakeCuda(True), set()
    for dtype, graph in graphs.items():
        for node in graph.nodes:
            if node.op.kind != "conv2d_nhwc":
                continue
            function = channels_last.compiled_for(node, graph, device)
            wanted, wide = "conv2d_nhwc", dtype in ("tf32", "float32")
            if not wide and node.op.planar:
                wanted = "conv2d_nhwc_wgmma_planar"
            elif not node.op.planar and (wide or graph.values[node.inputs[0]].storage_dtype):
                wanted = "conv2d_nhwc_wgmma"
                output = replace(graph, outputs=(*graph.outputs, node.inputs[0]))
                there = channels_last.compiled_for(node, output, device)
                assert (there == wanted) == (not wide), node.name
            assert function == wanted, node.name
            kernel, _ = kernels.choose(node, graph, device.target)
            if kernel.name == "implicit_gemm":
                found.add((function, kernel.shown_as(node, graph, device)))
            inputs = list(node.inputs) + [None] * (3 - len(node.inputs))
            inputs[2] = node.inputs[0]
            other = replace(node, inputs=tuple(inputs))
            assert channels_last.compiled_for(other, graph, device) == "conv2d_nhwc"
    assert found == {
        ("conv2d_nhwc", "implicit_gemm"),
        ("conv2d_nhwc_wgmma", "wgmma"),
        ("conv2d_nhwc_wgmma_planar", "wgmma_planar"),
    }


def test_float32_and_tf32_are_stored_as_they_are(fake):
    for dtype in ("float32", "tf32"):
        assert not placed(network(), dtype).graph.storage_dtype


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_plans_take_half_of_the_memory(fake, dtype):
    sizes = {}
    for kind in ("tf32", dtype):
        with Engine(network(size=64, width=32), device="cuda", dtype=kind) as engine:
            sizes[kind] = engine.plan(4, np.dtype(np.float32)).nbytes["cuda"]
    assert sizes[dtype] < 0.75 * sizes["tf32"]  # the images that come in are float32


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_nearest_neighbours_are_stored_as_they_are_read(fake, dtype):
    """A decoder's convolutions read 16 bits behind an image that was made larger."""
    b = Builder((1, 16, 8, 8))
    x = b.add(Resize((1, 16, 16, 16), (1.0, 1.0, 2.0, 2.0)), b.conv("images", 16))
    graph = placed(b.graph(b.conv(b.conv(x, 16), 8)), dtype).graph
    (resize,) = (node for node in graph.nodes if node.op.kind == "resize")
    names = resize.inputs[0], resize.outputs[0]
    assert {graph.values[name].storage_dtype for name in names} == {dtype}


def test_what_moves_elements_changes_no_type(fake):
    """Where one of a concatenation's values is a caller's, all of them are as he has them."""
    b = Builder((1, 16, 8, 8))
    x = b.conv("images", 16)
    y = b.relu(b.conv(x, 16))
    joined = b.add(Concat(1), x, y)
    z = b.conv(joined, 8)
    graph = b.graph(z)
    stored = placed(replace(graph, outputs=(z, joined)), "float16").graph
    concats = [node for node in stored.nodes if node.op.kind == "concat"]
    assert concats
    for node in concats:
        assert not any(
            value.storage_dtype for value in (*stored.inputs_of(node), *stored.outputs_of(node))
        )
    alone = placed(graph, "float16").graph
    for node in alone.nodes:
        if node.op.kind == "concat":
            values = (*alone.inputs_of(node), *alone.outputs_of(node))
            assert {value.storage_dtype for value in values} == {"float16"}


def test_what_has_no_kernel_for_it_reads_float32(fake):
    b = Builder((1, 16, 8, 8))
    y = b.add(Softmax(1), b.conv("images", 16))
    graph = placed(b.graph(b.conv(y, 8)), "float16").graph
    (node,) = (node for node in graph.nodes if node.op.kind == "softmax")
    assert not any(
        value.storage_dtype for value in (*graph.inputs_of(node), *graph.outputs_of(node))
    )


def test_a_graph_keeps_what_is_stored():
    value = Value("x", (2, 8))
    graph = Graph(
        "g",
        (value,),
        ("z",),
        (Node("a", Relu(), ("x",), ("y",)), Node("b", Sigmoid(), ("y",), ("z",))),
    )
    stored = replace(graph, storage_dtype={"y": "float16"})
    assert stored.values["y"].nbytes == 32
    assert stored.values["y"].dtype == "float32"
    assert stored.replaced(
        [stored.nodes[1]], [replace(stored.nodes[1], op=Relu())]
    ).storage_dtype == {"y": "float16"}
    assert pickle.loads(pickle.dumps(stored)).storage_dtype == {"y": "float16"}


def logarithm(constant: float, kind: type = Add) -> Graph:
    """The logarithm of squares, of which a constant keeps those that are 0 from it."""
    b = Builder((1, 8, 8, 8))
    b.constants["c"] = np.full((1, 8, 1, 1), constant, np.float32)
    b.shapes["c"] = (1, 8, 1, 1)
    x = b.conv("images", 8, 1)
    kept = b.add(kind(), b.add(Mul(), x, x), "c")
    return b.graph(b.conv(b.relu(b.add(Log(), kept)), 8, 1))


@pytest.mark.parametrize("kind", [Add, Max])
@pytest.mark.parametrize(
    ("dtype", "constant", "held"),
    [
        ("float16", 1e-10, False), ("float16", 1e-5, False), ("float16", 1e-3, True),
        ("float16", 0.0, True), ("float16", 65504.0, True), ("float16", 1e5, False),
        ("float16", -np.inf, True), ("bfloat16", 1e-10, True), ("bfloat16", 1e5, True),
        ("bfloat16", -3.4028235e38, False),
    ],
)  # fmt: skip
def test_constants_that_a_type_does_not_hold_are_computed_with_in_float32(
    fake, dtype, constant, held, kind
):
    graph = logarithm(constant, kind)
    (node,) = (node for node in graph.nodes if "c" in node.inputs)
    with Engine(graph, device="cuda", dtype=dtype) as engine:
        program = engine._plans.open()
        placed = program.placed(1, False)
        (found,) = (other for other in placed.graph.nodes if other.op.kind == node.op.kind)
        storage_dtype = {
            value.storage_dtype for value in placed.graph.inputs_of(found) if value.name != "c"
        }
        storage_dtype |= {value.storage_dtype for value in placed.graph.outputs_of(found)}
        assert dtype in storage_dtype or not held
        assert held or storage_dtype == {""}
        notes = engine.plan(1, np.dtype(np.float32)).fallbacks
        assert held == (node.name not in notes)
        assert held or f"{dtype} does not hold its constant" in notes[node.name]


def test_a_norm_that_is_many_nodes_keeps_squares_and_roots_in_float32(fake):
    """As exporters write LayerNorm: what is normalised stays in 16 bits."""
    b = Builder((1, 8, 8, 8))
    for name, value in (("two", 2.0), ("epsilon", 1e-12), ("one", 1.0)):
        b.constants[name], b.shapes[name] = np.full((1, 1, 1, 1), value, np.float32), (1, 1, 1, 1)
    x = b.conv("images", 8, 1)
    apart = b.add(Sub(), x, b.add(ReduceMean((1,)), x))
    square = b.add(Pow(), apart, "two")
    mean = b.add(ReduceMean((1,)), square)
    kept = b.add(Add(), mean, "epsilon")
    root = b.add(Sqrt(), kept)
    factor = b.add(Div(), "one", root)
    made = b.add(Mul(), apart, factor)
    with Engine(b.graph(b.conv(made, 8, 1)), device="cuda", dtype="float16") as engine:
        graph = engine._plans.open().placed(1, False).graph
        found = engine._plans.open().in_float32
    assert set(found) == {square, mean, kept, root, factor}
    assert "with " + kept in found[square]
    storage_dtype = {
        node.op.kind: graph.values[node.outputs[0]].storage_dtype for node in graph.nodes
    }
    assert storage_dtype["mul"] == "float16"
    assert {storage_dtype[kind] for kind in ("pow", "add", "sqrt", "div")} == {""}


def test_small_weights_of_what_is_added_to_others_are_rounded(fake):
    """As LayerScale is at its beginning, 1e-6: float16 keeps nothing of such a sum in what it is added to."""
    for adds, kept in ((True, "float16"), (False, "float32")):
        b = Builder((1, 8, 8, 8))
        x = b.relu(b.conv("images", 8))
        y = b.conv(x, 8)
        (name,) = (node.name for node in b.nodes if node.outputs == (y,))
        b.constants[b.nodes[-1].inputs[1]] = 1e-9 * b.constants[b.nodes[-1].inputs[1]]
        y = b.add(Add(), y, x) if adds else b.add(Sigmoid(), y)
        with Engine(b.graph(b.conv(y, 8)), device="cuda", dtype="float16") as engine:
            program = engine._plans.open()
            graph = program.placed(1, False).graph
        (node,) = (node for node in graph.nodes if name in (node.name, *node.covers))
        assert node.op.compute_dtype == kept
        assert (name in program.in_float32) == (not adds)


@pytest.mark.parametrize(
    ("ends", "lost"), [((Sigmoid,), False), ((Relu, Sigmoid), False), ((Relu, Log), True)]
)
def test_a_small_bias_counts_where_a_steep_function_reads_the_sum(fake, ends, lost):
    """Biases are added in float32: what a convolution reads loses nothing that it would keep."""
    b = Builder((1, 8, 8, 8))
    x = b.relu(b.conv("images", 8))
    b.constants["bias"], b.shapes["bias"] = np.full(8, 2.0**-26, np.float32), (8,)
    y = b.add(Conv2d(), x, b.constant((8, 8, 1, 1)), "bias")
    (name,) = (node.name for node in b.nodes if node.outputs == (y,))
    for op in ends:
        y = b.add(op(), y)
    with Engine(b.graph(b.conv(y, 8)), device="cuda", dtype="float16") as engine:
        program = engine._plans.open()
        program.placed(1, False)
    assert (name in program.in_float32) == lost


def test_numbers_of_functions_and_lost_weights_are_looked_at(fake):
    """Those of clip that clip nothing are none, and of weights the largest count."""
    b = Builder((1, 8, 8, 8))
    names = [b.conv("images", 8, 1)]
    for op in (Clip(1e-12, 1e30), Clip(-1e30, 6.0), LeakyRelu(1e-9), LeakyRelu(0.01)):
        names.append(b.add(op, names[-1]))
    names.append(b.conv(names[-1], 8, 1))
    graph = b.graph(b.conv(names[-1], 8, 1))
    weights = [node.inputs[1] for node in graph.nodes if node.op.kind == "conv2d"]
    small, few = np.full((8, 8, 1, 1), 1e-6, np.float32), graph.constants[weights[2]].copy()
    few[1:] = 1e-12
    graph = replace(graph, constants={**graph.constants, weights[1]: small, weights[2]: few})
    with Engine(graph, device="cuda", dtype="float16") as engine:
        engine.plan(1, np.dtype(np.float32))
        found = set(engine._plans.open().in_float32)
    assert found == {names[0], names[3], names[5]}


def test_words_are_used_again_and_told_of_once(fake):
    device = fake_cuda.FakeCuda(True)
    overflows = reduced_precision.Overflows(device)
    overflows.of("first")
    overflows.of("second")
    overflows.check()
    overflows._word[0] = 2
    with pytest.raises(
        UnsupportedError, match="float16: node second: expected results of at most 65504"
    ):
        overflows.check()
    overflows.check()
    word = overflows._word
    word[0] = 1
    del overflows
    again = reduced_precision.Overflows(device)
    assert again._word is word
    again.check()


def large(factor: float) -> Graph:
    """Sums that grow past float16's range in the second convolution, and shrink again behind it."""
    b = Builder((1, 8, 6, 6))
    x = b.relu(b.conv(b.conv("images", 8, 1), 16, 1))
    x = b.add(ReduceMean((2, 3), keepdims=False), b.conv(x, 8, 1))
    graph = b.graph(x)
    first, second, third = (node.inputs[1] for node in graph.nodes if node.op.kind == "conv2d")
    constants = dict(graph.constants)
    for name, value in ((first, 1.0), (second, factor), (third, 4 / factor)):
        constants[name] = np.abs(constants[name]) * np.float32(value)
    return replace(graph, constants=constants)


@pytest.mark.gpu
def test_results_out_of_float16_are_refused_by_name():
    x = np.abs(images(1, 6)[:, :1]).repeat(8, 1)
    for factor, dtype in ((4.0, "float16"), (3e4, "bfloat16")):
        with Engine(large(factor), device="cuda", dtype=dtype) as engine:
            assert np.isfinite(engine.predict(x)).all()
    with Engine(large(3e4), device="cuda", dtype="float16") as engine:
        for _ in range(3):
            with pytest.raises(
                UnsupportedError, match="float16: node conv2d1: expected results of"
            ):
                engine.predict(x)
        for _ in range(3):
            assert np.isfinite(engine.predict(x * np.float32(1e-6))).all()


@pytest.mark.gpu
def test_a_caller_on_the_device_learns_of_it_with_a_later_call():
    import cupy

    x = cupy.abs(cupy.asarray(images(1, 6)[:, :1].repeat(8, 1)))
    small = x * np.float32(1e-6)
    with Engine(large(3e4), device="cuda", dtype="float16") as engine:
        for _ in range(3):
            engine.predict(x)
            with pytest.raises(UnsupportedError, match="node conv2d1.* in a call on arrays of the"):
                engine.check_overflow()
            engine.check_overflow()
            assert np.isfinite(cupy.asnumpy(engine.predict(small))).all()
        engine.predict(x)
        cupy.cuda.Device().synchronize()
        with pytest.raises(UnsupportedError, match="node conv2d1.* in an earlier call"):
            engine.predict(small)
        assert np.isfinite(cupy.asnumpy(engine.predict(small))).all()
        engine.check_overflow()
        engine.predict(cupy.concatenate([x, x]))
        with pytest.raises(UnsupportedError, match="node conv2d1.* in a call on arrays of the"):
            engine.close()
    with pytest.raises(UnsupportedError, match="node conv2d1"):  # noqa: SIM117
        with Engine(large(3e4), device="cuda", dtype="float16") as engine:
            engine.predict(x)

    def fails() -> None:
        with Engine(large(3e4), device="cuda", dtype="float16") as engine:
            engine.predict(x)
            raise KeyError

    with pytest.raises(KeyError):
        fails()


def test_what_is_prepared_is_for_values_as_they_lie_in_memory(fake):
    """The graph of another batch may keep in float32 what this one rounds, and so need another kernel."""
    with Engine(network(), device="cuda", dtype="float16") as engine:
        program = engine._plans.open()
        placed = program.placed(1, False)
        graph = placed.graph
        reads = {
            n.name: graph.values[n.inputs[0]] for n in graph.nodes if n.op.kind == "conv2d_nhwc"
        }
        node = next(n for n in graph.nodes if n.name in reads and reads[n.name].storage_dtype)
        kernel = placed.kernels[node.name]
        found = program.prepared(graph, node, kernel)
        assert program.prepared(replace(graph, storage_dtype={}), node, kernel) is not found
        assert program.prepared(graph, node, kernel) is found
