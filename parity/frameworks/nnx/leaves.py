"""NNX models and states as leaves and layers, and how they are written."""

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.training.metrics import MetricState

from parity.errors import InputError
from parity.frameworks.jax.arrays import unreadable
from parity.weights.leaf import Layer, Leaf, Role, Shared
from parity.weights.mirrors import argument
from parity.weights.side_by_side import THREADS, batches, side_by_side

NAME = "flax"

# What may hold variables, and what most attributes of a layer are instead: to ask flax whether a number is a
# variable takes longer than all the rest of a walk.
ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
LEAVES = (nnx.Variable, *ARRAYS)
LISTS = (nnx.List, list, tuple)
NODES = (nnx.Pytree, dict, list, tuple, Mapping, *LEAVES)
NUMBERS = frozenset({bool, int, float, str})
PLAIN = frozenset({type(None), FunctionType, *NUMBERS})


def is_model(value: Any) -> bool:
    return isinstance(value, nnx.Module)


def owns(value: Any) -> bool:
    """Whether `value` is a module or a state."""
    return is_model(value) or isinstance(value, nnx.State)


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
    return named(array.dtype) if hasattr(array, "dtype") else type(array).__name__


@functools.lru_cache(maxsize=256)
def named(dtype: Any) -> str:
    return str(dtype)


def walk(node: Any) -> Iterator[tuple[tuple[str, ...], tuple[str, ...], Any]]:
    """Every module, container, variable and plain array below a node, each under every path that leads to it.

    Yields:
        The path, the path in torch's words, and the node itself.
    """
    waiting: list[tuple[tuple[str, ...], tuple[str, ...], Any, frozenset[int]]] = [((), (), node, frozenset())]
    while waiting:
        path, torch_path, node, above = waiting.pop()
        if id(node) in above:
            continue
        yield path, torch_path, node
        if is_kind(type(node), LEAVES):  # type: ignore[arg-type]
            continue
        left_out = left_out_by_torch(node)
        above |= {id(node)}
        waiting += [
            ((*path, name), torch_path if name == left_out else (*torch_path, name), child, above)
            for name, child in reversed(parts(node))
            if type(child) not in PLAIN and is_kind(type(child), NODES)  # type: ignore[arg-type]
        ]


@functools.lru_cache(maxsize=1024)
def is_kind(kind: Any, kinds: tuple[type, ...]) -> bool:
    """`isinstance`, once for each class: Flax's own, which looks for traced variables too, takes longer than all else here."""
    return issubclass(kind, (*kinds, jax.core.Tracer))


def left_out_by_torch(node: Any) -> str | None:
    """The part of a module of which torch's paths know nothing."""
    if isinstance(node, nnx.Sequential):
        # torch.nn.Sequential numbers its parts itself; nnx.Sequential keeps them in `layers`.
        return "layers"
    # torch keeps norm and direction in the layer itself.
    return "layer_instance" if isinstance(node, nnx.WeightNorm) else None


def parts(node: Any) -> list[tuple[str, Any]]:
    if isinstance(node, LISTS):
        return [(str(index), child) for index, child in enumerate(node)]
    if isinstance(node, Mapping):
        return [(key_name(key), child) for key, child in node.items()]
    if isinstance(node, nnx.Pytree):
        return [(name, child) for name, child in vars(node).items() if not name.startswith("_pytree__")]
    return []


def key_name(key: Any) -> str:
    """The key of a dict as part of a path; wrappers of Flax use the path of a variable as one."""
    return ".".join(map(str, key)) if isinstance(key, tuple) else str(key)


def kinds(module: Any) -> tuple[str, ...]:
    """Public names of a module's classes, nearest first."""
    kind: Any = type(module)
    return names_of(kind)


@functools.lru_cache(maxsize=256)
def names_of(kind: Any) -> tuple[str, ...]:
    names = []
    for cls in kind.__mro__:
        builtin = cls.__module__.startswith("flax.nnx")
        names.append(f"flax.nnx.{cls.__name__}" if builtin else f"{cls.__module__}.{cls.__qualname__}")
    return tuple(names)


