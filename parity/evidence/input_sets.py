"""Named inputs of one comparison, and what comes of several of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from parity.errors import InputError
from parity.evidence.notes import Note
from parity.evidence.result import LevelResult, Report, SetResult

# Figures of a level that are counted; of all others the largest is kept.
COUNTED = ("elements", "equal", "ties", "cancelled", "unexplained", "zero", "proved", "outputs", "kinks")


@dataclass(frozen=True)
class InputSet:
    """Arguments for one call of both models.

    Attributes:
        name: under which a report speaks of it.
        shows: what such inputs can show that others cannot, in a few words.
        args: positional arguments.
        kwargs: keyword arguments.
    """

    name: str
    shows: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def given_sets(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> list[InputSet]:
    """The input sets among what `compare` was given; a plain call is one without a name.

    Raises:
        InputError: sets and plain arguments are mixed, a list of sets is empty, or a name is there twice.
    """
    only = args[0] if len(args) == 1 else None
    several = isinstance(only, list | tuple) and len(only) > 0 and all(isinstance(one, InputSet) for one in only)
    if isinstance(only, InputSet) or several:
        if kwargs:
            raise InputError("kwargs stand in the input sets; leave them out beside them")
        sets = [only] if isinstance(only, InputSet) else list(only or ())
        names = [one.name for one in sets]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InputError(f"input sets must have different names, got {', '.join(map(repr, twice))} more than once")
        return sets
    if any(isinstance(one, InputSet) for one in args):
        raise InputError(
            "give one input set, or one list of them, and no other arguments; "
            f"got {len(args)} arguments, {sum(isinstance(one, InputSet) for one in args)} of them input sets"
        )
    return [InputSet("", "", args, kwargs or {})]


def one_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The arguments of one call, which may stand in an input set.

    Raises:
        InputError: there are several sets; all that `given_sets` raises.
    """
    sets = given_sets(args, kwargs)
    if len(sets) > 1:
        raise InputError(f"give one of the {len(sets)} input sets: {', '.join(repr(one.name) for one in sets)}")
    return sets[0].args, sets[0].kwargs


def climbed(sets: Sequence[InputSet], climb: Callable[[InputSet, bool, bool], Report]) -> Report:
    """One report for all sets.

    Args:
        sets: at least one.
        climb: makes the report of one set; is told whether it is the first, and whether a failure is to be traced.
    """
    reports: list[Report] = []
    for one in sets:
        # The first set that fails is looked into; of the others it is enough to know whether they fail too.
        reports.append(climb(one, not reports, all(agrees(computed(report)) for report in reports)))
    if len(reports) == 1:
        return replace(reports[0], inputs=sets[0].name)
    results = tuple(set_result(one, computed(report)) for one, report in zip(sets, reports, strict=True))
    # The weights were compared with the first set, whatever the inputs are.
    weights = tuple(level for level in reports[0].levels if level.level == "weights")
    first = next((number for number, result in enumerate(results) if not result.passed), None)
    if first is None:
        levels = (*weights, *(merged(found) for found in by_level([computed(report) for report in reports])))
        return replace(reports[0], levels=levels, notes=common_notes(reports), sets=results)
    levels = (*weights, *computed(reports[first]).levels)
    return replace(reports[first], levels=levels, notes=common_notes(reports), sets=results, inputs=sets[first].name)


def computed(report: Report) -> Report:
    """A report less what does not hang on inputs, if there is anything else."""
    levels = tuple(level for level in report.levels if level.level != "weights")
    return replace(report, levels=levels) if levels else report


def agrees(report: Report) -> bool:
    """Whether no level failed or could not run; where none applies, nothing speaks against it either."""
    return not any(level.status in ("failed", "not run") for level in report.levels)


def set_result(one: InputSet, report: Report) -> SetResult:
    failed = tuple(level.level for level in report.levels if level.status in ("failed", "not run"))
    return SetResult(one.name, one.shows, agrees(report), failed, report.verdict)


def by_level(reports: Sequence[Report]) -> Iterator[list[LevelResult]]:
    names = dict.fromkeys(level.level for report in reports for level in report.levels)
    for name in names:
        yield [level for report in reports for level in report.levels if level.level == name]


def merged(results: list[LevelResult]) -> LevelResult:
    """One level over several sets, all of which passed or to which it did not apply."""
    applied = [result for result in results if result.status != "not applicable"] or results[:1]
    figures = dict(applied[0].figures)
    for result in applied[1:]:
        for name, value in result.figures.items():
            if name in COUNTED:
                figures[name] = figures.get(name, 0) + value
            elif isinstance(value, int | float) and not isinstance(value, bool):
                figures[name] = max(figures.get(name, value), value)
    notes = tuple(dict.fromkeys(note for result in applied for note in result.notes))
    summary = applied[0].summary if len(applied) == 1 else f"{applied[0].summary}; {len(applied)} input sets in all"
    return replace(applied[0], figures=figures, notes=notes, summary=summary)


def common_notes(reports: Sequence[Report]) -> tuple[Note, ...]:
    """What inputs cannot show counts only if none of the sets shows it; what a model does counts if it does it once."""
    keys = [{(note.code, note.where) for note in report.notes} for report in reports]
    found: dict[tuple[str, str], Note] = {}
    for report in reports:
        for note in report.notes:
            key = note.code, note.where
            if all(key in of_one for of_one in keys) or not note.lint:
                found.setdefault(key, note)
    return tuple(found.values())
