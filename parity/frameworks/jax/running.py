"""Running Flax models as pure functions of their arrays, compiled or not: what NNX and Linen have in common."""

import contextlib
import functools
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Protocol

import flax
import jax
import jax.numpy as jnp
import numpy as np

from parity.errors import InputError, first_line
from parity.evidence.calls import Call, Evaluation
from parity.evidence.trees import containers, flatten, in_words, mapped
from parity.frameworks.jax.arrays import is_array
from parity.frameworks.settings import Held

# Evidence in float64 does not depend on how well XLA optimises: compiling less is four times faster.
QUICK = {"cpu": {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}}


class Program(Hashable, Protocol):
    """A model without its arrays. One without a hash is made anew for each run."""

    def call(self, parameters: Any, rest: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the model returns."""

    def split(self, parameters: Any) -> tuple[dict[Any, Any], Any]:
        """The floating point arrays by their keys, and what else `join` needs."""

    def join(self, trainable: Mapping[Any, Any], fixed: Any) -> Any:
        """The parameters again."""


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
                self.others[path] = exact(path, cast(value, dtype) if path in call.added else value)
            return Slot(path)

        self.skeleton = freeze((mapped(take, call.args, "args"), mapped(take, dict(call.kwargs), "kwargs")))

    def filled(self) -> Any:
        """Positional and keyword arguments with the arrays in their places."""
        arrays = {**self.values, **self.others}
        return mapped(lambda _, leaf: arrays[leaf.path] if isinstance(leaf, Slot) else leaf, self.skeleton.tree)


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
    if dtype == "float64" and jnp.issubdtype(array.dtype, jnp.complexfloating):
        return array.astype(np.complex128)
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


def functional(program: Program, skeleton: Frozen, heads: tuple[str, ...] | None) -> Callable[..., Any]:
    """The model as a pure function of its parameters and arguments, with gradients for the outputs in `heads`."""
    # A module that keeps a plain list or dict has no hash; its program is made anew each time.
    make = cached_functional if hashable(program) else cached_functional.__wrapped__
    return make(program, skeleton, heads)


# Makers of programs that are made once; what they made is let go of by `forget_changed`.
REMEMBERED: list[Any] = []


def remembered(make: Callable[..., Any]) -> Any:
    """A maker of programs that makes each once, as long as the code of models stays what it is."""
    kept = functools.lru_cache(maxsize=512)(make)
    REMEMBERED.append(kept)
    return kept


# Of how many models it is known what their programs were when they were made.
KNOWN = 512
TEXTS: dict[Hashable, int | None] = {}


def forget_changed(prepared: "Prepared") -> None:
    """Let go of all programs if a model does otherwise than when its program was made.

    A class tells nothing of that: it stays the same where a function that it calls is defined anew, as in a notebook, or its
    module is loaded again. Costs one trace.
    """
    program, *given, arguments = prepared
    if not hashable(program):
        return
    arrays = jax.tree.leaves((*given, arguments.values, arguments.others))
    key = program, arguments.skeleton, tuple((a.shape, str(a.dtype)) for a in arrays)
    try:
        text, held = program_text(prepared)
        now = hash((text, tuple(held)))
    except Exception:
        # What it raises is told where it is run.
        now = None
    if TEXTS.pop(key, now) != now:
        for make in REMEMBERED:
            make.cache_clear()
    TEXTS[key] = now
    if len(TEXTS) > KNOWN:
        del TEXTS[next(iter(TEXTS))]


@remembered
def cached_functional(program: Program, skeleton: Frozen, heads: tuple[str, ...] | None) -> Callable[..., Any]:

    def forward(parameters: Any, rest: Any, values: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
        arrays = {**values, **others}
        args, kwargs = mapped(lambda _, leaf: arrays[leaf.path] if isinstance(leaf, Slot) else leaf, skeleton.tree)
        parts = containers(args, kwargs)
        found = dict(flatten(program.call(parameters, rest, args, kwargs), is_array))
        after = containers(args, kwargs)
        body.written = tuple(path for path, before in parts.items() if after.get(path) != before)  # type: ignore[attr-defined]
        # Numbers, strings and None cannot leave a traced function as results.
        body.statics = {path: leaf for path, leaf in found.items() if not is_array(leaf)}  # type: ignore[attr-defined]
        return {path: leaf for path, leaf in found.items() if is_array(leaf)}

    def body(parameters: Any, rest: Any, values: Any, others: Any, cotangents: dict[str, Any]) -> tuple[Any, Any]:
        if heads is None:
            return forward(parameters, rest, values, others), {}
        trainable, fixed = program.split(parameters)

        def scalar_heads(trainable: Any, values: Any) -> tuple[dict[str, Any], dict[str, Any]]:
            outputs = forward(program.join(trainable, fixed), rest, values, others)
            fitting = {p: outputs[p] for p in heads if p in outputs and outputs[p].shape == cotangents[p].shape}
            return fitting, outputs

        chosen, pull, outputs = jax.vjp(scalar_heads, trainable, values, has_aux=True)
        by_parameter, by_value = pull({path: cotangents[path].astype(head.dtype) for path, head in chosen.items()})
        gradients = {f"input {path}": gradient for path, gradient in by_value.items()}
        gradients |= {".".join(map(str, path)): gradient for path, gradient in by_parameter.items()}
        return outputs, gradients

    return body


Prepared = tuple[Program, Any, Any, Arguments]


def run(
    prepared: Prepared, cotangents: Mapping[str, np.ndarray] | None = None, *, compiled: bool = True, quick: bool = False
) -> Evaluation:
    """Run a program on its arrays; see `evaluate` of the rooms."""
    program, parameters, rest, arguments = prepared
    body = functional(program, arguments.skeleton, tuple(sorted(cotangents)) if cotangents is not None else None)
    go = compile_body(body, quick) if compiled else body
    given = {p: jnp.asarray(np.asarray(c)) for p, c in (cotangents or {}).items()}
    outputs, gradients = go(parameters, rest, arguments.values, arguments.others, given)
    plain = {path: np.array(value) if is_array(value) else value for path, value in outputs.items()}
    by_path = {path: np.array(g) for path, g in gradients.items()}
    return Evaluation({**getattr(body, "statics", {}), **plain}, by_path, getattr(body, "written", ()))


@functools.lru_cache(maxsize=1024)
def compile_body(body: Callable[..., Any], quick: bool) -> Callable[..., Any]:
    options = QUICK.get(platform()) if quick else None
    return jax.jit(body, compiler_options=options)


def program_text(prepared: Prepared) -> tuple[str, list[bytes]]:
    """A program as jax traces it anew, and the constants in it: what Python drew while tracing stands there."""
    program, *given, arguments = prepared
    body = functional(program, arguments.skeleton, None)
    # A function of its own each time, or jax would find the last trace again.
    traced = jax.make_jaxpr(lambda *args: body(*args))(  # noqa: PLW0108
        *given, arguments.values, arguments.others, {}
    )
    # What is returned beside arrays does not stand in the program.
    statics = {path: in_words(leaf) for path, leaf in getattr(body, "statics", {}).items()}
    return re.sub("0x[0-9a-f]+", "", f"{traced} {statics}"), [np.asarray(c).tobytes() for c in constants(traced)]


def constants(traced: Any) -> Iterator[Any]:
    """The arrays in a traced program, and in those inside of it."""
    yield from (c for c in getattr(traced, "consts", ()) if not jnp.issubdtype(jnp.asarray(c).dtype, jax.dtypes.prng_key))
    for equation in getattr(traced, "jaxpr", traced).eqns:
        for parameter in equation.params.values():
            for part in parameter if isinstance(parameter, tuple | list) else (parameter,):
                if hasattr(part, "eqns") or hasattr(part, "jaxpr"):
                    yield from constants(part)


def outcome(prepared: Prepared) -> str | tuple[tuple[int, ...], ...]:
    """What a program does with its arrays, without computing: the error, or the shapes of its outputs."""
    program, parameters, rest, arguments = prepared
    body = functional(program, arguments.skeleton, None)
    try:
        outputs, _ = jax.eval_shape(body, parameters, rest, arguments.values, arguments.others, {})
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
    return tuple(tuple(leaf.shape) for leaf in outputs.values())


def dtypes_of_outputs(prepared: Prepared) -> dict[str, str]:
    """The dtypes of a program's outputs by path; nothing is computed."""
    program, *given, arguments = prepared
    body = functional(program, arguments.skeleton, None)
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
    """Versions, devices and settings as they are now, for the report."""
    devices = ", ".join(sorted({f"{d.platform} ({d.device_kind})" for d in jax.devices()}))
    config = jax.config
    return {
        "jax": jax.__version__,
        "flax": flax.__version__,
        "jax devices": devices,
        "jax matmul precision, as set": str(config.jax_default_matmul_precision or "default"),
        "jax 64-bit types, as set": "on" if config.jax_enable_x64 else "off",
        "jax compilation": "off" if config.jax_disable_jit else "on",
        "jax random numbers": str(config.jax_default_prng_impl),
    }


def gpu_missing() -> str | None:
    """Why no GPU can be used, None if one can."""
    return None if jax.default_backend() == "gpu" else f"jax {jax.__version__} runs on {jax.default_backend()} only"
