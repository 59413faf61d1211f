"""Dotted paths: their natural order, near misses, and renames."""

import copy
import difflib
import fnmatch
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from parity.errors import InputError
from parity.weights.named_layouts import Named
from parity.weights.names import Lookup, Match, Name, doubtful, holes


def join(*parts: str) -> str:
    """Join dotted paths, leaving out empty ones."""
    return ".".join(filter(None, parts))


def split(path: str) -> tuple[str, str]:
    """The owner's path and the last name."""
    owner, _, name = path.rpartition(".")
    return owner, name


def natural(path: str) -> list[tuple[int, int, str]]:
    """Sort key by which `layers.10` stands behind `layers.2`."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)|[.]", path) if part]


# More ways than these to write one path are not tried.
MOST_SPELLINGS = 64


def spellings(path: str) -> list[str]:
    """Further ways to write the numbers in a path of Linen's: `layers_0` is torch's `layers.0`, or `0` in a Sequential."""
    ways = [""]
    for part in path.split("."):
        head, _, number = part.rpartition("_")
        numbered = head and number.isdigit()
        found = [part, *([f"{head}.{number}"] if numbered else []), *([number] if numbered and head == "layers" else [])]
        ways = [join(way, one) for way in ways for one in found][:MOST_SPELLINGS]
    return ways[1:]


# Half of them for letters, half for parts of paths.
COLUMNS = 128


class Names:
    """Names among which those most like another one are looked for; fast among many thousands.

    A shared last name and shared parts weigh more than shared letters: `encoder.q.weight`
    is nearer to `q.weight` than to `encoder.k.weights`.
    """

    # How many are compared in full, of those that have the most letters and parts in common.
    COMPARED = 16

    def __init__(self, names: Iterable[str]):
        self.names = list(names)
        self.counts = np.array([counts(name) for name in self.names], np.int16).reshape(len(self.names), COLUMNS)
        self.sums = halves(self.counts)

    def nearest(self, path: str, count: int = 1) -> list[str]:
        """The names most like a path, best first; none if nothing is alike."""
        if not self.names:
            return []
        mine = counts(path)[None]
        letters, parts = halves(np.minimum(self.counts, mine))
        size, depth = (theirs + own for theirs, own in zip(self.sums, halves(mine), strict=True))
        # No likeness is above this one.
        order = np.argsort(-(letters / np.maximum(size, 1) + parts / depth), kind="stable")[: self.COMPARED]
        found = [(likeness(path, self.names[i]), self.names[i]) for i in sorted(order)]
        ranked = sorted(found, key=lambda one: sum(one[0]), reverse=True)
        return [name for (letters, parts), name in ranked[:count] if letters + parts > 1.15 or letters > 0.85]


def halves(counts: np.ndarray) -> list[np.ndarray]:
    """How many letters, and how many parts, are counted in each row."""
    return [half.sum(1) for half in np.split(counts, 2, axis=1)]


def counts(path: str) -> np.ndarray:
    """How often each letter, then each part, stands in a path, in as many columns each; some share one."""
    found = np.zeros(COLUMNS, np.int16)
    for letter in path:
        found[ord(letter) % (COLUMNS // 2)] += 1
    for part in path.split("."):
        found[COLUMNS // 2 + zlib.crc32(part.encode()) % (COLUMNS // 2)] += 1
    return found


def likeness(path: str, other: str) -> tuple[float, float]:
    """How much of two paths is the same in letters and in parts, each from 0 to 1."""
    letters = difflib.SequenceMatcher(None, path, other).ratio()
    return letters, difflib.SequenceMatcher(None, path.split("."), other.split(".")).ratio()


def nearest(path: str, candidates: Iterable[str], count: int = 1) -> list[str]:
    """The candidates most like a path, best first; none if nothing is alike."""
    return Names(candidates).nearest(path, count)


@dataclass(frozen=True)
class Renaming:
    """One entry of a rename, in one direction.

    Attributes:
        key: the side on which names are looked up.
        value: the side that they lead to.
    """

    key: Name
    value: Name

    @property
    def layouts(self) -> tuple[Named, ...]:
        """The layouts that stand behind one of its sides."""
        return self.value.layouts or self.key.layouts

    @property
    def forward(self) -> bool:
        """Whether the layouts lead from key to value; they lead to the side that they stand behind."""
        return bool(self.value.layouts)

    def __str__(self) -> str:
        return f"{self.key.text!r} -> {self.value.text!r}"


@dataclass(frozen=True)
class Renamed:
    """What became of a name.

    Attributes:
        name: the new one.
        entry: which entry made it.
        tail: what the name has behind the entry's own path; '' if the entry names it whole.
    """

    name: str
    entry: Renaming
    tail: str


class Rename:
    """A mapping from names on the torch side to names on the Flax side, usable in both directions.

    A key may be the path of a leaf or of a module with all that lies below it. `{i}` stands
    for one number and `{name}` for one part of a path; what a hole took on one side fills
    the same hole on the other. Patterns are anchored: they begin at the root. The pattern that
    says most of a path wins.

    Either side may take a slice of its array, as Python writes it: `c_attn.weight[:, 0:768]`. A hole in
    a slice counts along that axis: `h.{i}.weight` -> `h.kernel[{i}]` stacks, for a leaf or for all below a
    module. Layouts behind ` | ` lead from the other side's array to the one that they stand behind, which
    must be Flax's: `q.kernel | rotary(8)`.

    Raises:
        InputError: the holes of a key and of its value differ or could be filled in several ways, two keys
            have one value, or a slice or layout is not one.
    """

    def __init__(self, mapping: Mapping[str, str] | None):
        if not isinstance(mapping, Mapping | None) or not all(isinstance(n, str) for kv in (mapping or {}).items() for n in kv):
            raise InputError(f"rename must be a mapping from names to names, got {mapping!r}")
        self.mapping = dict(mapping or {})
        problems, entries = [], list[Renaming]()
        for key, value in self.mapping.items():
            try:
                counted = Name(key).numbers | Name(value).numbers
                entries.append(Renaming(Name(key, counted), Name(value, counted)))
            except InputError as error:
                problems.append(f"{key!r} -> {value!r}: {error}")
        problems += [f"{entry}: {problem}" for entry in entries if (problem := unclear(entry))]
        for side in ("value", "key"):
            meant = Counter(getattr(entry, side).meant for entry in entries)
            twice = sorted((name for name, count in meant.items() if count > 1), key=natural)
            if twice:
                which = "several names lead to" if side == "value" else "several entries are for"
                problems.append(f"{which} {', '.join(map(repr, twice))}; a rename must be invertible")
        if problems:
            raise InputError("rename: " + "; ".join(problems))
        self.entries = sorted(entries, key=lambda entry: exactness(entry.key), reverse=True)
        self.by_key = {id(entry.key): entry for entry in self.entries}
        self.keys = Lookup(entry.key for entry in self.entries)
        # What is left out of a name that no entry fits.
        self.shorter: Callable[[str], str] = str
        self.front = ""

    def inverse(self) -> "Rename":
        """The same, from values to keys."""
        return Rename({value: key for key, value in self.mapping.items()})

    def fitting(self, name: str) -> list[tuple[Renaming, Match]]:
        """The entries that fit a name, the most exact first."""
        if not self.entries:
            return []
        near = {id(key): key.matches(name) for path in {name, bare(name)} for key in self.keys.near(path)}
        found = [(self.by_key[key], match) for key, match in near.items() if match]
        return sorted(found, key=lambda one: exactness(one[0].key), reverse=True)

    def find(self, name: str) -> Renamed | None:
        """The new name and the entry that made it, None if nothing fits."""
        for entry, match in self.fitting(name):
            return Renamed(entry.value.filled(match), entry, match.tail)
        return None

    def apply(self, path: str) -> tuple[str, str | None]:
        """The new path, and the key that made it, None if nothing fits."""
        found = (self.find(path) or self.find(self.shorter(path))) if self.entries else None
        name = found.name if found else self.shorter(path)
        return join(self.front, name) if path else name, found.entry.key.text if found else None

    def shortened(self, shorter: Callable[[str], str], front: str) -> "Rename":
        """The same for names that have a part which the other side has not, or lack `front`, which all of it have."""
        found = copy.copy(self)
        found.shorter, found.front = shorter, front
        return found

    def rivals(self, name: str) -> str:
        """Why an entry is not the one that is meant, '' if it is: another says as much of the name, and something else."""
        fitting = self.fitting(name)
        best = [(e, m) for e, m in fitting if exactness(e.key) == exactness(fitting[0][0].key)]
        new = {entry.value.filled(match) for entry, match in best}
        if len(new) < 2:
            return ""
        keys = " and ".join(repr(entry.key.text) for entry, _ in best)
        return f"rename keys {keys} both fit {name}, and lead to {' and '.join(sorted(new))}; make one of them more exact"


def exactness(name: Name) -> tuple[int, int, bool]:
    """How much a pattern says of a path, to be compared."""
    return (*name.weight, bool(name.index))


def unclear(entry: Renaming) -> str:
    """Why an entry cannot be followed in both directions, '' if it can."""
    key, value = holes(entry.key.meant), holes(entry.value.meant)
    if sorted(key) != sorted(value) or len(set(key)) != len(key):
        return "both sides need the same holes, each once"
    if entry.key.layouts and entry.value.layouts:
        return "layouts stand behind both sides; write them behind Flax's name"
    return doubtful(entry.key.path, entry.key.counted) or doubtful(entry.value.path, entry.value.counted)


def fits(path: str, pattern: str) -> bool:
    """Whether a pattern of `ignore` means a path; one that is itself a path means that, whatever its brackets say."""
    return path == pattern or fnmatch.fnmatchcase(path, pattern)


def bare(name: str) -> str:
    """A name without the slice behind it."""
    if not name.endswith("]"):
        return name
    return re.sub(r"( \|[^\[\]]*)?\[[^\[\]]*\]$", "", name)


def turn_of(path: str) -> tuple[str, int | None]:
    """The path of a module without the turn behind it, and the turn, as in `blocks.norm[2]`; None where there is none."""
    found = re.fullmatch(r"(.*)\[(\d+)\]", path)
    return (found[1], int(found[2])) if found else (path, None)


def in_order(paths: Iterable[str]) -> list[str]:
    """The paths with numbered siblings in the order of their numbers, and all else as it comes.

    Files list `layers.10` before `layers.2`; a model lists its layers as they were made.
    """
    children: dict[str, dict[str, None]] = {}
    paths = list(paths)
    for path in paths:
        rest, known = path, False
        while rest and not known:
            rest, part = split(rest)
            parts = children.setdefault(rest, {})
            # Then all above it is known too.
            known = part in parts
            parts[part] = None
    ranks = {owner: {part: rank for rank, part in enumerate(numbered(list(parts)))} for owner, parts in children.items()}
    places: dict[str, tuple[int, ...]] = {"": ()}
    for path in paths:
        rest, below = path, list[tuple[str, str, str]]()
        while rest not in places:
            owner, part = split(rest)
            below.append((rest, owner, part))
            rest = owner
        for inner, owner, part in reversed(below):
            places[inner] = (*places[owner], ranks[owner][part])
    return sorted(paths, key=places.__getitem__)


def numbered(parts: list[str]) -> list[str]:
    """Siblings, those that differ by a number at the end alone in its order, at the places that they had."""
    if not any(part[-1:].isdigit() for part in parts):
        return parts
    found = {part: found.groups() for part in parts if (found := re.fullmatch(r"(.*?)([0-9]+)", part, re.DOTALL))}
    stems: dict[str, list[tuple[int, str]]] = {}
    for part, (stem, number) in found.items():
        stems.setdefault(stem, []).append((int(number), part))
    ascending = {stem: iter(sorted(same)) for stem, same in stems.items()}
    return [next(ascending[found[part][0]])[1] if part in found else part for part in parts]
