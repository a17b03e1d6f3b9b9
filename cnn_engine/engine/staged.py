"""Engines of graphs that find numbers while they run: how many boxes stay, which branch is taken.

Each stage of such a graph (:mod:`cnn_engine.graph.stages`) has an engine of its own, whose plans are kept by
size. What stands between two stages runs on the host: it finds how large the next one is, or which.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .. import devices
from ..devices import arrays
from ..devices import threads as thread_counts
from ..errors import InputError, UnsupportedError, expected
from ..floating_point import usual_mode
from ..graph.dims import Dim
from ..graph.graph import Node
from ..graph.reference import reference
from ..graph.stages import (
    Found,
    Stage,
    StagedModel,
    StageGraphs,
    bound,
    cut,
    evaluated,
    rest_of,
)
from ..graph.terms import Evaluator
from ..locks import ForkSafeLock
from ..workload import Samples
from . import arguments, conversion
from .check import Check, OutputCheck, check_of, compare_output, tolerance
from .engine import Engine
from .outputs import Outputs, outputs_by_name
from .phases import Phases
from .plan_cache import CLOSED, Shelf
from .predictor import address_of

#: Ways of going on after a stage that are kept, each with an engine.
MOST_WAYS = 32

#: What an engine of one graph has, whose plans are for all of it.
_OF_ONE_GRAPH = (
    "_plans", "_memory", "_schedule", "_only_batch", "choice", "data_mode", "kernels", "_tune",
)  # fmt: skip

#: Legs that are remembered.
MOST_REMEMBERED = 512


class _Way:
    """A stage as it is decided for some numbers, and the ways on from there.

    Attributes:
        rest: guards by numbers that its plans do not depend on.
        key: see :func:`_key`.
    """

    def __init__(self, stage: Stage, options: Mapping[str, Any]) -> None:
        self.stage = stage
        self.graphs = None if stage.graph is None else StageGraphs(stage)
        symbols = frozenset() if self.graphs is None else self.graphs.symbols
        self.rest = rest_of(stage.guards, symbols)
        self.key = _key(stage)
        self.ways = _Ways()
        self.engine: Engine | None = None
        if self.graphs is not None:
            example = self.graphs(self.graphs.sizes(stage.of.numbers))
            self.engine = Engine(example, **options)

    def stage_at(self, numbers: Mapping[str, int]) -> Stage | None:
        """Returns the stage as it is decided for these numbers; None: this is not the way."""
        at = Evaluator(numbers)
        try:
            if not all(guard.holds(at) for guard in self.rest):
                return None
        except (KeyError, ZeroDivisionError):
            return None
        return self.stage if self.graphs is None else self.graphs.stage(numbers)


class _Ways:
    """The ways on from a stage, by the numbers that were found."""

    def __init__(self) -> None:
        self._all: list[_Way] = []

    def find(self, numbers: Mapping[str, int]) -> tuple[_Way, Stage] | None:
        """Returns the way for these numbers and its stage, where it is known."""
        for way in self._all:
            if (stage := way.stage_at(numbers)) is not None:
                return way, stage
        return None

    def add(self, stage: Stage, options: Mapping[str, Any]) -> _Way:
        """Returns the way of a stage: a known one, which learns of other sizes, or a new one."""
        key = _key(stage)
        way = next((way for way in self._all if way.key == key), None)
        if way is None:
            way = _Way(stage, options)
            self._all = [*self._all[-MOST_WAYS + 1 :], way]
        elif way.graphs is not None:
            way.graphs.add(stage)
        return way


def _key(stage: Stage) -> tuple:
    """Returns what stages of one way have in common: they differ by decisions over its symbols."""
    symbols = stage.symbols
    return stage.signature, symbols, rest_of(stage.guards, symbols)


def _array(stage: Stage, name: str, env: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns a tensor in host memory."""
    found = env.get(name)
    return stage.of.graph.constants[name] if found is None else found


