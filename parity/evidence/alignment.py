"""Both sides of one call laid side by side: which two operations are the first that differ, and what is said of them."""

import numpy as np

from parity.evidence.faults import FirstOperation, SourceLine, Spot
from parity.evidence.fingerprints import apart, comparable, fingerprint, same_layout
from parity.evidence.isolation import Isolator
from parity.evidence.judging import gap_at
from parity.evidence.numerics import finite_scale
from parity.evidence.partings import KINDS, LARGEST, LEAST, PART, WHOLE, Found, Parting, Side, plain
from parity.evidence.tape import Tape
from parity.evidence.trees import flatten
from parity.evidence.trial import Place, Trial, is_array


def noise_of(trial: Trial, place: Place) -> float:
    """The most that rounding explains of a value that differs; of any, where none differs as a number.

    A row of ties, such as a query that sees nothing, may be rounded to anything, and says nothing of the others.
    """
    limits = trial.bounds.get(place, np.zeros(1))
    beyond = limits[gap_at(trial, place) > limits] if place in trial.bounds else limits
    return float((beyond if beyond.size else limits).max(initial=0.0))


def call_lines(isolator: Isolator, trial: Trial, name: str | None, number: int) -> tuple[SourceLine | None, SourceLine | None]:
    """The lines of torch's and of Flax's code that call a module below for the time `number`, from 0."""
    keys = [k for k in isolator.children.get(trial.torch.key, ()) if k[0] == name]
    if name is None or number >= len(keys):
        return None, None
    own = isolator.own.get((isolator.partners[name].path, keys[number][1]))
    return isolator.calls[keys[number]].line, own.line if own else None


