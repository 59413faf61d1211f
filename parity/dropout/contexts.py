"""Dropout masks of a run on the record, and runs with given masks."""

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, cast

from parity import frameworks
from parity.dropout.keys import Keyed, KeyOf, of_streams, one_after_another
from parity.dropout.masks import DropoutMasks
from parity.dropout.player import Player
from parity.dropout.threefry import checked, key_of
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

    Every step of a scan (`nnx.scan`, `nn.scan`, `jax.lax.scan`) has a mask of its own, in the order of the steps, if its key
    is another in every step; of a scan inside a scan, and under `jax.vmap`, masks cannot be replayed.

    It can stand around a run, eager or compiled: functions that were compiled before are compiled anew
    inside, and are as they were behind it. A compiled function takes its masks when it is
    traced, so that a second call of it would find none left; to call one program with masks of many runs, let
    the context stand inside the compiled function and give `arrays` as its argument::

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
    with played(model, masks, arrays, rename=rename, channels_last=channels_last):
        yield


@contextlib.contextmanager
def played(
    model: Any,
    masks: DropoutMasks,
    arrays: Mapping[str, Sequence[Any]] | None = None,
    *,
    rename: Mapping[str, str] | None = None,
    channels_last: Iterable[str] | None = None,
    silent: Iterable[str] = (),
) -> Iterator[None]:
    """`replay_dropout`, in which some modules of Flax return what they are given.

    Args:
        model: as there, and so the others.
        masks: without any of those modules.
        arrays: in place of the masks.
        rename: of names.
        channels_last: drops on feature maps.
        silent: the paths of those modules in torch.
    """
    room, target = room_of(model, "replay_dropout")
    if not isinstance(masks, DropoutMasks):
        raise InputError(f"masks must be what parity.record_dropout gave, got {frameworks.describe(masks)}")
    renames = Rename(rename) if target == "flax" else Rename(rename).inverse()
    told = (lambda path: renames.apply(path)[0]) if masks.source != target else str
    player = Player(masks, arrays, room.modules_of(model), target, rename=told, channels_last=channels_last, silent=silent)
    with room.replaying(model, player):
        yield


@contextlib.contextmanager
def threefry_dropout(
    torch_model: Any,
    keys: Any,
    *,
    x64: bool | None = None,
    partitionable: bool | None = None,
    rename: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Let a torch model drop by the masks that `jax.random.bernoulli` draws from keys, bit for bit; jax need not be there.

    Elements are counted in the order in which torch has them: a mask of a feature map is jax's with the
    channels first.

    Args:
        torch_model: a `torch.nn.Module` in train mode.
        keys: from where each drop has its key. A seed or a key: drop n of the run, from 0, has
            `jax.random.fold_in(key, n)`. A `flax.nnx.Module`: each module has the keys that its partner of the same
            path would take next; that model stays as it is. A function of the module's path and the number of its
            drop, from 0: what it returns; `parity.threefry.linen_key` helps with Linen.
        x64: whether jax has 64-bit types on, where it draws other numbers; None is as jax stands, if it is loaded.
        partitionable: jax's `jax_threefry_partitionable`; None likewise, otherwise on.
        rename: as in `parity.transfer`, if `keys` is a model.

    Raises:
        InputError: this is no model, or these are no keys.
        DivergenceError: on leaving: for some drop there is no key.
    """
    room, side = room_of(torch_model, "threefry_dropout")
    if side != "torch":
        raise InputError(
            f"threefry_dropout takes a torch.nn.Module, got {frameworks.describe(torch_model)}; Flax draws such masks itself"
        )
    wide, split = frameworks.load("nnx.dropout").draws_as() if "jax" in sys.modules else (False, True)
    source = Keyed(
        key_source(keys, rename),
        wide=wide if x64 is None else x64,
        partitionable=split if partitionable is None else partitionable,
    )
    with room.replaying(torch_model, source):
        yield


def key_source(keys: Any, rename: Mapping[str, str] | None) -> KeyOf:
    """What gives each drop its key.

    Raises:
        InputError: these are no keys.
    """
    if isinstance(keys, int) and not isinstance(keys, bool):
        return one_after_another(key_of(keys))
    owner = frameworks.owner(keys)
    if owner is not None and owner.is_model(keys):
        room, _ = room_of(keys, "threefry_dropout")
        if not hasattr(room, "streams_of"):
            raise InputError(f"{frameworks.describe(keys)} has no keys of its own; record its masks and replay them instead")
        renames = Rename(rename)
        return of_streams(room.streams_of(keys), lambda path: renames.apply(path)[0])
    if "jax" in sys.modules and frameworks.load("nnx").is_array(keys):
        keys = frameworks.load("nnx.dropout").key_data(keys)
    if callable(keys):
        return cast(KeyOf, keys)
    return one_after_another(checked(keys))
