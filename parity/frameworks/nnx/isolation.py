"""Every module call of an NNX model on the record, and one module run by itself on what it is told to take."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import get_opaque_trace_state

from parity.evidence.calls import Alone, Call, ModuleCall
from parity.evidence.trees import flatten, mapped
from parity.frameworks.jax.arrays import is_array
from parity.frameworks.jax.running import QUICK, Slot, compile_body, hashable, pinned, platform
from parity.frameworks.nnx.leaves import walk
from parity.frameworks.nnx.running import prepare, reseeded
from parity.frameworks.nnx.widening import follow_dtype, widened

# What a module below answers, by its path: for each of its calls, arrays by path in what it returns.
Replies = Mapping[str, list[Mapping[str, np.ndarray]]]


def observe(model: Any, call: Call, *, dtype: str | None = None) -> list[ModuleCall]:
    """Run a model once and record every call of every submodule, in the order in which they finish.

    What runs inside a transformation of jax (a scanned cell) has no value outside of it and is left out.
    """
    with pinned(double=dtype == "float64"), widened(model, dtype):
        graphdef, parameters, rest, arguments = prepare(model, call, dtype, None)
        records: list[ModuleCall] = []

        def body(parameters: Any, rest: Any, arrays: Any) -> list[Any]:
            records.clear()
            model = follow_dtype(nnx.merge(graphdef, parameters, rest))
            args, kwargs = mapped(
                lambda _, leaf: arrays[leaf.path] if isinstance(leaf, Slot) else leaf, arguments.skeleton.tree
            )
            kept: list[Any] = []
            with watching(model, Observer(records, kept).around):
                model(*args, **kwargs)
            return kept

        run = jax.jit(body, compiler_options=QUICK.get(platform()))
        given = parameters, rest, {**arguments.values, **arguments.others}
        try:
            arrays = run(*given)
        except Exception:
            # A model that decides by values cannot be compiled.
            arrays = body(*given)
        known = [np.array(array) for array in arrays]
        return [filled(one, known) for one in records]


class Observer:
    """Puts calls on the record, with a `Slot` for every array: those leave a compiled program apart."""

    def __init__(self, records: list[ModuleCall], kept: list[Any]):
        self.records, self.kept = records, kept
        self.counts: dict[str, int] = {}
        self.open: list[tuple[str, int]] = []

    def around(self, path: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.counts[path] = self.counts.get(path, 0) + 1
        key, inside = (path, self.counts[path] - 1), self.open[-1] if self.open else None
        given = self.slots(tuple(args)), self.slots(dict(kwargs))
        self.open.append(key)
        try:
            output = original(*args, **kwargs)
        finally:
            self.open.pop()
        self.records.append(ModuleCall(*key, *given, self.slots(output), inside))
        return output

    def slots(self, tree: Any) -> Any:
        def slot(_: str, leaf: Any) -> Any:
            if not is_array(leaf):
                return leaf
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                return None
            self.kept.append(leaf)
            return Slot(str(len(self.kept) - 1))

        return mapped(slot, tree)


def filled(one: ModuleCall, arrays: list[np.ndarray]) -> ModuleCall:
    def fill(tree: Any) -> Any:
        return mapped(lambda _, leaf: arrays[int(leaf.path)] if isinstance(leaf, Slot) else leaf, tree)

    return ModuleCall(one.path, one.call, fill(one.args), fill(one.kwargs), fill(one.output), one.inside)


def names(model: Any) -> dict[int, str]:
    """The first path, in torch's words, of every module, by its `id`."""
    found: dict[int, str] = {}
    for _, torch_path, node in walk(model):
        if isinstance(node, nnx.Module):
            found.setdefault(id(node), ".".join(torch_path))
    return found


@contextlib.contextmanager
def watching(model: Any, around: Callable[..., Any], only: frozenset[str] | None = None) -> Iterator[None]:
    """Send every call of a module below `model`, and of itself, through `around(path, call, args, kwargs)`.

    Args:
        model: the instance that is going to run.
        around: gets the module's path, its own bound call, and the arguments.
        only: the paths to watch; None watches all.
    """
    paths = {key: path for key, path in names(model).items() if only is None or path in only}
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
        told = {
            f"{relative}#{number}{leaf}": jnp.asarray(array)
            for relative, child in below.items()
            for number, reply in enumerate(replies[child])
            for leaf, array in reply.items()
        }
        spec = tuple(sorted((relative, len(replies[child])) for relative, child in below.items()))
        make = answering if hashable(graphdef) else answering.__wrapped__
        body = make(graphdef, arguments.skeleton, spec)
        given = parameters, rest, {**arguments.values, **arguments.others}, told
        try:
            outputs, arrays = compile_body(body, quick)(*given)
        except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError):
            outputs, arrays = body(*given)
        found: dict[tuple[str, int, str], Any] = {}
        for name, value in {**body.settings, **arrays}.items():  # type: ignore[attr-defined]
            relative, _, end = name.partition("#")
            number, _, leaf = end.partition(" ")
            found[below[relative], int(number), leaf] = np.array(value) if is_array(value) else value
        plain = {name: np.array(value) for name, value in outputs.items()}
        seen = {below[relative]: count for relative, count in body.seen.items()}  # type: ignore[attr-defined]
        return Alone({**body.statics, **plain}, found, seen)  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=512)
def answering(graphdef: Any, skeleton: Any, spec: tuple[tuple[str, int], ...]) -> Callable[..., Any]:
    """A module as a pure function of parameters, arguments and the replies of the modules in `spec`."""

    def body(parameters: Any, rest: Any, arrays: dict[str, Any], told: dict[str, Any]) -> tuple[Any, Any]:
        model = follow_dtype(nnx.merge(graphdef, parameters, jax.tree.map(lambda array: array, rest)))
        args, kwargs = mapped(lambda _, leaf: arrays[leaf.path] if isinstance(leaf, Slot) else leaf, skeleton.tree)
        seen, given, settings = dict.fromkeys((name for name, _ in spec), 0), dict[str, Any](), dict[str, Any]()

        def around(path: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            number, seen[path] = seen[path], seen[path] + 1
            for name, leaf in (*flatten(tuple(args), is_array, "args"), *flatten(dict(kwargs), is_array, "kwargs")):
                (given if is_array(leaf) else settings)[f"{path}#{number} {name}"] = leaf

            def reply(name: str, leaf: Any) -> Any:
                answer = told.get(f"{path}#{number}{name}")
                fits = answer is not None and is_array(leaf) and answer.shape == leaf.shape
                return answer.astype(leaf.dtype) if fits and answer is not None else leaf

            return mapped(reply, original(*args, **kwargs))

        with watching(model, around, frozenset(seen)):
            output = model(*args, **kwargs)
        found = dict(flatten(output, is_array))
        body.seen, body.settings = seen, settings  # type: ignore[attr-defined]
        # Numbers, strings and None cannot leave a traced function as results.
        body.statics = {name: leaf for name, leaf in found.items() if not is_array(leaf)}  # type: ignore[attr-defined]
        return {name: leaf for name, leaf in found.items() if is_array(leaf)}, given

    return body
