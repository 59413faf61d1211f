"""Versions, settings, what is missing and what is known to go wrong, in words."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from parity.report.plan import folded

if TYPE_CHECKING:
    from parity.surroundings import Environment


def environment_text(environment: "Environment", width: int | None = None) -> str:
    """Facts line by line, then what is missing, then what is known to go wrong, with the one thing to do.

    Args:
        environment: the facts.
        width: columns of the terminal; None leaves each sentence on one line.
    """
    lines = fact_lines(environment, width)
    for one in environment.missing:
        lines += folded(f"missing: {one.name}, for {one.needed_for}: {one.install}", width, "", "  ")
    for bad in environment.warnings:
        where = "not while comparing" if bad.proof else "also while comparing"
        lines += folded(f"{bad.code} ({where}): {bad.what}", width, "", "  ")
        lines += folded(f"do: {bad.do}", width, "  ", "    ")
    return "\n".join(lines)


def fact_lines(facts: Mapping[str, str], width: int | None = None) -> list[str]:
    """One fact a line."""
    longest = max(map(len, facts), default=0)
    # In a narrow terminal the names are not lined up.
    longest = longest if width is None or width >= 2 * longest else 0
    rest = " " * (longest + 2) if longest else "  "
    return [line for name, fact in facts.items() for line in folded(f"{name:<{longest}}  {fact}", width, "", rest)]
