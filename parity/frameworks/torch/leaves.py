"""PyTorch models and state_dicts as leaves and layers, and how they are written."""

import functools
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from parity.errors import InputError
from parity.frameworks.classes import asked_once
from parity.weights.leaf import Layer, Leaf, Role, Shared
from parity.weights.paths import split
from parity.weights.side_by_side import batches, side_by_side

NAME = "torch"

Result = TypeVar("Result")

# NumPy has no such dtypes: their bits travel as integers of the same width.
BITS = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
    torch.float8_e4m3fnuz: (torch.uint8, ml_dtypes.float8_e4m3fnuz),
    torch.float8_e5m2fnuz: (torch.uint8, ml_dtypes.float8_e5m2fnuz),
    torch.float8_e8m0fnu: (torch.uint8, ml_dtypes.float8_e8m0fnu),
}


def is_model(value: Any) -> bool:
    return isinstance(value, nn.Module)


def owns(value: Any) -> bool:
    """Whether `value` is a module, or a state_dict: a flat mapping from names to tensors."""
    if is_model(value):
        return True
    flat = isinstance(value, Mapping) and len(value) > 0
    return flat and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in value.items())


def is_array(value: Any) -> bool:
    return isinstance(value, Tensor)


def dtype_name(tensor: Tensor) -> str:
    return named(tensor.dtype)


@functools.lru_cache(maxsize=256)
def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def unreadable(tensor: Tensor) -> str:
    """Why a tensor has no values that NumPy could hold, '' if it has."""
    if tensor.is_meta:
        return "is on the meta device and holds no values; load or initialise the model first"
    if tensor.layout != torch.strided or tensor.is_quantized:
        return f"is not dense, it has layout {tensor.layout} and dtype {dtype_name(tensor)}; use .to_dense() or .dequantize()"
    return ""


def to_numpy(tensor: Tensor) -> np.ndarray:
    """The tensor as NumPy, sharing its memory where that is on the host.

    Raises:
        InputError: the tensor holds no values, or is sparse or quantised.
    """
    if unreadable(tensor):
        raise InputError(f"a tensor {unreadable(tensor)}")
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if tensor.dtype in BITS:
        bits, dtype = BITS[tensor.dtype]
        return tensor.view(bits).numpy().view(dtype)
    return tensor.numpy()


def from_numpy(array: np.ndarray) -> Tensor:
    """The array as a tensor that shares its memory; never write into it."""
    # Positive strides are all that torch knows, and at least one axis order.
    array = np.asarray(array) if all(s >= 0 for s in array.strides) else array.copy()
    with warnings.catch_warnings():
        # torch warns that a read-only array could be written through the tensor.
        warnings.simplefilter("ignore", UserWarning)
        for torch_dtype, (bits, dtype) in BITS.items():
            if array.dtype == dtype:
                carrier = np.dtype(str(bits).removeprefix("torch."))
                return torch.from_numpy(array.view(carrier)).view(torch_dtype)
        return torch.from_numpy(array)


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def kinds(module: nn.Module) -> tuple[str, ...]:
    """Public names of a module's classes, nearest first."""
    return names_of(type(module))


@asked_once
def names_of(kind: Any) -> tuple[str, ...]:
    names = []
    for cls in kind.__mro__:
        builtin = cls.__module__.startswith("torch.nn.modules")
        names.append(f"torch.nn.{cls.__name__}" if builtin else f"{cls.__module__}.{cls.__qualname__}")
    return tuple(names)


def make_leaf(path: str, tensor: Tensor, names: tuple[str, ...], role: Role) -> Leaf:
    owner, name = split(path)

    def share(axes: tuple[int, ...]) -> Shared | np.ndarray:
        if not dense(tensor) or tensor.is_conj() or tensor.is_neg():
            return to_numpy(tensor).transpose(axes)
        # jax cannot permute without a copy, but it takes the strides of a permuted array as they come.
        kept = tuple(range(tensor.ndim))
        permuted = tensor.detach() if axes == kept else tensor.detach().permute(axes)
        return Shared(Lent(permuted) if tensor.is_cpu and not tensor.is_pinned() else permuted, kept)

    def read() -> np.ndarray:
        return to_numpy(tensor)

    dtype, reason = dtype_name(tensor), unreadable(tensor)
    return Leaf(path, owner, name, names, tuple(tensor.shape), dtype, role, identity_of(tensor), read, share, reason)


class Lent:
    """A dense tensor in plain memory of the host, for `from_dlpack`: to say so takes torch itself as long as all the rest."""

    def __init__(self, tensor: Tensor):
        self.tensor, self.data_ptr = tensor, tensor.data_ptr

    def __dlpack_device__(self) -> tuple[int, int]:
        return torch.utils.dlpack.DLDeviceType.kDLCPU, 0

    def __dlpack__(self, *, stream: None = None) -> Any:
        return torch.utils.dlpack.to_dlpack(self.tensor)  # type: ignore[attr-defined]


def dense(tensor: Tensor) -> bool:
    """Whether the elements lie without gaps or overlaps, in whatever order of the axes: others cannot be lent to jax."""
    if tensor.is_contiguous():
        return True
    strides = tensor.stride()
    return tensor.permute(sorted(range(tensor.ndim), key=lambda axis: -strides[axis])).is_contiguous()


def identity_of(tensor: Tensor) -> Hashable:
    """Equal for two tensors exactly if they are the same elements of one memory."""
    memory = tensor.untyped_storage().data_ptr() if not unreadable(tensor) else 0
    return (memory, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()) if memory else id(tensor)


