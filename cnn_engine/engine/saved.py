"""Engines in files: the rewritten graph and packed weights, mapped when loaded, and no code.

A file is safetensors': a header in JSON, then arrays. ``constants/K`` are the graph's weights, ``packed/K``
what kernels made of them on the device that saved it. Everything a file says is checked as an imported model
is: shapes are inferred again, and packed weights must have the size that the kernel asks for.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import _cpu
from ..devices import Buffer
from ..errors import CnnEngineError, InputError, UnsupportedError, expected
from ..floating_point import usual_mode
from ..graph import mapped, serialized
from ..graph.dims import Sizes
from ..graph.graph import Graph, Node
from ..graph.guards import TYPICAL_BATCH
from ..graph.model import Model
from ..graph.specialization import Specializations
from ..io.files import atomic_write, describe_os_error
from ..kernels import Kernel, select
from ..kernels.select import Choice
from ..lower.lowering import Program

#: Raised when what packed weights, records or passes mean changes.
PACKING = 1

#: Where arrays begin: what vector instructions ask for.
ALIGNMENT = 64

#: Bytes of a header that are read.
MOST_HEADER = 256 << 20

#: Columns of 64-bit words whose sums tell whether an array is what was saved.
COLUMNS = 1024

KIND = "cnn_engine engine"

#: Arguments of an engine that a file has.
OPTIONS = "variant", "reduction", "dtype", "data_mode", "chunk", "batch_invariant"

#: NumPy's name of a type -> safetensors'.
DTYPES = {
    "float32": "F32", "float64": "F64", "float16": "F16", "int64": "I64", "int32": "I32", "int16": "I16",
    "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
NAMES = {short: name for name, short in DTYPES.items()}


def target_of(device: Any) -> str:
    """Returns the device's kind and instruction set, which packed weights depend on."""
    if device.kind == "cpu":
        return f"cpu {platform.machine()} {_cpu.selected_instruction_set()}"
    return f"{device.kind} {device.target.architecture}"


def version() -> str:
    """Returns the versions that packed weights and records depend on."""
    package = sys.modules[__name__.partition(".")[0]]
    return f"{package.__version__} {_cpu.commit or 'unknown'} packing {PACKING}"


