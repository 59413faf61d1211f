"""What a plan says of the leaves that found no counterpart, and the rename that may give them one."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

# In front of a name in a rename file that nobody has confirmed yet.
SUGGESTED = "? "


@dataclass(frozen=True)
class Unpaired:
    """A leaf that has no counterpart on the other side.

    Attributes:
        side: on which side it is.
        path: its path.
        shape: its shape.
        dtype: its dtype.
        reason: why it has none, as a whole sentence.
        nearest: the leaves of the other side whose names are most like its own.
    """

    side: Literal["source", "target"]
    path: str
    shape: tuple[int, ...]
    dtype: str
    reason: str
    nearest: tuple[str, ...] = ()


def draft(found: Mapping[str, str], unpaired: Iterable[Unpaired]) -> dict[str, str]:
    """The names that were paired, and for those that were not the nearest ones, marked as suggestions.

    Each name is suggested once: a rename must be invertible.
    """
    names, alone = dict(found), list(unpaired)
    pairs = [(one.path, near) for one in alone if one.side == "source" for near in one.nearest]
    pairs += [(near, one.path) for one in alone if one.side == "target" for near in one.nearest]
    open_targets = {one.path for one in alone if one.side == "target"}
    for source, target in pairs:
        if source not in names and target in open_targets:
            names[source] = SUGGESTED + target
            open_targets.remove(target)
    return names


def unconfirmed(names: Mapping[str, str]) -> list[str]:
    """The suggestions in a rename that nobody has confirmed, as they stand in the file."""
    return [f'"{key}": "{value}"' for key, value in names.items() if str(value).startswith(SUGGESTED.strip())]
