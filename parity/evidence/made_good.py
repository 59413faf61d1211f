"""Settings of which a layer of Flax has no word, and that the code around it may make good: a higher level shows it."""

import re
from collections.abc import Callable
from dataclasses import replace

from parity.evidence.result import LevelResult
from parity.evidence.subject import Subject, arrays_of
from parity.said import Said


def looked_up(subject: Subject, told: str) -> bool:
    """Whether the padding row is looked up at all by the ids that are given."""
    row = re.search(r"padding_idx=(\d+)", told)
    return row is not None and any((ids == int(row[1])).any() for _, ids in arrays_of(subject.call) if ids.dtype.kind in "iu")


def several(subject: Subject, told: str) -> bool:
    """Whether batch and length can be told apart: neither is one."""
    return all(array.shape[0] > 1 and array.shape[1] > 1 for _, array in subject.values() if array.ndim > 2)


# By the name of the setting: the level at which code that does not make it good fails, and whether the inputs can show it.
SHOWN: dict[str, tuple[str, Callable[[Subject, str], bool]]] = {
    "padding_idx": ("gradients", looked_up),
    "batch_first": ("identical", several),
}


def made_good(subject: Subject, results: list[LevelResult]) -> list[LevelResult]:
    """The levels, without the settings of `weights` that another level has shown to make no difference here."""
    passed = {result.level for result in results if result.passed}

    def shown(told: str) -> str:
        name = re.search(r": (\w+)=", told)
        level, can_show = SHOWN.get(name[1] if name else "", ("", several))
        return level if level in passed and can_show(subject, told) else ""

    return [without(result, shown) if result.level == "weights" else result for result in results]


def without(result: LevelResult, shown: Callable[[str], str]) -> LevelResult:
    good = [finding for finding in result.findings if finding.figures.get("setting") and shown(finding.what)]
    if not good or any(note.endswith("not listed") for note in result.notes):
        return result
    left = tuple(finding for finding in result.findings if finding not in good)
    told = (f"made good by the code around it, as {shown(one.what)} shows: {one.what}" for one in good)
    notes = tuple(Said("setting-made-good", text) for text in told)
    figures, size = result.figures, f"{result.figures.get('bytes', 0):,} bytes bit-equal"
    summary = f"{len(left)} do not agree" if left else f"{figures.get('leaves', 0)} arrays, {size}"
    return replace(result, status="failed" if left else "passed", summary=summary, findings=left, notes=(*result.notes, *notes))
