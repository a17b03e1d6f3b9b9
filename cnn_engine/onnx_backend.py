"""The engine as an ``onnx.backend.base.Backend``, which ONNX's own tests run.

    import cnn_engine.onnx_backend as backend
    outputs = backend.prepare(onnx.load("net.onnx"), device="CUDA").run([images])

Some models take a shape, an axis or a number of elements as an input. The engine makes a graph of known
shapes, so these inputs' values are taken into it: one graph is made for each of their values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx.backend.base import Backend, BackendRep, namedtupledict

from .devices import cuda_module
from .errors import CnnEngineError, InputError, UnsupportedError
from .graph.graph import Graph
from .graph.onnx import UnsupportedNodesError, load
from .graph.onnx.model import NEWEST_OPSET

#: A graph on a device: name -> array in, name -> array out.
Runner = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]

#: Graphs that are kept for values of inputs that were given before.
KEPT = 4


def engine(graph: Graph, device: str) -> Runner:
    """Returns the engine's way to run ``graph`` on ``cpu`` or ``cuda``."""
    from .engine.engine import Engine

    return Engine(graph, device=device).run


class CnnEngineRep(BackendRep):
    """A model that is ready to run.

    Attributes:
        inputs, outputs: names, in the model's order; initializers are no inputs.
    """

    def __init__(
        self, model: onnx.ModelProto, device: str, build: Callable[[Graph, str], Runner]
    ) -> None:
        self._model, self._device, self._build = model, device, build
        initialized = {tensor.name for tensor in model.graph.initializer}
        self._all = tuple(value.name for value in model.graph.input)
        self.inputs = tuple(name for name in self._all if name not in initialized)
        self.outputs = tuple(value.name for value in model.graph.output)
        self._bfloat16 = {
            value.name
            for value in model.graph.output
            if value.type.tensor_type.elem_type == onnx.TensorProto.BFLOAT16
        }
        self._known: tuple[str, ...] = ()
        self._runners: OrderedDict[Any, tuple[Graph, Runner]] = OrderedDict()
        try:
            self._runner({}, None)
        except UnsupportedNodesError as error:
            if not all(node.inputs for node in error.nodes):
                raise
            self._known = _inputs_of(error)
        except UnsupportedError:
            raise
        except InputError:
            pass  # dimensions that only what is given tells

    @property
    def graph(self) -> Graph:
        """Graph that was made or run last."""
        return next(reversed(self._runners.values()))[0]

    def run(self, inputs: Any, **kwargs: Any) -> tuple[np.ndarray, ...]:
        """Runs the model.

        Args:
            inputs: arrays in the order of the model's inputs, or a mapping from their names, or one array.

        Returns:
            the outputs, in the model's order.

        Raises:
            InputError: an input is missing, unknown, or of another shape or type than the model says.
        """
        fed = self._named(inputs)
        while True:
            known = {name: fed[name] for name in self._known}
            try:
                graph, runner = self._runner(known, fed)
                break
            except UnsupportedNodesError as error:
                more = [name for name in _inputs_of(error) if name not in known]
                if not more or not all(node.inputs for node in error.nodes):
                    raise
                self._known += tuple(more)
        found = runner({value.name: fed[value.name] for value in graph.inputs})
        results = tuple(self._in_type(name, np.asarray(found[name])) for name in self.outputs)
        return namedtupledict("Outputs", self.outputs)(*results)

    def _in_type(self, name: str, array: np.ndarray) -> np.ndarray:
        """Returns an output in bfloat16 where the model says so: the engine's are float32."""
        if name in self._bfloat16 and array.dtype == np.float32:
            return array.astype(helper.tensor_dtype_to_np_dtype(onnx.TensorProto.BFLOAT16))
        return array

    def _named(self, inputs: Any) -> dict[str, np.ndarray]:
        if isinstance(inputs, Mapping):
            fed = dict(inputs)
        else:
            given = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
            names = self.inputs if len(given) == len(self.inputs) else self._all
            if len(given) != len(names):
                raise InputError(
                    f"inputs: expected {len(self.inputs)} arrays ({', '.join(self.inputs)}), "
                    f"found {len(given)}"
                )
            fed = dict(zip(names, given, strict=True))
        missing = [name for name in self.inputs if name not in fed]
        if missing:
            raise InputError(f"inputs: expected {', '.join(self.inputs)}, found no {missing[0]}")
        fed = {name: fed[name] for name in self.inputs}
        for name, array in fed.items():
            if not isinstance(array, (np.ndarray, np.generic, int, float, bool)):
                raise UnsupportedError(
                    f"input {name!r}: expected an array, found {type(array).__name__}"
                )
        arrays = {name: np.asarray(array, order="C") for name, array in fed.items()}
        return {
            n: a.astype(np.float32) if a.dtype.name == "bfloat16" else a for n, a in arrays.items()
        }

    def _runner(
        self, known: Mapping[str, np.ndarray], fed: Mapping[str, np.ndarray] | None
    ) -> tuple[Graph, Runner]:
        """Returns the graph in which ``known`` are constants, and what runs it.

        Args:
            fed: what the shapes of inputs are taken from where the model leaves them open, or None.
        """
        shapes = {} if fed is None else {n: a.shape for n, a in fed.items() if n not in known}
        key = (
            tuple((n, a.dtype.name, a.shape, a.tobytes()) for n, a in known.items()),
            tuple(shapes.items()),
        )
        if key not in self._runners:
            graph = load(self._model, input_shape=shapes, constants=known)
            self._runners[key] = (graph, self._build(graph, self._device))
            while len(self._runners) > KEPT:
                self._runners.popitem(last=False)
        self._runners.move_to_end(key)
        return self._runners[key]


