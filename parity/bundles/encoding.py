"""Values of a recording as JSON, with its arrays apart: nothing that is read back can be run."""

import functools
import inspect
import math
from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, make_dataclass
from typing import Any

import numpy as np

from parity.bundles.form import checked_fields
from parity.errors import InputError
from parity.evidence.calls import Abstract, Call, Evaluation, ModuleCall
from parity.evidence.faults import SourceLine
from parity.evidence.numerics import Noise
from parity.evidence.sampling import Sample, sample
from parity.weights.leaf import DTYPES, digest

# Marks an object that stands for something that JSON has no form for.
MARK = "~"
# Values of this package that come back as they were; others keep their fields alone.
KNOWN: dict[str, Any] = {cls.__name__: cls for cls in (Abstract, Call, Evaluation, ModuleCall, SourceLine, Noise)}
# Complex numbers of 128 bits have no name in the file format: their halves lie side by side.
HALVES = np.dtype("complex128")


class Other:
    """What no file can hold: only what it was is known."""

    def __init__(self, kind: str):
        self.kind = kind

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Other) and other.kind == self.kind

    def __hash__(self) -> int:
        return hash(self.kind)

    def __repr__(self) -> str:
        return f"<{self.kind}>"


class Encoder:
    """Turns values into JSON.

    Attributes:
        arrays: those that were met, by their digests: one that is met twice is kept once.
    """

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}

    def array(self, array: np.ndarray) -> dict[str, Any]:
        """An array, to be found by its digest."""
        name = digest(array)
        if str(array.dtype) not in DTYPES:
            raise InputError(f"an array of {array.dtype} cannot be recorded; the dtypes of a bundle are {', '.join(DTYPES)}")
        halves = array.dtype == HALVES
        self.arrays[name] = np.stack([array.real, array.imag], -1) if halves else array
        return {MARK: "array", "of": name} | ({"halves": True} if halves else {})

    def encoded(self, value: Any) -> Any:
        """A value, with a mark where JSON has no such thing."""
        if value is None or isinstance(value, bool | str) or type(value) is int:
            return value
        if isinstance(value, Sample):
            return {MARK: "sample", "of": self.array(np.asarray(value)), "whole": list(value.whole)}
        if isinstance(value, np.ndarray):
            return self.array(value)
        if isinstance(value, np.generic):
            return self.encoded(value.item())
        if isinstance(value, float):
            return value if math.isfinite(value) else {MARK: "float", "of": str(value)}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return {MARK: "named", "kind": type(value).__name__, "names": list(value._fields), "of": self.each(value)}
        if isinstance(value, list):
            return self.each(value)
        for kind in (tuple, frozenset, set):
            if isinstance(value, kind):
                return {MARK: kind.__name__, "of": self.each(sorted(value) if kind is not tuple else value)}
        if isinstance(value, Mapping):
            return {MARK: "dict", "of": [[self.encoded(key), self.encoded(part)] for key, part in value.items()]}
        if is_dataclass(value) and not isinstance(value, type):
            parts = {f.name: self.encoded(getattr(value, f.name)) for f in fields(value)}
            return {MARK: "data", "kind": type(value).__name__, "of": parts}
        return {MARK: "other", "of": f"{type(value).__module__}.{type(value).__qualname__}"}

    def each(self, values: Any) -> list[Any]:
        return [self.encoded(value) for value in values]


def decoded(value: Any, arrays: Callable[[str], np.ndarray]) -> Any:
    """A value as it was.

    Args:
        value: what `Encoder.encoded` made of it.
        arrays: finds an array by its digest.
    """
    if isinstance(value, list):
        return [decoded(part, arrays) for part in value]
    if not isinstance(value, dict):
        return value
    mark, inner = value[MARK], value["of"]
    if mark == "array":
        found = arrays(inner)
        return np.asarray(found[..., 0] + 1j * found[..., 1]) if value.get("halves") else found
    if mark == "sample":
        return sample(np.asarray(decoded(inner, arrays)), tuple(value["whole"]))
    if mark == "float":
        return float(inner)
    if mark == "other":
        return Other(inner)
    if mark == "function":
        return function(value)
    if mark == "dict":
        return {decoded(key, arrays): decoded(part, arrays) for key, part in inner}
    if mark == "data":
        known = {name: decoded(part, arrays) for name, part in inner.items()}
        if value["kind"] in KNOWN:
            return checked_fields(KNOWN[value["kind"]](**known))
        return data(value["kind"], tuple(known))(**known)
    parts = [decoded(part, arrays) for part in inner]
    if mark == "named":
        return named(value["kind"], tuple(value["names"]))(*parts)
    return {"tuple": tuple, "frozenset": frozenset, "set": set}[mark](parts)


@functools.lru_cache(maxsize=256)
def named(kind: str, names: tuple[str, ...]) -> Any:
    return namedtuple(kind, names)


@functools.lru_cache(maxsize=256)
def data(kind: str, names: tuple[str, ...]) -> Any:
    return make_dataclass(kind, names)


# ------------------------------------------------------------------------------ settings


def plain_setting(value: Any) -> bool:
    """Whether a setting is a number, a word, or nothing but numbers and words."""
    if isinstance(value, tuple | list):
        return all(map(plain_setting, value))
    return value is None or isinstance(value, bool | int | float | str)


def setting(value: Any, encoder: Encoder) -> Any:
    """A setting of a layer; of a function, or an activation of torch, its name and what it was made with.

    None if it is nothing of these.
    """
    if plain_setting(value):
        return encoder.encoded(value)
    inner = value.func if isinstance(value, functools.partial) else value
    is_function = not inspect.ismethod(inner) and hasattr(inner, "__name__") and not isinstance(inner, type)
    if not callable(inner) or not (is_function or type(inner).__module__.startswith("torch.nn.modules.activation")):
        # A dtype is known by its name.
        return str(value).removeprefix("torch.") if type(value).__name__.endswith("dtype") else None
    found = {
        MARK: "function",
        "of": getattr(inner, "__name__", "") if is_function else type(inner).__name__,
        "module": str(getattr(inner, "__module__", "") if is_function else type(inner).__module__),
        "module of": not is_function,
        "takes": encoder.encoded(arguments(inner) if is_function else own_settings(inner)),
        "given": encoder.encoded(own_settings(value.keywords) if isinstance(value, functools.partial) else {}),
    }
    return found


def arguments(called: Any) -> dict[str, Any]:
    """The arguments of a function that have plain defaults."""
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {p.name: p.default for p in parameters if p.default is not p.empty and plain_setting(p.default)}


def own_settings(owner: Any) -> dict[str, Any]:
    found = owner if isinstance(owner, Mapping) else vars(owner)
    return {name: value for name, value in found.items() if not name.startswith("_") and plain_setting(value)}


def function(value: Mapping[str, Any]) -> Any:
    """What stands for a function or a module that a layer held: its name and arguments, and nothing to call."""
    takes, given = (decoded(value[name], no_arrays) for name in ("takes", "given"))

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        raise InputError(f"{value['of']} was recorded by its name, and cannot be called")

    if value["module of"]:
        kind = type(value["of"], (), {"__module__": value["module"], "__call__": stand_in})
        found = kind()
        vars(found).update(takes)
        return found
    stand_in.__name__, stand_in.__module__ = value["of"], value["module"]
    keywords = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default) for name, default in takes.items()]
    vars(stand_in)["__signature__"] = inspect.Signature(keywords)
    return functools.partial(stand_in, **given) if given else stand_in


def no_arrays(name: str) -> np.ndarray:
    raise InputError("a setting of a layer cannot be an array")
