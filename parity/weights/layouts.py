"""Named bijections between the layout of a torch array and that of its Flax twin.

A layout moves elements and changes none, so that its inverse gives the source back bit for
bit whatever the dtype.
"""

from dataclasses import dataclass

import numpy as np


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

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the Flax array for a torch shape."""
        return tuple(shape[axis] for axis in self.permutation(len(shape)))

    def apply(self, array: np.ndarray) -> np.ndarray:
        """The Flax array for a torch array, as a view."""
        return array.transpose(self.permutation(array.ndim))

    def fits(self, ndim: int) -> bool:
        """Whether an array with that many axes has this layout."""
        return self.axes is None or len(self.axes) == ndim


AS_IS = Layout("as is")
TRANSPOSED = Layout("transposed", (1, 0))
