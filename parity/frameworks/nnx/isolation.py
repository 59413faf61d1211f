"""Every module call of an NNX model on the record, and one module run by itself on what it is told to take."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
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
from parity.frameworks.nnx.leaves import walk
from parity.frameworks.nnx.running import evaluate, prepare, reseeded
from parity.frameworks.nnx.widening import follow_dtype, widened


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
        path: of the submodule, in torch's words.
        args: its positional arguments, arrays in NumPy in the dtype of the run.
        kwargs: its keyword arguments likewise.
        replies: by the path, in the model, of a module below. A reply that does not fit what the
            module returns is not used.
        dtype: floating point variables are cast to it; None keeps the model's.
        weights: arrays in place of variables, by their path in the model, in Flax's words.
        reseed: other than 0 gives other random keys.
        quick: compile with little optimisation; the last bits may differ from those that users see.
        settings: attributes of the submodule to run with instead.
        watch: sees every operation.
    """
    replies = replies or {}
    nodes = {".".join(torch_path): (node, ".".join(own)) for own, torch_path, node in reversed(list(walk(model)))}
    module, prefix = nodes[path]
    inner = names(module)
    below = {inner[id(nodes[child][0])]: child for child in replies}
    start = f"{prefix}." if prefix else ""
    own = {name.removeprefix(start): array for name, array in (weights or {}).items() if name.startswith(start)}
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
    nodes = {".".join(torch_path): (node, ".".join(own)) for own, torch_path, node in reversed(list(walk(model)))}
    module, prefix = nodes[path]
    found = evaluate(module, call, dtype=dtype, cotangents=cotangents, quick=True)
    start = f"{prefix}." if prefix else ""
    return Evaluation(found.outputs, {n if n.startswith("input ") else start + n: g for n, g in found.gradients.items()})