def role_of(variable: Any) -> Role:
    if isinstance(variable, nnx.RngState) or jnp.issubdtype(getattr(variable, "dtype", np.void), jax.dtypes.prng_key):
        return "random state"
    if isinstance(variable, nnx.Intermediate | nnx.Perturbation | MetricState):
        return "run state"
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
            for path, leaf in ((tuple(map(key_name, path)), leaf) for path, leaf in nnx.to_flat_state(value))
        ]
    found = []
    modules: dict[tuple[str, ...], Any] = {}
    for path, torch_path, node in walk(value):
        modules[path] = node
        if is_kind(type(node), LEAVES[:1]) and isinstance(node, nnx.Variable):  # type: ignore[arg-type]
            owner = modules[path[:-1]]
            names = kinds(owner) if isinstance(owner, nnx.Module) else ()
            leaf = make_leaf(".".join(path), ".".join(torch_path[:-1]), path[-1], names, role_of(node), id(node), content(node))
            found.append(leaf)
        elif isinstance(node, ARRAYS):
            found.append(plain_leaf(path, torch_path, modules[path[:-1]], node))
    return found


def plain_leaf(path: tuple[str, ...], torch_path: tuple[str, ...], holder: Any, array: Any) -> Leaf:
    """An array that a module holds by itself, without an `nnx.Variable` around it."""
    names = kinds(holder) if isinstance(holder, nnx.Module) else ()
    identity = (id(holder), path[-1])
    made = make_leaf(".".join(path), ".".join(torch_path[:-1]), path[-1], names, role_of(array), identity, array)
    # A constant that the model computed; one without values, as `nnx.eval_shape` leaves it, has to get some.
    return replace(made, loose=not isinstance(array, jax.ShapeDtypeStruct))


def content(variable: Any) -> Any:
    return variable.get_value() if isinstance(variable, nnx.Variable) else variable


def layers(value: Any) -> list[Layer]:
    """Every module under its path in torch's words, the root as '', and functions of jax that modules hold."""
    if not is_model(value):
        return []
    found = []
    for path, torch_path, node in walk(value):
        if isinstance(node, nnx.Module):
            found.append(Layer(".".join(torch_path), kinds(node), setting_reader(node), ".".join(path)))
        for name, child in () if is_kind(type(node), LEAVES) else parts(node):  # type: ignore[arg-type]
            if function := function_kind(child):
                # In an nnx.Sequential a function has a number as a module has.
                places = (*torch_path, name), (*path, name)
                found.append(Layer(".".join(places[0]), (function,), argument_reader(child), ".".join(places[1])))
    return found


def function_kind(value: Any) -> str:
    """The public name of a function of jax that stands for a layer of torch, '' of anything else."""
    if value is None or type(value) in NUMBERS:
        return ""
    function = value.func if isinstance(value, functools.partial) else value
    if isinstance(function, type | nnx.Module) or not callable(function):
        return ""
    home, name = str(getattr(function, "__module__", "")), getattr(function, "__name__", "")
    public = home.replace("jax._src.", "jax.")
    return next((f"{room}.{name}" for room in ("jax.nn", "jax.numpy") if f"{public}.".startswith(f"{room}.")), "")


def argument_reader(function: Any) -> Callable[[str], Any]:
    return lambda name: argument(function, name)


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
        variables = {".".join(path): node for path, _, node in walk(value) if is_kind(type(node), LEAVES)}  # type: ignore[arg-type]
    else:
        # The variables of a state are those of the module it was taken from: those stay as they are.
        copies: dict[int, Any] = {}
        flat = {
            keys: copies.setdefault(id(leaf), leaf.copy() if isinstance(leaf, nnx.Variable) else leaf)
            for keys, leaf in nnx.to_flat_state(value)
        }
        variables = {".".join(map(key_name, keys)): leaf for keys, leaf in flat.items()}
    new, done = received(arrays, {path: place(content(variables[path])) for path in arrays})
    for path, variable in variables.items():
        if path in new and isinstance(variable, nnx.Variable):
            variable.set_value(new[path])
    seed_abstract(variables)
    if is_model(value):
        if any(not isinstance(variables[path], nnx.Variable) for path in new):
            set_plain(value, new)
        return value, done
    for keys, leaf in flat.items():
        flat[keys] = leaf if isinstance(leaf, nnx.Variable) else new.get(".".join(map(key_name, keys)), leaf)
    return nnx.from_flat_state(flat), done


def received(arrays: Mapping[str, Any], places: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Arrays of jax's own by path, each where it belongs, and the paths whose memory is shared."""
    new, done = dict[str, Any](), set[str]()

    def send(batch: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], set[str]]:
        copies = copied_arrays({path: array for path, array in batch.items() if not isinstance(array, Shared)}, places)
        return copies, *shared_arrays({path: array for path, array in batch.items() if isinstance(array, Shared)})

    for copied, lent, shared in side_by_side(send, batches(arrays.items()), THREADS if same_in_threads() else 1):
        new |= copied | lent
        done |= shared
    return new, done