class _Leg:
    """A stage at known numbers, with all that follows from them: passes run it without a further look.

    Attributes:
        stage, way: which, and what it is a stage of.
        numbers: that are known when it begins.
        after: the legs after it, by what it finds.
    """

    def __init__(
        self, way: _Way, stage: Stage, numbers: Mapping[str, int], env: Mapping[str, np.ndarray]
    ) -> None:
        """Makes the leg.

        Args:
            env: arrays of the shapes that go with the numbers.

        Raises:
            InputError: an array has another shape than the stage's.
        """
        self.way, self.stage, self.numbers = way, stage, numbers
        self.after: dict[tuple, _Leg] = {}
        self._computed = _computed(stage, numbers)
        for array in self._computed.values():
            array.flags.writeable = False  # all passes read it
        known = {**env, **self._computed}
        self._inputs: list[str] = []
        self._outputs: list[tuple[str, tuple[int, ...], np.dtype]] = []
        self._shelf = Shelf()
        made = [name for node in stage.hosts for name in node.outputs]
        if way.engine is not None:
            self._inputs = [value.name for value in stage.graph.inputs]
            at = Evaluator(numbers)
            for value in stage.graph.inputs:
                shape = tuple(at(dim) if isinstance(dim, Dim) else dim for dim in value.shape)
                found = list(known[value.name].shape)
                if found != list(shape):  # kernels would read past its end
                    raise InputError(f"{value.name}: expected {list(shape)}, found {found}")
            self._sizes = way.graphs.sizes(numbers)
            self._outputs = way.engine.output_arrays(self._sizes)
            made += [name for name, *_ in self._outputs]
        self._read = [name for name in made if name in stage.of.read]

    def run(self, env: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], tuple]:
        """Adds what the stage makes to the arrays of ``env``; returns it, and what was found."""
        env |= self._computed
        made = {name: np.empty(shape, dtype) for name, shape, dtype in self._outputs}
        if self.way.engine is not None:
            given = [env[name] for name in self._inputs]  # kept until the pass is done
            addresses = [*map(address_of, given), *map(address_of, made.values())]
            if not self._shelf.run(*addresses):
                self._shelf = self.way.engine.run_sized(addresses, self._sizes)
        found: tuple = ()
        for node in self.stage.hosts:
            results = _on_host(self.stage, node, env)
            made |= results
            found += tuple(array.shape for array in results.values())
        env |= made
        return made, found + tuple(made[name].tobytes() for name in self._read)

    def outputs(self, env: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the outputs of the graph; the caller may write to them."""
        found = {name: _array(self.stage, name, env) for name in self.stage.of.graph.outputs}
        computed = self._computed
        return {name: a.copy() if name in computed else a for name, a in found.items()}


def _computed(stage: Stage, numbers: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Returns the tensors that the stage reads, and that are expressions of numbers."""
    computed = stage.of.computed
    if not computed:
        return {}
    read = [value.name for value in (stage.graph.inputs if stage.graph else ())]
    read += [name for node in stage.hosts for name in node.inputs if name is not None]
    read += stage.of.graph.outputs if stage.is_last else ()
    at = Evaluator(numbers)
    return {name: evaluated(*computed[name], at) for name in read if name in computed}


class StagedEngine(Engine):
    """An engine of a graph that finds numbers while it runs; made by :class:`Engine`."""

    def begin(self, network: StagedModel) -> None:
        """Makes the engines of the stages of an example.

        Raises:
            UnsupportedError: the device cannot run the graph.
        """
        self.network = network
        self.workload = None
        self.weights, self.weights_source = dict(network.base.constants), "the model's"
        self.form = network.form
        self.device = devices.select(self._options["device"])
        self.threads = thread_counts.check(self._options["threads"], "threads")
        self.dtype = self._options["dtype"]
        self.phases = Phases()
        self._found: Found = network.base.found
        self._ways = _Ways()
        self._legs: dict[tuple, _Leg] = {}  # the first of passes, by what is known of their inputs
        self._legs_known = 0
        self._extending = ForkSafeLock()
        self._closed = False
        ways = self._ways
        for stage in cut(self._found):
            ways = ways.add(stage, self._options).ways

    # -- passes ----------------------------------------------------------------------------------

    def _pass(
        self,
        given: Mapping[str, np.ndarray],
        seen: Callable[..., None] | None = None,
        known: tuple | None = None,
    ) -> dict[str, np.ndarray]:
        """Returns every output for arrays of all inputs, by name.

        Args:
            seen: called after each stage with its leg, all arrays so far, and those that it made.
            known: what :meth:`_known_of` returns for them.
        """
        if self._closed:
            raise InputError(CLOSED)
        env, legs, leg, made = dict(given), self._legs, None, given
        found = self._known_of(given.values()) if known is None else known
        while True:
            following = legs.get(found)
            if following is None:
                following = self._leg(leg, env, made)
                legs[found] = following
            leg = following
            made, found = leg.run(env)
            if seen is not None:
                seen(leg, env, made)
            if leg.stage.is_last:
                return leg.outputs(env)
            legs = leg.after

    def _known_of(self, given: Iterable[np.ndarray]) -> tuple:
        """Returns all that decides how a pass over these inputs begins."""
        read = self._found.read
        return tuple(
            (array.shape, array.dtype, array.tobytes() if value.name in read else None)
            for value, array in zip(self.network.inputs, given, strict=True)
        )

    def _leg(
        self, last: _Leg | None, env: Mapping[str, np.ndarray], made: Mapping[str, np.ndarray]
    ) -> _Leg:
        """Returns the leg after ``last``, which made some of the arrays of ``env``; None: the first."""
        if last is None:
            shapes = {name: array.shape for name, array in made.items()}
            numbers = dict(self.network.base.sizes_of(shapes).numbers)
            of, ways = self._found, self._ways
        else:
            numbers, of, ways = dict(last.numbers), last.stage.of, last.way.ways
        for name, array in made.items():
            numbers |= bound(of, of.graph.values[name], array)
        way, stage = ways.find(numbers) or self._extend(ways, env.keys(), numbers)
        self._legs_known += 1
        if self._legs_known > MOST_REMEMBERED:
            self._legs, self._legs_known = {}, 0
        return _Leg(way, stage, numbers, env)

    def _extend(
        self, ways: _Ways, made: Collection[str], numbers: Mapping[str, int]
    ) -> tuple[_Way, Stage]:
        """Returns the way on for numbers of which none is known: the model is read again.

        Args:
            ways: the known ones from there.
            made: the tensors that there are.
        """
        with self._extending:
            found = ways.find(numbers)
            if found is None:
                first, *rest = cut(self._found.at(numbers), made, numbers.keys())
                self._legs, self._legs_known = {}, 0  # they keep ways, of which some may go
                way = ways.add(first, self._options)
                found, on = (way, first), way.ways
                for stage in rest:  # as an example has it
                    on = on.add(stage, self._options).ways
            return found

    def run(
        self,
        inputs: Mapping[str, Any],
        outputs: Sequence[str] | None = None,
        out: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Runs the graph once: see :meth:`Engine.run`. Arrays are NumPy's."""
        plain = outputs is None and out is None and type(inputs) is dict
        if plain and (found := self._again(inputs)) is not None:
            return found
        arguments.check_mappings(inputs, out)
        views, _ = arguments.of_graph(self.form, conversion.inputs_of(self.form, inputs), False)
        arguments.wanted_outputs(self.form, outputs, out or {})
        found = self._pass(self._on_host(views))
        names = [value.name for value in self.form.outputs] if outputs is None else outputs
        return {name: _filled(name, found[name], (out or {}).get(name), views) for name in names}

    def _again(self, inputs: dict[str, Any]) -> dict[str, np.ndarray] | None:
        """Returns the outputs for inputs like some before, whose checks would cost more than a small pass.

        None: there were none, and nothing is done.
        """
        given = {}
        for value in self.network.inputs:
            array = inputs.get(value.name)
            if type(array) is not np.ndarray or not array.flags.c_contiguous:
                return None
            given[value.name] = array
        if len(inputs) != len(given) or (known := self._known_of(given.values())) not in self._legs:
            return None
        found = self._pass(given, known=known)
        return {value.name: found[value.name] for value in self.form.outputs}

    def predict(self, images: Any, batch: int | None = None, out: Any = None) -> Any:
        """Returns the outputs of a network with one input: see :meth:`Engine.predict`.

        All images go in one pass: how much an output has may depend on all of them.
        """
        images = conversion.images_of(self.form, self.network, images)
        view, _, _ = arguments.images_of(self.form, images)
        count = view.shape[0] if view.shape else 1
        if (arguments.batch_size(batch, count) or count) != count:
            raise expected("batch", f"{count}, for outputs have no row per image", batch)
        given = outputs_by_name(self.form, out)
        found = self._pass(self._on_host([view]))
        found = {n: _filled(n, array, given.get(n), [view]) for n, array in found.items()}
        if out is not None:
            return out
        return Outputs(found) if len(found) != 1 else next(iter(found.values()))

    def _on_host(self, views: Sequence[arrays.View]) -> dict[str, np.ndarray]:
        """Returns the arrays of all inputs by name."""
        for value, view in zip(self.form.inputs, views, strict=True):
            if view.device != arrays.CPU:
                raise UnsupportedError(
                    f"inputs: {value.name}: expected a NumPy array for a network that finds sizes while it "
                    f"runs, found an array on cuda:{view.device}"
                )
        return {value.name: view.array for value, view in zip(self.form.inputs, views, strict=True)}

    # -- the check ------------------------------------------------------------------------------

    def check(self, images: Any) -> Check:
        """Compares the outputs of every stage with the float64 reference's, for the stage's own inputs.

        Rounding may decide how many elements there are: these numbers are the engine's own.
        """
        given = images.arrays if isinstance(images, Samples) else None
        if given is None:
            given = self._on_host(arguments.images_of(self.form, images)[:1])
        compared: list[OutputCheck] = []

        def compare(leg: _Leg, env: Mapping, made: Mapping) -> None:
            way = leg.way
            if way.engine is None:
                return
            graph = way.graphs(way.graphs.sizes(leg.numbers))
            own = {value.name: env[value.name] for value in graph.inputs}
            exact = reference(graph, own)
            allowed = tolerance(graph, own, exact, way.engine._computes)
            compared.extend(
                compare_output(name, made[name], exact[name], allowed[name])
                for name in graph.outputs
            )

        self._pass(given, compare)
        first = next(iter(given.values()), np.empty(1))
        return check_of(compared, first.shape[0] if first.ndim else 1)

    # -- the rest --------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Raises UnsupportedError where a method of :class:`Engine` needs plans of the whole graph."""
        if name in _OF_ONE_GRAPH:
            raise self._unsupported("engine", "call run, predict or check")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _unsupported(self, what: str, instead: str) -> UnsupportedError:
        return UnsupportedError(
            f"{what}: expected a network whose sizes follow from its inputs', found {self.network.name}, "
            f"which finds some while it runs: {instead}"
        )

    @property
    def gives_probabilities(self) -> bool:
        """Whether the network ends in a softmax over classes: this one has outputs of other kinds."""
        return False

    def save(self, path: Any) -> None:
        """Raises UnsupportedError: which stages there are is found while the graph runs."""
        raise self._unsupported("save", "keep the ONNX file")

    def close(self) -> None:
        """Frees the engine's memory; it cannot be used afterwards."""
        self._closed = True
        self._ways, self._legs = _Ways(), {}

    def __reduce__(self) -> tuple:
        """Pickles where the graph comes from, and the options."""
        if self._closed:
            raise InputError(CLOSED)
        return _engine_of, (self._found, self._options)

    def check_overflow(self) -> None:
        """Does nothing: all passes are waited for."""

    def profile(self, *arguments: Any, **options: Any) -> Any:
        """Raises UnsupportedError: each pass may have other stages."""
        raise self._unsupported("profile", "time Engine.run")

    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        return (
            f"<Engine of {self.network.name} in stages on {self.device.name}, {self.dtype}{closed}>"
        )


def _engine_of(found: Found, options: Mapping[str, Any]) -> Engine:
    return Engine(found.example(), **options)


def _on_host(stage: Stage, node: Node, env: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns what a node that finds how much it makes makes."""
    given = (None if name is None else _array(stage, name, env) for name in node.inputs)
    with usual_mode():
        results = node.op.reference(*given)
    results = results if isinstance(results, tuple) else (results,)
    return {
        name: np.asarray(array, stage.of.graph.values[name].dtype, order="C")
        for name, array in zip(node.outputs, results, strict=True)
    }


def _filled(name: str, found: np.ndarray, room: Any, beside: Sequence[arrays.View]) -> Any:
    """Returns an output, in the caller's memory where there is some.

    Raises:
        InputError: that has another shape or type.
    """
    if room is None:
        return found
    view = arguments.room(f"out: {name}", room, found.shape, found.dtype.name, beside)
    view.array[...] = found
    return room
