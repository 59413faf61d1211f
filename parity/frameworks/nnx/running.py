"""Running NNX models on copies of their parameters, compiled or not."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from parity.errors import InputError, first_line
from parity.evidence.calls import Call, Evaluation
from parity.evidence.trees import flatten, mapped
from parity.frameworks.nnx.leaves import content, is_array, key_name, leaves, to_numpy, walk
from parity.frameworks.nnx.widening import follow_dtype, widened
from parity.frameworks.settings import Held
from parity.weights.leaf import Leaf

# Evidence in float64 does not depend on how well XLA optimises: compiling less is four times faster.
QUICK = {"cpu": {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}}


def problems_before_running(model: Any) -> list[str]:
    """Why a model cannot be compared as it stands: in train mode, or without values."""
    found = []
    if isinstance(jnp.zeros(()), jax.core.Tracer):
        found.append("this runs inside jax.jit, where arrays hold no numbers; call it outside")
    training = [
        ".".join(path) or "the model" for path, _, node in walk(model) if isinstance(node, nnx.Module) and depends_on_mode(node)
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
    nodes = [content(node) for _, _, node in walk(model) if isinstance(node, nnx.Variable)]
    return list(zip((leaf for leaf in leaves(model) if not leaf.loose), nodes, strict=True))


def depends_on_mode(module: Any) -> bool:
    if getattr(module, "use_running_average", True) is False:
        return True
    rate = next((getattr(module, name) for name in ("rate", "dropout_rate") if hasattr(module, name)), 0)
    return getattr(module, "deterministic", True) is False and rate > 0


@contextlib.contextmanager
def pinned(double: bool = False) -> Iterator[dict[str, str]]:
    """Full float32 products; 64-bit types inside if asked for; all restored afterwards.

    Args:
        double: whether 64-bit types are on inside. They stay on where the caller has them on.

    Yields:
        What was pinned, for the report.
    """
    # A float64 run widens what a model casts to float32, and may so mix dtypes that the model does not.
    promotion = jax.numpy_dtype_promotion("standard") if double else contextlib.nullcontext()
    double = double or bool(jax.config.jax_enable_x64)
    with UNFILTERED(), jax.default_matmul_precision("highest"), jax.enable_x64(double), jax.debug_nans(False), promotion:
        yield {"jax matmul precision": "highest", "jax 64-bit types": "on in float64 runs only"}


def unfiltered_tracebacks() -> Callable[[], object]:
    """Let jax leave tracebacks as they are; returns what restores it."""
    filtering = jax.config.jax_traceback_filtering
    # Errors of the user's model are caught and told in one line; filtering their tracebacks costs 8 ms each.
    jax.config.update("jax_traceback_filtering", "off")
    return functools.partial(jax.config.update, "jax_traceback_filtering", filtering)


UNFILTERED = Held(unfiltered_tracebacks)


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
        body = functional(graphdef, arguments.skeleton, tuple(sorted(cotangents)) if cotangents is not None else None)
        run = compile_body(body, quick) if compiled else body
        given = {p: jnp.asarray(np.asarray(c)) for p, c in (cotangents or {}).items()}
        outputs, gradients = run(parameters, rest, arguments.values, arguments.others, given)
        plain = {path: np.array(value) if is_array(value) else value for path, value in outputs.items()}
        return Evaluation({**getattr(body, "statics", {}), **plain}, {path: np.array(g) for path, g in gradients.items()})


class Arguments:
    """A call's arrays apart from the rest, so that a compiled program can be used again."""

    def __init__(self, call: Call, dtype: str | None):
        self.values: dict[str, jax.Array] = {}
        self.others: dict[str, jax.Array] = {}

        def take(path: str, value: Any) -> Any:
            if not isinstance(value, np.ndarray):
                return value
            if path in call.castable:
                self.values[path] = jnp.asarray(cast(value, dtype))
            else:
                self.others[path] = exact(path, value)
            return Slot(path)

        self.skeleton = freeze((mapped(take, call.args, "args"), mapped(take, dict(call.kwargs), "kwargs")))


