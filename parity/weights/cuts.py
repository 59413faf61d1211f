"""Arrays cut as a rename says, on either side, and every value of a cut array accounted for once."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from parity.errors import InputError
from parity.weights.layouts import Bijection
from parity.weights.leaf import Leaf
from parity.weights.named_layouts import Given, MisfitError
from parity.weights.names import Lookup, Match, Name, Span, in_brackets
from parity.weights.paths import Rename, Renaming, exactness, natural

Names = Callable[[Leaf], Iterable[str]]


@dataclass
class Cut:
    """The leaves of both sides, cut.

    Attributes:
        sources: of the source.
        targets: of the target.
        problems: slices that do not fit, overlap, leave a gap or are stacked in another number; one sentence each.
        blamed: paths of the arrays that a problem is about.
    """

    sources: list[Leaf]
    targets: list[Leaf]
    problems: list[str] = field(default_factory=list)
    blamed: set[str] = field(default_factory=set)


def cut_as_named(sources: list[Leaf], targets: list[Leaf], renames: Rename, names: tuple[Names, Names]) -> Cut:
    """Cut the arrays that a rename takes in slices.

    Args:
        sources: leaves of the source.
        targets: leaves of the target.
        renames: from source names to target names.
        names: by which names a leaf of either side may be meant.
    """
    done = Cut(sources, targets)
    if not any(entry.key.index or entry.value.index for entry in renames.entries):
        return done
    done.sources = cut_side(sources, [entry.key for entry in renames.entries], names[0], done)
    done.targets = cut_side(targets, [entry.value for entry in renames.entries], names[1], done)
    for entry in renames.entries:
        if entry.key.numbers or entry.value.numbers:
            stacked_alike(entry, done, names)
    return done


def cut_side(leaves: list[Leaf], sides: list[Name], names: Names, done: Cut) -> list[Leaf]:
    """The leaves of one side, those that are meant in slices cut."""
    found: list[Leaf] = []
    lookup, kept = Lookup(sides), Kept()
    for leaf in leaves:
        cutting = meaning(leaf, lookup, names)
        if not any(side.index for side in cutting):
            found.append(leaf)
            continue
        try:
            parts = [part for side in cutting for part in slices_of(leaf, side, kept)]
        except (InputError, MisfitError) as error:
            done.problems.append(f"{leaf.path}: {error}")
            done.blamed.add(leaf.path)
            found.append(leaf)
            continue
        wrong = uncovered(leaf, parts)
        done.problems += [wrong] if wrong else []
        done.blamed |= {leaf.path} if wrong else set()
        found += parts
    return found


class Kept:
    """The array that was read last: its parts are asked for one after the other, and some files read all of it for each."""

    def __init__(self) -> None:
        self.key: object = None
        self.array: np.ndarray | None = None

    def read(self, leaf: Leaf, before: Bijection | None) -> np.ndarray:
        """The whole array of a leaf, laid out as it is to be cut."""
        key = (leaf.path, before)
        if self.array is None or self.key != key:
            # Not two of them at once.
            self.key, self.array = None, None
            array = leaf.read()
            self.key, self.array = key, before.apply(array) if before else array
        return self.array


def meaning(leaf: Leaf, sides: Lookup, names: Names) -> list[Name]:
    """The sides of entries that say the most of a leaf's path, whatever the slice."""
    fitting = {side.text: side for name in names(leaf) for side in sides.fitting(name)}
    best = max((exactness(side)[:2] for side in fitting.values()), default=None)
    return [side for side in fitting.values() if exactness(side)[:2] == best]


def slices_of(leaf: Leaf, side: Name, kept: Kept) -> list[Leaf]:
    """The parts of a leaf that a side stands for.

    Raises:
        InputError: the leaf has no such places.
        MisfitError: what is to be done before does not fit its shape.
    """
    before: Bijection | None = None
    if side.before:
        before = Given(side.before).built(leaf.shape, None)
    shape = before.shape(leaf.shape) if before else leaf.shape
    if not side.index:
        raise InputError(f"rename takes it whole and in slices: {side.text!r}; write a slice for each")
    parts = [leaf.at(spans, mark, before) for mark, spans in side.slices(shape)]
    # What a model has in memory may change until it is read.
    return [from_kept(part, leaf, before, kept) for part in parts] if leaf.from_file else parts


def from_kept(part: Leaf, leaf: Leaf, before: Bijection | None, kept: Kept) -> Leaf:
    """A part of a leaf of a file, read from the array that was read last where that is its own."""
    assert part.part is not None
    index = part.part.index

    def read() -> np.ndarray:
        return kept.read(leaf, before)[index]

    return replace(part, read=read, share=lambda axes: read().transpose(axes))


def uncovered(leaf: Leaf, parts: list[Leaf]) -> str:
    """Which places of an array are in no part or in several, '' if each is in one."""
    cut = [part.part for part in parts if part.part]
    if len({part.before for part in cut}) > 1:
        return f"{leaf.path}: its slices lay it out in several ways before they cut it; write the same layouts in each"
    shape = cut[0].shape
    # Places that no slice tells apart are one: an axis of thousands is a few.
    axes = [Alike([part.spans[axis].places for part in cut], size) for axis, size in enumerate(shape)]
    counts = np.zeros([len(axis.runs) for axis in axes], np.int64)
    for part in cut:
        counts[np.ix_(*(axis.within[span.places] for axis, span in zip(axes, part.spans, strict=True)))] += 1
    wrong = np.argwhere(counts != 1)
    if not len(wrong):
        return ""
    number = int(counts[tuple(wrong[0])])
    where = in_brackets(tuple(axis.runs[group] for axis, group in zip(axes, wrong[0], strict=True)), shape)
    listed = ", ".join(part.mark for part in parts[:4]) + (" and others" if len(parts) > 4 else "")
    which = "no slice" if not number else f"{number} slices"
    return f"{leaf.path} {leaf.shape}: {where} is in {which} of rename ({listed}); each place must be in one"


