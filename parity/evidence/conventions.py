"""How the same values lie in what a module is given and returns: order of axes, order of arguments, names of outputs.

Torch keeps channels behind the batch, Flax keeps them last; recurrent layers may run over the
first or the second axis; a cell takes its state before or after its input.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from parity.evidence.sampling import permuted, shape_of
from parity.weights.leaf import Layer
from parity.weights.rules import row_of


@dataclass(frozen=True)
class Axes:
    """An order of axes, for arrays of any rank.

    Attributes:
        name: in words, for reports; '' keeps torch's order.
        order: for a rank, the torch axis of each Flax axis.
    """

    name: str
    order: Callable[[int], tuple[int, ...]] = field(compare=False, repr=False)

    def to_flax(self, array: np.ndarray) -> np.ndarray:
        """A torch array in Flax's order."""
        return permuted(array, self.order(len(shape_of(array))))

    def to_torch(self, array: np.ndarray) -> np.ndarray:
        """A Flax array in torch's order."""
        return permuted(array, tuple(int(i) for i in np.argsort(self.order(len(shape_of(array))))))


def channels_last(spatial: int | None = None) -> Axes:
    """Torch's channels, before so many spatial axes or all but the batch, stand last in Flax."""

    def order(ndim: int) -> tuple[int, ...]:
        axes = list(range(ndim))
        at = 1 if spatial is None else ndim - spatial - 1
        if 0 <= at < ndim:
            axes.append(axes.pop(at))
        return tuple(axes)

    return Axes("channels last", order)


def swapped(first: int, second: int, least: int) -> Callable[[int], tuple[int, ...]]:
    def order(ndim: int) -> tuple[int, ...]:
        axes = list(range(ndim))
        if ndim >= least:
            axes[first], axes[second] = axes[second], axes[first]
        return tuple(axes)

    return order


AS_IN_TORCH = Axes("", lambda ndim: tuple(range(ndim)))
BATCH_FIRST = Axes("first two axes swapped", swapped(0, 1, 2))
HEADS_LAST = Axes("heads behind the length", swapped(1, 2, 4))
# What a module of the user's own may keep, where no rule tells, likeliest first.
USUAL = (AS_IN_TORCH, channels_last(), HEADS_LAST, BATCH_FIRST)


@dataclass(frozen=True)
class Convention:
    """How one pair of layers is called and answers.

    Attributes:
        axes: of what carries values.
        arguments: Flax's path of an argument, by torch's; None leaves them in torch's order.
        outputs: Flax's path of an output, by torch's, for each way in which Flax may answer; what is not
            named cannot be compared. Empty compares all.
        rewritten: the arrays that torch's layer is given, by path, as they are in Flax where it wants one for several.
    """

    axes: Axes = AS_IN_TORCH
    arguments: Mapping[str, str] | None = None
    outputs: tuple[Mapping[str, str], ...] = ()
    rewritten: Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]] = dict

    def names(self, flax_outputs: Iterable[str]) -> Mapping[str, str] | None:
        """Flax's path of each output, by torch's, for what Flax returned; None compares all."""
        known = set(flax_outputs)
        return next(
            (names for names in self.outputs if set(names.values()) <= known), self.outputs[0] if self.outputs else None
        )


def convention(torch_layer: Layer, flax_layer: Layer) -> Convention | None:
    """The convention of a pair of layers that the ledger knows; None if it says nothing about their order of axes."""
    row = row_of(torch_layer.kinds, flax_layer.kinds)
    name = row.torch.removeprefix("torch.nn.") if row and row.flax.startswith(("flax.nnx.", "flax.linen.")) else ""
    kind = name.rstrip("123d")
    if kind in ("Conv", "ConvTranspose", "InstanceNorm"):
        return Convention(channels_last(int(name[-2])))
    if kind in ("BatchNorm", "SyncBatchNorm", "GroupNorm"):
        return Convention(channels_last())
    if name == "MultiheadAttention":
        order = time_first(torch_layer.settings("batch_first"), False)
        return Convention(order, outputs=({"[0]": ""},), rewritten=one_mask)
    if name in ("RNN", "GRU", "LSTM"):
        order = time_first(torch_layer.settings("batch_first"), flax_layer.settings("time_major"))
        # Flax returns the outputs alone, or the state before them.
        return Convention(order, {"args[0]": "args[0]"}, ({"[0]": ""}, {"[0]": "[1]"}))
    if name in ("RNNCell", "GRUCell"):
        return Convention(arguments={"args[0]": "args[1]", "args[1]": "args[0]"}, outputs=({"": "[1]"},))
    if name == "LSTMCell":
        given = {"args[0]": "args[1]", "args[1][0]": "args[0][1]", "args[1][1]": "args[0][0]"}
        return Convention(arguments=given, outputs=({"[0]": "[1]", "[1]": "[0][0]"},))
    if name == "PReLU" and torch_layer.settings("num_parameters") > 1:
        return Convention(channels_last())
    # What works element by element goes by what it is given.
    return Convention() if name and name not in ("PReLU", "Dropout") else None


# Where nnx.MultiHeadAttention takes its mask. True shows.
MASK = "kwargs['mask']"


def one_mask(given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The two masks of torch's attention, in which True or minus infinity hides, as the one of Flax, in which True shows."""
    padding = next((given[p] for p in ("kwargs['key_padding_mask']", "args[3]") if p in given), None)
    pairs = next((given[p] for p in ("kwargs['attn_mask']", "args[5]") if p in given), None)
    if any(mask is not None and adds(mask) for mask in (padding, pairs)):
        return dict(given)
    shown = np.ones((1, 1, 1, 1), bool)
    if padding is not None:
        shown = shown & ~hides(padding).reshape(-1, 1, 1, padding.shape[-1])
    if pairs is not None:
        batch = next(iter(given.values())).shape[0] if pairs.ndim == 3 else 1
        shown = shown & ~hides(pairs).reshape(batch, -1, *pairs.shape[-2:])
    masks = ("kwargs['key_padding_mask']", "kwargs['attn_mask']", "args[3]", "args[5]")
    return {**{path: array for path, array in given.items() if path not in masks}, MASK: shown}


def hides(mask: np.ndarray) -> np.ndarray:
    return mask if mask.dtype == bool else mask < -1e3


def adds(mask: np.ndarray) -> bool:
    """Whether a mask is numbers that are added, of which no switch can be made."""
    return mask.dtype != bool and bool(((mask != 0) & ~hides(mask)).any())


def time_first(batch_first: Any, time_major: Any) -> Axes:
    """Of a layer over sequences: the same on both sides, or the first two axes swapped."""
    return AS_IN_TORCH if bool(batch_first) is not bool(time_major) else BATCH_FIRST