def checksum(data: np.ndarray) -> str:
    """Returns a checksum that changes with every bit of ``data``, at the rate of memory."""
    words = data[: data.size // 8 * 8].view(np.uint64)
    whole = words[: words.size // COLUMNS * COLUMNS].reshape(-1, COLUMNS)
    sums = np.add.reduce(whole, axis=0, dtype=np.uint64)
    rest = data[whole.size * 8 :].tobytes()
    return hashlib.sha256(sums.tobytes() + rest).hexdigest()[:32]


# ---- writing ----


class _Recording:
    """A device that keeps what kernels pack."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self.buffers: list[Buffer] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def allocate(self, nbytes: int) -> Buffer:
        self.buffers.append(self._device.allocate(nbytes))
        return self.buffers[-1]


def save(engine: Any, program: Program, path: str | os.PathLike[str]) -> None:
    """Writes ``engine``; see :meth:`cnn_engine.Engine.save`."""
    network = engine.network
    if not isinstance(network, Model):
        wanted = "an engine of a model, as of an ONNX file"
        raise UnsupportedError(f"save: expected {wanted}, found the network {network.name}")
    for option, given in (("kernels", engine.kernels), ("tune", engine._tuner)):
        if given:
            raise UnsupportedError(f"save: expected an engine without {option}=, found some")
    lowered = engine.choice.layered and engine.data_mode in ("auto", "resident")
    placed = program.placed(*program.first)
    specializations = network._specializations
    if lowered:
        specializations = program._specializations[program.first[1]][0]
    known = tuple(_deciding(program.sizes(None)))
    variants = [v for v in specializations.variants if any(map(v.stands_for, known))]
    base = None if variants else specializations(program.sizes(None))
    graphs = [variant.graph for variant in variants] or [base]
    arrays: dict[int, tuple[str, np.ndarray]] = {}
    for graph in graphs:
        for array in graph.constants.values():
            arrays.setdefault(id(array), (f"constants/{len(arrays)}", mapped.read(array)))
    parts = dict(arrays.values())
    packs: dict[str, list[str]] = {}
    for node in placed.graph.nodes if lowered else ():
        kernel = placed.kernels.get(node.name)
        if kernel is None or kernel.prepare is None or kernel.device != "cpu":
            continue
        if not all(id(array) in arrays for array in packed_of(node, placed.graph, kernel)):
            continue  # made for this size alone
        device = _Recording(program.device_of(kernel.device))
        kernel.prepare(node, placed.graph, device)
        key = _key(node, kernel, kernel.packed_for(node, placed.graph, device))
        packs[key] = []
        for buffer in device.buffers:
            name = f"packed/{len(packs)}/{len(packs[key])}"
            parts[name] = np.frombuffer(buffer.owner, np.uint8, buffer.nbytes)
            packs[key].append(name)
    document = {
        "kind": KIND,
        "version": version(),
        "target": target_of(engine.device),
        "options": {
            "device": engine.device.kind,
            **{name: engine._options[name] for name in OPTIONS},
        },
        "choice": [engine.choice.variant, engine.choice.reduction, engine.choice.reason] if lowered else None,
        "gives_probabilities": engine.gives_probabilities,
        "weights": engine.weights_source,
        "sizes": _encode_sizes(program.sizes(None)),
        "variants": [serialized.encode_symbolic(variant) for variant in variants],
        "graph": None if base is None else serialized.encode_graph(base),
        "arrays": [
            {name: arrays[id(array)][0] for name, array in graph.constants.items()} for graph in graphs
        ],
        "packed": packs,
        "sums": {name: checksum(_bytes(array)) for name, array in parts.items()},
    }  # fmt: skip
    _write(path, document, parts)


def _deciding(sizes: Sizes) -> Iterator[Sizes]:
    """Yields the sizes by which graphs with symbols are made again: others that were made are not kept."""
    yield sizes.with_batch(TYPICAL_BATCH)
    yield sizes


def packed_of(node: Node, graph: Graph, kernel: Kernel) -> list[np.ndarray]:
    """Returns the constants that a node's kernel reads only in packed form."""
    return [
        graph.constants[name]
        for index, name in enumerate(node.inputs)
        if name in graph.constants and kernel.packs_input(index)
    ]


def _key(node: Node, kernel: Kernel, way: Any) -> str:
    return json.dumps([node.name, kernel.name, repr(way)])


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _encode_sizes(sizes: Sizes) -> dict[str, Any]:
    return {"numbers": [list(pair) for pair in sizes.numbers], "batch": sizes.batch}


def _digest(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _write(
    path: str | os.PathLike[str], document: dict[str, Any], parts: Mapping[str, np.ndarray]
) -> None:
    table: dict[str, Any] = {}
    blocks: list[np.ndarray | bytes] = []
    end = 0

    def add(name: str, dtype: str, shape: tuple[int, ...], block: np.ndarray | bytes) -> None:
        nonlocal end
        nbytes = len(block)
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        blocks.append(block)
        end += nbytes

    for name, array in parts.items():
        add(name, DTYPES[array.dtype.name], array.shape, _bytes(array))
        if lacks := -end % ALIGNMENT:
            add(f"padding/{len(table)}", "U8", (lacks,), bytes(lacks))
    document["digest"] = _digest({**document, "table": table})
    words = {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in document.items()
    }
    header = json.dumps({"__metadata__": words, **table}).encode()
    header += b" " * (-(8 + len(header)) % ALIGNMENT)
    with atomic_write(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for block in blocks:
            file.write(block)


# ---- reading ----


class SavedWeights:
    """Rewritten graphs and packed weights of a saved engine, used as they are.

    Attributes:
        choice: the variant.
        specializations: the graphs for all sizes, rewritten.
        gives_probabilities: of the network as it was.
    """

    def __init__(
        self,
        choice: Choice,
        specializations: Specializations,
        gives_probabilities: bool,
        constants: Collection[np.ndarray],
        packed: Mapping[str, list[np.ndarray]],
    ) -> None:
        self.choice, self.specializations = choice, specializations
        self.gives_probabilities = gives_probabilities
        self._constants = {id(array): array for array in constants}
        self._packed = packed

    def has(self, node: Node, kernel: Kernel, way: Any, constants: Collection[np.ndarray]) -> bool:
        known = all(id(array) in self._constants for array in constants)
        return known and _key(node, kernel, way) in self._packed

    def device(self, device: Any, node: Node, kernel: Kernel, way: Any) -> Any:
        return _Mapped(device, node, self._packed[_key(node, kernel, way)])


class _Mapped:
    """A device whose memory for packed weights is a file's."""

    def __init__(self, device: Any, node: Node, arrays: list[np.ndarray]) -> None:
        self._device, self._node, self._arrays = device, node, iter(arrays)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def saved(self, nbytes: int) -> Buffer:
        """Returns the next packed weights; they must have as many bytes."""
        array = next(self._arrays, None)
        if array is None or array.nbytes != nbytes:
            found = "none" if array is None else f"{array.nbytes}"
            raise InputError(
                f"node {self._node.name}: expected {nbytes} bytes of packed weights, found {found}"
            )
        return Buffer(_cpu.address_of(array), nbytes, array)


@dataclass
class _Reader:
    """The header of a file, checked, and its arrays."""

    path: Path
    document: dict[str, Any]
    table: dict[str, Any]
    start: int

    @classmethod
    def open(cls, path: Path) -> _Reader:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, MOST_HEADER):
                raise InputError(
                    "expected the header of a saved engine, found none: it is cut off or another"
                )
            header = json.loads(file.read(length))
        words = header.pop("__metadata__", None) if isinstance(header, dict) else None
        if not isinstance(words, dict) or words.get("kind") != KIND:
            raise InputError("expected a file that Engine.save wrote, found another")
        if words.get("version") != version():
            raise InputError(
                f"expected an engine of version {version()}, found {words.get('version')}: save it again"
            )
        strings = ("kind", "version", "target", "weights", "digest")
        document = {k: v if k in strings else json.loads(v) for k, v in words.items()}
        digest = document.pop("digest", None)
        if digest != _digest({**document, "table": header}):
            raise InputError("expected the header as it was saved, found it changed")
        reader = cls(path, document, header, 8 + length)
        reader._check(size)
        return reader

    def _check(self, size: int) -> None:
        """Sees that the arrays fill the file, one after the other."""
        end = 0
        for name, row in self.table.items():
            first, last = row["data_offsets"]
            dtype = np.dtype(NAMES[row["dtype"]])
            shape = row["shape"]
            if not all(type(n) is int and 0 <= n < 1 << 48 for n in (first, last, *shape)):
                raise InputError(f"{name}: expected sizes, found {shape!r:.60}")
            count = 1
            for number in shape:
                count *= number
            if first != end or last - first != count * dtype.itemsize:
                raise InputError(f"{name}: expected arrays one after the other, found others")
            end = last
            if (
                name.startswith("padding/")
                and np.fromfile(self.path, np.uint8, last - first, offset=self.start + first).any()
            ):
                raise InputError(f"{name}: expected zeros, found other bytes")
        if self.start + end != size:
            raise InputError(
                f"expected {self.start + end} bytes, found {size}: it is cut off, or has more"
            )

    def array(self, name: str, check: bool) -> np.ndarray:
        """Returns an array of the file, mapped; with ``check`` as it was saved for certain."""
        row = self.table[name]
        first, last = row["data_offsets"]
        dtype, shape = np.dtype(NAMES[row["dtype"]]), tuple(row["shape"])
        if not last - first:
            return np.empty(shape, dtype)
        found = mapped.mapped(
            self.path, dtype, (last - first) // dtype.itemsize, self.start + first
        )
        total = self.document["sums"][name]
        if check and checksum(found.view(np.uint8)) != total:
            raise InputError(f"{name}: expected what was saved, found other bytes")
        if not check:
            mapped.expect(found, lambda data: checksum(data) == total)
        return found.reshape(shape)


@usual_mode()
def load_engine(
    path: str | os.PathLike[str], *, device: str = "auto", threads: int | None = None
) -> Any:
    """Returns the engine that :meth:`Engine.save` wrote: the same bits, without import, rewriting or packing.

    The file is mapped: its weights are read when a pass needs them. It must stay as it is while the engine
    lives; replace it by renaming another over it.

    Args:
        device: ``"auto"``, or which of several GPUs.
        threads: CPU threads; None: as many as CPUs.

    Raises:
        InputError: the file is damaged, is no saved engine, or is of another version or kind of device.
    """
    from .. import devices
    from .engine import Engine

    path = Path(path)
    try:
        reader = _Reader.open(path)
        kind = reader.document["options"]["device"]
        if device == "auto":
            device = "cuda" if kind == "cuda" else "cpu"
        found = target_of(devices.select(device))
        if found != reader.document["target"]:
            raise expected("target", reader.document["target"], found)
        options = {name: reader.document["options"][name] for name in OPTIONS}
        if reader.document["choice"] is not None:
            dtypes = select.layered_dtypes(devices.select(device), True)
            if options["dtype"] not in dtypes or options["data_mode"] not in ("auto", "resident"):
                wanted = f"data of {', '.join(dtypes)}, resident"
                raise expected("options", wanted, f"{options['dtype']}, {options['data_mode']}")
        model = _model_of(reader)
        engine = Engine(model, device=device, threads=threads, **options)
        engine.weights_source = str(reader.document["weights"])
        return engine
    except CnnEngineError as error:
        raise type(error)(f"{path}: {error}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {describe_os_error(error)}") from None
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # a header that says what no save writes, in any of a hundred ways
        found = f"{type(error).__name__}: {error}"
        raise expected(f"{path}", "a file that Engine.save wrote", f"{found:.100}") from None


def _model_of(reader: _Reader) -> Model:
    document = reader.document
    numbers = tuple((str(symbol), int(number)) for symbol, number in document["sizes"]["numbers"])
    sizes = Sizes(numbers, document["sizes"]["batch"])
    packs = {
        key: [reader.array(name, check=True) for name in names]
        for key, names in document["packed"].items()
    }
    large = {name for names in document["arrays"] for name in names.values()}
    arrays = {name: reader.array(name, check=False) for name in sorted(large)}

    variants, first = [], None
    for found, names in zip(document["variants"], document["arrays"], strict=False):
        constants = {name: arrays[key] for name, key in names.items()}
        variants.append(serialized.decode_symbolic(found, constants, _deciding(sizes)))
    if document["graph"] is not None:
        constants = {name: arrays[key] for name, key in document["arrays"][0].items()}
        first = serialized.decode_graph(document["graph"], constants)

    def make(wanted: Sizes) -> Graph:
        if first is not None and wanted == first.sizes:
            return first
        raise UnsupportedError(
            f"{reader.path}: expected sizes like those that were saved ({sizes}), found {wanted}"
        )

    specializations = Specializations(make, None, tuple(variants))
    model = Model.__new__(Model)
    model._specializations = specializations
    model.base = specializations(sizes)
    model.name = model.base.name
    if document["choice"] is not None:
        model.saved = SavedWeights(
            Choice(*document["choice"]), specializations, bool(document["gives_probabilities"]),
            list(arrays.values()), packs,
        )  # fmt: skip
    return model
