"""A transfer in words: leaf by leaf, what stands in its way, and the sums."""

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from parity.said import Said, code_of

if TYPE_CHECKING:
    from parity.weights.transfer import Entry, Transfer

# Narrower than this nothing can be laid out.
NARROWEST = 20


def transfer_text(transfer: "Transfer", width: int | None = None) -> str:
    """The plan as a table, what a reader must know, what stands in the way, and the sums.

    Args:
        transfer: the result or plan.
        width: columns of the terminal; None leaves each leaf and each sentence on one line, as `grep` wants it.
    """
    lines = rows(transfer.plan, width)
    for sentence in coded_sentences(transfer):
        lines += folded(sentence, width, "  ", "    ")
    if transfer.problems:
        found = len(transfer.problems)
        lines += folded(f"refused, nothing is written: {found} problem{'' if found == 1 else 's'}", width)
        lines += [line for problem in transfer.problems for line in folded(f"- {problem}", width, "  ", "    ")]
    return "\n".join([*lines, *folded(sums(transfer), width)])


def rows(plan: "tuple[Entry, ...]", width: int | None) -> list[str]:
    """One line for each leaf if all of them fit, else three for each."""
    wide = max((len(entry.source) for entry in plan), default=0)
    lines = [f"  {entry.source:<{wide}} -> {entry.target}  {how(entry)}" for entry in plan]
    if width is None or all(len(line) <= width for line in lines):
        return lines
    stacked = []
    for entry in plan:
        stacked += folded(entry.source, width, "  ", "    ")
        stacked += folded(f"-> {entry.target}", width, "    ", "       ")
        stacked += folded(how(entry), width, "    ", "    ")
    return stacked


def how(entry: "Entry") -> str:
    """The layout and who decided it, the shape, the dtype and the size."""
    dtype = entry.dtype if entry.dtype == entry.target_dtype else f"{entry.dtype} -> {entry.target_dtype}"
    # Of a name that stayed the name has decided nothing.
    guessed = entry.decided_by == "name" and (entry.layout != "as is" or entry.source != entry.target)
    merged = f"merged from {' and '.join(entry.merged)}, " if entry.merged else ""
    return f"{merged}{entry.layout}{' by name' if guessed else ''}, {entry.shape} {dtype}, {entry.bytes:,} bytes"


def coded_sentences(transfer: "Transfer") -> Iterator[Said]:
    """What a reader must know besides the table."""

    def each(code: str, sentences: Iterable[str]) -> Iterator[Said]:
        return (Said(code, sentence) for sentence in sentences)

    yield from each("left-out", (f"left out: {path}" for path in transfer.ignored))
    if transfer.random:
        yield Said("random-state", f"random state, and what runs leave behind, stays: {len(transfer.random)} arrays")
    yield from each("tied", (f"one array: {', '.join(names)}" for names in transfer.ties))
    yield from each("tie-lost", (f"tie lost: {sentence}" for sentence in transfer.lost_ties))
    yield from each("setting-differs", (f"setting: {sentence}" for sentence in transfer.settings))
    yield from each("without-counterpart", transfer.alone)
    yield from (Said(code_of(note, "transfer-note"), f"note: {note}") for note in transfer.notes)
    if transfer.verified:
        yield Said("read-back", "read back: bit-equal")
    if by_name := sum(entry.decided_by == "name" for entry in transfer.plan):
        yield Said("by-name", f"{by_name} layouts were decided by name, no layer type being known")


def sums(transfer: "Transfer") -> str:
    """How much travelled, or would."""
    shared = sum(entry.shared for entry in transfer.plan)
    text = f"{len(transfer.plan)} arrays, {transfer.bytes:,} bytes"
    if transfer.value is None:
        alone = {side: sum(one.side == side for one in transfer.unpaired) for side in ("source", "target")}
        parts = [f"{count} of the {side}" for side, count in alone.items() if count]
        return f"{text}, planned only" + (f"; without counterpart: {', '.join(parts)}" if parts else "")
    return text + (f", {shared} of them sharing memory" if shared else ", all copied")


def folded(text: str, width: int | None, first: str = "", rest: str = "") -> list[str]:
    """A text in lines no wider than a terminal, broken after spaces and after the dots of a path."""
    if width is None or len(first) + len(text) <= width:
        return [first + text]
    width = max(width, NARROWEST)
    lines, line = list[str](), first
    for piece in re.findall(r"\S*?\.(?=\S)|\S+\s*|\s+", text):
        if len(line) + len(piece.rstrip()) > width and line.strip():
            lines, line = [*lines, line.rstrip()], rest
        line += piece
        while len(line.rstrip()) > width:
            # A single part of a path that is wider than the terminal.
            lines, line = [*lines, line[:width]], rest + line[width:]
    return [*lines, line.rstrip()]
