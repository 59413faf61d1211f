"""What parity raises. Every message names the values seen, what was wanted, and one thing to do."""

from collections.abc import Mapping, Sequence
from typing import Any


class ParityError(Exception):
    """Base of every error of this package."""


class InputError(ParityError, ValueError):
    """The call cannot be carried out as it stands. Nothing of the caller's was changed."""


class TransferError(InputError):
    """Source and target do not fit. Nothing was written.

    Attributes:
        problems: every problem found, one sentence each.
        rename: source and target names of the leaves that do fit, to begin a rename with.
        plan: the `Transfer` as far as it could be planned, None where there was nothing to pair.
    """

    def __init__(self, message: str, problems: Sequence[str] = (), rename: Mapping[str, str] | None = None, plan: Any = None):
        super().__init__(message)
        self.problems = tuple(problems)
        self.rename = dict(rename or {})
        self.plan = plan


class MissingFrameworkError(ParityError, ImportError):
    """The call needs a framework that is not installed."""


class DivergenceError(ParityError, AssertionError):
    """Two models, or two sets of arrays, are not the same."""


def listed(heading: str, problems: Sequence[str]) -> str:
    """Join problems into one message: inline if there is one, a list otherwise."""
    if len(problems) == 1:
        return f"{heading}: {problems[0]}"
    return f"{heading}: {len(problems)} problems\n" + "\n".join(f"  - {problem}" for problem in problems)


def first_line(error: BaseException) -> str:
    """The first line of an error that says something."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
