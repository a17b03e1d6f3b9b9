"""Coverage-guided fuzzing of the reader of ONNX models: any bytes give a graph or an InputError.

``pip install atheris onnx``, then, in the project's root,
``python fuzz/fuzz_onnx.py -max_total_time=600 -rss_limit_mb=2048 -timeout=10 CORPUS_FOLDER``

Half of the mutations are of bytes, half of a model's parts, so that it stays one: another operator, another
input, another number.
"""

import os
import random
import sys
from pathlib import Path

import atheris
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import onnx
from google.protobuf.message import DecodeError
from onnx import helper, numpy_helper

with atheris.instrument_imports(include=["cnn_engine.graph", "cnn_engine.operators"]):
    from cnn_engine.devices.cpu import CpuDevice
    from cnn_engine.errors import InputError
    from cnn_engine.graph import folding
    from cnn_engine.graph.onnx import load, refusal
    from cnn_engine.lower import pipeline

# What a file may ask for is bounded; here the bounds are lower, so that a run keeps its pace.
folding.FOLD_BYTES = 2**20
folding.FOLD_WORK = 2**24
refusal.FILL_BYTES = 2**20

node = helper.make_node


def seeds() -> list[onnx.ModelProto]:
    """Sound models of many operators, for the fuzzer to begin with."""

    def model(nodes, shape, constants):
        inputs = [helper.make_tensor_value_info("x", 1, shape)]
        outputs = [helper.make_empty_tensor_value_info("y")]
        arrays = [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()]
        graph = helper.make_graph(nodes, "g", inputs, outputs, arrays)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)

    ones = np.ones((2, 2, 3, 3), np.float32)
    window = {"kernel_shape": [2, 2], "strides": [2, 1], "pads": [0, 1, 1, 0]}
    body = [node("Add", ["a", "a"], ["b"])]
    images = model(
        [
            node("Conv", ["x", "w", "c"], ["a"], pads=[1, 1, 1, 1], group=1),
            node("BatchNormalization", ["a", "c", "c", "c", "c"], ["b"]),
            node("Relu", ["b"], ["d"]),
            node("MaxPool", ["d"], ["e"], ceil_mode=1, **window),
            node("AveragePool", ["e"], ["f"], count_include_pad=1, **window),
            node("ConvTranspose", ["f", "w"], ["h"], strides=[2, 2], output_padding=[1, 0]),
            node("GlobalAveragePool", ["h"], ["i"]),
            node("Flatten", ["i"], ["j"]),
            node("Gemm", ["j", "v"], ["k"], transB=1, alpha=0.5),
            node("Softmax", ["k"], ["y"], axis=-1),
        ],
        ["N", 2, 8, 8],
        {"w": ones, "c": np.ones(2, np.float32), "v": np.ones((3, 2), np.float32)},
    )
    shapes = model(
        [
            node("Shape", ["x"], ["s"]),
            node("Gather", ["s", "zero"], ["n"]),
            node("Unsqueeze", ["n", "zeros"], ["row"]),
            node("Concat", ["row", "rest"], ["shape"], axis=0),
            node("Reshape", ["x", "shape"], ["a"]),
            node("Slice", ["a", "zeros", "rest", "zeros"], ["b"]),
            node("Pad", ["b", "pads"], ["c"]),
            node("Resize", ["c", "", "scales"], ["d"], mode="linear"),
            node("Tile", ["d", "pair"], ["e"]),
            node("Transpose", ["e"], ["f"], perm=[1, 0]),
            node("Split", ["f"], ["g", "h"], num_outputs=2),
            node("ReduceMean", ["g", "zeros"], ["i"]),
            node("Einsum", ["i", "i"], ["j"], equation="ij,ij->i"),
            node("Range", ["zero", "five", "one"], ["k"]),
            node("Cast", ["k"], ["l"], to=1),
            node("Expand", ["j", "five5"], ["m"]),
            node("Where", ["flag", "m", "l"], ["y"]),
        ],
        [2, 3, 4],
        {
            "zero": np.int64(0), "one": np.int64(1), "five": np.int64(5), "zeros": np.int64([0]),
            "rest": np.int64([-1]), "pads": np.int64([1, 1, 0, 1]), "pair": np.int64([2, 1]),
            "scales": np.float32([2, 1.5]), "five5": np.int64([5]), "flag": np.array(True),
        },
    )  # fmt: skip
    inner = model([node("f", ["x"], ["y"], domain="m")], [3], {})
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("m", 1)]
    inner.functions.append(helper.make_function("m", "f", ["a"], ["b"], body, opsets))
    inner.opset_import.append(helper.make_opsetid("m", 1))
    return [images, shapes, inner]


