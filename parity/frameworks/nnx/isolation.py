"""Every module call of an NNX model on the record, and one module run by itself on what it is told to take."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.extend.core import get_opaque_trace_state

from parity.evidence.calls import Alone, Call, Evaluation, ModuleCall
from parity.evidence.shelf import copied
from parity.frameworks.jax.isolation import Around, Replies, answered, observed
from parity.frameworks.jax.recording import Recorder
from parity.frameworks.jax.running import pinned
from parity.frameworks.nnx.leaves import leaves, walk
from parity.frameworks.nnx.running import evaluate, prepare, reseeded
from parity.frameworks.nnx.widening import follow_dtype, widened
from parity.weights.paths import turn_of

# Modules by their paths in torch's words, each with that in Flax's.
Nodes = Mapping[str, tuple[Any, str]]


@dataclass(frozen=True)
class WatchedGraph:
    """An NNX model without its arrays, each call of whose modules can be watched."""

    graphdef: Any

    def watched(self, parameters: Any, rest: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], around: Around) -> Any:
        """What the model returns, when the call of every module, its own as '', is sent through `around`."""
        model = follow_dtype(nnx.merge(self.graphdef, parameters, jax.tree.map(lambda array: array, rest)))
        with watching(model, around):
            return model(*args, **kwargs)


def observe(
    model: Any, call: Call, *, dtype: str | None = None, keep: Callable[[np.ndarray], Any] = copied
) -> list[ModuleCall]:
    """Run a model once and record every call of every submodule, in the order in which they finish.

    What runs inside a transformation of jax (a scanned cell) has no value outside of it and is left out.

    Args:
        model: left as it is.
        call: the arguments, in NumPy.
        dtype: as of `evaluate`.
        keep: as of `capture`.
    """
    with pinned(double=dtype == "float64"), widened(model, dtype):
        graphdef, parameters, rest, arguments = prepare(model, call, dtype, None)
        return observed(WatchedGraph(graphdef), parameters, rest, arguments, keep)


def names(model: Any) -> dict[int, str]:
    """The first path, in torch's words, of every module, by its `id`."""
    found: dict[int, str] = {}
    for _, torch_path, node in walk(model):
        if isinstance(node, nnx.Module):
            found.setdefault(id(node), ".".join(torch_path))
    return found


@contextlib.contextmanager
def watching(model: Any, around: Around) -> Iterator[None]:
    """Send every call of a module below `model`, and of itself, through `around(path, call, args, kwargs)`.

    Args:
        model: the instance that is going to run.
        around: gets the module's path, its own bound call, and the arguments.
    """
    paths = names(model)
    depth: list[int] = []
    state = trace_state()

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            # A class that calls super().__call__ is still one module; values inside a transformation cannot leave it.
            if id(self) not in paths or id(self) in depth or trace_state() != state:
                return original(self, *args, **kwargs)
            depth.append(id(self))
            try:
                return around(paths[id(self)], functools.partial(original, self), args, kwargs)
            finally:
                depth.pop()

        return watched

    modules = [node for _, _, node in walk(model) if isinstance(node, nnx.Module)]
    owners = {c for m in modules for c in type(m).__mro__ if "__call__" in vars(c) and issubclass(c, nnx.Module)}
    originals = {cls: vars(cls)["__call__"] for cls in owners}
    try:
        for cls, original in originals.items():
            setattr(cls, "__call__", wrap(original))  # noqa: B010
        yield
    finally:
        for cls, original in originals.items():
            setattr(cls, "__call__", original)  # noqa: B010


def trace_state() -> Any:
    """Equal at two places exactly if values of one can be used in the other."""
    return get_opaque_trace_state(convention="nnx")


