"""What one side of a rename says: a path, the slice of its array that is meant, and layouts.

`h.{i}.c_attn.weight[:, 0:768]`, `layers[{i}]`, `qkv.weight | qkv per head(8) | [0:512]` and
`q.kernel | rotary(8) | transposed` are such sides. A slice is Python's own; layouts before
it say how the whole array is laid out first, those behind it lead from torch's slice to Flax's.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from parity.errors import InputError
from parity.weights.named_layouts import Named, parse

HOLE = re.compile(r"\{(\w+)\}")
BRACKETS = re.compile(r"\[([^\[\]]*)\]")
RANGE = re.compile(r"(-?\d+)?\s*:\s*(-?\d+)?\s*(?::\s*(-?\d+)?)?")
NUMBER = re.compile(r"-?\d+")
# Without leading zeros: 01 and 1 would be one place in a stack.
COUNTED = r"(?:0|[1-9]\d*)"


def holes(pattern: str) -> list[str]:
    """The names in braces."""
    return HOLE.findall(pattern)


@dataclass(frozen=True)
class Span:
    """The places along one axis that a slice takes.

    Attributes:
        places: their numbers.
        single: whether the axis is gone behind it.
    """

    places: range
    single: bool = False

    @property
    def index(self) -> int | slice:
        """What takes them out of an array."""
        return self.places.start if self.single else slice(self.places.start, self.places.stop, self.places.step)

    def __str__(self) -> str:
        if self.single:
            return str(self.places.start)
        step = f":{self.places.step}" if self.places.step > 1 else ""
        return f"{self.places.start}:{self.places.stop}{step}"


def in_brackets(spans: tuple[Span, ...], shape: tuple[int, ...]) -> str:
    """Spans in Python's notation: whole axes are `:`, those at the end are left out."""
    words = [
        ":" if not span.single and span.places == range(size) else str(span) for span, size in zip(spans, shape, strict=True)
    ]
    while len(words) > 1 and words[-1] == ":":
        words.pop()
    return f"[{', '.join(words)}]"


def span_of(item: str, size: int) -> Span:
    """The places that one item of an index takes on an axis of a size.

    Raises:
        ValueError: it takes none, or some that are not there.
    """
    if NUMBER.fullmatch(item):
        number = int(item)
        if not -size <= number < size:
            raise ValueError(f"{item} is out of range")
        number %= size
        return Span(range(number, number + 1), single=True)
    found = RANGE.fullmatch(item)
    assert found is not None
    bounds = [None if group is None else int(group) for group in found.groups()]
    if bounds[2] is not None and bounds[2] < 1:
        raise ValueError(f"{item} runs backwards or stands still")
    # Python cuts a slice that is too long; here that would hide a size that is not the expected one.
    if any(bound is not None and not -size <= bound <= size for bound in bounds[:2]):
        raise ValueError(f"{item} is out of range")
    places = range(size)[slice(*bounds)]
    if not places:
        raise ValueError(f"{item} is empty")
    return Span(places)


def indexing(inner: str) -> list[str] | None:
    """The items of an index, one for each axis; None if it is a name, such as `q`."""
    items = [re.sub(r"\s+", "", item) for item in inner.split(",")]
    if all(NUMBER.fullmatch(item) or RANGE.fullmatch(item) or HOLE.fullmatch(item) for item in items):
        return items
    if any(sign in inner for sign in ":,{.") or not inner.strip():
        raise InputError(f"[{inner}] is no slice; write a number, a:b, a:b:c or {{i}} for each axis")
    return None


@dataclass(frozen=True)
class Match:
    """How a side fits a name.

    Attributes:
        holes: what they took.
        tail: what the name has behind the path, '' if the side names the array itself.
    """

    holes: dict[str, str]
    tail: str


