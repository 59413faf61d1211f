"""Dropout masks of a run on the record, and runs with given masks."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from parity import frameworks
from parity.dropout.masks import DropoutMasks
from parity.dropout.player import Player
from parity.errors import InputError
from parity.weights.paths import Rename


def room_of(model: Any, verb: str) -> tuple[ModuleType, str]:
    """The dropout room of a model's framework, and `torch` or `flax`.

    Raises:
        InputError: it is no model.
    """
    owner = frameworks.owner(model)
    if owner is None or not owner.is_model(model):
        raise InputError(
            f"{verb} takes a torch.nn.Module, a flax.nnx.Module or a parity.Linen, got {frameworks.describe(model)}"
        )
    return frameworks.load(f"{owner.__name__.rpartition('.')[2]}.dropout"), owner.NAME


@contextlib.contextmanager
def record_dropout(model: Any) -> Iterator[DropoutMasks]:
    """Put every mask that a model draws inside the context on the record.

    Of torch: `nn.Dropout` and its 1d, 2d, 3d and alpha forms, `F.dropout` and the like, attention weights
    inside `F.scaled_dot_product_attention`, `nn.MultiheadAttention` and the layers made of it, between the
    layers of `nn.LSTM`, `nn.GRU` and `nn.RNN`, and masks drawn by `torch.bernoulli`. Of Flax: masks drawn by
    `jax.random.bernoulli`, as all of Flax's own are, in compiled functions too.

    The model runs as it would otherwise, in train mode and with the caller's random numbers. The record
    is whole when the context is left.

    Args:
        model: a `torch.nn.Module`, a `flax.nnx.Module` or a `parity.Linen`; the very object that runs.

    Yields:
        The masks, still empty.

    Raises:
        InputError: it is no model, its masks cannot be seen, or it draws what is no mask.
    """
    room, _ = room_of(model, "record_dropout")
    with room.recording(model) as masks:
        yield masks


@contextlib.contextmanager
def replay_dropout(
    model: Any,
    masks: DropoutMasks,
    arrays: Mapping[str, Sequence[Any]] | None = None,
    *,
    rename: Mapping[str, str] | None = None,
    channels_last: Iterable[str] | None = None,
) -> Iterator[None]:
    """Let a model in train mode drop by recorded masks instead of its own.

    Masks find their places by the paths of modules; inside the innermost module that both models have they
    are taken in order. Layers that are Flax's own drop in torch's arithmetic, `x * (mask / (1 - rate))`, to the
    last bit; Flax alone divides by `1 - rate`, and gives 0 in place of a dropped NaN.

    It can stand around a run, eager or compiled: functions that were compiled before are compiled anew
    inside, and are as they were behind it. A compiled function takes its masks when it is
    traced, so that a second call of it would find none left; to call one program with masks of many runs, let
    the context stand inside the compiled function and give `arrays` as its argument:

        @jax.jit
        def step(state, batch, arrays):
            model = nnx.merge(graphdef, state)
            with parity.replay_dropout(model, masks, arrays):
                ...

    Args:
        model: a `flax.nnx.Module`, a `parity.Linen` or a `torch.nn.Module`. It keeps its own random
            keys, which Flax asks for though they are not used.
        masks: as `record_dropout` has them. With `arrays`, only their `plan` counts.
        arrays: masks in place of those in `masks`, of the structure and shapes of `masks.arrays()`;
            they may be traced.
        rename: as in `parity.transfer`.
        channels_last: paths in torch, or patterns of them, of drops on feature maps whose channels Flax has last.
            None decides by the shapes.

    Raises:
        InputError: this is no model, or `arrays` do not fit.
        DivergenceError: on leaving: the two do not drop alike: too often, too rarely, at another place, in
            another shape, with another rate or scale; all at once.
    """
    room, target = room_of(model, "replay_dropout")
    if not isinstance(masks, DropoutMasks):
        raise InputError(f"masks must be what parity.record_dropout gave, got {frameworks.describe(masks)}")
    renames = Rename(rename) if target == "flax" else Rename(rename).inverse()
    told = (lambda path: renames.apply(path)[0]) if masks.source != target else str
    player = Player(masks, arrays, room.modules_of(model), target, rename=told, channels_last=channels_last)
    with room.replaying(model, player):
        yield
