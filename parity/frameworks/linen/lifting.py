"""Classes that flax makes of other ones for a transformation such as `nn.remat`. Their calls cannot be intercepted."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from flax import linen as nn
from flax.linen import transforms

# Where flax makes a class of another one for a transformation.
LIFTED = "flax.linen.transforms"

# What it makes them with.
MAKERS = ("module_class_lift_transform", "module_class_lift_transform_cached")


def class_inside(cls: type) -> Any:
    """The class that flax wrapped, where the transformation changes no values: `nn.remat`, `nn.jit`; else the class itself."""
    inside = cls.__mro__[1]
    changes_none = cls.__name__ in (f"Checkpoint{inside.__name__}", f"Jit{inside.__name__}")
    return inside if cls.__module__ == LIFTED and changes_none else cls


def lifted_classes(cls: type = nn.Module) -> Iterator[type]:
    """Every class that flax has made for a transformation so far."""
    below: list[type] = cls.__subclasses__()
    for one in below:
        if one.__module__ == LIFTED:
            yield one
        yield from lifted_classes(one)


@contextlib.contextmanager
def lifted_calls(lifted: Iterable[type], around: Callable[..., Any]) -> Iterator[None]:
    """Send the calls of such classes through `around(module, call, args, kwargs)`.

    Args:
        lifted: those that exist already; a `@compact` module makes its own each time it runs.
        around: gets the module, its own bound call, and the arguments.
    """
    originals: dict[type, Any] = {}
    makers = {name: getattr(transforms, name) for name in MAKERS}

    def watch(cls: Any) -> None:
        if "__call__" in vars(cls) and cls not in originals:
            originals[cls] = vars(cls)["__call__"]
            cls.__call__ = call_of(cls, originals[cls], around)

    def made(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def watched(*args: Any, **kwargs: Any) -> Any:
            found = make(*args, **kwargs)
            watch(found.func if isinstance(found, functools.partial) else found)
            return found

        return watched

    try:
        for cls in lifted:
            watch(cls)
        for name, make in makers.items():
            setattr(transforms, name, made(make))
        yield
    finally:
        for name, make in makers.items():
            setattr(transforms, name, make)
        for cls, original in originals.items():
            setattr(cls, "__call__", original)  # noqa: B010


def call_of(cls: Any, original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    """A class's call on the record; where the transformation changes no values, that of the class inside."""
    inside = class_inside(cls)
    if inside is not cls:
        plain: Callable[..., Any] = inside.__call__
        return plain

    @functools.wraps(original)
    def watched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return around(self, functools.partial(original, self), args, kwargs)

    return watched
