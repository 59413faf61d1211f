"""NNX models and states as leaves and layers, and how they are written."""

import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.training.metrics import MetricState

from parity.errors import InputError
from parity.frameworks.classes import asked_once
from parity.frameworks.jax.arrays import unreadable
from parity.weights.leaf import Layer, Leaf, Role, Shared
from parity.weights.mirrors import argument
from parity.weights.side_by_side import batches, side_by_side

NAME = "flax"

# What may hold variables.
ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
LEAVES = (nnx.Variable, *ARRAYS)
LISTS = (nnx.List, list, tuple)
NODES = (nnx.Pytree, *LISTS, Mapping, *LEAVES)


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


@functools.lru_cache(maxsize=256)
def is_key(dtype: Any) -> bool:
    """Whether arrays of a dtype are random keys."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def walk(node: Any) -> Iterator[tuple[tuple[str, ...], tuple[str, ...], Any]]:
    """Every module, container, variable and plain array below a node, each under every path that leads to it.

    Yields:
        The path, the path in torch's words, and the node itself.
    """
    return ((path, torch_path, node) for path, torch_path, node, _ in walk_with_parts(node))


def walk_with_parts(node: Any) -> Iterator[tuple[tuple[str, ...], tuple[str, ...], Any, list[tuple[str, Any]]]]:
    """`walk`, with the parts of each node behind it; variables and arrays have none."""
    waiting: list[tuple[tuple[str, ...], tuple[str, ...], Any, frozenset[int]]] = [((), (), node, frozenset())]
    while waiting:
        path, torch_path, node, above = waiting.pop()
        if is_leaf(type(node)):
            yield path, torch_path, node, []
            continue
        if id(node) in above:
            continue
        inside = parts(node)
        yield path, torch_path, node, inside
        left_out = left_out_by_torch(type(node))
        above |= {id(node)}
        for name, child in reversed(inside):
            if is_node(type(child)):
                waiting.append(((*path, name), torch_path if name == left_out else (*torch_path, name), child, above))


# What follows is asked once for each class, not for each attribute of each layer: Flax's own `isinstance`, which looks
# for traced variables too, takes longer than all else here. A tracer may be one, so that each is asked itself.


@asked_once
def is_node(kind: Any) -> bool:
    return issubclass(kind, (*NODES, jax.core.Tracer))


@asked_once
def is_leaf(kind: Any) -> bool:
    return issubclass(kind, (*LEAVES, jax.core.Tracer))


@asked_once
def is_array(kind: Any) -> bool:
    return issubclass(kind, ARRAYS)


@asked_once
def left_out_by_torch(kind: Any) -> str | None:
    """The part of a module of a class of which torch's paths know nothing."""
    if issubclass(kind, nnx.Sequential):
        # torch.nn.Sequential numbers its parts itself; nnx.Sequential keeps them in `layers`.
        return "layers"
    # torch keeps norm and direction in the layer itself.
    return "layer_instance" if issubclass(kind, nnx.WeightNorm) else None


def parts(node: Any) -> list[tuple[str, Any]]:
    return parts_of(type(node))(node)


@asked_once
def parts_of(kind: Any) -> Callable[[Any], list[tuple[str, Any]]]:
    """What lists the parts of the instances of a class."""
    if issubclass(kind, LISTS):
        return lambda node: [(str(index), child) for index, child in enumerate(node)]
    if issubclass(kind, Mapping):
        return lambda node: [(key_name(key), child) for key, child in node.items()]
    if issubclass(kind, nnx.Pytree):
        return lambda node: [item for item in vars(node).items() if item[0][:9] != "_pytree__"]
    return lambda node: []


def key_name(key: Any) -> str:
    """The key of a dict as part of a path; wrappers of Flax use the path of a variable as one."""
    return ".".join(map(str, key)) if isinstance(key, tuple) else str(key)


def kinds(module: Any) -> tuple[str, ...]:
    """Public names of a module's classes, nearest first."""
    return names_of(type(module))


