"""What a forward pass leaves behind in a torch model beside its parameters and buffers, put back."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# What every module keeps for torch itself; `training` is the user's too.
OWN = frozenset(vars(nn.Module())) - {"training"}
# How deep objects are followed that a module holds as plain attributes.
DEPTH = 3
# They hold nothing that a forward pass would write, or are looked at under their own path.
LEFT = (nn.Module, nn.Parameter, type, FunctionType, MethodType, ModuleType, str, bytes, int, float, complex, bool, type(None))

Restore = Callable[[], bool]


@contextlib.contextmanager
def as_it_was(model: nn.Module) -> Iterator[list[str]]:
    """Put back plain attributes that a run changes, such as a counter or a cache.

    Followed are lists, dicts, sets, arrays, tensors, and objects with a `__dict__` to a depth of 3.

    Yields:
        A list that is filled when the run is over: the paths of what it had changed.
    """
    changed: list[str] = []
    seen: set[int] = set()
    kept = [
        (f"{path}.{name}" if path else name, module, name, value, followed(value, seen, DEPTH))
        for path, module in model.named_modules()
        for name, value in plain_attributes(module).items()
    ]
    before = {path: set(vars(module)) for path, module in model.named_modules()}
    try:
        yield changed
    finally:
        for path, module in list(model.named_modules()):
            for name in set(vars(module)) - before.get(path, set(vars(module))):
                del vars(module)[name]
                changed.append(f"{path}.{name}" if path else name)
        for where, module, name, value, restore in kept:
            other = vars(module).get(name, module) is not value
            if other:
                vars(module)[name] = value
            if restore() or other:
                changed.append(where)


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in OWN}


def followed(value: Any, seen: set[int], depth: int) -> Restore:
    """What puts a value back as it is now, and tells whether it had to."""
    if isinstance(value, LEFT) or id(value) in seen or depth < 0:
        return unchanged
    seen.add(id(value))
    if isinstance(value, Tensor):
        return kept_tensor(value)
    if isinstance(value, np.ndarray):
        return kept_array(value)
    if isinstance(value, list):
        return kept_list(value, [followed(part, seen, depth - 1) for part in value])
    if isinstance(value, dict):
        return kept_dict(value, [followed(part, seen, depth - 1) for part in value.values()])
    if isinstance(value, set):
        return kept_set(value)
    if isinstance(value, tuple):
        return every([followed(part, seen, depth - 1) for part in value])
    attributes = getattr(value, "__dict__", None)
    # What torch keeps for itself, such as what it has compiled, is no state of the user's.
    if isinstance(attributes, dict) and type(value).__module__.partition(".")[0] != "torch":
        return kept_dict(attributes, [followed(part, seen, depth - 1) for part in attributes.values()])
    return unchanged


def unchanged() -> bool:
    return False


def every(parts: list[Restore]) -> Restore:
    def restore() -> bool:
        # A list first: every part has to be put back.
        changed = [part() for part in parts]
        return any(changed)

    return restore


def kept_tensor(tensor: Tensor) -> Restore:
    if tensor.is_inference() or tensor.is_meta:
        return unchanged
    version, copy = tensor._version, tensor.detach().clone()

    def restore() -> bool:
        if tensor._version == version:
            return False
        with torch.no_grad():
            tensor.copy_(copy)
        return True

    return restore


def kept_array(array: np.ndarray) -> Restore:
    if array.dtype == object:
        return unchanged
    copy = array.copy()

    def restore() -> bool:
        if array.tobytes() == copy.tobytes():
            return False
        array[...] = copy
        return True

    return restore


def kept_list(values: list[Any], parts: list[Restore]) -> Restore:
    copy, inside = list(values), every(parts)

    def restore() -> bool:
        same = len(values) == len(copy) and all(a is b for a, b in zip(values, copy, strict=True))
        if not same:
            values[:] = copy
        return inside() or not same

    return restore


def kept_dict(values: dict[Any, Any], parts: list[Restore]) -> Restore:
    copy, inside = dict(values), every(parts)

    def restore() -> bool:
        same = list(values) == list(copy) and all(values[key] is copy[key] for key in copy)
        if not same:
            values.clear()
            values.update(copy)
        return inside() or not same

    return restore


def kept_set(values: set[Any]) -> Restore:
    copy = set(values)

    def restore() -> bool:
        if values == copy:
            return False
        values.clear()
        values.update(copy)
        return True

    return restore


def written(given: Mapping[str, Tensor]) -> list[str]:
    """Paths of the arguments that a run wrote into: torch counts writes in place."""
    return [path for path, tensor in given.items() if not tensor.is_inference() and tensor._version > 0]
