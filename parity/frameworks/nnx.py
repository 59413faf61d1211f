"""Flax NNX in the words of this package: leaves, layers, writing, running, capturing."""

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import primitives

from parity.errors import InputError, first_line
from parity.evidence.calls import Call, Captured, Evaluation
from parity.evidence.trees import flatten, mapped
from parity.weights.leaf import Layer, Leaf, Role, Shared

NAME = "flax"

# Evidence in float64 does not depend on how well XLA optimises: compiling less is four times faster.
QUICK = {"cpu": {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}}


def is_model(value: Any) -> bool:
    return isinstance(value, nnx.Module)


def owns(value: Any) -> bool:
    """Whether `value` is a module or a state."""
    return is_model(value) or isinstance(value, nnx.State)


def is_array(value: Any) -> bool:
    return isinstance(value, jax.Array)


def unreadable(array: Any) -> str:
    """Why an array has no values that NumPy could hold, '' if it has."""
    if isinstance(array, jax.ShapeDtypeStruct):
        return "is abstract and holds no values; it can be a target of transfer, not a source"
    if isinstance(array, jax.core.Tracer):
        return "is being traced and holds no values; call outside jit, grad and vmap"
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return "is spread over several machines and cannot be read from one of them"
    if not isinstance(array, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
        return f"holds a {type(array).__name__}, not an array; leave it out with ignore"
    return ""


def to_numpy(array: Any) -> np.ndarray:
    """The array as NumPy, sharing its memory where that is on the host.

    Raises:
        InputError: the array has no values, or lies partly on another machine.
    """
    if unreadable(array):
        raise InputError(f"an array {unreadable(array)}")
    return np.asarray(array) if hasattr(array, "dtype") else np.asarray(array, dtype_name(array))


def dtype_name(array: Any) -> str:
    """The dtype's name; of a Python number that of the array that jax would make; of anything else its type's."""
    if isinstance(array, bool | int | float | complex):
        return str(jnp.result_type(array))
    return str(getattr(array, "dtype", type(array).__name__))


def walk(
    node: Any, path: tuple[str, ...] = (), torch_path: tuple[str, ...] = (), inside: tuple[int, ...] = ()
) -> Iterator[Any]:
    """Every module, container and variable below a node, each under every path that leads to it.

    Yields:
        The path, the path in torch's words, and the node itself.
    """
    if id(node) in inside:
        return
    yield path, torch_path, node
    if isinstance(node, nnx.Variable):
        return
    for name, child in parts(node):
        if isinstance(child, nnx.Pytree | nnx.Variable | Mapping | list | tuple):
            # torch.nn.Sequential numbers its parts itself; nnx.Sequential keeps them in `layers`.
            skip = isinstance(node, nnx.Sequential) and name == "layers"
            yield from walk(child, (*path, name), torch_path if skip else (*torch_path, name), (*inside, id(node)))


def parts(node: Any) -> list[tuple[str, Any]]:
    if isinstance(node, nnx.List | list | tuple):
        return [(str(index), child) for index, child in enumerate(node)]
    if isinstance(node, Mapping):
        return [(str(key), child) for key, child in node.items()]
    if isinstance(node, nnx.Pytree):
        return [(name, child) for name, child in vars(node).items() if not name.startswith("_pytree__")]
    return []


def kinds(module: Any) -> tuple[str, ...]:
    """Public names of a module's classes, nearest first."""
    names = []
    for cls in type(module).__mro__:
        builtin = cls.__module__.startswith("flax.nnx")
        names.append(f"flax.nnx.{cls.__name__}" if builtin else f"{cls.__module__}.{cls.__qualname__}")
    return tuple(names)


def role_of(variable: Any) -> Role:
    if isinstance(variable, nnx.RngState):
        return "random state"
    return "parameter" if isinstance(variable, nnx.Param) else "buffer"


def make_leaf(path: str, owner: str, name: str, names: tuple[str, ...], role: Role, identity: Hashable, array: Any) -> Leaf:
    shape, dtype, reason = tuple(getattr(array, "shape", ())), dtype_name(array), unreadable(array)
    if role == "random state":
        shape, dtype, reason = (), "key", ""

    def share(axes: tuple[int, ...]) -> Shared | np.ndarray:
        lendable = isinstance(array, jax.Array) and len(array.devices()) == 1
        return Shared(array, axes) if lendable else to_numpy(array).transpose(axes)

    return Leaf(path, owner, name, names, shape, dtype, role, identity, lambda: to_numpy(array), share, reason)


def leaves(value: Any) -> list[Leaf]:
    """Every variable, shared ones under each name, in the order of the attributes."""
    if not is_model(value):
        return [
            make_leaf(".".join(path), ".".join(path[:-1]), path[-1], (), role_of(leaf), id(leaf), content(leaf))
            for path, leaf in ((tuple(map(str, path)), leaf) for path, leaf in nnx.to_flat_state(value))
        ]
    found = []
    modules: dict[tuple[str, ...], Any] = {}
    for path, torch_path, node in walk(value):
        modules[path] = node
        if isinstance(node, nnx.Variable):
            owner = modules[path[:-1]]
            names = kinds(owner) if isinstance(owner, nnx.Module) else ()
            leaf = make_leaf(".".join(path), ".".join(torch_path[:-1]), path[-1], names, role_of(node), id(node), content(node))
            found.append(leaf)
    return found


def content(variable: Any) -> Any:
    return variable.get_value() if isinstance(variable, nnx.Variable) else variable


def layers(value: Any) -> list[Layer]:
    """Every module under its path in torch's words, the root as ''."""
    if not is_model(value):
        return []
    return [
        Layer(".".join(torch_path), kinds(node), setting_reader(node), ".".join(path))
        for path, torch_path, node in walk(value)
        if isinstance(node, nnx.Module)
    ]


def setting_reader(module: Any) -> Callable[[str], Any]:
    def read(name: str) -> Any:
        value = getattr(module, name, None)
        if name == "dtype" and value is not None:
            return str(jnp.dtype(value))
        return value

    return read


def fill(value: Any, arrays: Mapping[str, Any]) -> tuple[Any, set[str]]:
    """Write arrays into a module in place, or make a state of them.

    Args:
        value: the target.
        arrays: by path; NumPy arrays are copied, `Shared` ones keep their memory where jax can.

    Returns:
        The filled module or the new state, and the paths whose memory is shared.
    """
    if is_model(value):
        variables = {".".join(path): node for path, _, node in walk(value) if isinstance(node, nnx.Variable)}
    else:
        # The variables of a state are those of the module it was taken from: those stay as they are.
        copies: dict[int, Any] = {}
        flat = {
            keys: copies.setdefault(id(leaf), leaf.copy() if isinstance(leaf, nnx.Variable) else leaf)
            for keys, leaf in nnx.to_flat_state(value)
        }
        variables = {".".join(map(str, keys)): leaf for keys, leaf in flat.items()}
    new = copied_arrays({p: a for p, a in arrays.items() if not isinstance(a, Shared)}, variables)
    lent, done = shared_arrays({p: a for p, a in arrays.items() if isinstance(a, Shared)})
    new |= lent
    for path, variable in variables.items():
        if path in new and isinstance(variable, nnx.Variable):
            variable.set_value(new[path])
    seed_abstract(variables)
    if is_model(value):
        return value, done
    for keys, leaf in flat.items():
        flat[keys] = leaf if isinstance(leaf, nnx.Variable) else new.get(".".join(map(str, keys)), leaf)
    return nnx.from_flat_state(flat), done


def seed_abstract(variables: Mapping[str, Any]) -> None:
    """Give random state without values, as `nnx.eval_shape` leaves it, keys from seed 0: no source has any."""
    for index, variable in enumerate(variables.values()):
        state = content(variable)
        if isinstance(variable, nnx.RngState) and isinstance(state, jax.ShapeDtypeStruct):
            # Each its own, so that no two dropout layers draw the same mask.
            key = jax.random.fold_in(jax.random.key(0), index)
            seeded = jax.random.split(key, state.shape) if state.shape else key
            variable.set_value(seeded if isinstance(variable, nnx.RngKey) else jnp.zeros(state.shape, state.dtype))


def copied_arrays(arrays: Mapping[str, np.ndarray], targets: Mapping[str, Any]) -> dict[str, Any]:
    # device_put of an aligned, contiguous NumPy array keeps using its memory: those are copied
    # here. What is strided it must copy itself, and one call for all of them is the fastest.
    own = {
        path: np.array(a) if a.flags.c_contiguous or (a.flags.f_contiguous and a.ndim < 2) else a for path, a in arrays.items()
    }
    places = {path: place(content(targets[path])) for path in own}
    return jax.block_until_ready(jax.device_put(own, places))


def shared_arrays(arrays: Mapping[str, Shared]) -> tuple[dict[str, Any], set[str]]:
    new, done = {}, set()
    for path, shared in arrays.items():
        array = jax.dlpack.from_dlpack(shared.array)
        if shared.axes != tuple(range(len(shared.axes))):
            new[path] = jax.block_until_ready(jnp.transpose(array, shared.axes))
        elif array.unsafe_buffer_pointer() == pointer(shared.array):
            new[path] = array
            done.add(path)
        else:
            # jax copies on its own where it cannot use the memory as it lies.
            new[path] = jax.block_until_ready(jnp.array(array, copy=True))
    return new, done


def pointer(array: Any) -> int | None:
    if isinstance(array, jax.Array):
        return array.unsafe_buffer_pointer()
    return array.data_ptr() if hasattr(array, "data_ptr") else None


def place(target: Any) -> Any:
    """Where an existing array was put on purpose; None lets jax choose."""
    return target.sharding if isinstance(target, jax.Array) and target.committed else None


def refusals(value: Any, dtypes: Mapping[str, str]) -> list[str]:
    """Why a module or state cannot take arrays of these dtypes, by path; one sentence each."""
    wide = [path for path, dtype in dtypes.items() if dtype in ("float64", "int64", "uint64", "complex128")]
    if not wide or jax.config.jax_enable_x64:
        return []
    return [
        f"{', '.join(wide[:4])}{' and others' if len(wide) > 4 else ''} would be cut from "
        f"{dtypes[wide[0]]} to 32 bits, because jax runs without 64-bit types; "
        'call jax.config.update("jax_enable_x64", True) first, or pass cast="target"'
    ]


def problems_before_running(model: Any) -> list[str]:
    """Why a model cannot be compared as it stands: in train mode, or without values."""
    found = []
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
    return list(zip(leaves(model), nodes, strict=True))


def depends_on_mode(module: Any) -> bool:
    if getattr(module, "use_running_average", True) is False:
        return True
    rate = next((getattr(module, name) for name in ("rate", "dropout_rate") if hasattr(module, name)), 0)
    return getattr(module, "deterministic", True) is False and rate > 0


def model_dtype(model: Any) -> str | None:
    """The dtype of the floating point parameters, None if there are none."""
    floats = [leaf.dtype for leaf in leaves(model) if leaf.role == "parameter" and "float" in leaf.dtype]
    return floats[0] if floats else None


@contextlib.contextmanager
def pinned(double: bool = False) -> Iterator[dict[str, str]]:
    """Full float32 products; 64-bit types inside if asked for; all restored afterwards.

    Args:
        double: whether 64-bit types are on inside. They stay on where the caller has them on.

    Yields:
        What was pinned, for the report.
    """
    double = double or bool(jax.config.jax_enable_x64)
    filtering = jax.config.jax_traceback_filtering
    # Errors of the user's model are caught and told in one line; filtering their tracebacks costs 8 ms each.
    jax.config.update("jax_traceback_filtering", "off")
    try:
        with jax.default_matmul_precision("highest"), jax.enable_x64(double), jax.debug_nans(False):
            yield {"jax matmul precision": "highest", "jax 64-bit types": "on in float64 runs only"}
    finally:
        jax.config.update("jax_traceback_filtering", filtering)


def evaluate(
    model: Any,
    call: Call,
    *,
    dtype: str | None = None,
    weights: Mapping[str, np.ndarray] | None = None,
    cotangents: Mapping[str, np.ndarray] | None = None,
    compiled: bool = True,
    quick: bool = False,
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

    Returns:
        Outputs by path, and gradients by `input ...` and variable path.
    """
    with pinned(double=dtype == "float64"), widened(model, dtype):
        graphdef, parameters, rest, arguments = prepare(model, call, dtype, weights)
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
        narrow = jnp.asarray(np.where(array == 0, 0.0, np.where(np.isnan(array), np.nan, np.sign(array))).astype(np.float32))
    return narrow


def prepare(
    model: Any, call: Call, dtype: str | None, weights: Mapping[str, np.ndarray] | None
) -> tuple[Any, Any, Any, Arguments]:
    graphdef, parameters, rest = nnx.split(model, nnx.Param, ...)

    def renewed(path: tuple[Any, ...], leaf: Any) -> Any:
        given = None if weights is None else weights.get(".".join(map(str, path)))
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
    model = follow_dtype(nnx.merge(graphdef, parameters, rest))
    args, kwargs = mapped(lambda _, leaf: arrays[leaf.path] if isinstance(leaf, Slot) else leaf, skeleton.tree)
    return model(*args, **kwargs)


@functools.lru_cache(maxsize=1024)
def compile_body(body: Callable[..., Any], quick: bool) -> Callable[..., Any]:
    options = QUICK.get(platform()) if quick else None
    return jax.jit(body, compiler_options=options)


def capture(model: Any, call: Call, *, dtype: str | None = None) -> tuple[Evaluation, list[Captured]]:
    """Run a model once under jit and record every submodule's output, in the order in which they finish.

    What ran inside a loop of the compiler (a scanned cell) has no value outside of it and is left out.
    """
    with pinned(double=dtype == "float64"), widened(model, dtype):
        graphdef, parameters, rest, arguments = prepare(model, call, dtype, None)
        order: list[tuple[str, int, str, Any]] = []

        def body(parameters: Any, rest: Any, values: Any, others: Any) -> Any:
            order.clear()
            model = follow_dtype(nnx.merge(graphdef, parameters, rest))
            args, kwargs = mapped(
                lambda _, leaf: {**values, **others}[leaf.path] if isinstance(leaf, Slot) else leaf, arguments.skeleton.tree
            )
            with recording(model) as records:
                output = model(*args, **kwargs)
            arrays = []
            for path, call_number, values_ in records:
                for name, value in values_.items():
                    order.append((path, call_number, name, None if is_array(value) else value))
                    arrays.append(value if is_array(value) else None)
            return dict(flatten(output, is_array)), arrays

        quick = jax.jit(body, compiler_options=QUICK.get(platform()))
        run = quick if can_jit(body, parameters, rest, arguments) else body
        outputs, arrays = run(parameters, rest, arguments.values, arguments.others)
        captured: dict[tuple[str, int], dict[str, Any]] = {}
        for (path, number, name, static), array in zip(order, arrays, strict=True):
            captured.setdefault((path, number), {})[name] = static if array is None else np.array(array)
        plain = {path: np.array(v) if is_array(v) else v for path, v in outputs.items()}
    return Evaluation(plain), [Captured(path, number, values) for (path, number), values in captured.items()]


def can_jit(body: Callable[..., Any], parameters: Any, rest: Any, arguments: Arguments) -> bool:
    """Whether all that was recorded can leave the traced function; inside an inner jit or scan it cannot."""
    try:
        jax.eval_shape(body, parameters, rest, arguments.values, arguments.others)
    except jax.errors.UnexpectedTracerError:
        return False
    except TypeError:
        # A result that is no array, such as a string, cannot leave a traced function.
        return False
    return True


@contextlib.contextmanager
def recording(model: Any) -> Iterator[list[tuple[str, int, dict[str, Any]]]]:
    """Record what every module below `model` returns, by replacing `__call__` on their classes meanwhile."""
    records: list[tuple[str, int, dict[str, Any]]] = []
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
            records.append((path, counts[path] - 1, dict(flatten(output, is_array))))
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
        graphdef, parameters, rest, arguments = prepare(model, call, dtype, None)
        body = functional(graphdef, arguments.skeleton, None)
        outputs, _ = jax.eval_shape(body, parameters, rest, arguments.values, arguments.others, {})
        return {path: str(leaf.dtype) for path, leaf in outputs.items()}


def follow_dtype(model: Any) -> Any:
    """Let the embeddings of a merged copy compute in the dtype of their tables.

    `nnx.Embed` writes down the dtype of its table when it is made, also if the caller named none.
    """
    for _, _, node in walk(model):
        if isinstance(node, nnx.Embed):
            node.dtype = content(node.embedding).dtype
    return model


class Widening(threading.local):
    """The dtypes to which this thread's float64 run must not be cut; empty outside of such a run."""

    kept_from: tuple[Any, ...] = ()


WIDENING = Widening()
# How many threads are inside; jax is left as it was found when the last one leaves.
INSIDE: list[None] = []
LOCK = threading.Lock()
# Operations by which a model asks for a dtype, and the name of the parameter that says which.
CASTS = {
    primitives.convert_element_type_p: "new_dtype",
    primitives.dot_general_p: "preferred_element_type",
    primitives.conv_general_dilated_p: "preferred_element_type",
}


@contextlib.contextmanager
def widened(model: Any, dtype: str | None) -> Iterator[None]:
    """Leave out casts that would cut a float64 run to the dtype in which the model is deployed, or a wider one.

    Where the model is deployed such a cast does nothing: `jax.nn.dot_product_attention` computes
    its softmax in float32 whatever it is given. A cast to a narrower dtype rounds there too, and stays.
    """
    deployed = model_dtype(model) or "float32"
    if dtype != "float64" or deployed == "float64":
        yield
        return
    with LOCK:
        INSIDE.append(None)
        for primitive, name in CASTS.items() if len(INSIDE) == 1 else ():
            primitive.bind = widening_bind(primitive.bind, name)
    before, WIDENING.kept_from = WIDENING.kept_from, (jnp.dtype(deployed), jnp.dtype("float32"))
    try:
        # Functions that jax traced before under another setting are not found again, nor these by others:
        # "float32" means what "highest" means, but is kept apart.
        with jax.default_matmul_precision("float32"):
            yield
    finally:
        WIDENING.kept_from = before
        with LOCK:
            INSIDE.pop()
            for primitive in CASTS if not INSIDE else ():
                # The method of the class shows again.
                del primitive.bind


def widening_bind(bind: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(bind)
    def bound(*operands: Any, **parameters: Any) -> Any:
        wide = any(getattr(operand, "dtype", None) == np.float64 for operand in operands)
        if WIDENING.kept_from and wide and parameters.get(name) in WIDENING.kept_from:
            parameters[name] = np.dtype(np.float64)
        return bind(*operands, **parameters)

    return bound


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
