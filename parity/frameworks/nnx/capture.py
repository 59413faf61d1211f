"""What every module of an NNX model returns while it runs."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from parity.evidence.calls import Call, Captured, Evaluation
from parity.evidence.shelf import copied
from parity.evidence.trees import flatten, mapped
from parity.frameworks.jax.arrays import is_array
from parity.frameworks.jax.pieces import Records, held, in_pieces
from parity.frameworks.jax.running import Slot, pinned
from parity.frameworks.nnx.leaves import walk
from parity.frameworks.nnx.running import prepare, reseeded
from parity.frameworks.nnx.widening import follow_dtype, widened


def capture(
    model: Any,
    call: Call,
    *,
    dtype: str | None = None,
    reseed: int = 0,
    keep: Callable[[np.ndarray], Any] = copied,
    each: Callable[[Captured], Captured] | None = None,
) -> tuple[Evaluation, list[Captured]]:
    """Run a model once, compiled, and record every submodule's output, in the order in which they finish.

    What ran inside a loop of the compiler (a scanned cell) has no value outside of it and is left out.

    Args:
        model: left as it is.
        call: the arguments, in NumPy.
        dtype: as of `evaluate`.
        reseed: as of `evaluate`.
        keep: gets every array soon after its module returns; what it returns stands on the record. A model that cannot
            be compiled is recorded whole before.
        each: gets every record as soon as it is complete; what it returns stands in its place.
    """
    with pinned(double=dtype == "float64"), widened(model, dtype):
        graphdef, parameters, rest, arguments = prepare(model, call, dtype, None)
        rest = reseeded(rest, reseed) if reseed else rest
        kept = Records(each)

        def body(parameters: Any, rest: Any, values: Any, others: Any) -> Any:
            kept.clear()
            model = follow_dtype(nnx.merge(graphdef, parameters, rest))
            args, kwargs = mapped(
                lambda _, leaf: {**values, **others}[leaf.path] if isinstance(leaf, Slot) else leaf, arguments.skeleton.tree
            )
            with recording(model) as records:
                output = model(*args, **kwargs)
            return kept.arrays(records), dict(flatten(output, is_array))

        given = parameters, rest, arguments.values, arguments.others
        try:
            _, outputs = in_pieces(body, given, keep, kept.take)
        except (jax.errors.UnexpectedTracerError, TypeError):
            # Inside an inner jit or scan, what was recorded cannot leave it; nor can a result that is no array, as a string.
            arrays, outputs = body(*given)
            for place, leaf in enumerate(arrays):
                kept.take(place, held(leaf, keep))
            outputs = {path: held(leaf, keep) for path, leaf in outputs.items()}
    return Evaluation(outputs), kept.captured


@contextlib.contextmanager
def recording(model: Any) -> Iterator[list[tuple[str, int, dict[str | int, Any]]]]:
    """Record what every module below `model` is given and returns, by replacing `__call__` on their classes meanwhile."""
    records: list[tuple[str, int, dict[str | int, Any]]] = []
    paths: dict[int, str] = {}
    for _, torch_path, node in walk(model):
        if isinstance(node, nnx.Module):
            paths.setdefault(id(node), ".".join(torch_path))
    counts: dict[str, int] = {}
    depth: list[int] = []

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
            # A class that calls super().__call__ is still one module: only its outermost call counts.
            if id(self) not in paths or id(self) in depth:
                return original(self, *args, **kwargs)
            depth.append(id(self))
            try:
                output = original(self, *args, **kwargs)
            finally:
                depth.pop()
            path = paths[id(self)]
            counts[path] = counts.get(path, 0) + 1
            record: dict[str | int, Any] = dict(flatten(output, is_array))
            record |= {number: value for number, value in enumerate(args) if is_array(value)}
            records.append((path, counts[path] - 1, record))
            return output

        return recorded

    owners = {
        cls
        for _, _, node in walk(model)
        if isinstance(node, nnx.Module)
        for cls in type(node).__mro__
        if "__call__" in vars(cls) and issubclass(cls, nnx.Module)
    }
    originals = {cls: vars(cls)["__call__"] for cls in owners}
    try:
        for cls, original in originals.items():
            setattr(cls, "__call__", wrap(original))  # noqa: B010
        yield records
    finally:
        for cls, original in originals.items():
            setattr(cls, "__call__", original)  # noqa: B010
