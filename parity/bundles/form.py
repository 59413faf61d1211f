"""The form of what a bundle holds: a file may say anything, and what is used of it has been looked at before."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Named:
    """An object whose entries have any names.

    Attributes:
        each: the form of every entry.
    """

    each: Any


class Encoded:
    """Stands for a value as `Encoder` writes it, which is looked at where it is decoded."""


CLAIM = (str, str, [str])
LEAF: dict[str, Any] = {
    **dict.fromkeys(("path", "owner", "name", "dtype", "role", "unreadable", "digest"), str),
    **{name: [str] for name in ("kinds", "also", "merged")},
    **{"shape": [int], "identity": int, "claims": [CLAIM], "by_name": bool, "loose": bool, "values": Encoded},
}
LAYER: dict[str, Any] = {
    **{"path": str, "own_path": str, "by_name": bool, "kinds": [str], "also": [str]},
    "settings": [(str, Encoded)],
}
SET: dict[str, Any] = {"name": str, "shows": str, "call": Encoded, "padding mask": Encoded, "masks": Encoded}
# Of a type its values; of [form] a list; of (form, form) a list of that length; of a dict an object with those entries.
FACTS: dict[str, Any] = {
    **dict.fromkeys(("side", "room", "model", "keep", "made", "dtype"), str),
    **{"seed": int, "gradients": bool, "x64": bool},
    **dict.fromkeys(("environment", "machine", "pinned"), Named(str)),
    **{"leaves": [LEAF], "layers": [LAYER], "sets": [SET], "answers": Named(dict)},
}
RETURNS: dict[str, Any] = {"returns": Encoded}
# The error's name, its text, and what else it held.
RAISES: dict[str, Any] = {"raises": (str, str, Named(Encoded))}
# What a bundle may keep of its arrays.
KEEPS = ("all", "summaries", "digests")
# What else some entries must be.
ONE_OF = {"side": ("torch", "flax"), "room": ("torch", "nnx", "linen"), "keep": KEEPS}


def problems(facts: Mapping[str, Any]) -> list[str]:
    """What facts lack, or hold in another form; one sentence each."""
    found = list(of(facts, FACTS, ""))
    for key, told in facts["answers"].items() if not found else ():
        found += of(told, RAISES if "raises" in told else RETURNS, f"answers.{key}")
    if found:
        return found
    for name, known in ONE_OF.items():
        if facts[name] not in known:
            found.append(f"its entry {name!r} is {facts[name]!r}, not {', '.join(known)}")
    return found if facts["sets"] else [*found, "its entry 'sets' is empty: it holds no run"]


def of(value: Any, form: Any, where: str) -> Iterator[str]:
    """What is wrong with one part."""
    if form is Encoded:
        return
    kind: Any = list if isinstance(form, list | tuple) else dict if isinstance(form, dict | Named) else form
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        yield f"its entry {where!r} is {type(value).__name__}, not {kind.__name__}"
    elif isinstance(form, tuple) and len(value) != len(form):
        yield f"its entry {where!r} has {len(value)} parts, not {len(form)}"
    elif isinstance(form, list | tuple):
        for number, part in enumerate(value):
            yield from of(part, form[number] if isinstance(form, tuple) else form[0], f"{where}[{number}]")
    elif isinstance(form, Named):
        for name, part in value.items():
            yield from of(part, form.each, f"{where}.{name}")
    elif isinstance(form, dict):
        for name, inner in form.items():
            place = f"{where}.{name}" if where else name
            if name in value:
                yield from of(value[name], inner, place)
            else:
                yield f"its facts have no entry {place!r}"


def checked(value: Any, wanted: Any) -> Any:
    """A value that is what a type annotation says.

    Raises:
        TypeError: it is something else.
    """
    if not fits(value, wanted):
        raise TypeError(f"{type(value).__name__} in the place of {getattr(wanted, '__name__', wanted)}")
    return value


def checked_fields(value: Any) -> Any:
    """A dataclass whose fields are what their annotations say.

    Raises:
        TypeError: one is something else.
    """
    for name, hint in hints(value.__class__).items():
        if not fits(getattr(value, name), hint):
            raise TypeError(f"{name} of {type(value).__name__} is {type(getattr(value, name)).__name__}")
    return value


@lru_cache
def hints(cls: type) -> dict[str, Any]:
    known = get_type_hints(cls)
    return {field.name: known[field.name] for field in fields(cls)}


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is what a type annotation says, parts included."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(fits(value, one) for one in inner)
    if origin is None:
        return isinstance(value, int | float if hint is float else hint)
    if not isinstance(value, origin):
        return False
    if isinstance(value, Mapping):
        return all(fits(key, inner[0]) and fits(part, inner[1]) for key, part in value.items())
    if origin is tuple and inner[-1] is not Ellipsis:
        return len(value) == len(inner) and all(map(fits, value, inner))
    return all(fits(part, inner[0]) for part in value)