def alone(
    model: Any,
    path: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    replies: Replies | None = None,
    *,
    dtype: str | None = "float64",
    weights: Mapping[str, np.ndarray] | None = None,
    reseed: int = 0,
    quick: bool = True,
    settings: Mapping[str, Any] | None = None,
    watch: Recorder | None = None,
) -> Alone:
    """Run one submodule by itself; modules below that have replies answer with those.

    Args:
        model: left as it is.
        path: of the submodule, in torch's words; `blocks[2]` is one turn of a module whose arrays are stacked.
        args: its positional arguments, arrays in NumPy in the dtype of the run.
        kwargs: its keyword arguments likewise.
        replies: by the path, in the model, of a module below. A reply that does not fit what the
            module returns is not used, nor is one of a module that runs inside a transformation of jax.
        dtype: floating point variables are cast to it; None keeps the model's.
        weights: arrays in place of variables, by their path in the model, in Flax's words.
        reseed: other than 0 gives other random keys.
        quick: compile with little optimisation; the last bits may differ from those that users see.
        settings: attributes of the submodule to run with instead.
        watch: sees every operation.
    """
    replies = replies or {}
    nodes = nodes_of(model)
    module, prefix, turn = found_at(nodes, path)
    below = relative(nodes, path, replies)
    start = f"{prefix}." if prefix else ""
    own = {name.removeprefix(start): array for name, array in (weights or {}).items() if name.startswith(start)}
    if turn is not None:
        module, own = one_turn(module, turn), {name: array[turn] for name, array in own.items()}
    if settings:
        module = nnx.merge(*nnx.split(module))
        for setting, value in settings.items():
            setattr(module, setting, value)
    with pinned(double=dtype == "float64"), widened(module, dtype):
        graphdef, parameters, rest, arguments = prepare(module, Call(args, kwargs), dtype, own)
        rest = reseeded(rest, reseed) if reseed else rest
        return answered(WatchedGraph(graphdef), parameters, rest, arguments, below, replies, quick=quick, watch=watch)


def pulled_back(
    model: Any, path: str, call: Call, cotangents: Mapping[str, np.ndarray], *, dtype: str | None = "float64"
) -> Evaluation:
    """Run one submodule by itself forwards and backwards; gradients of its arrays under their paths in the model.

    Args:
        model: left as it is.
        path: of the submodule, in torch's words.
        call: its arguments, arrays in NumPy.
        cotangents: by output path.
        dtype: of the run; None is the model's.
    """
    module, prefix, turn = found_at(nodes_of(model), path)
    start = f"{prefix}." if prefix else ""
    one = module if turn is None else one_turn(module, turn)
    found = evaluate(one, call, dtype=dtype, cotangents=cotangents, quick=True)
    gradients = {name: array for name, array in found.gradients.items() if name.startswith("input ")}
    arrays = {name: array for name, array in found.gradients.items() if name not in gradients}
    if turn is not None:
        shapes = {leaf.path: leaf.shape for leaf in leaves(module)}
        arrays = {name: among(array, turn, shapes[name][0]) for name, array in arrays.items()}
    return Evaluation(found.outputs, {**gradients, **{start + name: array for name, array in arrays.items()}})


# ---------------------------------------------------------------- modules whose arrays are stacked, for a scan over layers


def stacked(model: Any, path: str, turns: int) -> bool:
    """Whether every array of a module is a stack of that many, so that one turn of it can be run alone."""
    module = nodes_of(model)[path][0]
    arrays = jax.tree.leaves(nnx.split(module)[1])
    return all(np.shape(array)[:1] == (turns,) for array in arrays)


def one_turn(module: Any, turn: int) -> Any:
    """A module with one of the arrays that each of its variables stacks."""
    graphdef, state = nnx.split(module)
    return nnx.merge(graphdef, jax.tree.map(lambda array: array[turn], state))


def among(array: np.ndarray, turn: int, turns: int) -> np.ndarray:
    """What belongs to one turn, in the place that it has among all."""
    found = np.zeros((turns, *array.shape), array.dtype)
    found[turn] = array
    return found


def nodes_of(model: Any) -> Nodes:
    """Every module by its path in torch's words, with that in Flax's; of several the first."""
    return {".".join(torch_path): (node, ".".join(own)) for own, torch_path, node in reversed(list(walk(model)))}


def found_at(nodes: Nodes, path: str) -> tuple[Any, str, int | None]:
    """The module at a path, its path in Flax's words, and the turn that is meant where it is a stack."""
    base, turn = turn_of(path)
    return *nodes[base], turn


def relative(nodes: Nodes, path: str, children: Iterable[str]) -> dict[str, str]:
    """Modules below one module, by their paths as seen from it. A turn of what that runs in a scan cannot answer there."""
    base, turn = turn_of(path)
    inner = names(nodes[base][0])
    told = {child: turn_of(child) for child in children}
    return {inner[id(nodes[below][0])]: child for child, (below, of) in told.items() if of == turn}
