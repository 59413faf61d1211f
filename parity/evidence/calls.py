"""A call of a model, and what came of it, with every array in NumPy."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from parity.evidence.faults import SourceLine
from parity.evidence.shelf import taken
from parity.evidence.trees import mapped


@dataclass(frozen=True)
class Call:
    """Arguments for both models.

    Attributes:
        args: positional arguments, arrays in NumPy, anything else as given.
        kwargs: keyword arguments likewise.
        castable: paths of the floating point arrays that carry values, not masks: they take
            on the dtype of a run and get gradients.
        added: paths of the floating point masks: torch adds them to scores of the same dtype alone, so that
            they too take on the dtype of a run, but they get no gradient and are never drawn. So do complex arrays.
        masks: paths of the arguments that the model calls masks.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    castable: frozenset[str] = frozenset()
    masks: tuple[str, ...] = ()
    added: frozenset[str] = frozenset()

    def cast(self, path: str) -> bool:
        """Whether the array at a path takes on the dtype of a run."""
        return path in self.castable or path in self.added


@dataclass(frozen=True)
class Evaluation:
    """What a run returned, and what it did besides.

    Attributes:
        outputs: by path.
        gradients: by `input ...` or parameter path.
        written: paths of arguments, or of containers of them, that the model wrote into.
        attributes: plain attributes of modules that the model changed; they are as they were again.
        buffers: by path, what of torch's buffers the run changed, as it left them; the model's own are as they were.
    """

    outputs: dict[str, Any]
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    written: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    buffers: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def floats(self) -> dict[str, np.ndarray]:
        """The outputs that are floating point arrays."""
        return {p: a for p, a in self.outputs.items() if isinstance(a, np.ndarray) and "float" in str(a.dtype)}


@dataclass(frozen=True)
class Abstract:
    """An array of which only shape and dtype are known."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Captured:
    """What one call of one submodule returned.

    Attributes:
        path: the submodule's dotted path, in torch's words.
        call: 0 for its first call, 1 for its second.
        outputs: arrays, or what stands for them where they were put aside, by path in the returned tree.
        inputs: the positional arguments that are arrays, by position.
    """

    path: str
    call: int
    outputs: dict[str, Any]
    inputs: dict[int, np.ndarray] = field(default_factory=dict)

    @property
    def passes_on(self) -> bool:
        """Whether it returned what it was given, as dropout in eval mode does: there is nothing in it to look into."""
        return list(self.outputs) == [""] and 0 in self.inputs and same(taken(self.inputs[0]), taken(self.outputs[""]))

    def taken(self, *, inputs: bool = True) -> "Captured":
        """The same with its arrays in memory, those of its inputs only if asked for."""
        outputs = {path: taken(value) for path, value in self.outputs.items()}
        return replace(self, outputs=outputs, inputs={n: taken(a) for n, a in self.inputs.items()} if inputs else {})


def same(given: Any, returned: Any) -> bool:
    """Whether two values are one array."""
    if not isinstance(given, np.ndarray) or not isinstance(returned, np.ndarray) or given.shape != returned.shape:
        return False
    if given.dtype != returned.dtype or (given.size and given.flat[0] != returned.flat[0]):
        # Most that differ do so in the first value already.
        return False
    return np.array_equal(given, returned)


@dataclass(frozen=True)
class ModuleCall:
    """One call of one submodule, with all that it was given and what it returned; arrays in NumPy, or put aside.

    Attributes:
        path: the submodule's dotted path, in torch's words.
        call: 0 for its first call, 1 for its second.
        args: its positional arguments.
        kwargs: its keyword arguments.
        output: the tree that it returned.
        inside: path and call of the recorded call that made this one; None for the model itself.
        line: of the user's code that makes it; None if a layer of the framework does.
    """

    path: str
    call: int
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    inside: tuple[str, int] | None
    line: SourceLine | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.path, self.call

    def taken(self) -> "ModuleCall":
        """The same with the arrays in memory that were put aside."""
        args, kwargs, output = (mapped(lambda _, leaf: taken(leaf), tree) for tree in (self.args, self.kwargs, self.output))
        return replace(self, args=args, kwargs=kwargs, output=output)


@dataclass(frozen=True)
class Alone:
    """A submodule run by itself, with the modules below it answering as they were told.

    Attributes:
        outputs: leaves by path in the returned tree.
        given: what it gave the modules below, by their path, call and path of the argument.
        seen: how often each module below was called where an answer can be given; a call inside a
            transformation of the compiler is none.
    """

    outputs: dict[str, Any]
    given: dict[tuple[str, int, str], Any] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Operation:
    """One operation of a module's own code, without its arrays.

    Attributes:
        number: its place among them.
        name: what torch's dispatcher calls it.
        shapes: of the arrays it takes, by position.
        dtypes: theirs.
        args: its positional arguments, None in the place of an array.
        kwargs: its keyword arguments likewise.
        shape: of its result, or of the first of several.
        masks: whether one of the arrays hides and shows.
        switches: whether one of them holds nothing but the numbers 0 and 1.
        operands: the fingerprints of the floating point arrays that it takes, by position, or by that of their
            list and theirs in it.
    """

    number: int
    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    shape: tuple[int, ...]
    masks: bool
    switches: bool
    operands: Mapping[tuple[int, ...], int] = field(default_factory=dict)


def fingerprint(array: np.ndarray) -> int:
    """A number that two arrays share if, and hardly ever unless, they have the same shape, dtype and bits."""
    told = zlib.crc32(f"{array.shape} {array.dtype}".encode())
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, told)
