"""Running NNX models on copies of their parameters, compiled or not."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from parity.evidence.calls import Call, Evaluation
from parity.frameworks.jax import running
from parity.frameworks.jax.keys import reached
from parity.frameworks.jax.running import Arguments, cast, dtypes_of_outputs, outcome, pinned, program_text, run
from parity.frameworks.nnx.leaves import content, key_name, leaves, to_numpy, walk
from parity.frameworks.nnx.widening import follow_dtype, widened
from parity.weights.leaf import Leaf


def with_call(model: Any, call: Call) -> Any:
    """The model itself: what it has inside does not depend on its arguments."""
    return model


def problems_before_running(model: Any, dropout: bool = False) -> list[str]:
    """Why a model cannot be compared as it stands: in train mode, or without values; it may drop if told so."""
    found = []
    if isinstance(jnp.zeros(()), jax.core.Tracer):
        found.append("this runs inside jax.jit, where arrays hold no numbers; call it outside")
    depends = updates if dropout else depends_on_mode
    training = [
        ".".join(path) or "the model" for path, _, node in walk(model) if isinstance(node, nnx.Module) and depends(node)
    ]
    if training:
        found.append(
            f"the Flax model is in train mode, and that changes what {', '.join(training[:4])}"
            f"{' and others' if len(training) > 4 else ''} computes; call .eval() on it first"
        )
    empty = [leaf.path for leaf, array in contents(model) if isinstance(array, jax.ShapeDtypeStruct)]
    if empty:
        found.append(f"the Flax model holds no values at {', '.join(empty[:4])}; transfer into it first")
    wide = [leaf.path for leaf, _ in contents(model) if leaf.dtype in ("float64", "int64")]
    if wide and not jax.config.jax_enable_x64:
        found.append(
            f"the Flax model holds 64-bit arrays at {', '.join(wide[:4])}, but jax runs without 64-bit types; "
            'call jax.config.update("jax_enable_x64", True)'
        )
    return found


def contents(model: Any) -> list[tuple[Leaf, Any]]:
    # Plain arrays are constants of the model, unless they wait for their values.
    nodes = [content(node) for _, _, node in walk(model) if isinstance(node, nnx.Variable | jax.ShapeDtypeStruct)]
    return list(zip((leaf for leaf in leaves(model) if not leaf.loose), nodes, strict=True))


def updates(module: Any) -> bool:
    """Whether a module computes with the statistics of the batch."""
    return getattr(module, "use_running_average", True) is False


def depends_on_mode(module: Any) -> bool:
    if updates(module):
        return True
    rate = next((getattr(module, name) for name in ("rate", "dropout_rate") if hasattr(module, name)), 0)
    return getattr(module, "deterministic", True) is False and rate > 0


def evaluate(
    model: Any,
    call: Call,
    *,
    dtype: str | None = None,
    weights: Mapping[str, np.ndarray] | None = None,
    cotangents: Mapping[str, np.ndarray] | None = None,
    compiled: bool = True,
    quick: bool = False,
    reseed: int = 0,
) -> Evaluation:
    """Run a model on copies of its parameters, as one compiled program or eagerly.

    Args:
        model: left as it is.
        call: the arguments, in NumPy.
        dtype: floating point parameters and arguments are cast to it; None keeps the model's.
        weights: arrays to use in place of variables, by path.
        cotangents: by output path; if given, gradients are computed in the same program.
        compiled: under jit, or operation by operation.
        quick: compile with little optimisation; the last bits may differ.
        reseed: other than 0 gives the model other random keys than it holds.

    Returns:
        Outputs by path, and gradients by `input ...` and variable path.
    """
    with pinned(double=dtype == "float64"), widened(model, dtype):
        graphdef, parameters, rest, arguments = prepare(model, call, dtype, weights)
        rest = reseeded(rest, reseed) if reseed else rest
        return run((Graph(graphdef), parameters, rest, arguments), cotangents, compiled=compiled, quick=quick)


def prepare(
    model: Any, call: Call, dtype: str | None, weights: Mapping[str, np.ndarray] | None
) -> tuple[Any, Any, Any, Arguments]:
    graphdef, parameters, rest = nnx.split(model, nnx.Param, ...)

    def renewed(path: tuple[Any, ...], leaf: Any) -> Any:
        given = None if weights is None else weights.get(".".join(map(key_name, path)))
        value = content(leaf) if given is None else given
        if isinstance(leaf, nnx.RngState):
            return leaf
        new = jnp.asarray(cast(to_numpy(value), dtype))
        return leaf.replace(new) if isinstance(leaf, nnx.Variable) else new

    def renew(state: Any) -> Any:
        return nnx.from_flat_state({path: renewed(path, leaf) for path, leaf in nnx.to_flat_state(state)})

    return graphdef, renew(parameters), renew(rest), Arguments(call, dtype)


@dataclass(frozen=True)
class Graph:
    """An NNX model without its arrays."""

    graphdef: Any

    def call(self, parameters: Any, rest: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the model returns."""
        # Variables can be written only where they were made: here, not outside of a gradient.
        model = follow_dtype(nnx.merge(self.graphdef, parameters, jax.tree.map(lambda array: array, rest)))
        return model(*args, **kwargs)

    def split(self, parameters: Any) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """The floating point arrays by path, and the variables."""
        return split_floats(parameters)

    def join(self, trainable: Mapping[Any, Any], fixed: Mapping[Any, Any]) -> Any:
        """The state again."""
        full = {path: leaf.replace(trainable[path]) if path in trainable else leaf for path, leaf in fixed.items()}
        return nnx.from_flat_state(full)