class Slot:
    """Where an array goes in the arguments."""

    def __init__(self, path: str):
        self.path = path

    def __hash__(self) -> int:
        return hash(self.path)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slot) and other.path == self.path


class Frozen:
    """Arguments with a hash, so that programs are found again; unhashable parts compare by identity."""

    def __init__(self, tree: Any):
        self.tree = tree
        self.parts = tuple((path, leaf if hashable(leaf) else id(leaf)) for path, leaf in flatten(tree, lambda _: False))

    def __hash__(self) -> int:
        return hash(self.parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frozen) and other.parts == self.parts


def freeze(tree: Any) -> Frozen:
    return Frozen(tree)


def hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def cast(array: np.ndarray, dtype: str | None) -> np.ndarray:
    floating = jnp.issubdtype(array.dtype, jnp.floating)
    return array.astype(jnp.dtype(dtype)) if dtype and floating else array


def exact(path: str, array: np.ndarray) -> jax.Array:
    """An integer, boolean or mask array on the device, without losing a value."""
    narrow = jnp.asarray(array)
    if array.dtype.itemsize == 8 and narrow.dtype.itemsize == 4 and array.dtype.kind in "iu":
        if not np.array_equal(np.asarray(narrow), array):
            raise InputError(f"{path} holds {array.dtype} values that do not fit in 32 bits; jax runs without 64-bit types")
    elif array.dtype == np.float64 and narrow.dtype != np.float64:
        # A float64 mask may hold numbers that float32 cannot tell from zero.
        lost = (array != 0) & (np.abs(array) < np.finfo(np.float32).tiny)
        with np.errstate(over="ignore"):
            narrow = jnp.asarray(np.where(lost, np.sign(array), array).astype(np.float32))
    return narrow


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


def functional(graphdef: Any, skeleton: Frozen, heads: tuple[str, ...] | None) -> Callable[..., Any]:
    """The model as a pure function of its parameters and arguments, with gradients for the outputs in `heads`."""
    # A module that keeps a plain list or dict has no hash; its program is made anew each time.
    make = cached_functional if hashable(graphdef) else cached_functional.__wrapped__
    return make(graphdef, skeleton, heads)


