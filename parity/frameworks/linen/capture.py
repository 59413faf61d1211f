"""What every module of a Linen model returns while it runs."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from parity.evidence.calls import Call, Captured, Evaluation
from parity.evidence.shelf import copied
from parity.evidence.trees import flatten
from parity.frameworks.jax.arrays import is_array
from parity.frameworks.jax.pieces import Records, held, in_pieces
from parity.frameworks.jax.running import pinned
from parity.frameworks.linen.lifting import lifted_calls
from parity.frameworks.linen.running import arguments_of, prepare, reseeded, widened
from parity.frameworks.linen.structure import Path, trace_state
from parity.linen import Linen

Record = tuple[str, int, dict[str | int, Any]]


def capture(
    model: Linen,
    call: Call,
    *,
    dtype: str | None = None,
    reseed: int = 0,
    keep: Callable[[np.ndarray], Any] = copied,
    each: Callable[[Captured], Captured] | None = None,
) -> tuple[Evaluation, list[Captured]]:
    """Run a model once, compiled, and record every submodule's output, in the order in which they finish.

    What ran inside a transformation of jax (a scanned cell) has no value outside of it and is left out;
    the module that is transformed is not. `nn.remat` and `nn.jit` change no values and are left out themselves.

    Args:
        model: left as it is.
        call: the arguments, in NumPy.
        dtype: as of `evaluate`.
        reseed: as of `evaluate`.
        keep: gets every array soon after its module returns; what it returns stands on the record. A model that cannot
            be compiled is recorded whole before.
        each: gets every record as soon as it is complete; what it returns stands in its place, also of the model's own.
    """
    with pinned(double=dtype == "float64"), widened(model, dtype):
        program, parameters, rest, arguments = prepare(model, call, dtype, None)
        rest["rngs"] = reseeded(rest["rngs"], reseed) if reseed else rest["rngs"]
        kept = Records(each)

        def body(parameters: Any, rest: Any, values: Any, others: Any) -> Any:
            kept.clear()
            with recording(model) as records:
                args, kwargs = arguments_of(arguments, values, others)
                output = program.call(parameters, rest, args, kwargs)
            return kept.arrays([*records, ("", 0, given_and_returned(args, output))])

        given = parameters, rest, arguments.values, arguments.others
        try:
            in_pieces(body, given, keep, kept.take)
        except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError):
            # A model that decides by values cannot be compiled.
            for place, leaf in enumerate(body(*given)):
                kept.take(place, held(leaf, keep))
    return Evaluation(dict(kept.found["", 0].outputs)), kept.captured


def given_and_returned(args: tuple[Any, ...], output: Any) -> dict[str | int, Any]:
    """Outputs under their path, inputs under their position."""
    record: dict[str | int, Any] = dict(flatten(output, is_array))
    return record | {number: value for number, value in enumerate(args) if is_array(value)}


@contextlib.contextmanager
def recording(model: Linen) -> Iterator[list[Record]]:
    """Record what every module below the model is given and returns."""
    records: list[Record] = []
    counts: dict[str, int] = {}

    def record(path: Path, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        words = words_of(model, path)
        counts[words] = counts.get(words, 0) + 1
        records.append((words, counts[words] - 1, given_and_returned(args, output)))
        return output

    with watching(model.structure.lifted, record):
        yield records


def words_of(model: Linen, path: Path) -> str:
    """The path of a module in torch's words."""
    parts = model.structure.parts
    return str(parts[path].words) if path in parts else ".".join(path)


@contextlib.contextmanager
def watching(lifted: tuple[type, ...], around: Callable[..., Any]) -> Iterator[None]:
    """Send every call of a module below the one that runs through `around(path, call, args, kwargs)`.

    Args:
        lifted: classes that flax made of others for a transformation, as far as they are there already.
        around: gets the module's path, its own bound call, and the arguments.
    """
    state = trace_state()
    depth: list[Path] = []

    def watched(module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        path = tuple(map(str, module.path)) if module.scope is not None else ()
        # Values inside a transformation cannot leave it; a class that calls super().__call__ is still one module.
        if not path or path in depth or trace_state() != state:
            return call(*args, **kwargs)
        depth.append(path)
        try:
            return around(path, call, args, kwargs)
        finally:
            depth.pop()

    def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        return watched(context.module, call, args, kwargs) if context.method_name == "__call__" else call(*args, **kwargs)

    with nn.intercept_methods(intercept), lifted_calls(lifted, watched):
        yield
