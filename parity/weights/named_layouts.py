"""Layouts that a rename carries by name: `q_proj.weight` -> `q.kernel | rotary(8) | transposed`.

Each is written from torch to Flax; the other direction takes the inverse. Some say in which
order the axes lie, and then nothing else does. The others only move rows or columns, and
what the ledger says of the array comes behind them.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from parity.errors import InputError
from parity.weights.layouts import (
    AS_IS,
    HEADS_BIAS,
    HEADS_IN,
    HEADS_OUT,
    TRANSPOSED,
    Bijection,
    Chain,
    Family,
    Heads,
    Layout,
    Reordered,
    Shape,
    channels_last,
    flipped_kernel,
)


class MisfitError(ValueError):
    """A layout does not fit a shape; the message says what it needs."""


def reordered(name: str, shape: Shape, axis: int, order: np.ndarray) -> Reordered:
    return Reordered(name, shape, axis % len(shape), tuple(order.reshape(-1).tolist()))


def rows_of(name: str, shape: Shape, divisor: int, words: str) -> int:
    """How many rows there are for each of `divisor` blocks.

    Raises:
        MisfitError: the rows are not a multiple of it.
    """
    if not shape or divisor < 1 or shape[0] % divisor:
        raise MisfitError(f"layout {name} needs rows in a multiple of {words} = {divisor}, got shape {shape}")
    return shape[0] // divisor


def permuted(name: str, shape: Shape, ndims: Sequence[int], layout: Bijection | None) -> Bijection:
    if len(shape) not in ndims or layout is None:
        axes = f"{ndims[0]} axes" if len(ndims) == 1 else f"{ndims[0]} to {ndims[-1]} axes"
        raise MisfitError(f"layout {name} needs {axes}, got shape {shape}")
    return layout


def as_is(name: str, shape: Shape, goal: Shape | None) -> Bijection:
    """The array lies in Flax as it does in torch."""
    return AS_IS


def transposed(name: str, shape: Shape, goal: Shape | None) -> Bijection:
    """A matrix: torch has (outputs, inputs), Flax (inputs, outputs)."""
    return permuted(name, shape, (2,), TRANSPOSED)


def kernel(name: str, shape: Shape, goal: Shape | None) -> Bijection:
    """The kernel of a convolution: (outputs, inputs, space) to (space, inputs, outputs)."""
    return permuted(name, shape, (3, 4, 5), channels_last(len(shape) - 2))


def flipped(name: str, shape: Shape, goal: Shape | None) -> Bijection:
    """The kernel of a transposed convolution: (inputs, outputs, space) to (space turned round, inputs, outputs)."""
    return permuted(name, shape, (3, 4, 5), flipped_kernel(len(shape) - 2))


def split_heads(name: str, family: Heads, shape: Shape, goal: Shape | None, heads: int | None) -> Bijection:
    if heads is not None:
        width = shape[family.axis] // heads if heads > 0 else 0
        sizes = [*shape[: family.axis], heads, width, *shape[family.axis + 1 :]]
        goal = tuple(sizes[axis] for axis in family.axes)
    if goal is None:
        raise MisfitError(f"layout {name} needs the number of heads where another layout follows: {name}(8)")
    made = family.between(shape, goal)
    if made is None:
        raise MisfitError(f"layout {name} leads from {shape} to {family.wanted(shape)}, wanted {goal}")
    return made


def heads(name: str, shape: Shape, goal: Shape | None, heads: int | None = None) -> Bijection:
    """Rows that hold all heads: (h d, E) to (E, h, d), and of a bias (h d) to (h, d)."""
    permuted(name, shape, (1, 2), AS_IS)
    return split_heads(name, HEADS_BIAS if len(shape) == 1 else HEADS_OUT, shape, goal, heads)


def heads_in(name: str, shape: Shape, goal: Shape | None, heads: int | None = None) -> Bijection:
    """Columns that hold all heads, as behind attention: (E, h d) to (h, d, E)."""
    permuted(name, shape, (2,), AS_IS)
    return split_heads(name, HEADS_IN, shape, goal, heads)


def flatten(name: str, shape: Shape, goal: Shape | None, C: int, *space: int) -> Bijection:
    """Columns behind torch's flatten of (C, H, W) in the order of Flax's flatten of (H, W, C); of a vector its entries."""
    size = C * int(np.prod(space, dtype=np.int64))
    if not shape or shape[-1] != size:
        raise MisfitError(f"layout {name} needs a last axis of {size}, got shape {shape}")
    return reordered(name, shape, -1, np.moveaxis(np.arange(size).reshape(C, *space), 0, -1))


def unflatten(name: str, shape: Shape, goal: Shape | None, C: int, *space: int) -> Bijection:
    """Rows of a layer whose outputs torch folds into (C, H, W), and Flax into (H, W, C)."""
    size = C * int(np.prod(space, dtype=np.int64))
    if not shape or shape[0] != size:
        raise MisfitError(f"layout {name} needs {size} rows, got shape {shape}")
    return reordered(name, shape, 0, np.moveaxis(np.arange(size).reshape(C, *space), 0, -1))


def rotary(name: str, shape: Shape, goal: Shape | None, heads: int, width: int | None = None) -> Bijection:
    """Rows of a query or key projection: torch rotates the halves of a head, Flax neighbouring pairs.

    Only the first `width` rows of each head, if it is given.
    """
    each = rows_of(name, shape, heads, "heads")
    width = each if width is None else width
    if width % 2 or not 0 < width <= each:
        raise MisfitError(f"layout {name} needs an even width of at most {each} in each of {heads} heads, got shape {shape}")
    order = np.arange(shape[0]).reshape(heads, each)
    order[:, :width] = order[:, :width].reshape(heads, 2, width // 2).swapaxes(1, 2).reshape(heads, width)
    return reordered(name, shape, 0, order)


def qkv_per_head(name: str, shape: Shape, goal: Shape | None, heads: int) -> Bijection:
    """Rows of a fused projection: query, key and value of each head together, to all queries, all keys, all values."""
    each = rows_of(name, shape, 3 * heads, "3 * heads")
    return reordered(name, shape, 0, np.arange(shape[0]).reshape(heads, 3, each).swapaxes(0, 1))


def grouped(name: str, shape: Shape, goal: Shape | None, heads: int, kv_heads: int) -> Bijection:
    """Rows of a fused grouped-query projection: each key's queries, it and its value together, to all of each kind."""
    if kv_heads < 1 or heads % kv_heads:
        raise MisfitError(f"layout {name} needs heads in a multiple of kv_heads, got shape {shape}")
    each = rows_of(name, shape, heads + 2 * kv_heads, "heads + 2 * kv_heads")
    order = np.arange(shape[0]).reshape(kv_heads, heads // kv_heads + 2, each)
    return reordered(name, shape, 0, np.concatenate([part.reshape(-1) for part in (order[:, :-2], order[:, -2], order[:, -1])]))


@dataclass(frozen=True)
class Known:
    """A layout that may be named.

    Attributes:
        build: makes it for a shape; behind the name, the shape and the shape aimed at come its arguments.
        axes: whether it says in which order the axes lie.
    """

    build: Callable[..., Bijection]
    axes: bool

    @property
    def limits(self) -> tuple[int, int | None]:
        """The least and the greatest number of arguments; None has no end."""
        found = list(inspect.signature(self.build).parameters.values())[3:]
        many = any(one.kind is one.VAR_POSITIONAL for one in found)
        # Channels alone are no flatten: one axis of space at least.
        return sum(one.default is one.empty for one in found), None if many else len(found)

    @property
    def arguments(self) -> str:
        """The arguments in words, such as `(heads[, width])`."""
        found = list(inspect.signature(self.build).parameters.values())[3:]
        needed = ["H, W" if one.name == "space" else one.name for one in found if one.default is one.empty]
        optional = "".join(f"[{', ' if needed else ''}{one.name}]" for one in found if one.default is not one.empty)
        return f"({', '.join(needed)}{optional})" if found else ""


KNOWN = {
    "as is": Known(as_is, axes=True),
    "transposed": Known(transposed, axes=True),
    "channels last": Known(kernel, axes=True),
    "flipped": Known(flipped, axes=True),
    "heads": Known(heads, axes=True),
    "heads in": Known(heads_in, axes=True),
    "flatten": Known(flatten, axes=False),
    "unflatten": Known(unflatten, axes=False),
    "rotary": Known(rotary, axes=False),
    "qkv per head": Known(qkv_per_head, axes=False),
    "grouped": Known(grouped, axes=False),
}
INVERSE = "inverse "


def layout_names() -> dict[str, str]:
    """The layouts that a rename may name behind `|`, as they are written, each with what it does from torch to Flax."""
    return {f"{word}{known.arguments}": (known.build.__doc__ or "").partition("\n")[0] for word, known in KNOWN.items()}


@dataclass(frozen=True)
class Named:
    """A layout as a rename names it: `rotary(8)`, or `inverse rotary(8)` for the way back.

    Attributes:
        word: what stands before the arguments.
        arguments: whole numbers.
        turned: whether it is the inverse.
    """

    word: str
    arguments: tuple[int, ...]
    turned: bool

    @property
    def name(self) -> str:
        """As it is written in a rename."""
        listed = f"({', '.join(map(str, self.arguments))})" if self.arguments else ""
        return f"{INVERSE if self.turned else ''}{self.word}{listed}"

    @property
    def axes(self) -> bool:
        """Whether it says in which order the axes lie."""
        return KNOWN[self.word].axes

    def on(self, shape: Shape, goal: Shape | None) -> Bijection:
        """The layout for arrays of a shape.

        Args:
            shape: of the array that it takes.
            goal: the shape that it is to give; None if that is not known.

        Raises:
            MisfitError: it does not fit the shape.
        """
        known = KNOWN[self.word]
        if not self.turned:
            return known.build(self.name, shape, goal, *self.arguments)
        if not self.axes:
            return known.build(self.name, shape, goal, *self.arguments).inverse()
        # What moves axes is made for the shape that comes out; a permutation for any of its rank.
        if goal is None and known.build not in (heads, heads_in):
            return known.build(self.name, shape, None, *self.arguments).inverse()
        if goal is None:
            raise MisfitError(f"layout {self.name} needs to be the last one, got shape {shape}")
        made = known.build(self.name, goal, shape, *self.arguments).inverse()
        if made.shape(shape) != goal:
            raise MisfitError(f"layout {self.name} leads from {shape} to another shape than {goal}")
        return made


@dataclass(frozen=True)
class Given:
    """What a rename says of an array's layout, as a family.

    Attributes:
        steps: the layouts named, from torch to Flax.
        last: what comes behind them, where they do not say how the axes lie.
    """

    steps: tuple[Named, ...]
    last: Family | None = None

    @property
    def name(self) -> str:
        """As it is written in a rename; what comes behind by itself stands there too."""
        return " | ".join([*(step.name for step in self.steps), *([self.last.name] if self.last else [])])

    def built(self, torch_shape: Shape, flax_shape: Shape | None) -> Bijection:
        """The layout from one shape, to the other if that is known.

        Raises:
            MisfitError: a step does not fit.
        """
        made, shape = list[Bijection](), torch_shape
        for number, step in enumerate(self.steps):
            goal = flax_shape if number == len(self.steps) - 1 and self.last is None else None
            made.append(step.on(shape, goal))
            shape = made[-1].shape(shape)
        if self.last is not None and flax_shape is not None:
            end = self.last.between(shape, flax_shape)
            if end is None:
                raise MisfitError(f"{self.name} leads from {torch_shape} to {self.last.wanted(shape)}")
            made.append(end)
        # One permutation alone can be lent without a copy.
        return made[0] if len(made) == 1 and isinstance(made[0], Layout) else Chain(tuple(made), self.name)

    def inverse(self) -> "Given":
        """The layouts named, from Flax to torch; nothing comes behind them."""
        return Given(tuple(replace(step, turned=not step.turned) for step in reversed(self.steps)))

    def between(self, torch_shape: Shape, flax_shape: Shape) -> Bijection | None:
        """The layout that leads from one shape to the other, None if there is none."""
        try:
            made = self.built(torch_shape, flax_shape)
        except MisfitError:
            return None
        return made if made.shape(torch_shape) == flax_shape else None

    def wanted(self, torch_shape: Shape) -> str:
        """The shapes on the Flax side that fit a torch shape, in words."""
        try:
            return str(self.built(torch_shape, None).shape(torch_shape))
        except MisfitError as error:
            return str(error)


def parse(word: str) -> Named:
    """A layout from its name.

    Raises:
        InputError: there is none of that name, or its arguments are not what it takes.
    """
    found = re.fullmatch(r"(inverse )?([a-z ]*[a-z])\s*(?:\(([^()]*)\))?", " ".join(word.split()))
    known = KNOWN.get(found[2]) if found else None
    if found is None or known is None:
        raise InputError(f"there is no layout {word!r}; known are {', '.join(k + v.arguments for k, v in KNOWN.items())}")
    listed = [part.strip() for part in found[3].split(",")] if found[3] is not None and found[3].strip() else []
    least, most = known.limits
    wrong = [part for part in listed if not re.fullmatch(r"[1-9]\d*", part)]
    if wrong or len(listed) < least or (most is not None and len(listed) > most):
        took = f"{found[2]}{known.arguments}"
        raise InputError(f"layout {word!r} is written {took}, in whole numbers from 1; known are {', '.join(KNOWN)}")
    return Named(found[2], tuple(map(int, listed)), bool(found[1]))
