"""Looking inside a Linen model.

A `@compact` module has its layers only while it runs, so it is run once on shapes alone.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen as nn

from parity.errors import InputError, first_line
from parity.evidence.trees import mapped
from parity.frameworks.jax.running import Slot
from parity.frameworks.linen.lifting import LIFTED, lifted_calls, lifted_classes
from parity.frameworks.linen.structure import Found, Structure, held_modules, trace_state
from parity.weights.files import COLLECTIONS
from parity.weights.leaf import DTYPES


def structure_of(model: Any) -> Structure:
    """Every module of a model.

    Args:
        model: a `parity.Linen`.
    """
    found = called_on_shapes(model) or set_up(model)
    return found.structure()


def wide_structure_of(model: Any) -> Structure:
    """Every module as it is in a float64 run: the attributes of some depend on the dtype of what the model is given.

    Args:
        model: a `parity.Linen`; 64-bit types must be on.
    """
    found = called_on_shapes(model, "float64")
    return found.structure() if found else model.structure  # type: ignore[no-any-return]


def called_on_shapes(model: Any, dtype: str | None = None) -> Found | None:
    """Every module, by running `init` on shapes alone; None if the example arguments, if any, do not serve."""
    found = Found()
    try:
        initialised(model, found, dtype)
    except Exception:
        # What a model raises is told where it is run.
        return None
    return found


def initialised(model: Any, found: Found, dtype: str | None = None) -> Any:
    """The abstract variables of a model, with every module met on the way.

    Args:
        model: a `parity.Linen`.
        found: takes the modules.
        dtype: of its floating point arguments; None keeps theirs.
    """

    def watch(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        if type(context.module).__module__ == LIFTED:
            found.lifted[type(context.module)] = None
        # Functions that a transformation lifts have names of their own and a scope without a path.
        known = context.method_name != "<lambda>" and context.module.scope is not None
        return meet(context.module, call, args, kwargs) if known else call(*args, **kwargs)

    def meet(module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        first = tuple(map(str, module.path)) not in found.classes
        found.classes.setdefault(tuple(map(str, module.path)), [])
        try:
            return call(*args, **kwargs)
        finally:
            found.meet(module)
            if first:
                found.keep(module, trace_state() != states[0])

    arrays: dict[str, jax.ShapeDtypeStruct] = {}

    def take(path: str, value: Any) -> Any:
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            arrays[path] = shaped(value, dtype)
            return Slot(path)
        return value

    args, kwargs = examples(model, take)

    states: list[Any] = []

    def run(key: Any, arrays: Mapping[str, Any]) -> Any:
        states.append(trace_state())

        def put(_: str, value: Any) -> Any:
            return arrays[value.path] if isinstance(value, Slot) else value

        return model.module.init({"params": key}, *mapped(put, args), method=model.method, **mapped(put, kwargs))

    with nn.intercept_methods(watch), lifted_calls(lifted_classes(), meet):
        return jax.eval_shape(run, jax.random.key(0), arrays)


def examples(model: Any, change: Callable[[str, Any], Any]) -> tuple[Any, Any]:
    """The example arguments with every leaf changed."""
    return mapped(change, model.args, "args"), mapped(change, dict(model.kwargs), "kwargs")


def same_shapes(model: Any, other: Any) -> bool:
    """Whether two models of one module are called alike, up to the numbers in their arrays."""

    def shape(_: str, value: Any) -> Any:
        return shaped(value) if hasattr(value, "shape") and hasattr(value, "dtype") else value

    return bool(examples(model, shape) == examples(other, shape))


def shaped(value: Any, floating: str | None = None) -> jax.ShapeDtypeStruct:
    """An array of any framework as its shape and dtype, in the width that jax has at hand; a floating point one as told."""
    name = str(value.dtype).removeprefix("torch.")
    # Random keys have a dtype that only jax knows.
    dtype = jax.dtypes.canonicalize_dtype(DTYPES[name]) if name in DTYPES else value.dtype
    dtype = jax.numpy.dtype(floating) if floating and jax.numpy.issubdtype(dtype, jax.numpy.floating) else dtype
    return jax.ShapeDtypeStruct(tuple(value.shape), dtype)


def set_up(model: Any) -> Found:
    """The modules that `setup` makes; those of `@compact` modules stay unknown."""
    found = Found()

    def visit(module: nn.Module) -> None:
        # Looking for an attribute that is not there makes flax run setup.
        getattr(module, "no such attribute", None)
        found.meet(module)
        found.keep(module)
        for _, child in held_modules(module):
            if child.scope is not None and tuple(child.path) not in found.classes:
                visit(child)

    try:
        jax.eval_shape(lambda variables: model.module.apply(variables, method=visit), model.variables)
    except Exception:
        # What setup needs is not there: names have to do.
        found.classes.setdefault((), [type(model.module)])
        found.settings.setdefault((), {})
    return found


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
