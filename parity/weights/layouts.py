"""Named bijections between the layout of a torch array and that of its Flax twin.

A layout moves elements and changes none, so that its inverse gives the source back bit for
bit whatever the dtype. What stands in a row of the ledger is a `Family`: it names a layout
once the shapes on both sides are known. A permutation of axes is its own family.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Shape = tuple[int, ...]


class Bijection(Protocol):
    """A layout between two arrays of known shapes."""

    @property
    def name(self) -> str:
        """What plans and reports call it."""

    def inverse(self) -> "Bijection":
        """The layout that leads back."""

    def shape(self, shape: Shape) -> Shape:
        """The shape of the Flax array for a torch shape."""

    def apply(self, array: np.ndarray) -> np.ndarray:
        """The Flax array for a torch array."""


class Family(Protocol):
    """What a row of the ledger declares: the layout of its array, whatever the sizes."""

    @property
    def name(self) -> str:
        """What plans and reports call it."""

    def between(self, torch_shape: Shape, flax_shape: Shape) -> Bijection | None:
        """The layout that leads from one shape to the other, None if there is none."""

    def wanted(self, torch_shape: Shape) -> str:
        """The shapes on the Flax side that fit a torch shape, in words."""


@dataclass(frozen=True)
class Layout:
    """A permutation of axes.

    Attributes:
        name: what plans and reports call it.
        axes: for each axis of the Flax array, the axis of the torch array; None keeps all.
    """

    name: str
    axes: tuple[int, ...] | None = None

    def permutation(self, ndim: int) -> tuple[int, ...]:
        """The axes of the torch array in the order of the Flax array.

        Raises:
            ValueError: the layout is for another number of axes.
        """
        if self.axes is None:
            return tuple(range(ndim))
        if len(self.axes) != ndim:
            raise ValueError(f"layout {self.name} is for {len(self.axes)} axes, got {ndim}")
        return self.axes

    def inverse(self) -> "Layout":
        """The layout that leads back."""
        if self.axes is None:
            return self
        return Layout(self.name, tuple(int(axis) for axis in np.argsort(self.axes)))

    def shape(self, shape: Shape) -> Shape:
        """The shape of the Flax array for a torch shape."""
        return shape if self.axes is None else tuple([shape[axis] for axis in self.permutation(len(shape))])

    def apply(self, array: np.ndarray) -> np.ndarray:
        """The Flax array for a torch array, as a view."""
        return array.transpose(self.permutation(array.ndim))

    def fits(self, ndim: int) -> bool:
        """Whether an array with that many axes has this layout."""
        return self.axes is None or len(self.axes) == ndim

    def between(self, torch_shape: Shape, flax_shape: Shape) -> "Layout | None":
        """Itself, if it leads from one shape to the other."""
        return self if self.fits(len(torch_shape)) and self.shape(torch_shape) == flax_shape else None

    def wanted(self, torch_shape: Shape) -> str:
        """The one shape on the Flax side that fits, in words."""
        return str(self.shape(torch_shape)) if self.fits(len(torch_shape)) else f"{len(self.axes or ())} axes"


@dataclass(frozen=True)
class Flipped:
    """A permutation of axes that also turns some of them round.

    Attributes:
        name: what plans and reports call it.
        axes: for each axis of the Flax array, the axis of the torch array.
        flips: the axes of the Flax array that run the other way.
    """

    name: str
    axes: tuple[int, ...]
    flips: tuple[int, ...]

    def inverse(self) -> "Flipped":
        """The layout that leads back."""
        back = tuple(int(axis) for axis in np.argsort(self.axes))
        return Flipped(self.name, back, tuple(self.axes[axis] for axis in self.flips))

    def shape(self, shape: Shape) -> Shape:
        """The shape of the Flax array for a torch shape."""
        return tuple(shape[axis] for axis in self.axes)

    def apply(self, array: np.ndarray) -> np.ndarray:
        """The Flax array for a torch array, as a view."""
        return np.flip(array.transpose(self.axes), self.flips)

    def between(self, torch_shape: Shape, flax_shape: Shape) -> "Flipped | None":
        """Itself, if it leads from one shape to the other."""
        return self if len(torch_shape) == len(self.axes) and self.shape(torch_shape) == flax_shape else None

    def wanted(self, torch_shape: Shape) -> str:
        """The one shape on the Flax side that fits, in words."""
        return str(self.shape(torch_shape)) if len(torch_shape) == len(self.axes) else f"{len(self.axes)} axes"


@dataclass(frozen=True)
class Regrouped:
    """Axes split, permuted and joined again, for arrays of these sizes.

    Attributes:
        name: what plans and reports call it.
        before: the shape that it takes.
        split: the same elements with some axes split in several.
        axes: the split axes in their new order.
        after: the shape that it gives.
    """

    name: str
    before: Shape
    split: Shape
    axes: tuple[int, ...]
    after: Shape

    def inverse(self) -> "Regrouped":
        """The layout that leads back."""
        moved = tuple(self.split[axis] for axis in self.axes)
        return Regrouped(self.name, self.after, moved, tuple(int(axis) for axis in np.argsort(self.axes)), self.before)

    def shape(self, shape: Shape) -> Shape:
        """The shape that it gives.

        Raises:
            ValueError: the layout is for another shape.
        """
        if shape != self.before:
            raise ValueError(f"layout {self.name} is for shape {self.before}, got {shape}")
        return self.after

    def apply(self, array: np.ndarray) -> np.ndarray:
        """The array in its new shape; a view where NumPy can make one."""
        return array.reshape(self.split).transpose(self.axes).reshape(self.after)


@dataclass(frozen=True)
class Heads:
    """One axis of the torch array holds all heads, one after the other; Flax has an axis for the heads.

    Attributes:
        name: what plans and reports call it.
        axis: the axis of the torch array that is split into heads and their width.
        axes: the axes after the split, in Flax's order.
    """

    name: str
    axis: int
    axes: tuple[int, ...]

    def between(self, torch_shape: Shape, flax_shape: Shape) -> Regrouped | None:
        """The layout for as many heads as the Flax array has."""
        if len(flax_shape) != len(self.axes) or len(torch_shape) != len(self.axes) - 1:
            return None
        split = tuple(flax_shape[self.axes.index(axis)] for axis in range(len(self.axes)))
        joined = (*split[: self.axis], split[self.axis] * split[self.axis + 1], *split[self.axis + 2 :])
        return Regrouped(self.name, torch_shape, split, self.axes, flax_shape) if joined == torch_shape else None

    def wanted(self, torch_shape: Shape) -> str:
        """The shapes on the Flax side that fit, in words."""
        if len(torch_shape) != len(self.axes) - 1:
            return f"{len(self.axes)} axes"
        sizes = [str(size) for size in torch_shape]
        sizes[self.axis : self.axis + 1] = ["heads", f"{torch_shape[self.axis]} / heads"]
        return f"({', '.join(sizes[axis] for axis in self.axes)})"


@dataclass(frozen=True)
class OneNumber:
    """A torch array of one element against a Flax array without axes; anything longer stays as it is."""

    name: str = "one number"

    def between(self, torch_shape: Shape, flax_shape: Shape) -> Bijection | None:
        """The layout, if both shapes hold one number, or are the same."""
        if torch_shape == (1,) and flax_shape == ():
            return Regrouped(self.name, (1,), (), (), ())
        return AS_IS.between(torch_shape, flax_shape)

    def wanted(self, torch_shape: Shape) -> str:
        """The shapes on the Flax side that fit, in words."""
        return "()" if torch_shape == (1,) else str(torch_shape)


@dataclass(frozen=True)
class Reordered:
    """One axis in another order, for arrays of one shape.

    Attributes:
        name: what plans and reports call it.
        before: the shape that it takes and gives.
        axis: the axis whose entries move.
        order: for each place of the result, the place that it comes from.
    """

    name: str
    before: Shape
    axis: int
    order: tuple[int, ...]

    def inverse(self) -> "Reordered":
        """The layout that leads back."""
        return Reordered(self.name, self.before, self.axis, tuple(np.argsort(self.order).tolist()))

    def shape(self, shape: Shape) -> Shape:
        """The same shape.

        Raises:
            ValueError: the layout is for another shape.
        """
        if shape != self.before:
            raise ValueError(f"layout {self.name} is for shape {self.before}, got {shape}")
        return shape

    def apply(self, array: np.ndarray) -> np.ndarray:
        """The array in its new order, as a copy."""
        return array.take(self.order, self.axis)


@dataclass(frozen=True)
class Chain:
    """Layouts one after the other.

    Attributes:
        steps: in the order in which they are applied.
        name: what plans and reports call it, in either direction.
    """

    steps: tuple[Bijection, ...]
    name: str

    def inverse(self) -> "Chain":
        """The layout that leads back."""
        return Chain(tuple(step.inverse() for step in reversed(self.steps)), self.name)

    def shape(self, shape: Shape) -> Shape:
        """The shape behind the last step."""
        for step in self.steps:
            shape = step.shape(shape)
        return shape

    def apply(self, array: np.ndarray) -> np.ndarray:
        """The array behind the last step."""
        for step in self.steps:
            array = step.apply(array)
        return array


@dataclass(frozen=True)
class Squeezed:
    """A torch array with axes of length 1 that Flax leaves out."""

    name: str = "squeezed"

    def between(self, torch_shape: Shape, flax_shape: Shape) -> Regrouped | None:
        """The layout, if the other axes are the same."""
        kept, wanted = ([size for size in shape if size != 1] for shape in (torch_shape, flax_shape))
        axes = tuple(range(len(torch_shape)))
        return Regrouped(self.name, torch_shape, torch_shape, axes, flax_shape) if kept == wanted else None

    def wanted(self, torch_shape: Shape) -> str:
        """The shapes on the Flax side that fit, in words."""
        return str(tuple(size for size in torch_shape if size != 1))


@dataclass(frozen=True)
class General:
    """A matrix of outputs and inputs that Flax has turned over, with several axes for either.

    Attributes:
        name: what plans and reports call it.
        axes: the axes of the torch array in Flax's order, before any is split.
    """

    name: str
    axes: tuple[int, ...]

    def between(self, torch_shape: Shape, flax_shape: Shape) -> Regrouped | None:
        """The layout, if Flax's axes are torch's, each split into some."""
        if len(torch_shape) != len(self.axes) or not splits(tuple(torch_shape[axis] for axis in self.axes), flax_shape):
            return None
        return Regrouped(self.name, torch_shape, torch_shape, self.axes, flax_shape)

    def wanted(self, torch_shape: Shape) -> str:
        """The shapes on the Flax side that fit, in words."""
        if len(torch_shape) != len(self.axes):
            return f"as many elements as {len(self.axes)} axes"
        return f"({', '.join(str(torch_shape[axis]) for axis in self.axes)}), each in one axis or several"


def splits(sizes: Shape, shape: Shape) -> bool:
    """Whether a shape has each of some sizes as the product of one axis or several, in order."""
    if not sizes:
        return not shape
    return any(math.prod(shape[:count]) == sizes[0] and splits(sizes[1:], shape[count:]) for count in range(1, len(shape) + 1))


AS_IS = Layout("as is")
NORMS = Squeezed()
TRANSPOSED = Layout("transposed", (1, 0))
ONE_NUMBER = OneNumber()
GENERAL = General("transposed", (1, 0))
SPLIT = General("split", (0,))
HEADS_OUT = Heads("heads", 0, (2, 0, 1))
HEADS_IN = Heads("heads", 1, (1, 2, 0))
HEADS_BIAS = Heads("heads", 0, (0, 1))


def channels_last(ndim: int) -> Layout:
    """The kernel of a convolution: torch has outputs, inputs, space; Flax space, inputs, outputs."""
    return Layout("channels last", (*range(2, ndim + 2), 1, 0))


def flipped_kernel(ndim: int) -> Flipped:
    """The kernel of a transposed convolution that Flax slides as it lies: torch has inputs, outputs, space, turned round."""
    return Flipped("flipped", (*range(2, ndim + 2), 0, 1), tuple(range(ndim)))
