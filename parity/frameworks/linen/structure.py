"""The modules that a Linen model has inside: their classes, settings and paths, in Linen's words and in torch's."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from flax import linen as nn
from jax.extend.core import get_opaque_trace_state

from parity.frameworks.linen.lifting import LIFTED, class_inside
from parity.weights.paths import spellings

Path = tuple[str, ...]

# Why a module has no copy that could be run by itself.
TRANSFORMED = "runs inside a transformation of jax, which may give it one layer of a stack or one example of a batch"
MADE_IN_CALL = "is made with arrays of the call that it is in"

# What flax puts before the name of a class that it wraps in a transformation.
WRAPPED = re.compile(r"^(?:(?:Checkpoint|Jit|Vmap|Scan|Remat_scan|Map_variables|Add_metadata_axis|Custom_vjp|Grad)+)(?=[A-Z])")


@dataclass(frozen=True)
class Part:
    """One module inside a model.

    Attributes:
        path: names of modules from the root, as in the variables.
        kinds: public names of its classes along the MRO; first those of the outer of two that share a scope.
        settings: its attributes by name; empty where only its name is known.
        words: its dotted path in torch's words: `layers.0` for an element of a list, `0` in a Sequential.
        also: further paths under which torch may know it.
        by_name: whether only its name tells its class.
        module: a copy that is bound to nothing, to run it by itself; None where there can be none.
        given: of the modules in its attributes that lie elsewhere in the model, the paths, by the names
            that they have in the copy.
        why_not: why there is no copy.
    """

    path: Path
    kinds: tuple[str, ...]
    settings: Mapping[str, Any]
    words: str
    also: tuple[str, ...]
    by_name: bool = False
    module: nn.Module | None = None
    given: Mapping[str, Path] = field(default_factory=dict)
    why_not: str = "was not met in a call of the model"


@dataclass(frozen=True)
class Structure:
    """What a model has inside.

    Attributes:
        parts: by path, in the order of their calls where a call could be tried.
        lifted: classes that flax made of others for a transformation such as `nn.remat`.
    """

    parts: Mapping[Path, Part]
    lifted: tuple[type, ...] = ()


@dataclass
class Found:
    """Modules as they are met, in the order of their first calls.

    Attributes:
        classes: of the modules of each path; several where a scope is shared.
        settings: attributes by path.
        held: for the path of a module, that of the attribute that holds it, and of the module whose attribute it is.
        lifted: classes that flax made of others for a transformation.
        copies: by path, what `Part` has as its `module`, as `given` and as `why_not`.
    """

    classes: dict[Path, list[type]] = field(default_factory=dict)
    settings: dict[Path, dict[str, Any]] = field(default_factory=dict)
    held: dict[Path, list[tuple[Path, Path]]] = field(default_factory=dict)
    lifted: dict[type, None] = field(default_factory=dict)
    copies: dict[Path, tuple[nn.Module | None, dict[str, Path], str]] = field(default_factory=dict)

    def meet(self, module: nn.Module) -> None:
        """Note a module that has a scope, and the modules that it holds."""
        path = tuple(map(str, module.path))
        classes = self.classes.setdefault(path, [])
        if type(module) not in classes:
            classes.append(type(module))
        self.settings[path] = settings_of(module) | self.settings.get(path, {})
        for keys, child in held_modules(module):
            whole = (*path, *keys[1:]) if isinstance(module, nn.Sequential) and keys[0] == "layers" else (*path, *keys)
            if child.scope is not None and (whole, path) not in self.held.setdefault(tuple(child.path), []):
                self.held[tuple(child.path)].append((whole, path))

    def keep(self, module: nn.Module, transformed: bool = False) -> None:
        """Keep a copy of the module of a path; of two that share a scope that is the outer one."""
        copy = None if transformed else unbound(module)
        self.copies[tuple(map(str, module.path))] = copy, given_to(module), TRANSFORMED if transformed else MADE_IN_CALL

    def structure(self) -> Structure:
        """All that was met."""
        return Structure(self.parts(), tuple(self.lifted))

    def parts(self) -> dict[Path, Part]:
        """What was met, under the paths in torch's words."""
        words: dict[Path, Path] = {}
        # A module that shares the scope of another moves to that one's path.
        met = [path for path in self.classes if path in self.settings]
        for path in sorted(met, key=len):
            own = next((whole for whole, owner in self.held.get(path, []) if owner == path[:-1]), path) if path else path
            parent = words.get(path[:-1], path[:-1])
            words[path] = (*parent, *own[len(path) - 1 :]) if path else ()
        return {
            path: Part(
                *(path, kinds_of(self.classes[path]), self.settings[path], ".".join(words[path]), self.further(path, words)),
                *(False, *self.copies.get(path, ())),
            )
            for path in met
        }

    def further(self, path: Path, words: Mapping[Path, Path]) -> tuple[str, ...]:
        found = [words[path], path]
        for length in range(1, len(path) + 1):
            for whole, owner in self.held.get(path[:length], []):
                above = words.get(owner, owner)
                found.append((*above, *whole[len(owner) :], *path[length:]))
        return other_words(tuple(".".join(one) for one in found))


