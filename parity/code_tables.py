"""Every code that a result or an error may have: the tables of all rooms side by side."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from parity.errors import InputError, ParityError
from parity.evidence import precision
from parity.evidence.hypotheses import table
from parity.evidence.notes import NOTE_CODES
from parity.evidence.result import PROVES
from parity.evidence.verdicts import VERDICTS
from parity.report.data import document
from parity.said import HINTS, NEXT, REFUSALS
from parity.surroundings import KNOWN_BAD
from parity.training import causes, statistics

# Causes that are found in another way than by a hypothesis.
OTHER_CAUSES = {
    "order of modules": "Modules run in another order, or their values are exchanged.",
    "train mode": "Train mode does otherwise than torch's: dropout at another place, or the statistics of the batch.",
}
KINDS = {
    "verdict": "what a comparison comes to: `verdict` of a report, or `code` of an error in place of one",
    "level": "a level of the ladder: `level` of an entry of `levels`",
    "note": "what a reader must know although it decides nothing: `code` of an entry of `notes` and of `hints`",
    "hint": "a sentence of a result: `code` of an entry of `hints`",
    "cause": "what would explain a difference: `hypothesis` of a cause, `code` of an entry of `hints`; two causes at once have "
    "both, joined by ` and `",
    "next": "the one thing to do: `code` of an entry of `hints`",
    "environment": "a known-bad combination: `code` of an entry of `warnings` and of `hints`",
    "refusal": "why a call was refused: `code` of an error, and of what `--json` prints in place of a result",
}


@dataclass(frozen=True)
class Code:
    """One code.

    Attributes:
        kind: one of the kinds that `parity codes` prints; a code is unique within its kind.
        code: as results carry it.
        meaning: in a few words.
    """

    kind: str
    code: str
    meaning: str


def codes(kind: str | None = None) -> tuple[Code, ...]:
    """Every code that a result or an error of this version may have, hypotheses that were added included.

    Args:
        kind: only codes of this kind; None gives all.

    Raises:
        InputError: there is no such kind.
    """
    if kind is not None and kind not in KINDS:
        raise InputError(f"no such kind of code: {kind!r}; the kinds are {', '.join(KINDS)}")
    tables = {
        "verdict": VERDICTS,
        "level": PROVES,
        "note": NOTE_CODES,
        "hint": HINTS,
        "cause": cause_codes(),
        "next": NEXT,
        "environment": KNOWN_BAD,
        "refusal": REFUSALS,
    }
    return tuple(
        Code(name, code, meaning) for name, known in tables.items() if kind in (None, name) for code, meaning in known.items()
    )


def cause_codes() -> dict[str, str]:
    """Names of causes, each with the first line of what its hypotheses say of themselves."""
    found: dict[str, list[str]] = {}
    for name, meaning in said_of_causes():
        if meaning not in found.setdefault(name, []):
            found[name].append(meaning)
    return {name: " ".join(meanings) for name, meanings in found.items()}


def said_of_causes() -> Iterator[tuple[str, str]]:
    """Every cause that may be named, and what it means."""
    known: tuple[Any, ...] = (table.WEIGHTS, *table.HYPOTHESES, *causes.HYPOTHESES)
    for hypothesis in known:
        yield hypothesis.name, first_line(hypothesis.variants)
    yield from OTHER_CAUSES.items()
    yield from ((name, f"{what[0].upper()}{what[1:]}.") for _, name, what in precision.SETTINGS.values())
    yield from statistics.CAUSES.items()


def first_line(function: Any) -> str:
    return (function.__doc__ or "No description.").strip().splitlines()[0]


def codes_document(found: Iterable[Code]) -> dict[str, Any]:
    """Codes for machines."""
    return document("codes", None, codes=list(found))


def codes_page() -> str:
    """The page of the documentation that lists all codes."""
    lines = [
        "# Codes",
        "",
        "Sentences change from version to version, codes do not. In what `--json` and `to_dict()` give, every sentence has",
        "one; `hints` holds all of a result with where they belong and what to do. This page is what `parity codes --markdown`",
        "prints; `parity codes --json` gives the same for scripts, `parity schema` the JSON schema.",
    ]
    for kind, where in KINDS.items():
        lines += ["", f"## {kind}", "", f"{where[0].upper()}{where[1:]}.", "", "| code | meaning |", "|---|---|"]
        lines += [f"| `{one.code}` | {one.meaning.replace('|', chr(92) + '|')} |" for one in codes(kind)]
    return "\n".join(lines) + "\n"


def refusal(error: ParityError, status: int) -> dict[str, Any]:
    """An error for machines, in place of a result.

    Args:
        error: what was raised.
        status: the exit status of the process.
    """
    problems = list(getattr(error, "problems", ()))
    return document("refusal", None, code=error.code, message=str(error), problems=problems, status=status, passed=False)
