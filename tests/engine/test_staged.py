"""Graphs that find numbers while they run: how many elements there are, which branch is taken."""

import pickle
import threading

import fake_cuda
import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx_models import model, onnxruntime_outputs, tensor

from cnn_engine import Engine
from cnn_engine.engine import staged
from cnn_engine.engine.staged import StagedEngine
from cnn_engine.errors import CnnEngineError, InputError, UnsupportedError
from cnn_engine.graph.onnx import importer, reading
from cnn_engine.workload import Samples

node = helper.make_node
RNG = np.random.default_rng(5)


def floats(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def integers(name, shape):
    return tensor(name, shape, TensorProto.INT64)


def positive_elements():
    """exp of the elements of x that are above 0, and how many they are."""
    return model(
        [
            node("Relu", ["x"], ["r"]), node("NonZero", ["r"], ["at"]),
            node("Transpose", ["at"], ["rows"]), node("GatherND", ["x", "rows"], ["v"]),
            node("Exp", ["v"], ["y"]), node("Shape", ["v"], ["count"]),
        ],
        [tensor("x", ["n", 4])], [tensor("y", None), integers("count", [1])],
    )  # fmt: skip


def boxes_that_stay():
    """Corners of the boxes that no better one overlaps, doubled."""
    return model(
        [
            node("NonMaxSuppression", ["boxes", "scores", "most", "iou", "least"], ["kept"]),
            node("Gather", ["kept", "two"], ["column"], axis=1),
            node("Squeeze", ["column", "axis"], ["which"]),
            node("Gather", ["boxes", "which"], ["b"], axis=1),
            node("Add", ["b", "b"], ["y"]),
        ],
        [tensor("boxes", [1, "n", 4]), tensor("scores", [1, 2, "n"])], [tensor("y", None)],
        {"most": np.int64([4]), "iou": np.float32([0.3]), "least": np.float32([0.4]),
         "two": np.int64([2]), "axis": np.int64([1])},
    )  # fmt: skip


def branches():
    """x doubled where its sum is above 0; else x transposed and squared: another shape."""
    one = helper.make_graph([node("Add", ["x", "x"], ["a"])], "one", [], [tensor("a", None)])
    nodes = [node("Transpose", ["x"], ["t"], perm=[1, 0]), node("Mul", ["t", "t"], ["b"])]
    other = helper.make_graph(nodes, "other", [], [tensor("b", None)])
    return model(
        [
            node("ReduceSum", ["x"], ["sum"], keepdims=0), node("Greater", ["sum", "zero"], ["c"]),
            node("If", ["c"], ["z"], then_branch=one, else_branch=other), node("Neg", ["z"], ["y"]),
        ],
        [tensor("x", ["n", 3])], [tensor("y", None)], {"zero": np.float32(0)},
    )  # fmt: skip


def branches_over_others():
    """exp(x) where the sum of x is above 0; else the elements that are not 0, all made before the branch."""
    one = helper.make_graph([node("Neg", ["e"], ["a"])], "one", [], [tensor("a", None)])
    nodes = [node("Transpose", ["at"], ["t"]), node("GatherND", ["x", "t"], ["b"])]
    other = helper.make_graph(nodes, "other", [], [tensor("b", None)])
    return model(
        [
            node("Exp", ["x"], ["e"]), node("NonZero", ["x"], ["at"]),
            node("ReduceSum", ["x"], ["sum"], keepdims=0), node("Greater", ["sum", "zero"], ["c"]),
            node("If", ["c"], ["z"], then_branch=one, else_branch=other), node("Neg", ["z"], ["y"]),
        ],
        [tensor("x", ["n", 3])], [tensor("y", None)], {"zero": np.float32(0)},
    )  # fmt: skip


def loop():
    """x times w, as often as the sum of ``times`` says, beside every step."""
    body = helper.make_graph(
        [
            node("Mul", ["state", "w"], ["next"]), node("Identity", ["next"], ["step"]),
            node("Identity", ["on"], ["goes_on"]),
        ],
        "body",
        [integers("i", []), tensor("on", [], TensorProto.BOOL), tensor("state", [2])],
        [tensor("goes_on", [], TensorProto.BOOL), tensor("next", [2]), tensor("step", [2])],
    )  # fmt: skip
    return model(
        [
            node("ReduceSum", ["times", "axis"], ["count"], keepdims=0),
            node("Loop", ["count", "", "x"], ["y", "all"], body=body),
        ],
        [tensor("x", [2]), integers("times", ["n"])], [tensor("y", None), tensor("all", None)],
        {"w": np.float32([2, 3]), "axis": np.int64([0])},
    )  # fmt: skip


def of_operands(nodes, shape, constants=None, *operands):
    """exp of what nodes make ``z`` of x, by operands that are int64 rows computed as a + a - a."""
    computed = []
    for name, _ in operands:
        computed += [
            node("Add", [name, name], [f"{name}2"]),
            node("Sub", [f"{name}2", name], [f"{name}_"]),
        ]
    return model(
        [*computed, *nodes, node("Exp", ["z"], ["y"])],
        [tensor("x", shape), *(integers(name, [size]) for name, size in operands)],
        [tensor("y", None)], constants,
    )  # fmt: skip


X = floats(3, 4)
#: Model, and inputs of several calls: sizes, counts of 0 and each other decision.
CASES = {
    "NonZero": (positive_elements(), [{"x": floats(n, 4)} for n in (1, 2, 5)] + [{"x": -np.abs(X)}]),
    "NonMaxSuppression": (
        boxes_that_stay(),
        [{"boxes": np.abs(floats(1, n, 4)), "scores": RNG.random((1, 2, n), np.float32) - away}
         for n, away in ((1, 0), (30, 0), (30, 1), (7, 0))],
    ),
    "If": (branches(), [{"x": sign * np.abs(floats(n, 3))} for n in (1, 2, 4) for sign in (1, -1)]),
    "If over others": (
        branches_over_others(),
        [{"x": sign * np.float32([[1, 0, 2], *[[3, 0, 0]] * n])} for n in (1, 2) for sign in (1, -1)],
    ),
    "Loop": (loop(), [{"x": floats(2), "times": np.int64(t)} for t in ([1], [2, 1], [1, 1], [5])]),
    "Reshape": (
        of_operands([node("Reshape", ["x", "s_"], ["z"])], ["n", 4], None, ("s", 2)),
        [{"x": X, "s": np.int64(s)} for s in ([3, 4], [12, 1], [-1, 6], [0, -1], [2, 6])],
    ),
    "Slice": (
        of_operands(
            [node("Slice", ["x", "a_", "b_", "axis"], ["z"])], ["n", 4], {"axis": np.int64([1])},
            ("a", 1), ("b", 1),
        ),
        [{"x": X, "a": np.int64([a]), "b": np.int64([b])} for a, b in ((0, 2), (-3, 9), (1, -1), (2, 2))],
    ),
    "Expand": (
        of_operands([node("Expand", ["x", "s_"], ["z"])], ["n", 1], None, ("s", 2)),
        [{"x": X[:, :1].copy(), "s": np.int64(s)} for s in ([3, 2], [1, 5], [3, 1])],
    ),
    "Tile": (
        of_operands([node("Tile", ["x", "s_"], ["z"])], ["n", 4], None, ("s", 2)),
        [{"x": X, "s": np.int64(s)} for s in ([1, 2], [3, 1], [0, 1])],
    ),
    "Pad": (
        of_operands([node("Pad", ["x", "s_"], ["z"])], ["n", 4], None, ("s", 4)),
        [{"x": X, "s": np.int64(s)} for s in ([0, 1, 2, 0], [1, 0, 0, 0], [0, -1, 0, -1])],
    ),
    "Range": (
        of_operands(
            [node("Squeeze", ["s_", "zero"], ["e"]), node("Range", ["b", "e", "by"], ["r"]),
             node("Cast", ["r"], ["f"], to=1), node("Add", ["f", "x"], ["z"])], [1],
            {"zero": np.int64([0]), "b": np.int64(1), "by": np.int64(2)}, ("s", 1),
        ),
        [{"x": floats(1), "s": np.int64([s])} for s in (4, 1, 9, -3)],
    ),
    "ConstantOfShape": (
        of_operands(
            [node("ConstantOfShape", ["s_"], ["o"]), node("Add", ["o", "x"], ["z"])], [1], None, ("s", 2)
        ),
        [{"x": floats(1), "s": np.int64(s)} for s in ([2, 3], [4, 1], [0, 2])],
    ),
    "TopK": (
        of_operands([node("TopK", ["x", "s_"], ["z", "at"])], ["n", 4], None, ("s", 1)),
        [{"x": X, "s": np.int64([s])} for s in (1, 3, 4, 0)],
    ),
    "Unique": (
        model(
            [node("Unique", ["x"], ["u", "", "at", "n"]), node("Cast", ["n"], ["f"], to=1),
             node("Mul", ["u", "f"], ["y"])],
            [tensor("x", ["n"])], [tensor("y", None), integers("at", None)],
        ),
        [{"x": RNG.integers(0, 4, n).astype(np.float32)} for n in (1, 3, 20)],
    ),
    "Compress": (
        model(
            [node("Greater", ["x", "zero"], ["c"]), node("Compress", ["w", "c"], ["z"], axis=1),
             node("MatMul", ["z", "x2"], ["y"])],
            [tensor("x", [3]), tensor("w", [2, 3]), tensor("x2", ["k", 2])], [tensor("y", None)],
            {"zero": np.float32(0)},
        ),
        [{"x": np.float32(x), "w": floats(2, 3), "x2": floats(sum(v > 0 for v in x), 2)}
         for x in ([1, 2, -1], [1, 2, 3], [-1, 5, -1])],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_found_while_it_runs(name):
    proto, calls = CASES[name]
    engine = Engine(proto, device="cpu", threads=1)
    assert isinstance(engine, StagedEngine)
    for inputs in (*calls, calls[0]):
        wanted = onnxruntime_outputs(proto, inputs)
        for found, exact in zip(engine.run(inputs).values(), wanted, strict=True):
            assert (found.shape, found.dtype) == (exact.shape, exact.dtype)
            np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-6)
    first = next(iter(calls[0].values()))
    assert engine.check(Samples(calls[0], len(first))).passed


def test_sizes_are_planned_once(monkeypatch):
    proto, calls = CASES["NonZero"]
    engine = Engine(proto, device="cpu")
    first = [engine.run(inputs)["y"] for inputs in calls]
    monkeypatch.setattr(reading._Reader, "found", lambda *_: pytest.fail("the file is read again"))
    for inputs, exact in zip(calls, first, strict=True):
        np.testing.assert_array_equal(engine.run(inputs)["y"], exact)  # the same bits
    engine.run({"x": floats(9, 4)})  # a size for which nothing else is decided


def test_a_call_like_one_before_finds_nothing_again(monkeypatch):
    """All that follows from what was found is known, and the same bits come out."""
    proto, calls = CASES["If"]
    engine = Engine(proto, device="cpu")
    first = [engine.run(inputs) for inputs in (*calls, *calls)][: len(calls)]
    monkeypatch.setattr(engine, "_leg", None)
    monkeypatch.setattr(staged.arguments, "of_graph", None)
    for inputs, wanted in zip((*calls, *calls), (*first, *first), strict=True):
        found = engine.run(inputs)
        assert [*found] == [*wanted]
        for name, array in found.items():
            np.testing.assert_array_equal(array, wanted[name])
            array += 1  # the caller's own


def test_a_call_unlike_those_before_is_looked_at():
    engine = Engine(positive_elements(), device="cpu")
    x = floats(3, 4)
    wanted = engine.run({"x": x})["y"]
    np.testing.assert_array_equal(engine.run({"x": x.astype(np.float64)})["y"], wanted)
    np.testing.assert_array_equal(engine.run({"x": x.tolist()})["y"], wanted)
    apart = np.repeat(x, 2, axis=1)[:, ::2]
    for inputs in ({}, {"x": x, "y": x}, {"x": x[0]}, {"x": apart}, {"x": None}, [x]):
        with pytest.raises(InputError):
            engine.run(inputs)


def test_legs_are_forgotten_past_a_number(monkeypatch):
    monkeypatch.setattr(staged, "MOST_REMEMBERED", 3)
    engine = Engine(positive_elements(), device="cpu")
    for size in (*range(1, 9), 2, 1):
        x = floats(size, 4)
        np.testing.assert_allclose(engine.run({"x": x})["y"], np.exp(x[x > 0]), rtol=1e-6)
        assert len(engine._legs) <= 3


def test_outputs_say_what_is_open():
    assert [str(v.shape) for v in Engine(positive_elements(), device="cpu").outputs] == [
        "(at.shape[1],)", "(1,)",
    ]  # fmt: skip
    (y,) = Engine(branches(), device="cpu").outputs
    assert str(y.shape) == "(y.shape[0], y.shape[1])"


def test_threads_share_an_engine():
    proto, calls = CASES["If"]
    engine, failed = Engine(proto, device="cpu"), []
    wanted = [onnxruntime_outputs(proto, inputs)[0] for inputs in calls]

    def work(first):
        for place in range(len(calls)):
            place = (place + first) % len(calls)
            if not np.allclose(engine.run(calls[place])["y"], wanted[place]):
                failed.append(place)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_predict_out_pickle_and_close():
    x = floats(3, 4)
    engine = pickle.loads(pickle.dumps(Engine(positive_elements(), device="cpu")))
    outputs = engine.predict(x)
    np.testing.assert_allclose(outputs["y"], np.exp(x[x > 0]), rtol=1e-6)
    room = np.empty_like(outputs["y"])
    assert engine.run({"x": x}, ["y"], {"y": room})["y"] is room
    np.testing.assert_array_equal(room, outputs["y"])
    with pytest.raises(InputError, match="out: y: expected"):
        engine.run({"x": x}, ["y"], {"y": np.empty(99, np.float32)})
    with pytest.raises(UnsupportedError, match="finds some while it runs"):
        engine.save("never.safetensors")
    for needs_one_plan in (
        lambda: engine.plan(1, np.dtype(np.float32)), lambda: engine.empty_images(1),
        engine.keep_sizes, lambda: engine.takes_files(1), lambda: engine.own_kernels(1),
        lambda: engine.tuned(1), lambda: engine.choice, lambda: engine.batch_size(1, 1),
    ):  # fmt: skip
        with pytest.raises(UnsupportedError, match="finds some while it runs: call run"):
            needs_one_plan()
    engine.close()
    with pytest.raises(InputError, match="closed"):
        engine.predict(x)


def test_on_a_gpu_the_host_finds_numbers(monkeypatch):
    fake_cuda.install(monkeypatch)
    proto, calls = CASES["NonZero"]
    engine = Engine(proto, device="cuda")
    for inputs in calls:
        x = inputs["x"]
        np.testing.assert_allclose(engine.run(inputs)["y"], np.exp(x[x > 0]), rtol=1e-5)


def test_an_example_is_found_for_settings():
    """One of 1, the usual example, fits neither: a row has no axis 1, and two pieces of 1 are no 5."""
    proto = model(
        [node("CumSum", ["x", "axis"], ["s"]), node("Split", ["s", "sizes"], ["y", "z"], axis=0)],
        [tensor("x", [5]), integers("axis", []), integers("sizes", [2])],
        [tensor("y", None), tensor("z", None)],
    )  # fmt: skip
    engine, x = Engine(proto, device="cpu"), floats(5)
    for first in (0, 2, 5):
        found = engine.run({"x": x, "axis": np.int64(0), "sizes": np.int64([first, 5 - first])})
        assert (len(found["y"]), len(found["z"])) == (first, 5 - first)
        np.testing.assert_allclose(np.concatenate([*found.values()]), x.cumsum(), rtol=1e-6)
    with pytest.raises(InputError, match="axis"):
        engine.run({"x": x, "axis": np.int64(1), "sizes": np.int64([2, 3])})


def test_no_example_is_no_fault_of_the_file():
    sizes = [integers(name, []) for name in ("bins", "length", "rate")]
    edges = [tensor(name, []) for name in ("low", "high")]
    proto = model(
        [node("MelWeightMatrix", ["bins", "length", "rate", "low", "high"], ["y"])],
        [*sizes, *edges], [tensor("y", None)],
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="found none that do"):
        Engine(proto, device="cpu")


def test_an_early_decision_may_be_what_fits_no_example():
    """Of two branches one alone takes these 8 numbers; decisions on a length come between."""
    ends = {f"e{end}": np.int64([end]) for end in (5, 6, 7, 9, 11)}
    good = helper.make_graph(
        [node("Reshape", ["x", "two"], ["a"])], "good", [], [tensor("a", None)]
    )
    bad = helper.make_graph(
        [
            *(node("Slice", ["z", "zero", end, "zero"], [f"s{end}"]) for end in ends),
            node("Concat", [f"s{end}" for end in ends], ["all"], axis=0),
            node("ReduceSum", ["all"], ["sum"], keepdims=0),
            node("Add", ["x", "sum"], ["moved"]), node("Reshape", ["moved", "three"], ["b"]),
        ],
        "bad", [], [tensor("b", None)],
    )  # fmt: skip
    proto = model(
        [
            node("Equal", ["rate", "known"], ["c"]),
            node("If", ["c"], ["y"], then_branch=good, else_branch=bad),
        ],
        [tensor("x", [8]), tensor("z", ["m"]), integers("rate", [])], [tensor("y", None)],
        {"known": np.int64(16000), "two": np.int64([2, 4]), "three": np.int64([3, 3]),
         "zero": np.int64([0]), **ends},
    )  # fmt: skip
    engine, x = Engine(proto, device="cpu"), floats(8)
    given = {"x": x, "z": floats(20), "rate": np.int64(16000)}
    np.testing.assert_array_equal(engine.run(given)["y"], x.reshape(2, 4))
    with pytest.raises(InputError, match="Reshape"):
        engine.run({**given, "rate": np.int64(8000)})


def test_an_example_is_found_that_is_supported():
    """Of a flag by which Dropout would train, false is the example."""
    proto = model(
        [node("Dropout", ["x", "ratio", "flag"], ["z"]), node("Neg", ["z"], ["y"])],
        [tensor("x", [3]), tensor("flag", [], TensorProto.BOOL)], [tensor("y", None)],
        {"ratio": np.float32(0.5)},
    )  # fmt: skip
    engine, x = Engine(proto, device="cpu"), floats(3)
    np.testing.assert_array_equal(engine.run({"x": x, "flag": np.array(False)})["y"], -x)
    with pytest.raises(UnsupportedError, match="training"):
        engine.run({"x": x, "flag": np.array(True)})


def test_sizes_at_which_numbers_begin_to_be_found(monkeypatch):
    """The example size runs a loop 0 times, whose body finds a number."""
    body = helper.make_graph(
        [
            node("NonZero", ["x"], ["at"]), node("Shape", ["at"], ["sizes"]),
            node("Gather", ["sizes", "last"], ["count"]),
            node("Cast", ["count"], ["number"], to=TensorProto.FLOAT),
            node("Add", ["v", "number"], ["next"]), node("Identity", ["go"], ["still"]),
        ],
        "body", [integers("i", []), tensor("go", [], TensorProto.BOOL), tensor("v", [1])],
        [tensor("still", [], TensorProto.BOOL), tensor("next", [1])],
    )  # fmt: skip
    proto = model(
        [
            node("Shape", ["x"], ["n"]), node("Sub", ["n", "least"], ["more"]),
            node("Max", ["more", "none"], ["times"]), node("Squeeze", ["times"], ["trips"]),
            node("Loop", ["trips", "", "start"], ["y"], body=body),
        ],
        [tensor("x", ["n"])], [tensor("y", [1])],
        {"least": np.int64([64]), "none": np.int64([0]), "last": np.int64([1]), "start": np.float32([1])},
        opset=18,
    )  # fmt: skip
    ones, made, make = np.ones(66, np.float32), [], reading._Reader.graph
    with Engine(proto, device="cpu") as engine:
        assert engine.run({"x": ones[:64]})["y"] == 1
        assert engine.run({"x": ones})["y"] == engine.predict(ones) == 1 + 2 * 66
        ones[0] = 0
        assert engine.run({"x": ones})["y"] == 1 + 2 * 65
        monkeypatch.setattr(reading._Reader, "graph", lambda *given: made.append(0) or make(*given))
        assert engine.run({"x": ones})["y"] == 1 + 2 * 65
        assert engine.run({"x": ones[:64]})["y"] == 1
        assert not made
        with pytest.raises(CnnEngineError, match=r"Loop_4.*give them as input_shape"):
            engine.plan(66, ones.dtype)
    with Engine(proto, device="cpu", input_shape={"x": (66,)}) as engine:
        assert engine.run({"x": ones})["y"] == 1 + 2 * 65


@pytest.mark.parametrize("casts", [True, False])
def test_how_many_there_are_is_found_where_no_node_reads_what_was_found(casts):
    """Nothing but their number is wanted: as float32 a constant of each number, else a shape."""
    nodes = [
        node("NonZero", ["x"], ["at"]), node("Shape", ["at"], ["sizes"]),
        node("Gather", ["sizes", "last"], ["count"]),
    ]  # fmt: skip
    if casts:
        nodes += [
            node("Cast", ["count"], ["number"], to=TensorProto.FLOAT),
            node("Add", ["number", "one"], ["y"]),
        ]
    constants = {"last": np.int64([1]), "one": np.float32([1])}
    output = tensor("y", [1]) if casts else integers("count", [1])
    proto = model(nodes, [tensor("x", ["n"])], [output], constants, opset=18)
    with Engine(proto, device="cpu") as engine:
        for zeros in (0, 3, 0, 66):
            x = np.ones(66, np.float32)
            x[:zeros] = 0
            (found,) = engine.run({"x": x}).values()
            assert found == 66 - zeros + casts


def test_inputs_of_no_elements():
    """Which dimensions of x are 0, and the sum of its elements that are not: found beside one another."""
    proto = model(
        [
            node("Shape", ["x"], ["shape"]), node("Less", ["shape", "one"], ["none"]),
            node("Compress", ["shape", "none"], ["zeros"], axis=0), node("NonZero", ["x"], ["at"]),
            node("Transpose", ["at"], ["rows"]), node("GatherND", ["x", "rows"], ["v"]),
            node("ReduceSum", ["v"], ["sum"], keepdims=0),
        ],
        [tensor("x", ["a", "b"])], [integers("zeros", [None]), tensor("sum", [])],
        {"one": np.int64(1)}, opset=18,
    )  # fmt: skip
    engine = Engine(proto, device="cpu")
    for shape in ((2, 3), (0, 3), (2, 0), (0, 0), (1, 4)):
        found = engine.run({"x": np.full(shape, 2, np.float32)})
        assert found["zeros"].tolist() == [0] * shape.count(0)
        assert found["sum"] == 2 * np.prod(shape)


def test_what_no_iteration_stacks():
    """As many dimensions as the body states: those that it leaves open are 0, as in ONNX Runtime."""
    body = helper.make_graph(
        [node("Identity", ["on"], ["still"]), node("Identity", ["x"], ["step"])],
        "body", [integers("i", []), tensor("on", [], TensorProto.BOOL)],
        [tensor("still", [], TensorProto.BOOL), tensor("step", [None, 2])],
    )  # fmt: skip
    proto = model(
        [
            node("ReduceSum", ["times"], ["count"], keepdims=0),
            node("Loop", ["count", ""], ["all"], body=body),
        ],
        [tensor("x", ["a", 2]), integers("times", ["n"])], [tensor("all", None)], opset=18,
    )  # fmt: skip
    engine, x = Engine(proto, device="cpu"), floats(3, 2)
    for times, shape in (([0, 0], (0, 0, 2)), ([2, 1], (3, 3, 2)), ([0], (0, 0, 2))):
        given = {"x": x, "times": np.int64(times)}
        assert engine.run(given)["all"].shape == shape
        assert onnxruntime_outputs(proto, given)[0].shape == shape


def doubled_until():
    """x doubled until its sum is no less than a limit, what x was joined to, and every step."""
    body = helper.make_graph(
        [
            node("Add", ["state", "state"], ["next"]), node("ReduceSum", ["next"], ["sum"], keepdims=0),
            node("Less", ["sum", "limit"], ["more"]), node("Concat", ["grown", "next"], ["longer"], axis=0),
        ],
        "body",
        [
            integers("i", []), tensor("on", [], TensorProto.BOOL), tensor("state", [2]),
            tensor("grown", [None]),
        ],
        [
            tensor("more", [], TensorProto.BOOL), tensor("next", [2]), tensor("longer", [None]),
            tensor("next", [2]),
        ],
    )  # fmt: skip
    return model(
        [node("Loop", ["", "start", "x", "x"], ["y", "joined", "all"], body=body)],
        [tensor("x", [2]), tensor("limit", [])],
        [tensor("y", [2]), tensor("joined", [None]), tensor("all", [None, 2])],
        {"start": np.array(True)}, opset=18,
    )  # fmt: skip


def test_loop_ends_by_what_it_computes(monkeypatch):
    """As often as ONNX Runtime runs it; the file is read a few times for many iterations."""
    proto, reads, read = doubled_until(), [], reading._found_at
    monkeypatch.setattr(reading, "_found_at", lambda *given: reads.append(0) or read(*given))
    engine, x = Engine(proto, device="cpu", threads=1), np.ones(2, np.float32)
    for limit, times in ((0, 1), (8, 2), (2**20, 19), (7, 2), (2**40, 39)):
        given = {"x": x, "limit": np.array(limit, np.float32)}
        found, wanted = engine.run(given), onnxruntime_outputs(proto, given)
        assert found["all"].shape == (times, 2)
        for array, exact in zip(found.values(), wanted, strict=True):
            np.testing.assert_array_equal(array, exact)
    assert 0 < len(reads) < 16
    assert engine.check(Samples({"x": x, "limit": np.array(2**20, np.float32)}, 1)).passed


def test_loop_that_does_not_end_is_refused(monkeypatch):
    monkeypatch.setattr(importer, "MOST_WRITTEN_OUT", 100)
    engine = Engine(doubled_until(), device="cpu")
    with pytest.raises(UnsupportedError, match=r"Loop 'Loop_0': .* loops of up to 100 nodes"):
        engine.run({"x": np.zeros(2, np.float32), "limit": np.array(1, np.float32)})
