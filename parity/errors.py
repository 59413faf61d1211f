"""What parity raises. Every message names the values seen, what was wanted, and one thing to do."""

import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Frames of these packages are not the user's.
INSIDE = frozenset(
    ("torch", "jax", "jaxlib", "flax", "numpy", "parity", "contextlib", "functools", "importlib", "jaxtyping", "optax")
)


# Characters that move a terminal's cursor, colour it or turn the direction of reading, as they are told instead.
CONTROL = {
    number: f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"
    for number in (*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
    if chr(number) not in "\t\n"
}


def printable(text: str) -> str:
    """A text that a terminal shows as it stands: names and sentences of a stranger's file are in it."""
    return text.translate(CONTROL)


class ParityError(Exception):
    """Base of every error of this package.

    Attributes:
        code: stays the same from version to version: one of `parity.REFUSALS`, or of `parity.VERDICTS` where the error
            stands in place of a verdict.
    """

    code = "misuse"

    def __str__(self) -> str:
        return printable(super().__str__())


class InputError(ParityError, ValueError):
    """The call cannot be carried out as it stands. Nothing of the caller's was changed."""

    def __init__(self, message: str = "", code: str = ""):
        super().__init__(message)
        self.code = code or type(self).code


class TransferError(InputError):
    """Source and target do not fit. Nothing was written.

    Attributes:
        problems: every problem found, one sentence each.
        rename: source and target names of the leaves that do fit, to begin a rename with.
        plan: the `Transfer` as far as it could be planned, None where there was nothing to pair.
    """

    code = "does-not-fit"

    def __init__(self, message: str, problems: Sequence[str] = (), rename: Mapping[str, str] | None = None, plan: Any = None):
        super().__init__(message)
        self.problems = tuple(problems)
        self.rename = dict(rename or {})
        self.plan = plan


class MissingFrameworkError(ParityError, ImportError):
    """The call needs a framework that is not installed."""

    code = "missing-package"


class NotRecordedError(ParityError):
    """A bundle does not hold what was asked of the side that it stands for."""


class DivergenceError(ParityError, AssertionError):
    """Two models, or two sets of arrays, are not the same."""

    code = "diverges"


def listed(heading: str, problems: Sequence[str]) -> str:
    """Join problems into one message: inline if there is one, a list otherwise."""
    if len(problems) == 1:
        return f"{heading}: {problems[0]}"
    return f"{heading}: {len(problems)} problems\n" + "\n".join(f"  - {problem}" for problem in problems)


def first_line(error: BaseException) -> str:
    """The first line of an error that says something."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def raised(error: BaseException) -> str:
    """An error in one line, with the last line of the user's own code on its way."""
    where = users_line(error)
    return f"{type(error).__name__}: {first_line(error)}" + (f" (at {where})" if where else "")


def users_line(error: BaseException) -> str:
    """File, line and function of the last frame of an error that belongs to no framework; '' if there is none."""
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in INSIDE:
            found = f"{Path(frame.f_code.co_filename).name}:{line}, in {frame.f_code.co_name}"
    return found
