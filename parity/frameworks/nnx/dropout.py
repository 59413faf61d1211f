"""Drops of NNX models: on the record, and run with given masks."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from parity.dropout.keys import Stream
from parity.dropout.masks import DropoutMasks
from parity.dropout.player import Player
from parity.frameworks.jax import dropout
from parity.frameworks.jax.dropout import Around
from parity.frameworks.nnx.leaves import kinds, walk

# Each module of a model is told its path in an attribute meanwhile: that goes along into compiled functions and
# gradients, where the module is another object.
MARK = "_parity_dropout"
CONTEXTS = itertools.count(1)


def module_paths(model: Any) -> list[tuple[str, Any]]:
    """Every module under its first path in torch's words."""
    found: dict[int, tuple[str, Any]] = {}
    for _, torch_path, node in walk(model):
        if isinstance(node, nnx.Module):
            found.setdefault(id(node), (".".join(torch_path), node))
    return list(found.values())


def modules_of(model: Any) -> dict[str, str]:
    """The first path, in torch's words, of every module by all paths that it has."""
    firsts = {id(module): path for path, module in module_paths(model)}
    found: dict[str, str] = {}
    for path, torch_path, node in walk(model):
        if isinstance(node, nnx.Module):
            found |= dict.fromkeys((".".join(path), ".".join(torch_path)), firsts[id(node)])
    return found


class Marks:
    """Tells modules their paths."""

    def __init__(self, model: Any):
        self.number = next(CONTEXTS)
        self.marked: list[Any] = []
        self.shape = shape_of(model)
        self.mark(model)

    def mark(self, model: Any) -> None:
        """Tell every module inside its path."""
        for path, module in module_paths(model):
            # As a static attribute, not by nnx's own way: that refuses what another trace has made.
            object.__setattr__(module, MARK, (self.number, path))
            self.marked.append(module)

    def path_of(self, module: Any, outermost: bool) -> str | None:
        """The path of a module, None if it is of another model."""
        mark = vars(module).get(MARK)
        if mark is None and outermost and shape_of(module) == self.shape:
            # The model put together again from parts that were split before.
            self.mark(module)
            mark = vars(module)[MARK]
        return mark[1] if mark is not None and mark[0] == self.number else None

    def remove(self) -> None:
        """Leave no trace."""
        for module in self.marked:
            vars(module).pop(MARK, None)


def shape_of(model: Any) -> list[tuple[str, type]]:
    return [(path, type(module)) for path, module in module_paths(model)]


@contextlib.contextmanager
def followed(model: Any, around: Around) -> Iterator[None]:
    """Send every call of a module of a model through `around`, in compiled functions too."""
    marks = Marks(model)
    depth: list[int] = []

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def followed_call(self: Any, *args: Any, **kwargs: Any) -> Any:
            # A class that calls super().__call__ is still one module.
            path = None if id(self) in depth else marks.path_of(self, not depth)
            if path is None:
                return original(self, *args, **kwargs)
            depth.append(id(self))
            try:
                return around(self, path, functools.partial(original, self), args, kwargs)
            finally:
                depth.pop()

        return followed_call

    classes = {cls for _, module in module_paths(model) for cls in type(module).__mro__}
    originals = {cls: vars(cls)["__call__"] for cls in classes if "__call__" in vars(cls) and issubclass(cls, nnx.Module)}
    try:
        for cls, original in originals.items():
            setattr(cls, "__call__", wrap(original))  # noqa: B010
        yield
    finally:
        for cls, original in originals.items():
            setattr(cls, "__call__", original)  # noqa: B010
        marks.remove()


def stock(module: Any) -> bool:
    """Whether a module drops by Flax's own arithmetic."""
    return next((cls for cls in type(module).__mro__ if "__call__" in vars(cls)), None) is nnx.Dropout


def kind_of(module: Any) -> tuple[str, bool]:
    """The kind of mask that a module draws, and whether it scales by 1 / (1 - rate)."""
    if isinstance(module, nnx.MultiHeadAttention):
        return "attention", True
    if isinstance(module, nnx.Dropout):
        return "channels" if module.broadcast_dims else "element", stock(module)
    return "function", False


def convolutional(model: Any) -> bool:
    """Whether a model has convolutions."""
    return any(kind.startswith("flax.nnx.Conv") for _, module in module_paths(model) for kind in kinds(module))


def recording(model: Any) -> contextlib.AbstractContextManager[DropoutMasks]:
    """Put every drop of a model on the record; see `parity.record_dropout`."""
    masks = DropoutMasks("flax", modules_of(model), convolutional(model))
    return dropout.recording(masks, functools.partial(followed, model), kind_of)


def replaying(model: Any, player: Player) -> contextlib.AbstractContextManager[None]:
    """Let a model drop by given masks; see `parity.replay_dropout`."""
    return dropout.replaying(player, functools.partial(followed, model), stock, alone)


def alone(module: Any, ones: Any, kwargs: Any) -> Any:
    """What a module without parameters returns, outside of its model."""
    graphdef, state = nnx.split(module)
    if any(not isinstance(leaf, nnx.RngState) for _, leaf in nnx.to_flat_state(state)):
        raise ValueError("it has parameters")

    def known(leaf: Any) -> Any:
        # The real ones may be known only when the program runs.
        return leaf.replace(jax.random.key(0) if isinstance(leaf, nnx.RngKey) else jnp.zeros((), jnp.uint32))

    twin = nnx.merge(graphdef, nnx.from_flat_state({path: known(leaf) for path, leaf in nnx.to_flat_state(state)}))
    vars(twin).pop(MARK)
    return twin(ones, **kwargs)


def streams_of(model: Any) -> dict[str, Stream]:
    """The stream of keys from which each module drops, by all paths of the module."""
    modules, names = dict(module_paths(model)), modules_of(model)
    found = {}
    for way, first in names.items():
        stream = getattr(modules[first], "rngs", None)
        if isinstance(stream, nnx.Rngs):
            stream = stream.dropout if "dropout" in stream or "default" in stream else None
        if isinstance(stream, nnx.RngStream):
            found[way] = Stream(key_data(stream.key[...]), int(stream.count[...]), id(stream))
    return found


def key_data(key: Any) -> np.ndarray:
    """A key as two uint32."""
    return np.asarray(jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key)


def draws_as() -> tuple[bool, bool]:
    """Whether jax has 64-bit types on, and whether its bits are partitionable."""
    return bool(jax.config.jax_enable_x64), bool(jax.config.jax_threefry_partitionable)
