"""What one module computes, operation by operation: fingerprints in place of arrays."""

from dataclasses import dataclass, field

import numpy as np

from parity.evidence.faults import SourceLine
from parity.evidence.fingerprints import Fingerprint, fingerprint

# Operations of one module that are put on the record; with more than that none is named.
LIMIT = 2000
# The name of a step that takes, of arrays over which a loop runs, what one turn works on.
TURN = "turn of a scan"


class TooLongError(Exception):
    """A module computes more operations than are put on the record."""


@dataclass
class Value:
    """One array that was given to an operation, or came of one.

    Attributes:
        print: its fingerprint.
        dtype: of the array.
        source: number of the operation that made it; None if it was given: an argument, a weight, a constant,
            or what a module below answers.
        constant: whether no argument, weight or answer has any part in it.
    """

    print: Fingerprint
    dtype: str
    source: int | None = None
    constant: bool = False


@dataclass(frozen=True)
class Step:
    """One operation.

    Attributes:
        name: of torch's dispatcher, or of jax's primitive.
        within: the function of the library that the user's line calls, where that is known and another.
        line: in the user's code; None where a layer of the framework was called by nobody's code.
        inputs: numbers of the values that it takes.
        outputs: of those that it makes.
    """

    name: str
    within: str
    line: SourceLine | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass
class Tape:
    """The operations of a module's own code, in the order in which they ran.

    Attributes:
        values: every array, by number.
        steps: every operation, by number.
    """

    values: list[Value] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def add(self, array: np.ndarray, source: int | None = None, constant: bool = False) -> int:
        """Put one array on the record; returns its number."""
        self.values.append(Value(fingerprint(array), str(array.dtype), source, constant))
        return len(self.values) - 1

    def begin(self) -> int:
        """The number of the next operation.

        Raises:
            TooLongError: there are too many already.
        """
        if len(self.steps) >= LIMIT:
            raise TooLongError(f"more than {LIMIT} operations")
        return len(self.steps)
