"""The only rooms that speak torch or jax. Each is imported at first use."""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

from parity.errors import InputError, MissingFrameworkError

# The module that a room needs, and the extra that brings it.
NEEDS = {"torch": ("torch", "torch"), "nnx": ("flax", "flax"), "linen": ("flax", "flax")}
# Rooms that own no models: they only read and write files.
FILES = {"torch.files": ("torch", "torch"), "nnx.orbax": ("orbax.checkpoint", "flax")}
# Rooms of optimizers, schedules and initialisers.
TRAINING = {
    "torch.optimizers": ("torch", "torch"),
    "torch.schedulers": ("torch", "torch"),
    "torch.training": ("torch", "torch"),
    "nnx.training": ("optax", "flax"),
    "linen.training": ("optax", "flax"),
    "optax": ("optax", "flax"),
    "jax.initializers": ("jax", "flax"),
}
# Rooms of dropout masks.
DROPOUT = {
    "torch.dropout": ("torch", "torch"),
    "nnx.dropout": ("flax", "flax"),
    "linen.dropout": ("flax", "flax"),
}


def load(room: str) -> ModuleType:
    """Import a room of this package.

    Args:
        room: a key of the tables above.

    Raises:
        MissingFrameworkError: its framework is not installed.
    """
    package, extra = (NEEDS | FILES | TRAINING | DROPOUT)[room]
    # The parent first: a search below a package that is missing is an error.
    if any(importlib.util.find_spec(name) is None for name in dict.fromkeys((package.partition(".")[0], package))):
        raise MissingFrameworkError(f"{package} is not installed; install it with: pip install '.[{extra}]' in a clone")
    return importlib.import_module(f"parity.frameworks.{room}")


def load_both() -> tuple[ModuleType, ModuleType]:
    """The rooms of torch and of NNX.

    Raises:
        MissingFrameworkError: a framework is not installed; tells of both.
    """
    found, missing = list[ModuleType](), list[str]()
    for room in ("torch", "nnx"):
        try:
            found.append(load(room))
        except MissingFrameworkError as error:
            missing.append(str(error))
    if missing:
        raise MissingFrameworkError("; ".join(missing))
    return found[0], found[1]


def imported() -> list[ModuleType]:
    """The rooms whose arrays can be at hand: a framework that nobody has imported has made none."""
    return [load(room) for room, package in (("torch", "torch"), ("nnx", "jax")) if package in sys.modules]


def owner(value: Any) -> ModuleType | None:
    """The room whose models or trees `value` is one of.

    A framework that nobody has imported owns nothing, so it is not imported to find out.
    """
    for room, (package, _) in NEEDS.items():
        if package in sys.modules and load(room).owns(value):
            return load(room)
    return None


def owner_of(value: Any, role: str) -> ModuleType:
    """`owner`, or an error that names what was given.

    Raises:
        InputError: no framework knows the value.
    """
    found = owner(value)
    if found is None:
        raise InputError(
            f"{role} must be a torch.nn.Module, a state_dict, a flax.nnx.Module or an nnx.State, a parity.Linen "
            f"or its variables, or the path of a checkpoint, got {describe(value)}",
            "no-model",
        )
    return found


def describe(value: Any) -> str:
    """A value in a few words, for an error."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    if isinstance(value, type):
        return f"the class {value.__module__}.{value.__qualname__} itself; make an instance of it"
    if any(f"{cls.__module__}.{cls.__qualname__}" == "flax.linen.module.Module" for cls in type(value).__mro__):
        return f"the Linen module {kind} without its variables; give parity.Linen(module, variables)"
    if isinstance(value, dict) and value:
        key, entry = next(iter(value.items()))
        return f"a {kind} with {key!r}: {type(entry).__module__}.{type(entry).__qualname__} first"
    return f"{kind}" if value is not None else "None"
