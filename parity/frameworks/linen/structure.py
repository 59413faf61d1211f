"""Which modules a Linen model has inside, of which classes and under which paths.

A `@compact` module has its layers only while it runs, so it is run once on shapes alone.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from flax import linen as nn

from parity.errors import InputError, first_line
from parity.evidence.trees import mapped
from parity.frameworks.jax.running import Slot
from parity.weights.files import COLLECTIONS
from parity.weights.leaf import DTYPES
from parity.weights.paths import spellings

Path = tuple[str, ...]

# What flax puts before the name of a class that it wraps in a transformation.
WRAPPED = re.compile(r"^(?:(?:Checkpoint|Jit|Vmap|Scan|Remat_scan|Map_variables|Add_metadata_axis|Custom_vjp|Grad)+)(?=[A-Z])")


# Where flax makes a class of another one for a transformation.
LIFTED = "flax.linen.transforms"


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
    """

    path: Path
    kinds: tuple[str, ...]
    settings: Mapping[str, Any]
    words: str
    also: tuple[str, ...]
    by_name: bool = False


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
    """

    classes: dict[Path, list[type]] = field(default_factory=dict)
    settings: dict[Path, dict[str, Any]] = field(default_factory=dict)
    held: dict[Path, list[tuple[Path, Path]]] = field(default_factory=dict)
    lifted: dict[type, None] = field(default_factory=dict)

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
                path, kinds_of(self.classes[path]), self.settings[path], ".".join(words[path]), self.further(path, words)
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


# ---------------------------------------------------------------- looking inside


def structure_of(model: Any) -> Structure:
    """Every module of a model.

    Args:
        model: a `parity.Linen`.
    """
    found = Found()
    if not called_on_shapes(model, found):
        set_up(model, found)
    return found.structure()


def called_on_shapes(model: Any, found: Found) -> bool:
    """Meet every module by running `init` on shapes alone; False if the example arguments, if any, do not serve."""
    try:
        initialised(model, found)
    except Exception:
        # What a model raises is told where it is run.
        return False
    return True


def initialised(model: Any, found: Found) -> Any:
    """The abstract variables of a model, with every module met on the way."""

    def watch(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if type(module).__module__ == LIFTED:
            found.lifted[type(module)] = None
        # Functions that a transformation lifts have names of their own and a scope without a path.
        known = context.method_name != "<lambda>" and module.scope is not None
        if known:
            found.classes.setdefault(tuple(map(str, module.path)), [])
        try:
            return call(*args, **kwargs)
        finally:
            if known:
                found.meet(module)

    arrays: dict[str, jax.ShapeDtypeStruct] = {}

    def take(path: str, value: Any) -> Any:
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            arrays[path] = shaped(value)
            return Slot(path)
        return value

    args, kwargs = examples(model, take)

    def run(key: Any, arrays: Mapping[str, Any]) -> Any:
        def put(_: str, value: Any) -> Any:
            return arrays[value.path] if isinstance(value, Slot) else value

        return model.module.init({"params": key}, *mapped(put, args), method=model.method, **mapped(put, kwargs))

    with nn.intercept_methods(watch):
        return jax.eval_shape(run, jax.random.key(0), arrays)


def examples(model: Any, change: Callable[[str, Any], Any]) -> tuple[Any, Any]:
    """The example arguments with every leaf changed."""
    return mapped(change, model.args, "args"), mapped(change, dict(model.kwargs), "kwargs")


def same_shapes(model: Any, other: Any) -> bool:
    """Whether two models of one module are called alike, up to the numbers in their arrays."""

    def shape(_: str, value: Any) -> Any:
        return shaped(value) if hasattr(value, "shape") and hasattr(value, "dtype") else value

    return bool(examples(model, shape) == examples(other, shape))


def shaped(value: Any) -> jax.ShapeDtypeStruct:
    """An array of any framework as its shape and dtype, in the width that jax has at hand."""
    name = str(value.dtype).removeprefix("torch.")
    # Random keys have a dtype that only jax knows.
    dtype = jax.dtypes.canonicalize_dtype(DTYPES[name]) if name in DTYPES else value.dtype
    return jax.ShapeDtypeStruct(tuple(value.shape), dtype)


def set_up(model: Any, found: Found) -> None:
    """Meet the modules that `setup` makes; those of `@compact` modules stay unknown."""

    def visit(module: nn.Module) -> None:
        # Looking for an attribute that is not there makes flax run setup.
        getattr(module, "no such attribute", None)
        found.meet(module)
        for _, child in held_modules(module):
            if child.scope is not None and tuple(child.path) not in found.classes:
                visit(child)

    try:
        jax.eval_shape(lambda variables: model.module.apply(variables, method=visit), model.variables)
    except Exception:
        # What setup needs is not there: names have to do.
        found.classes.setdefault((), [type(model.module)])
        found.settings.setdefault((), {})


def part_by_name(path: Path) -> Part:
    """What the path alone tells of a module: the class of an automatic name such as `Dense_0`."""
    prefix, _, number = path[-1].rpartition("_") if path else ("", "", "")
    name = WRAPPED.sub("", prefix)
    cls = getattr(nn, name, None) if number.isdigit() else None
    known = isinstance(cls, type) and issubclass(cls, nn.Module)
    words = ".".join(path)
    return Part(path, kinds(cls) if known else (), {}, words, other_words((words,)), by_name=True)  # type: ignore[arg-type]


# ---------------------------------------------------------------- checks of what is given


def check_parts(model: Any, variables: Any) -> None:
    """Refuse what is no Linen model.

    Raises:
        InputError: see `parity.Linen`.
    """
    module = model.module
    if isinstance(module, type) and issubclass(module, nn.Module):
        raise InputError(f"parity.Linen takes a module, got the class {module.__name__} itself; make an instance of it")
    if not isinstance(module, nn.Module):
        raise InputError(f"parity.Linen takes a flax.linen.Module, got {type(module).__module__}.{type(module).__qualname__}")
    if module.scope is not None:
        raise InputError(f"the {type(module).__name__} is bound to variables; give the parts of module.unbind()")
    if variables is None:
        return
    if not isinstance(variables, Mapping):
        raise InputError(f"variables must be what module.init returns, a dict of collections, got {type(variables).__name__}")
    inner = variables.get("params")
    if isinstance(inner, Mapping) and isinstance(inner.get("params"), Mapping) and len(inner) == 1:
        raise InputError("variables hold params inside params; pass variables['params']")
    if variables and not any(name in COLLECTIONS for name in variables):
        names = ", ".join(map(repr, list(variables)[:4]))
        raise InputError(
            f"variables must be collections, such as {{'params': ...}}, got {names}; pass {{'params': variables}} if these are "
            "the parameters, or add an empty 'params' if they are collections"
        )


def abstract(model: Any) -> tuple[Any, Structure]:
    """The variables of a model as shapes and dtypes, and its structure.

    Raises:
        InputError: the module cannot be initialised on the example arguments.
    """
    found = Found()
    try:
        variables = initialised(model, found)
        return variables, found.structure()
    except Exception as error:
        raise InputError(
            f"the Linen module {type(model.module).__name__} cannot be initialised on shapes: {type(error).__name__}: "
            f"{first_line(error)}; give example arguments after the variables, or the variables themselves"
        ) from error
