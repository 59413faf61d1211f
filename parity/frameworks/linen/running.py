"""Running Linen models on copies of their variables, compiled or not."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import errors
from flax import linen as nn

from parity.errors import first_line
from parity.evidence.calls import Call, Evaluation
from parity.evidence.trees import mapped
from parity.frameworks.jax import running, widening
from parity.frameworks.jax.arrays import is_array
from parity.frameworks.jax.keys import reached
from parity.frameworks.jax.running import (
    Arguments,
    Prepared,
    cast,
    dtypes_of_outputs,
    hashable,
    outcome,
    pinned,
    program_text,
    run,
)
from parity.frameworks.linen.leaves import flat, leaves, model_dtype
from parity.frameworks.nnx.leaves import to_numpy
from parity.linen import Linen

Keys = tuple[str, ...]


def with_call(model: Linen, call: Call) -> Linen:
    """The model with a call's arguments as its examples: by them its layers are known."""
    return model.replaced(args=call.args, kwargs={**model.kwargs, **call.kwargs})


def problems_before_running(model: Linen, dropout: bool = False) -> list[str]:
    """Why a model cannot be compared as it stands: in train mode, or without values; it may drop if it has keys for it."""
    found = []
    if isinstance(jnp.zeros(()), jax.core.Tracer):
        found.append("this runs inside jax.jit, where arrays hold no numbers; call it outside")
    arrays = {".".join(keys): array for keys, array in flat(model.variables).items()}
    empty = [path for path, array in arrays.items() if isinstance(array, jax.ShapeDtypeStruct)]
    if empty:
        found.append(f"the Flax model holds no values at {', '.join(empty[:4])}; transfer into it first and take .value")
    wide = [leaf.path for leaf in leaves(model) if leaf.dtype in ("float64", "int64")]
    if wide and not jax.config.jax_enable_x64:
        found.append(
            f"the Flax model holds 64-bit arrays at {', '.join(wide[:4])}, but jax runs without 64-bit types; "
            'call jax.config.update("jax_enable_x64", True)'
        )
    return found or train_mode(model)


def train_mode(model: Linen) -> list[str]:
    """Why a model that is told to train by its arguments cannot be compared; one sentence at most."""
    instead = "give parity.Linen the keyword of its call that says so, such as train=False or deterministic=True"
    try:
        program, parameters, rest, arguments = prepare(model, Call(model.args), None, None)
        with pinned():
            jax.eval_shape(
                lambda *given: program.call(given[0], given[1], *arguments_of(arguments, given[2], given[3])),
                *(parameters, rest, arguments.values, arguments.others),
            )
    except errors.InvalidRngError as error:
        return [
            "the Flax model draws random numbers and is given none, so it is in train mode "
            f"({reason(error)}); {instead}, or rngs={{...}}"
        ]
    except errors.ModifyScopeVariableError as error:
        return [f"the Flax model writes into its variables, so it is in train mode ({reason(error)}); {instead}"]
    except Exception:
        # What else it raises is told where both sides are run.
        return []
    return []


def reason(error: Exception) -> str:
    """An error of flax's without the address that it gives."""
    return first_line(error).partition(" (http")[0].rstrip(".")


def arguments_of(arguments: Arguments, values: Mapping[str, Any], others: Mapping[str, Any]) -> Any:
    arrays = {**values, **others}
    return mapped(lambda _, leaf: arrays[leaf.path] if hasattr(leaf, "path") else leaf, arguments.skeleton.tree)


@dataclass(frozen=True, eq=False)
class Applied:
    """A Linen model without its arrays.

    Attributes:
        module: compared by value where it has a hash; one that was given a list has none.
        method: as of `parity.Linen`.
        wide: whether it runs in float64.
    """

    module: nn.Module
    method: Any
    wide: bool

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for programs that do the same."""
        return self.module if hashable(self.module) else id(self.module), self.method, self.wide

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Applied) and self.key == other.key

    def call(self, parameters: Any, rest: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the model returns; no collection may change."""
        variables = nested({**parameters, **rest["variables"]})
        with following(jnp.float64) if self.wide else contextlib.nullcontext():
            return self.module.apply(variables, *args, method=self.method, rngs=rest["rngs"], mutable=False, **kwargs)

    def split(self, parameters: Any) -> tuple[dict[Any, Any], Any]:
        """The floating point arrays by their keys, and the others."""
        floats = {keys: array for keys, array in parameters.items() if jnp.issubdtype(array.dtype, jnp.floating)}
        return floats, {keys: array for keys, array in parameters.items() if keys not in floats}

    def join(self, trainable: Mapping[Any, Any], fixed: Any) -> Any:
        """The parameters again."""
        return {**trainable, **fixed}


def nested(arrays: Mapping[Keys, Any]) -> dict[str, Any]:
    """Variables as Linen has them, of arrays by their keys."""
    tree: dict[str, Any] = {}
    for keys, array in arrays.items():
        node = tree
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = array
    return tree