def leaves(value: Any) -> list[Leaf]:
    """Parameters and persistent buffers in the order of the state_dict, tied ones under each name.

    Raises:
        InputError: a lazy module has not seen an input yet.
    """
    if not is_model(value):
        return [make_leaf(path, tensor, (), "parameter") for path, tensor in value.items()]
    modules = dict(value.named_modules(remove_duplicate=False))
    state = value.state_dict(keep_vars=True)
    lazy = [path for path, tensor in state.items() if is_lazy(tensor)]
    if lazy:
        raise InputError(f"{', '.join(lazy)} of a lazy module has no shape yet; run the model once on an example first")
    found = []
    for path, tensor in state.items():
        if isinstance(tensor, Tensor):
            owner, name = split(path)
            module = modules.get(owner)
            role: Role = "parameter" if module is not None and name in module._parameters else "buffer"
            found.append(make_leaf(path, tensor, kinds(module) if module is not None else (), role))
    return found


def layers(value: Any) -> list[Layer]:
    """Every module under its path, the root as ''."""
    if not is_model(value):
        return []
    modules = value.named_modules(remove_duplicate=False)
    return [Layer(path, kinds(module), setting_reader(module), path, named=setting_names(module)) for path, module in modules]


def setting_names(module: nn.Module) -> Callable[[], list[str]]:
    """Lists what a module has as attributes, its own and those of its class, and what `setting_reader` derives."""
    derived = ["parameter dtype", "buffers that are not saved"]
    return lambda: [*(name for name in dir(module) if not name.startswith("_")), *derived]


def setting_reader(module: nn.Module) -> Callable[[str], Any]:
    def read(name: str) -> Any:
        if name == "parameter dtype":
            floats = [dtype_name(p) for p in module.parameters(recurse=False) if p.is_floating_point()]
            return floats[0] if floats else None
        if name == "buffers that are not saved":
            return sorted(module._non_persistent_buffers_set)
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part, None)
        return found

    return read


def refusals(value: Any, dtypes: Mapping[str, str]) -> list[str]:
    """Why a module cannot take arrays of these dtypes, by path; one sentence each. A tree can take any."""
    if not is_model(value):
        return []
    existing = value.state_dict(keep_vars=True)
    found = []
    for path in dtypes:
        tensor = existing[path]
        if tensor.is_meta:
            found.append(f'{path} of the target is on the meta device; call .to_empty(device="cpu") on the model first')
        elif tensor.layout != torch.strided or tensor.is_quantized:
            found.append(f"{path} of the target {unreadable(tensor)}")
        elif tensor.numel() and any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
            found.append(f"{path} of the target holds one element for several; make it a .clone() first")
        elif tensor.is_inference() and not torch.is_inference_mode_enabled():
            found.append(f"{path} of the target was made in inference mode and cannot be written; make it outside")
    return found


def fill(value: Any, arrays: Mapping[str, Any]) -> tuple[Any, set[str]]:
    """Write arrays into a module in place, or make a state_dict of them.

    Args:
        value: the target.
        arrays: by path; NumPy arrays are copied, `Shared` ones keep their memory where that can be.

    Returns:
        The filled module or the new state_dict, and the paths whose memory is shared.
    """
    if not is_model(value):
        return new_state_dict(value, arrays)
    existing = value.state_dict(keep_vars=True)
    lent: set[str] = set()
    done: set[str] = set()
    for path, shared in in_threads(lambda path, tensor: written(existing[path], tensor, path in lent), arrays, lent):
        done |= {path} if shared else set()
    return value, done


def in_threads(
    call: Callable[[str, Tensor], Result], arrays: Mapping[str, Any], lent: set[str]
) -> Iterator[tuple[str, Result]]:
    """Each path with the result of a call on it and its array as a tensor; paths of what is lent are added to `lent`."""
    inference = torch.is_inference_mode_enabled()

    def work(batch: dict[str, Tensor]) -> list[tuple[str, Result]]:
        # torch's modes hold for one thread alone.
        with torch.inference_mode(inference), torch.no_grad():
            return [(path, call(path, tensor)) for path, tensor in batch.items()]

    for results in side_by_side(work, batches((path, as_tensor(path, arrays[path], lent)) for path in arrays)):
        yield from results


def as_tensor(path: str, array: Any, lent: set[str]) -> Tensor:
    """An array that has arrived as a tensor on its memory; its path is added to `lent` if it may stay there."""
    if not isinstance(array, Shared):
        return from_numpy(array)
    lent.add(path)
    return torch.utils.dlpack.from_dlpack(array.array).permute(array.axes)


def written(target: Tensor, tensor: Tensor, lent: bool) -> bool:
    """Write into a parameter or buffer; whether it uses the memory of what was lent instead."""
    if lent and target.device == tensor.device:
        target.data = tensor
        return True
    if target.dtype != tensor.dtype:
        # Only by cast: the parameter takes on the dtype in which the array arrives.
        target.data = tensor.to(target.device, copy=True).contiguous()
    else:
        target.copy_(tensor)
    return False


def new_state_dict(value: Mapping[str, Tensor], arrays: Mapping[str, Any]) -> tuple[dict[str, Tensor], set[str]]:
    """A state_dict like `value` with new values, contiguous and on the old devices; what was tied is tied again."""
    lent: set[str] = set()

    def copied(path: str, tensor: Tensor) -> Tensor:
        device = tensor.device if value[path].is_meta else value[path].device
        # The clone is wanted also where the device is the same: `tensor` is the source's own memory.
        return tensor if path in lent else tensor.clone(memory_format=torch.contiguous_format).to(device)

    made: dict[Hashable, Tensor] = {identity_of(value[path]): tensor for path, tensor in in_threads(copied, arrays, lent)}
    for tensor in value.values():
        made.setdefault(identity_of(tensor), tensor.detach().clone())
    return {path: made[identity_of(tensor)] for path, tensor in value.items()}, lent