class Name:
    """One side of a rename.

    Args:
        text: as it is written.
        counted: holes that stand for places of a stack on either side.

    Raises:
        InputError: it is not written as a side must be.
    """

    def __init__(self, text: str, counted: Iterable[str] = ()):
        path, *words = (part.strip() for part in text.split("|"))
        self.text, self.index, before = text, list[str](), list[Named]()
        self.path = self.without_indices(path)
        behind = list[Named]()
        for word in words:
            inner = BRACKETS.fullmatch(word)
            if inner is None:
                behind.append(parse(word))
                continue
            if self.index:
                raise InputError(f"{text!r} is cut twice; write one slice")
            items = indexing(inner[1])
            if items is None:
                raise InputError(f"{word} is no slice; write a number, a:b, a:b:c or {{i}} for each axis")
            self.index, before, behind = items, behind, []
        self.before, self.layouts = tuple(before), tuple(behind)
        self.numbers = set(holes("".join(self.index)))
        self.counted = self.numbers | set(counted)

    def without_indices(self, path: str) -> str:
        """The path alone; the slices in it are kept for its array, wherever in the path they stand."""

        def take(found: re.Match[str]) -> str:
            items = indexing(found[1])
            self.index += items or []
            return "" if items else found[0]

        return BRACKETS.sub(take, path)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        """Fits the path, and what may stand behind it."""
        return re.compile(self.body() + r"(?:\.(?P<tail>.*))?" if self.path else "(?P<tail>.+)", re.DOTALL)

    @cached_property
    def _marked(self) -> re.Pattern[str]:
        """Fits a name with the slice behind it."""
        mark = re.sub(r"\\\{(\w+)\\\}", lambda hole: f"(?P<mark_{hole[1]}>{COUNTED})", re.escape(self.mark))
        return re.compile(rf"(?P<path>[^\[|]*?){mark}")

    def body(self) -> str:
        body = ""
        for part in re.split(r"(\{\w+\})", self.path):
            if HOLE.fullmatch(part):
                name = part[1:-1]
                any_ = r"\d+" if len(name) == 1 else "[^.]+"
                body += f"(?P<hole_{name}>{COUNTED if name in self.counted else any_})"
            else:
                body += re.escape(part)
        return body

    @property
    def mark(self) -> str:
        """What stands behind the name of an array of which this is a slice; '' if it is none."""
        if not self.index:
            return ""
        return "".join(f" | {one.name}" for one in self.before) + (" | " if self.before else "") + f"[{', '.join(self.index)}]"

    @property
    def weight(self) -> tuple[int, int]:
        """How much it says of a path: parts, then letters that are no holes."""
        return (len(self.path.split(".")) if self.path else 0), len(HOLE.sub("", self.path))

    @property
    def meant(self) -> str:
        """The path with the slice and without the layouts behind it."""
        return self.path + self.mark

    def fits(self, path: str) -> Match | None:
        """How it fits a path, whatever the slice."""
        if self.path and "{" not in self.path:
            # Of saved names there are thousands: to compile a pattern for each takes longer than all else.
            inside = path.startswith(f"{self.path}.")
            return Match({}, path[len(self.path) + 1 :]) if inside or path == self.path else None
        found = self._pattern.fullmatch(path)
        return self.matched(found) if found else None

    def matches(self, name: str) -> Match | None:
        """How it fits a name, its slice included."""
        if not self.index:
            return self.fits(name)
        if not self.numbers and not name.endswith(self.mark):
            return None
        found = self._marked.fullmatch(name)
        match = self.fits(found["path"]) if found else None
        if found is None or match is None:
            return None
        taken = {name.removeprefix("mark_"): text for name, text in found.groupdict().items() if name != "path"}
        return Match(match.holes | taken, match.tail)

    @staticmethod
    def matched(found: re.Match[str]) -> Match:
        groups = found.groupdict()
        tail = groups.pop("tail", "") or ""
        return Match({name.removeprefix("hole_"): text for name, text in groups.items()}, tail)

    def filled(self, match: Match) -> str:
        """The name that it stands for, given what the holes of the other side took."""
        path, mark = (HOLE.sub(lambda hole: match.holes[hole[1]], text) for text in (self.path, self.mark))
        return ".".join(part for part in (path, match.tail) if part) + mark

    def slices(self, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[Span, ...]]]:
        """Every slice of an array that it stands for: holes of the index take every number.

        Yields:
            What stands behind the array's name, and a span for each axis.

        Raises:
            InputError: the array has no such places.
        """
        if len(self.index) > len(shape):
            raise InputError(f"{self.mark} is for {len(self.index)} axes or more, got shape {shape}")
        choices = [[str(n) for n in range(size)] if HOLE.fullmatch(item) else [item] for item, size in zip(self.index, shape)]
        for chosen in product(*choices):
            try:
                spans = [span_of(item, size) for item, size in zip(chosen, shape)]
            except ValueError as error:
                raise InputError(f"{self.mark} does not lie in shape {shape}: {error}") from None
            whole = [Span(range(size)) for size in shape[len(chosen) :]]
            behind = self.mark[: self.mark.index("[")] + f"[{', '.join(chosen)}]"
            yield behind, (*spans, *whole)


class Lookup:
    """Which of many names fit a path: those without holes are found by it, not tried one after the other."""

    def __init__(self, names: Iterable[Name]):
        self.plain: dict[str, list[Name]] = {}
        self.patterns: list[Name] = []
        for name in names:
            if HOLE.search(name.path):
                self.patterns.append(name)
            else:
                self.plain.setdefault(name.path, []).append(name)

    def near(self, path: str) -> list[Name]:
        """The names that fit a path or what holds it, whatever the slice; patterns are not tried."""
        parts = path.split(".")
        fronts = {".".join(parts[:depth]) for depth in range(len(parts) + 1)}
        return [name for front in fronts if front in self.plain for name in self.plain[front]] + self.patterns

    def fitting(self, path: str) -> list[Name]:
        """The names that fit a path, whatever the slice."""
        return [name for name in self.near(path) if name.fits(path)]


def doubtful(path: str, numbers: set[str]) -> str:
    """Why a pattern could be filled in two ways, '' if it cannot."""
    for part in path.split("."):
        pieces = re.split(r"(\{\w+\})", part)
        words = [hole for hole in pieces[1::2] if len(hole) > 3 and hole[1:-1] not in numbers]
        close = any(not between or between.isdigit() for between in pieces[2:-1:2])
        if close or len(words) > 1:
            return f"the holes in {part!r} could be filled in several ways; put a dot between them"
    return ""