class Alignment:
    """Both sides of one call, seen from one place at which they differ."""

    def __init__(
        self, isolator: Isolator, trial: Trial, place: Place, tapes: tuple[Tape, Tape], arrays: tuple[np.ndarray, np.ndarray]
    ):
        self.isolator, self.trial, self.place = isolator, trial, place
        self.expected, self.actual = map(fingerprint, arrays)
        self.gap = apart(self.expected, self.actual)
        noise = noise_of(trial, place) / (finite_scale(arrays[0]) or 1.0)
        self.least = max(LEAST, noise)
        tolerance = min(LARGEST, max(self.least, self.gap * PART if np.isfinite(self.gap) else LARGEST))
        if self.gap <= self.least:
            tolerance = LARGEST
        mine, theirs = tapes
        self.torch, self.flax = Side(mine, theirs, tolerance), Side(theirs, mine, tolerance)

    def run(self) -> FirstOperation:
        """What differs first."""
        mine, theirs = self.torch.made(self.expected), self.flax.made(self.actual)
        if mine is None or theirs is None:
            return self.passed_on(mine, theirs)
        if self.gap <= self.least:
            return self.arranged(mine, theirs)
        ours, others = self.torch.parting(mine), self.flax.parting(theirs)
        pair = self.best(ours.found, others.found)
        if pair is None:
            return self.passed_on(mine, theirs)
        first, second = pair
        moved = self.moved(first, second)
        if moved is not None:
            return moved
        return self.told(*self.in_step(ours, others, first.step, second.step))

    def in_step(self, ours: Parting, others: Parting, first: int, second: int) -> tuple[Spot, Spot, str]:
        """The two operations, where each side has those of the other in another order; and what must be known of them."""
        first, second = ours.past_taking(first, others.kind(second)), others.past_taking(second, ours.kind(first))
        note = self.weights_note(first, second)
        if ours.kind(first) != others.kind(second):
            mine = next((s for s in ours.after(first) if ours.kind(s) == others.kind(second)), None)
            theirs = next((s for s in others.after(second) if others.kind(s) == ours.kind(first)), None)
            if mine is not None and theirs is not None:
                first, second = self.commuted(ours, others, (first, mine), (second, theirs))
            elif theirs is None and ours.kind(first) in KINDS and others.kind(second) in WHOLE:
                name = self.torch.step(first).name
                note = note or f"Flax has no {name} there, and goes on with {self.flax.step(second).name}"
        one, other = self.hidden(self.torch, first), self.hidden(self.flax, second)
        nan = self.expected.shares[2] != self.actual.shares[2] and "masking" not in (ours.kind(first), others.kind(second))
        if nan and one is not None and other is not None and self.infinite(self.torch, one) != self.infinite(self.flax, other):
            # What is hidden is hidden by another number, which is the same to all but a row of nothing else.
            first, second = self.hiding(self.torch, first), self.hiding(self.flax, second)
        for side, step, name in ((self.torch, first, "torch"), (self.flax, second, "Flax")):
            note = f"{name} draws random numbers there" if side.draws(step) else note
        return self.spot(self.torch, first), self.spot(self.flax, second), note

    def commuted(self, ours: Parting, others: Parting, mine: tuple[int, int], theirs: tuple[int, int]) -> tuple[int, int]:
        """Of two operations that the sides have in another order, those of the sort that differs."""
        pairs = (mine[0], theirs[1]), (mine[1], theirs[0])
        for one, other in (pairs, pairs[::-1]):
            if ours.kind(one[0]) == "masking":
                return one if ours.hides(one[0]) != others.hides(one[1]) else other
        for one, other in (pairs, pairs[::-1]):
            if ours.kind(one[0]) == "product":
                return other if self.same_roots(ours.roots(one[0]), others.roots(one[1])) else one
        return pairs[0]

    def same_roots(self, mine: list[int], theirs: list[int]) -> bool:
        """Whether two operations work on the same numbers, whatever scales them."""
        return all(any(n in theirs for n in self.torch.alike(i)) for i in mine)

    def hidden(self, side: Side, step: int) -> int | None:
        """What an operation takes some of which is hidden."""
        return next((i for i in side.step(step).inputs if 0 < side.value(i).print.shares[0] < 1), None)

    def infinite(self, side: Side, number: int) -> bool:
        return side.value(number).print.infinite > 0

    def hiding(self, side: Side, step: int) -> int:
        """The operation that puts huge numbers among those that an operation takes; itself if none does."""
        while True:
            hidden = self.hidden(side, step)
            source = None if hidden is None else side.value(hidden).source
            if source is None:
                return step
            step = source

    def weights_note(self, first: int, second: int) -> str:
        """That an operation takes an array that was given to it and that the other side has not: itself it may be right."""
        mine, theirs = (
            any(self.is_foreign(side, i) for i in side.step(step).inputs)
            for side, step in ((self.torch, first), (self.flax, second))
        )
        if mine and theirs:
            return "a weight that they take differs"
        return "it takes an array that torch has not" if theirs else ""

    def is_foreign(self, side: Side, number: int) -> bool:
        value = side.value(number)
        # A mask may be given as what it hides or as what it shows.
        numbers = "float" in value.dtype and not value.print.shares[0] and not plain(value)
        return numbers and side.maker(number) is None and not side.alike(number)

    def best(self, mine: tuple[Found, ...], theirs: tuple[Found, ...]) -> tuple[Found, Found] | None:
        """The first two operations that take the same operands; the first of all if none do, None if a side has none."""
        pairs = [(self.shared(a, b), a, b) for a in mine for b in theirs]
        if not pairs:
            return None
        _, first, second = max(pairs, key=lambda p: (p[0] > 0, -p[1].step, p[0], -p[2].step))
        return first, second

    def shared(self, mine: Found, theirs: Found) -> int:
        """How many operands two operations have in common."""
        return sum(any(n in theirs.inputs for n in self.torch.alike(i)) for i in mine.inputs)

    # --- where numbers are the same, and arranged otherwise ---------------------------------------

    def moved(self, mine: Found, theirs: Found) -> FirstOperation | None:
        """What arranges an operand of two operations otherwise; None if their operands are alike."""
        for a in mine.inputs:
            for b in theirs.inputs:
                if b not in self.torch.alike(a):
                    continue
                pairs = [(one, other) for one in self.torch.stages(a) for other in self.flax.stages(b)]
                for one, other in pairs:
                    prints = self.torch.value(one).print, self.flax.value(other).print
                    if comparable(*prints):
                        if not same_layout(*prints, self.torch.tolerance):
                            return self.arranged(one, other, mine.step, theirs.step)
                        break
        return None

    def arranged(self, a: int, b: int, mine: int | None = None, theirs: int | None = None) -> FirstOperation:
        """The operations that arrange two values of the same numbers otherwise."""
        first, second = self.torch.rearranged(a), self.flax.rearranged(b)
        spots = []
        for side, found, default, number in ((self.torch, first, mine, a), (self.flax, second, theirs, b)):
            step = next((s for s in (found, default, side.maker(number)) if s is not None), None)
            spots.append(self.passed(side, number) if step is None else self.spot(side, step))
        return self.told(spots[0], spots[1], "the same numbers, in another arrangement")

    # --- where one side does nothing --------------------------------------------------------------

    def passed_on(self, mine: int | None, theirs: int | None) -> FirstOperation:
        """One side or both hand on a value that the other has too, or that was given to them."""
        spots, notes = [], []
        for side, number, name, other in ((self.torch, mine, "torch", "Flax"), (self.flax, theirs, "Flax", "torch")):
            found = () if number is None else side.parting(number).found
            step = found[0].step if found else None if number is None else side.maker(number)
            spots.append(self.passed(side, number) if step is None else self.spot(side, step))
            notes += [] if found else [f"{name} hands on what {other} goes on computing with"]
        return self.told(spots[0], spots[1], notes[0] if len(notes) == 1 else "another value is handed on")

    def passed(self, side: Side, number: int | None) -> Spot:
        """A value that is handed on as it is: the line that calls the module to which it is given, or from which it comes."""
        return Spot("", "", self.call_line(side, self.place.child, self.place.call) or self.answer_line(side, number))

    # --- in words ---------------------------------------------------------------------------------

    def spot(self, side: Side, number: int) -> Spot:
        step = side.step(number)
        within = step.within if step.within and step.within != step.name else ""
        return Spot(step.name, within, step.line or self.own_line(side))

    def own_line(self, side: Side) -> SourceLine | None:
        """The line of the user's code that calls the module itself, a layer of the framework's own."""
        one = self.trial.torch
        if side is self.torch:
            return one.line
        own = self.isolator.own.get((self.trial.partner.path, one.call))
        return own.line if own else None

    def call_line(self, side: Side, name: str | None, number: int) -> SourceLine | None:
        """The line that calls a module below for the time `number`, from 0."""
        mine, theirs = call_lines(self.isolator, self.trial, name, number)
        return mine if side is self.torch else theirs

    def answer_line(self, side: Side, number: int | None) -> SourceLine | None:
        """The line that calls the module below which answers with a value."""
        wanted = self.expected if number is None else side.value(number).print
        for name, answers in self.trial.replies.items():
            for i, answer in enumerate(answers):
                arrays = [leaf for _, leaf in flatten(answer, is_array) if is_array(leaf)]
                if any(apart(fingerprint(array), wanted) <= side.tolerance for array in arrays):
                    return self.call_line(side, name, i)
        return self.own_line(side)

    def told(self, mine: Spot, theirs: Spot, note: str = "") -> FirstOperation:
        return FirstOperation(mine, theirs, str(self.place), note)