@functools.lru_cache(maxsize=512)
def cached_functional(graphdef: Any, skeleton: Frozen, heads: tuple[str, ...] | None) -> Callable[..., Any]:

    def forward(parameters: Any, rest: Any, values: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
        output = apply(graphdef, parameters, rest, skeleton, {**values, **others})
        found = dict(flatten(output, is_array))
        # Numbers, strings and None cannot leave a traced function as results.
        body.statics = {path: leaf for path, leaf in found.items() if not is_array(leaf)}  # type: ignore[attr-defined]
        return {path: leaf for path, leaf in found.items() if is_array(leaf)}

    def body(parameters: Any, rest: Any, values: Any, others: Any, cotangents: dict[str, Any]) -> tuple[Any, Any]:
        if heads is None:
            return forward(parameters, rest, values, others), {}
        trainable, fixed = split_floats(parameters)

        def scalar_heads(trainable: Any, values: Any) -> tuple[dict[str, Any], dict[str, Any]]:
            outputs = forward(joined(trainable, fixed), rest, values, others)
            fitting = {p: outputs[p] for p in heads if p in outputs and outputs[p].shape == cotangents[p].shape}
            return fitting, outputs

        chosen, pull, outputs = jax.vjp(scalar_heads, trainable, values, has_aux=True)
        by_parameter, by_value = pull({path: cotangents[path].astype(head.dtype) for path, head in chosen.items()})
        gradients = {f"input {path}": gradient for path, gradient in by_value.items()}
        gradients |= {".".join(map(str, path)): gradient for path, gradient in by_parameter.items()}
        return outputs, gradients

    return body


def draws(model: Any) -> bool:
    """Whether a model holds random keys, and so may use them."""
    return any(isinstance(node, nnx.RngKey) for _, _, node in walk(model))


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


def joined(trainable: Mapping[Any, Any], fixed: Mapping[Any, Any]) -> Any:
    full = {path: leaf.replace(trainable[path]) if path in trainable else leaf for path, leaf in fixed.items()}
    return nnx.from_flat_state(full)


def apply(graphdef: Any, parameters: Any, rest: Any, skeleton: Frozen, arrays: Mapping[str, Any]) -> Any:
    # Variables can be written only where they were made: here, not outside of a gradient.
    model = follow_dtype(nnx.merge(graphdef, parameters, jax.tree.map(lambda array: array, rest)))
    args, kwargs = mapped(lambda _, leaf: arrays[leaf.path] if isinstance(leaf, Slot) else leaf, skeleton.tree)
    return model(*args, **kwargs)


@functools.lru_cache(maxsize=1024)
def compile_body(body: Callable[..., Any], quick: bool) -> Callable[..., Any]:
    options = QUICK.get(platform()) if quick else None
    return jax.jit(body, compiler_options=options)


def raises(model: Any, call: Call, dtype: str | None = None) -> str | tuple[tuple[int, ...], ...]:
    """What a model does with arguments, without computing: the error, or the shapes of its outputs."""
    with pinned(double=dtype == "float64"):
        graphdef, parameters, rest, arguments = prepare(model, call, dtype, None)
        body = functional(graphdef, arguments.skeleton, None)
        try:
            outputs, _ = jax.eval_shape(body, parameters, rest, arguments.values, arguments.others, {})
        except Exception as error:
            return f"{type(error).__name__}: {first_line(error)}"
        return tuple(tuple(leaf.shape) for leaf in outputs.values())


def output_dtypes(model: Any, call: Call, dtype: str) -> dict[str, str]:
    """The dtypes of a model's outputs, by path, when parameters and arguments are cast: a pinned dtype stays.

    Nothing is computed.
    """
    with pinned(double=dtype == "float64"):
        graphdef, *given, arguments = prepare(model, call, dtype, None)
        body = functional(graphdef, arguments.skeleton, None)
        arrays, tree = jax.tree.flatten((*given, arguments.values, arguments.others, {}))
        return abstract_dtypes(body, tree, tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays))


@functools.lru_cache(maxsize=512)
def abstract_dtypes(body: Callable[..., Any], tree: Any, arrays: tuple[jax.ShapeDtypeStruct, ...]) -> dict[str, str]:
    """The dtypes of a body's outputs. Kept, since they do not depend on numbers and a trace takes 15 ms."""
    outputs, _ = jax.eval_shape(body, *jax.tree.unflatten(tree, arrays))
    return {path: str(leaf.dtype) for path, leaf in outputs.items()}


def x64_enabled() -> bool:
    """Whether the caller has 64-bit types."""
    return bool(jax.config.jax_enable_x64)


def platform() -> str:
    device = jax.config.jax_default_device
    return device.platform if isinstance(device, jax.Device) else jax.default_backend()


@contextlib.contextmanager
def on_device(name: str) -> Iterator[None]:
    """Put new arrays on the CPU or the GPU."""
    with jax.default_device(jax.devices(name)[0]):
        yield


def environment() -> dict[str, str]:
    """Versions and devices, for the report."""
    devices = ", ".join(sorted({f"{d.platform} ({d.device_kind})" for d in jax.devices()}))
    return {"jax": jax.__version__, "flax": flax.__version__, "jax devices": devices}


def gpu_missing() -> str | None:
    """Why no GPU can be used, None if one can."""
    return None if jax.default_backend() == "gpu" else f"jax {jax.__version__} runs on {jax.default_backend()} only"
