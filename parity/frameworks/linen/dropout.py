"""Drops of Linen models: on the record, and run with given masks."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import linen as nn
from flax.core import axes_scan

from parity.dropout.masks import DropoutMasks
from parity.dropout.player import Player
from parity.frameworks.jax import dropout
from parity.frameworks.jax.dropout import Around
from parity.frameworks.linen.capture import words_of
from parity.frameworks.linen.lifting import lifted_calls
from parity.linen import Linen


def modules_of(model: Linen) -> dict[str, str]:
    """The path, in torch's words, of every module by all paths that it has."""
    parts = model.structure.parts.values()
    return {way: part.words for part in parts for way in (*part.also, ".".join(part.path), part.words)}


@contextlib.contextmanager
def followed(model: Linen, around: Around) -> Iterator[None]:
    """Send every call of a module of a model through `around`, in compiled functions too."""
    depth: list[tuple[str, ...]] = []

    def follow(module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        path = tuple(map(str, module.path)) if module.scope is not None else None
        # A method that calls another of the same module, or super's, is one call.
        if path is None or path in depth or type(root_of(module)) is not type(model.module):
            return call(*args, **kwargs)
        depth.append(path)
        try:
            return around(module, words_of(model, path), call, args, kwargs)
        finally:
            depth.pop()

    def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        return call(*args, **kwargs) if context.method_name == "setup" else follow(context.module, call, args, kwargs)

    with nn.intercept_methods(intercept), lifted_calls(model.structure.lifted, follow):
        yield


def root_of(module: nn.Module) -> nn.Module:
    """The outermost module around one."""
    while isinstance(module.parent, nn.Module):
        module = module.parent
    return module


def stock(module: Any) -> bool:
    """Whether a module drops by Flax's own arithmetic."""
    return next((cls for cls in type(module).__mro__ if "__call__" in vars(cls)), None) is nn.Dropout


def kind_of(module: Any) -> tuple[str, bool]:
    """The kind of mask that a module draws, and whether it scales by 1 / (1 - rate)."""
    if isinstance(module, nn.MultiHeadDotProductAttention):
        return "attention", True
    if isinstance(module, nn.Dropout):
        return "channels" if module.broadcast_dims else "element", stock(module)
    return "function", False


def convolutional(model: Linen) -> bool:
    """Whether a model has convolutions."""
    return any(kind.startswith("flax.linen.Conv") for part in model.structure.parts.values() for kind in part.kinds)


def recording(model: Linen) -> contextlib.AbstractContextManager[DropoutMasks]:
    """Put every drop of a model on the record; see `parity.record_dropout`."""
    masks = DropoutMasks("flax", modules_of(model), convolutional(model))
    return dropout.recording(masks, functools.partial(followed, model), kind_of)


@contextlib.contextmanager
def replaying(model: Linen, player: Player) -> Iterator[None]:
    """Let a model drop by given masks; see `parity.replay_dropout`."""
    with once_through_scans(), dropout.replaying(player, functools.partial(followed, model), stock, alone):
        yield


@contextlib.contextmanager
def once_through_scans() -> Iterator[None]:
    """Keep `nn.scan` from tracing its body a first time outside of the scan, where it would take masks.

    It does so to find out whether what is broadcast stays as it is, for which a model that has run before needs no proof.
    """
    original = axes_scan.scan

    @functools.wraps(original)
    def scan(fn: Any, in_axes: Any, out_axes: Any, *args: Any, **kwargs: Any) -> Any:
        # Without that trace nothing can be broadcast to the outside.
        if axes_scan.broadcast not in jax.tree.leaves(out_axes):
            kwargs["check_constancy_invariants"] = False
        return original(fn, in_axes, out_axes, *args, **kwargs)

    axes_scan.scan = scan
    try:
        yield
    finally:
        axes_scan.scan = original


def alone(module: nn.Module, ones: Any, kwargs: Any) -> Any:
    """What a module without parameters returns, outside of its model."""
    key = jax.random.key(0)
    copy, _ = module.unbind()
    return copy.clone(parent=None).apply({}, ones, rngs={"params": key, "dropout": key}, **kwargs)