@asked_once
def names_of(kind: Any) -> tuple[str, ...]:
    names = []
    for cls in kind.__mro__:
        builtin = cls.__module__.startswith("flax.nnx")
        names.append(f"flax.nnx.{cls.__name__}" if builtin else f"{cls.__module__}.{cls.__qualname__}")
    return tuple(names)


ROLES: tuple[tuple[tuple[type, ...], Role], ...] = (
    ((nnx.RngState,), "random state"),
    ((nnx.Intermediate, nnx.Perturbation, MetricState), "run state"),
    ((nnx.Param,), "parameter"),
)


def role_of(variable: Any) -> Role:
    if is_key(getattr(variable, "dtype", np.void)):
        return "random state"
    if not isinstance(variable, jax.core.Tracer):
        return role_of_class(type(variable))
    return next((role for kinds, role in ROLES if isinstance(variable, kinds)), "buffer")


@asked_once
def role_of_class(kind: Any) -> Role:
    return next((role for kinds, role in ROLES if issubclass(kind, kinds)), "buffer")


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
        if not is_leaf(type(node)):
            continue
        if not is_array(type(node)) and isinstance(node, nnx.Variable):
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
    """What a variable holds, as it gives it out itself; anything else is its own content."""
    if not isinstance(variable, nnx.Variable):
        return variable
    return variable.get_raw_value() if is_plain(variable, "get_value") else variable.get_value()


def put(variable: Any, array: Any) -> None:
    """Give a variable an array."""
    if is_plain(variable, "set_value"):
        variable.set_raw_value(array)
    else:
        variable.set_value(array)


def is_plain(variable: Any, method: str) -> bool:
    """Whether a method of a variable does no more than its raw form: of most models, where that takes a tenth of the time.

    The methods also follow references, copy trees of several arrays, and call what the user hung on them.
    """
    return (
        inherits(type(variable), method)
        and is_array(type(variable.get_raw_value()))
        and not variable.has_metadata(f"on_{method}")
    )


@asked_once
def inherits(kind: Any, method: str) -> bool:
    """Whether a class of variables leaves a method as Flax has it."""
    return getattr(kind, method) is getattr(nnx.Variable, method)


def layers(value: Any) -> list[Layer]:
    """Every module under its path in torch's words, the root as '', and functions of jax that modules hold."""
    if not is_model(value):
        return []
    found = []
    for path, torch_path, node, inside in walk_with_parts(value):
        if isinstance(node, nnx.Module):
            words, own, named = ".".join(torch_path), ".".join(path), setting_names(node)
            found.append(Layer(words, kinds(node), setting_reader(node), own, named=named, identity=id(node)))
        for name, child in inside:
            if may_be_function(type(child)) and (function := function_kind(child)):
                # In an nnx.Sequential a function has a number as a module has.
                places = (*torch_path, name), (*path, name)
                words, own = (".".join(place) for place in places)
                found.append(Layer(words, (function,), argument_reader(child), own, named=argument_names(child)))
    return found


def function_kind(value: Any) -> str:
    """The public name of a function of jax that stands for a layer of torch, '' of anything else."""
    function = value.func if isinstance(value, functools.partial) else value
    if isinstance(function, type | nnx.Module) or not callable(function):
        return ""
    room = public_room(str(getattr(function, "__module__", "")))
    return f"{room}.{getattr(function, '__name__', '')}" if room else ""


@asked_once
def may_be_function(kind: Any) -> bool:
    """Whether an attribute of a class may be a function of jax: most are numbers, variables and modules."""
    return not is_node(kind) and not issubclass(kind, (type, int, float, str, type(None)))


@functools.lru_cache(maxsize=1024)
def public_room(module: str) -> str:
    """The public module of jax that functions of a module of Python's are found in, '' if none of layers."""
    public = f"{module}.".replace("jax._src.", "jax.")
    return next((room for room in ("jax.nn", "jax.numpy") if public.startswith(f"{room}.")), "")