def left_behind(model: Any, call: Call, dtype: str) -> dict[str, np.ndarray]:
    """A model's variables as a run in a dtype leaves them, by path; the model's own stay as they are."""
    with pinned(double=dtype == "float64"), widened(model, dtype):
        graphdef, parameters, rest, arguments = prepare(model, call, dtype, None)
        copy = follow_dtype(nnx.merge(graphdef, parameters, rest))
        args, kwargs = arguments.filled()
        copy(*args, **kwargs)
        return {leaf.path: np.array(to_numpy(array)) for leaf, array in contents(copy) if leaf.role != "random state"}


def draws(model: Any) -> bool:
    """Whether a model holds random keys, and so may use them."""
    return any(isinstance(node, nnx.RngKey) for _, _, node in walk(model))


def reached_by_keys(model: Any, call: Call) -> bool:
    """Whether what a model returns can depend on its random keys; nothing is computed."""
    with pinned(double=False):
        graphdef, parameters, rest, arguments = prepare(model, call, None, None)
        return reached((Graph(graphdef), parameters, rest, arguments), reseeded(rest, 1))


def reseeded(state: Any, seed: int) -> Any:
    """A state with other random keys, everything else as it is."""

    def other(leaf: Any) -> Any:
        return leaf.replace(jax.random.fold_in(content(leaf), seed)) if isinstance(leaf, nnx.RngKey) else leaf

    return nnx.from_flat_state({path: other(leaf) for path, leaf in nnx.to_flat_state(state)})


def split_floats(state: Any) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """A state's floating point arrays by path, and its other variables."""
    trainable: dict[Any, Any] = {}
    fixed: dict[Any, Any] = {}
    for path, leaf in nnx.to_flat_state(state):
        floating = jnp.issubdtype(content(leaf).dtype, jnp.floating)
        (trainable if floating else fixed)[path] = content(leaf) if floating else leaf
        if floating:
            fixed[path] = leaf
    return trainable, fixed


def raises(model: Any, call: Call, dtype: str | None = None) -> str | tuple[tuple[int, ...], ...]:
    """What a model does with arguments, without computing: the error, or the shapes of its outputs."""
    with pinned(double=dtype == "float64"):
        graphdef, *rest = prepare(model, call, dtype, None)
        return outcome((Graph(graphdef), *rest))


def traced(model: Any, call: Call, dtype: str | None = None) -> tuple[str, list[bytes]]:
    """A model as jax traces it anew on such arguments: equal for two traces, unless Python draws numbers in it.

    Args:
        model: left as it is.
        call: the arguments, in NumPy.
        dtype: floating point parameters and arguments are cast to it; None keeps the model's.
    """
    with pinned(double=dtype == "float64"), widened(model, dtype):
        graphdef, *rest = prepare(model, call, dtype, None)
        return program_text((Graph(graphdef), *rest))


def forget_changed(model: Any, call: Call) -> None:
    """Let go of all compiled programs if the model does otherwise than when its own was compiled."""
    with pinned(double=False):
        graphdef, *rest = prepare(model, call, None, None)
        running.forget_changed((Graph(graphdef), *rest))


def output_dtypes(model: Any, call: Call, dtype: str) -> dict[str, str]:
    """The dtypes of a model's outputs, by path, when parameters and arguments are cast: a pinned dtype stays,
    but for that in which the model is deployed.

    Nothing is computed.
    """
    with pinned(double=dtype == "float64"), widened(model, dtype):
        graphdef, *rest = prepare(model, call, dtype, None)
        return dtypes_of_outputs((Graph(graphdef), *rest))