@contextlib.contextmanager
def following(dtype: Any) -> Iterator[None]:
    """Let recurrent cells make their first state in the dtype of the run: they have it from `param_dtype`."""

    def follow(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        for cell in (context.module, getattr(context.module, "cell", None)):
            if isinstance(cell, nn.RNNCellBase) and hasattr(cell, "param_dtype"):
                # The module is flax's own copy for this call.
                object.__setattr__(cell, "param_dtype", dtype)
        return call(*args, **kwargs)

    with nn.intercept_methods(follow):
        yield


def prepare(model: Linen, call: Call, dtype: str | None, weights: Mapping[str, np.ndarray] | None) -> Prepared:
    """A model and a call as a program with copies of its arrays.

    Args:
        model: left as it is.
        call: the arguments, in NumPy; keyword arguments stand before those of the model itself.
        dtype: floating point arrays are cast to it; None keeps the model's.
        weights: arrays to use in place of variables, by path.
    """
    parameters: dict[Keys, Any] = {}
    variables: dict[Keys, Any] = {}
    for keys, array in flat(model.variables).items():
        given = None if weights is None else weights.get(".".join(keys))
        drawn = jnp.issubdtype(getattr(array, "dtype", "float32"), jax.dtypes.prng_key)
        new = array if drawn else jnp.asarray(cast(to_numpy(array if given is None else given), dtype))
        (parameters if keys[0] == "params" else variables)[keys] = new
    own = mapped(lambda _, value: np.array(to_numpy(value)) if is_array(value) else value, dict(model.kwargs))
    whole = replace(call, kwargs={**own, **call.kwargs})
    program = Applied(model.module, model.method, dtype == "float64")
    return program, parameters, {"variables": variables, "rngs": dict(model.rngs)}, Arguments(whole, dtype)


def widened(model: Linen, dtype: str | None) -> contextlib.AbstractContextManager[None]:
    """Leave out casts that would cut a float64 run to the dtype in which the model is deployed."""
    return widening.widened(model_dtype(model) or "float32", dtype)


def evaluate(
    model: Linen,
    call: Call,
    *,
    dtype: str | None = None,
    weights: Mapping[str, np.ndarray] | None = None,
    cotangents: Mapping[str, np.ndarray] | None = None,
    compiled: bool = True,
    quick: bool = False,
    reseed: int = 0,
) -> Evaluation:
    """Run a model on copies of its variables, as one compiled program or eagerly.

    Args:
        model: left as it is.
        call: the arguments, in NumPy.
        dtype: floating point variables and arguments are cast to it; None keeps the model's.
        weights: arrays to use in place of variables, by path.
        cotangents: by output path; if given, gradients are computed in the same program.
        compiled: under jit, or operation by operation.
        quick: compile with little optimisation; the last bits may differ.
        reseed: other than 0 gives the model other random keys than it holds.

    Returns:
        Outputs by path, and gradients by `input ...` and variable path.
    """
    with pinned(double=dtype == "float64"), widened(model, dtype):
        program, parameters, rest, arguments = prepare(model, call, dtype, weights)
        rest["rngs"] = reseeded(rest["rngs"], reseed) if reseed else rest["rngs"]
        return run((program, parameters, rest, arguments), cotangents, compiled=compiled, quick=quick)


def raises(model: Linen, call: Call, dtype: str | None = None) -> str | tuple[tuple[int, ...], ...]:
    """What a model does with arguments, without computing: the error, or the shapes of its outputs."""
    with pinned(double=dtype == "float64"):
        return outcome(prepare(model, call, dtype, None))


def traced(model: Linen, call: Call, dtype: str | None = None) -> tuple[str, list[bytes]]:
    """A model as jax traces it anew on such arguments: equal for two traces, unless Python draws numbers in it.

    Args:
        model: left as it is.
        call: the arguments, in NumPy.
        dtype: floating point parameters and arguments are cast to it; None keeps the model's.
    """
    with pinned(double=dtype == "float64"), widened(model, dtype):
        return program_text(prepare(model, call, dtype, None))


def forget_changed(model: Linen, call: Call) -> None:
    """Let go of all compiled programs if the model does otherwise than when its own was compiled."""
    with pinned(double=False):
        running.forget_changed(prepare(model, call, None, None))


def output_dtypes(model: Linen, call: Call, dtype: str) -> dict[str, str]:
    """The dtypes of a model's outputs, by path, when variables and arguments are cast: a pinned dtype stays,
    but for that in which the model is deployed.

    Nothing is computed.
    """
    with pinned(double=dtype == "float64"), widened(model, dtype):
        return dtypes_of_outputs(prepare(model, call, dtype, None))


def draws(model: Linen) -> bool:
    """Whether a model is given random keys, and so may use them."""
    return bool(model.rngs)


def reached_by_keys(model: Linen, call: Call) -> bool:
    """Whether what a model returns can depend on the random keys that it is given; nothing is computed."""
    with pinned(double=False):
        program, parameters, rest, arguments = prepare(model, call, None, None)
        return reached((program, parameters, rest, arguments), {**rest, "rngs": reseeded(rest["rngs"], 1)})


def reseeded(rngs: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Other random keys for every stream."""
    return {name: jax.random.fold_in(key, seed) for name, key in rngs.items()}