NUMBERS = (-(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 5, 64, 2**16, 2**31, 2**40, 2**62, 2**63 - 1)
OPERATORS = sorted({schema.name for schema in onnx.defs.get_all_schemas() if not schema.domain})


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Returns ``data`` with bytes changed, or with a part of the model that it is."""
    chance = random.Random(seed)
    if chance.random() < 0.5:
        return atheris.Mutate(data, max_size)
    try:
        mutated = change(data, chance)
    except (DecodeError, UnicodeDecodeError, IndexError):  # no model, or nothing in it to change
        return atheris.Mutate(data, max_size)
    return mutated if len(mutated) <= max_size else data


def change(data: bytes, chance: random.Random) -> bytes:
    """Returns the model ``data`` with a few of its parts changed."""
    model = onnx.ModelProto()
    model.ParseFromString(data)
    graph = model.graph
    for _ in range(chance.randint(1, 4)):
        made = chance.choice(graph.node)
        names = [n for other in graph.node for n in (*other.input, *other.output)] + ["x", ""]
        match chance.randrange(7):
            case 0:
                made.op_type = chance.choice(OPERATORS)
            case 1 if made.input:
                made.input[chance.randrange(len(made.input))] = chance.choice(names)
            case 2 if made.output:
                made.output[chance.randrange(len(made.output))] = chance.choice(names)
            case 3 if made.attribute:
                attribute = chance.choice(made.attribute)
                if attribute.ints:
                    attribute.ints[chance.randrange(len(attribute.ints))] = chance.choice(NUMBERS)
                else:
                    attribute.i = chance.choice(NUMBERS)
                    attribute.f = chance.choice((0.0, -1.0, 1e30, float("nan"), float("inf")))
            case 4 if graph.initializer:
                tensor = chance.choice(graph.initializer)
                if tensor.dims and chance.random() < 0.5:
                    tensor.dims[chance.randrange(len(tensor.dims))] = chance.choice(NUMBERS)
                elif tensor.data_type == onnx.TensorProto.INT64:
                    count = len(tensor.raw_data) // 8
                    values = np.array([chance.choice(NUMBERS) for _ in range(count)], np.int64)
                    tensor.raw_data = values.tobytes()
            case 5:
                graph.node.add().CopyFrom(made)
            case _:
                model.opset_import[0].version = chance.randint(6, 28)
    return model.SerializeToString()


def test_one_input(data: bytes) -> None:
    try:
        graph = load(data, batch=2)
        for value in graph.values.values():
            if value.size > 2**24:
                return  # a sound graph that takes its time
        setting = pipeline.Setting(CpuDevice(), simplified=False)
        pipeline.lower(graph, setting)
    except InputError as error:
        message = str(error)
        assert "\n" not in message, message
        assert len(message) < 4100, len(message)


if __name__ == "__main__":
    folders = [Path(argument) for argument in sys.argv[1:] if not argument.startswith("-")]
    for folder in folders[:1]:
        os.makedirs(folder, exist_ok=True)
        for index, seed in enumerate(seeds()):
            (folder / f"seed{index}").write_bytes(seed.SerializeToString())
    atheris.Setup(sys.argv, test_one_input, custom_mutator=mutate)
    atheris.Fuzz()