class Alike:
    """Places along an axis that the same ranges hold, as one group.

    Attributes:
        runs: of each group its first places that follow each other, in their order along the axis.
        within: the groups of which each range consists, by their places in `runs`.
    """

    def __init__(self, ranges: list[range], size: int):
        distinct = list(dict.fromkeys(ranges))
        groups = grouped(distinct, size)
        starts = np.flatnonzero(np.diff(groups, prepend=-1))
        ends = np.append(starts[1:], size)
        met, first = np.unique(groups[starts], return_index=True)
        order = np.argsort(first)
        runs = first[order]
        self.runs = [Span(range(start, end)) for start, end in zip(starts[runs].tolist(), ends[runs].tolist(), strict=True)]
        place_of = np.zeros(size, np.int64)
        place_of[met[order]] = np.arange(len(met))
        numbers = place_of[groups]
        self.within = {places: np.unique(numbers[places.start : places.stop : places.step]) for places in distinct}


def grouped(ranges: list[range], size: int) -> np.ndarray:
    """A number for each place along an axis, the same for those that the same ranges hold.

    One range after the other parts the groups that it holds in part, so that the time is that of going through each
    range once: a stack of thousands of layers is as many ranges of one place.
    """
    groups, sizes, count = np.zeros(size, np.int64), np.zeros(size, np.int64), 1
    sizes[:1] = size
    for places in ranges:
        held = groups[places.start : places.stop : places.step]
        met, inverse, inside = np.unique(held, return_inverse=True, return_counts=True)
        parted = inside < sizes[met]
        new = np.where(parted, count + np.cumsum(parted) - 1, met)
        held[:] = new[inverse]
        sizes[met] -= np.where(parted, inside, 0)
        sizes[new] = inside
        count += int(parted.sum())
    return groups


def stacked_alike(entry: Renaming, done: Cut, names: tuple[Names, Names]) -> None:
    """Tell of a stack that has another number of layers than the other side."""
    mine, theirs = taken(entry.key, done.sources, names[0]), taken(entry.value, done.targets, names[1])
    for hole in sorted(entry.key.numbers | entry.value.numbers):
        left, right = ({match.holes[hole] for match in found.values()} for found in (mine, theirs))
        if left == right or not left or not right:
            continue
        alone = sorted(left ^ right, key=natural)
        where = "the source" if alone[0] in left else "the target"
        done.problems.append(
            f"{entry.key.text} of the source has {counted(left)}, {entry.value.text} of the target {counted(right)}; "
            f"number {', '.join(alone[:4])}{' and others' if len(alone) > 4 else ''} is in {where} alone"
        )
        done.blamed |= {path for found in (mine, theirs) for path, match in found.items() if match.holes[hole] in alone}


def counted(numbers: set[str]) -> str:
    """How many layers there are, and which."""
    ordered = sorted(map(int, numbers))
    run = len(ordered) > 2 and ordered[-1] - ordered[0] == len(ordered) - 1
    return f"{len(ordered)} ({f'{ordered[0]} to {ordered[-1]}' if run else ', '.join(map(str, ordered))})"


def taken(side: Name, leaves: list[Leaf], names: Names) -> dict[str, Match]:
    """How a side fits the leaves that it means, by path."""
    found = {}
    for leaf in leaves:
        match = next((match for name in names(leaf) if (match := side.matches(name))), None)
        if match:
            found[leaf.path] = match
    return found


def stack_hints(sources: dict[str, Leaf], targets: dict[str, Leaf], sides: Sequence[str]) -> list[str]:
    """What to pass where one side's leaves are numbered and the other's have one axis more, under the same names otherwise.

    Args:
        sources: leaves of the source without counterpart, by torch's names.
        targets: of the target.
        sides: whose names the source and the target have.
    """
    found: dict[str, str] = {}
    for separate, stacked, flip in ((sources, targets, False), (targets, sources, True)):
        for pattern, numbers in numbered_alike(separate).items():
            path, front = pattern.replace(".{i}", "", 1), pattern[: pattern.index(".{i}")]
            whole, count = stacked.get(path), len(numbers)
            if whole is None or sorted(numbers) != list(range(count)) or len(whole.shape) != len(numbers[0].shape) + 1:
                continue
            axes = [axis for axis, size in enumerate(whole.shape) if size == count]
            if axes:
                index = ":, " * axes[0] + "{i}"
                mine, theirs = f"{front}.{{i}}", f"{front}[{index}]"
                # The torch side comes first, between two of one framework the source.
                turned = flip if sides[0] == sides[1] else sides[flip] == "flax"
                pair_ = {theirs: mine} if turned else {mine: theirs}
                found.setdefault(
                    str(pair_),
                    f"{whole.path} {whole.shape} may be the {count} arrays {numbers[0].path} to {numbers[count - 1].path} "
                    f"{numbers[0].shape} in a stack; if so, pass rename={pair_}",
                )
    return list(found.values())


def numbered_alike(leaves: dict[str, Leaf]) -> dict[str, dict[int, Leaf]]:
    """Leaves whose names differ in one number, by that number, under the name with a hole."""
    found: dict[str, dict[int, Leaf]] = {}
    for name, leaf in leaves.items():
        parts = name.split(".")
        for place, part in enumerate(parts[1:], 1):
            if part.isdecimal():
                pattern = ".".join([*parts[:place], "{i}", *parts[place + 1 :]])
                found.setdefault(pattern, {})[int(part)] = leaf
    return {pattern: same for pattern, same in found.items() if len(same) > 1}