def _inputs_of(error: UnsupportedNodesError) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for node in error.nodes for name in node.inputs))


class CnnEngineBackend(Backend):
    """The interface that ONNX's backend tests drive; the functions of this module are its methods."""

    #: Makes a graph runnable; a subclass may put another executor behind the same interface.
    build = staticmethod(engine)

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> CnnEngineRep:
        """Returns ``model`` ready to run.

        Args:
            device: ``CPU`` or ``CUDA``, or ``CUDA:1``.

        Raises:
            UnsupportedError: there is no such device, or the engine lacks operators of the model.
            InputError: the model is not sound.
        """
        if not cls.supports_device(device):
            raise UnsupportedError(f"device: expected CPU or CUDA with a GPU, found {device}")
        return CnnEngineRep(model, device.lower(), cls.build)

    @classmethod
    def run_model(
        cls, model: onnx.ModelProto, inputs: Any, device: str = "CPU", **kwargs: Any
    ) -> tuple[np.ndarray, ...]:
        """Runs ``model`` once: :meth:`prepare`, then :meth:`CnnEngineRep.run`."""
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(
        cls,
        node: onnx.NodeProto,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> tuple[np.ndarray, ...]:
        """Runs one node.

        Args:
            inputs: arrays for the node's inputs that have names.
            kwargs: ``opset_version``: the node's; the newest that is known unless given.
        """
        names = list(dict.fromkeys(name for name in node.input if name))
        given = inputs if isinstance(inputs, Mapping) else dict(zip(names, inputs, strict=True))
        arrays = {name: np.asarray(given[name]) for name in names}
        made = [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
            )
            for name, array in arrays.items()
        ]
        outputs = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
        newest = min(NEWEST_OPSET, onnx.defs.onnx_opset_version())
        opset = helper.make_opsetid(node.domain, kwargs.get("opset_version", newest))
        graph = helper.make_graph([node], node.op_type, made, outputs)
        return cls.run_model(helper.make_model(graph, opset_imports=[opset]), arrays, device)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Whether ``device`` (``CPU``, ``CUDA``, ``CUDA:1``) is here."""
        kind = device.partition(":")[0].upper()
        if kind not in ("CPU", "CUDA"):
            return False
        return kind == "CPU" or cuda_module.unavailable() is None

    @classmethod
    def is_compatible(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        """Whether :meth:`prepare` can be expected to take ``model``."""
        try:
            load(model)
        except UnsupportedNodesError as error:
            return all(node.inputs for node in error.nodes)
        except CnnEngineError:
            return False
        return True


is_compatible = CnnEngineBackend.is_compatible
prepare = CnnEngineBackend.prepare
run = CnnEngineBackend.run_model
run_model = CnnEngineBackend.run_model
run_node = CnnEngineBackend.run_node
supports_device = CnnEngineBackend.supports_device
