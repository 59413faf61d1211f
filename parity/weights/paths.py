"""Dotted paths: their natural order, near misses, and renames."""

import difflib
import re
import zlib
from collections.abc import Iterable, Mapping

import numpy as np

from parity.errors import InputError


def join(*parts: str) -> str:
    """Join dotted paths, leaving out empty ones."""
    return ".".join(part for part in parts if part)


def split(path: str) -> tuple[str, str]:
    """The owner's path and the last name."""
    owner, _, name = path.rpartition(".")
    return owner, name


def natural(path: str) -> list[tuple[int, int, str]]:
    """Sort key by which `layers.10` stands behind `layers.2`."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)|[.]", path) if part]


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

    def nearest(self, path: str, count: int = 1) -> list[str]:
        """The names most like a path, best first; none if nothing is alike."""
        if not self.names:
            return []
        common = np.minimum(self.counts, counts(path))
        letters, parts = (half.sum(1) for half in np.split(common, 2, axis=1))
        size, depth = (half.sum(1) for half in np.split(self.counts + counts(path), 2, axis=1))
        # No likeness is above this one.
        order = np.argsort(-(letters / np.maximum(size, 1) + parts / depth), kind="stable")[: self.COMPARED]
        found = [(likeness(path, self.names[i]), self.names[i]) for i in sorted(order)]
        ranked = sorted(found, key=lambda one: sum(one[0]), reverse=True)
        return [name for (letters, parts), name in ranked[:count] if letters + parts > 1.15 or letters > 0.85]


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


# What wrappers put in front of the names of the model inside, and how to get at that model.
WRAPPERS = {
    "_orig_mod": "torch.compile puts that there",
    "module": "torch.nn.DataParallel and DistributedDataParallel put that there",
    "_fsdp_wrapped_module": "FullyShardedDataParallel puts that there",
}


def wrapper(paths: list[str], others: list[str]) -> str | None:
    """The prefix that a wrapper gave to all of the first paths and to none of the others."""
    first = {path.partition(".")[0] for path in paths}
    found = next(iter(first)) if len(first) == 1 else ""
    return found if found in WRAPPERS and not any(path.startswith(f"{found}.") for path in others) else None


class Rename:
    """A mapping from names on the torch side to names on the Flax side, usable in both directions.

    A key may be the path of a leaf or of a module with all that lies below it. `{i}` stands
    for one number and `{name}` for one part of a path; what a hole took on one side fills
    the same hole on the other. Patterns are anchored: they begin at the root. The longest
    pattern that fits wins.

    Raises:
        InputError: the holes of a key and of its value differ, or two keys have one value.
    """

    def __init__(self, mapping: Mapping[str, str] | None):
        if not isinstance(mapping, Mapping | None) or not all(isinstance(n, str) for kv in (mapping or {}).items() for n in kv):
            raise InputError(f"rename must be a mapping from names to names, got {mapping!r}")
        self.mapping = dict(mapping or {})
        problems = []
        for key, value in self.mapping.items():
            if sorted(holes(key)) != sorted(holes(value)) or len(set(holes(key))) != len(holes(key)):
                problems.append(f"{key!r} -> {value!r}: both sides need the same holes, each once")
        if len(set(self.mapping.values())) < len(self.mapping):
            twice = sorted({v for v in self.mapping.values() if list(self.mapping.values()).count(v) > 1})
            problems.append(f"several names lead to {', '.join(map(repr, twice))}; a rename must be invertible")
        if problems:
            raise InputError("rename: " + "; ".join(problems))
        ordered = sorted(self.mapping.items(), key=lambda item: len(item[0]), reverse=True)
        self._patterns = [(key, compiled(key), value) for key, value in ordered]

    def inverse(self) -> "Rename":
        return Rename({value: key for key, value in self.mapping.items()})

    def apply(self, path: str) -> tuple[str, str | None]:
        """The new path, and the key that made it, None if nothing fits."""
        for key, pattern, value in self._patterns:
            match = pattern.match(path)
            if match:
                filled = re.sub(r"\{(\w+)\}", lambda hole: match.group(f"hole_{hole.group(1)}"), value)  # noqa: B023
                return join(filled, path[match.end() :].lstrip(".")), key
        return path, None


def holes(pattern: str) -> list[str]:
    return re.findall(r"\{(\w+)\}", pattern)


def compiled(pattern: str) -> re.Pattern[str]:
    body = ""
    for part in re.split(r"(\{\w+\})", pattern):
        if part.startswith("{") and part.endswith("}"):
            name = part[1:-1]
            body += rf"(?P<hole_{name}>\d+)" if len(name) == 1 else rf"(?P<hole_{name}>[^.]+)"
        else:
            body += re.escape(part)
    # Up to the end of a path or of one of its parts.
    return re.compile(rf"{body}(?=\.|$)" if pattern else r"(?=.)")