def set_plain(value: Any, new: Mapping[str, Any]) -> None:
    """Put new arrays in the place of plain ones, which cannot be written into."""
    holders: dict[tuple[str, ...], Any] = {}
    for path, _, node in list(walk(value)):
        holders[path] = node
        if isinstance(node, ARRAYS) and ".".join(path) in new:
            holder, name, array = holders[path[:-1]], path[-1], new[".".join(path)]
            if isinstance(holder, list | nnx.List):
                holder[int(name)] = array
            elif isinstance(holder, Mapping):
                holder[next(key for key in holder if key_name(key) == name)] = array  # type: ignore[index]
            else:
                setattr(holder, name, array)


def same_in_threads() -> bool:
    """Whether jax does in a new thread what it does here: a `with jax.enable_x64()` holds for one thread alone."""

    def settings() -> Any:
        return {name: getattr(jax.config, name, None) for name in jax.config.values}, jax.sharding.get_abstract_mesh()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(settings).result() == settings()


def seed_abstract(variables: Mapping[str, Any]) -> None:
    """Give random state without values, as `nnx.eval_shape` leaves it, keys from seed 0: no source has any."""
    for index, variable in enumerate(variables.values()):
        if isinstance(variable, nnx.RngState) and isinstance(state := content(variable), jax.ShapeDtypeStruct):
            # Each its own, so that no two dropout layers draw the same mask.
            key = jax.random.fold_in(jax.random.key(0), index)
            seeded = jax.random.split(key, state.shape) if state.shape else key
            variable.set_value(seeded if isinstance(variable, nnx.RngKey) else jnp.zeros(state.shape, state.dtype))


def copied_arrays(arrays: Mapping[str, np.ndarray], places: Mapping[str, Any]) -> dict[str, Any]:
    # device_put of an aligned, contiguous NumPy array keeps using its memory: those are copied
    # here. What is strided it must copy itself, faster than NumPy could.
    own = {path: own_copy(array) if array.flags.c_contiguous else array for path, array in arrays.items()}
    return jax.block_until_ready(jax.device_put(own, {path: places[path] for path in own}))


# Where jax on the CPU takes memory as it lies.
ALIGNMENT = 64


def own_copy(array: np.ndarray) -> np.ndarray:
    """A contiguous copy that jax need not copy once more, in memory that no one else has."""
    memory = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    copy = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


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
    """Where an existing array was put on purpose, or an abstract one is to be; None lets jax choose."""
    if isinstance(target, jax.ShapeDtypeStruct):
        return target.sharding
    return target.sharding if isinstance(target, jax.Array) and target.committed else None


def refusals(value: Any, dtypes: Mapping[str, str]) -> list[str]:
    """Why a module or state cannot take arrays of these dtypes, by path; one sentence each."""
    return immutable(value, dtypes) + wide_refusals(dtypes)


def wide_refusals(dtypes: Mapping[str, str]) -> list[str]:
    """Why jax as it runs cannot hold arrays of these dtypes, by path; one sentence each."""
    wide = [path for path, dtype in dtypes.items() if dtype in ("float64", "int64", "uint64", "complex128")]
    if not wide or jax.config.jax_enable_x64:
        return []
    return [
        f"{', '.join(wide[:4])}{' and others' if len(wide) > 4 else ''} would be cut from "
        f"{dtypes[wide[0]]} to 32 bits, because jax runs without 64-bit types; "
        'call jax.config.update("jax_enable_x64", True) first, or pass cast="target"',
    ]


def immutable(value: Any, paths: Iterable[str]) -> list[str]:
    """Plain arrays that cannot be replaced where they stand; one sentence each."""
    numbered = [path for path in paths if path.rpartition(".")[2].isdigit()]
    nodes = {".".join(path): node for path, _, node in walk(value)} if numbered and is_model(value) else {}
    return [
        f"{path} of the target stands in a tuple, which nothing can be put into; keep it in an nnx.List"
        for path in numbered
        if isinstance(nodes.get(path.rpartition(".")[0]), tuple)
    ]


def model_dtype(model: Any) -> str | None:
    """The dtype of the floating point parameters, None if there are none."""
    return model_dtype_of(leaves(model))


def model_dtype_of(found: list[Leaf]) -> str | None:
    floats = [leaf.dtype for leaf in found if leaf.role == "parameter" and "float" in leaf.dtype]
    return floats[0] if floats else None