def argument_reader(function: Any) -> Callable[[str], Any]:
    return lambda name: argument(function, name)


def argument_names(function: Any) -> Callable[[], list[str]]:
    """Lists what a function takes."""
    inner = function.func if isinstance(function, functools.partial) else function

    def names() -> list[str]:
        try:
            return list(inspect.signature(inner).parameters)
        except (TypeError, ValueError):
            return []

    return names


def setting_names(module: Any) -> Callable[[], list[str]]:
    """Lists what a module has as attributes, its own and those of its class."""
    return lambda: [name for name in dir(module) if not name.startswith("_")]


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
        variables = {".".join(path): node for path, _, node in walk(value) if is_leaf(type(node))}
    else:
        # The variables of a state are those of the module it was taken from: those stay as they are.
        copies: dict[int, Any] = {}
        flat = {
            keys: copies.setdefault(id(leaf), leaf.copy() if isinstance(leaf, nnx.Variable) else leaf)
            for keys, leaf in nnx.to_flat_state(value)
        }
        variables = {".".join(map(key_name, keys)): leaf for keys, leaf in flat.items()}
    new, done = received(arrays, lambda path: place(content(variables[path])))
    for path, variable in variables.items():
        if path in new and isinstance(variable, nnx.Variable):
            put(variable, new[path])
    seed_abstract(variables)
    if is_model(value):
        if any(not isinstance(variables[path], nnx.Variable) for path in new):
            set_plain(value, new)
        return value, done
    for keys, leaf in flat.items():
        flat[keys] = leaf if isinstance(leaf, nnx.Variable) else new.get(".".join(map(key_name, keys)), leaf)
    return nnx.from_flat_state(flat), done


def received(arrays: Mapping[str, Any], place_of: Callable[[str], Any]) -> tuple[dict[str, Any], set[str]]:
    """Arrays of jax's own by path, each where it belongs, and the paths whose memory is shared."""
    new, done = dict[str, Any](), set[str]()

    def to_copy() -> Iterator[tuple[str, Any]]:
        # What is lent takes no time that a thread could save.
        for path, array in arrays.items():
            if not isinstance(array, Shared):
                yield path, array
            elif lend(array, path, new):
                done.add(path)
            # A name that lasts until the next one is read would keep one more in memory.
            del array

    for copied in side_by_side(lambda batch: copied_arrays(batch, place_of), batches(to_copy()), same_in_threads):
        new |= copied
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


def copied_arrays(arrays: Mapping[str, np.ndarray], place_of: Callable[[str], Any]) -> dict[str, Any]:
    # device_put of an aligned, contiguous NumPy array keeps using its memory: those are copied
    # here. What is strided it must copy itself, faster than NumPy could.
    own = {path: own_copy(array) if array.flags.c_contiguous else array for path, array in arrays.items()}
    return jax.block_until_ready(jax.device_put(own, {path: place_of(path) for path in own}))


# Where jax on the CPU takes memory as it lies.
ALIGNMENT = 64


def own_copy(array: np.ndarray) -> np.ndarray:
    """A contiguous copy that jax need not copy once more, in memory that no one else has."""
    memory = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    copy = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def lend(shared: Shared, path: str, new: dict[str, Any]) -> bool:
    """Put an array that was lent under its path, and say whether it uses that memory still."""
    array = jax.dlpack.from_dlpack(shared.array)
    if shared.axes != tuple(range(len(shared.axes))):
        new[path] = jax.block_until_ready(jnp.transpose(array, shared.axes))
    elif array.unsafe_buffer_pointer() == pointer(shared.array):
        new[path] = array
        return True
    else:
        # jax copies on its own where it cannot use the memory as it lies.
        new[path] = jax.block_until_ready(jnp.array(array, copy=True))
    return False


def pointer(array: Any) -> int | None:
    if hasattr(array, "data_ptr"):
        return array.data_ptr()
    return array.unsafe_buffer_pointer() if isinstance(array, jax.Array) else None


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