def other_words(paths: tuple[str, ...]) -> tuple[str, ...]:
    """All but the first path, and every way to write the numbers in any of them."""
    spelt = [way for path in paths for way in (path, *spellings(path))]
    return tuple(dict.fromkeys(way for way in spelt if way != paths[0]))


def kinds_of(classes: list[type]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for cls in classes for name in kinds(cls)))


def kinds(cls: type) -> tuple[str, ...]:
    """Public names of a class and its bases, nearest first; what flax wraps for a transformation is the class inside."""
    names = []
    for one in cls.__mro__:
        if one.__module__ == LIFTED:
            continue
        builtin = one.__module__.startswith("flax.linen")
        names.append(f"flax.linen.{one.__name__}" if builtin else f"{one.__module__}.{one.__qualname__}")
    return tuple(names)


def settings_of(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module, without arrays that exist only in the call and without what flax keeps there."""
    hidden = ("parent", "name", "scope")
    found = {name: value for name, value in vars(module).items() if not name.startswith("_") and name not in hidden}
    # Modules are kept without their scope: it would keep the whole call alive.
    found = {name: value.clone(parent=None) if isinstance(value, nn.Module) else value for name, value in found.items()}
    return {name: value for name, value in found.items() if not isinstance(value, jax.core.Tracer)}


def held_modules(module: nn.Module) -> Iterator[tuple[Path, nn.Module]]:
    """The modules in the attributes of a module, in lists and dicts too, with the path from attribute to module."""

    def inside(value: Any, keys: Path) -> Iterator[tuple[Path, nn.Module]]:
        if isinstance(value, nn.Module):
            yield keys, value
        elif isinstance(value, tuple | list):
            for index, one in enumerate(value):
                yield from inside(one, (*keys, str(index)))
        elif isinstance(value, Mapping):
            for key, one in value.items():
                yield from inside(one, (*keys, str(key)))

    for name, value in vars(module).items():
        if name != "parent" and not name.startswith("_"):
            yield from inside(value, (name,))


def trace_state() -> Any:
    """Equal at two places exactly if values of one can be used in the other."""
    return get_opaque_trace_state(convention="flax")


def unbound(module: nn.Module) -> nn.Module | None:
    """A copy of a bound module outside of its model; None if it holds arrays that exist only in the call."""
    copy, _ = module.unbind()
    fields = {f.name: getattr(copy, f.name) for f in dataclasses.fields(copy) if f.init and f.name != "parent"}
    if holds_tracers(copy):
        return None
    # A class that a @compact module makes anew in each call is another one in every layer; what is inside is not.
    plain = class_inside(type(copy))
    return copy if plain is type(copy) else plain(**fields, parent=None)


def holds_tracers(module: nn.Module) -> bool:
    """Whether a module, or one that it holds, has arrays among its attributes that exist only in a call."""
    own = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(dict(vars(module))))
    return own or any(holds_tracers(child) for _, child in held_modules(module))


def given_to(module: nn.Module) -> dict[str, Path]:
    """The paths of the modules in a module's fields that are not its own, by the names under which a copy takes them in."""
    path, fields = tuple(map(str, module.path)), {f.name for f in dataclasses.fields(module) if f.init}
    children = {
        "_".join(keys): tuple(map(str, child.path))
        for keys, child in held_modules(module)
        if keys[0] in fields and child.scope is not None
    }
    return {name: where for name, where in children.items() if where != (*path, name)}


def part_by_name(path: Path) -> Part:
    """What the path alone tells of a module: the class of an automatic name such as `Dense_0`."""
    prefix, _, number = path[-1].rpartition("_") if path else ("", "", "")
    name = WRAPPED.sub("", prefix)
    cls = getattr(nn, name, None) if number.isdigit() else None
    known = isinstance(cls, type) and issubclass(cls, nn.Module)
    words = ".".join(path)
    return Part(path, kinds(cls) if known else (), {}, words, other_words((words,)), by_name=True)  # type: ignore[arg-type]
