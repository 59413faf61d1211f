"""The first operation of a wrong module that differs: torch's operations aligned with Flax's by fingerprints.

A value of one side has a counterpart if the other side computes the same numbers anywhere, in
whatever arrangement. From the value that differs, both sides are walked backwards as long as
values have none: where all operands have one, there stands the operation that differs. What
only one side computes on its way, as a softmax in five steps does, is never reached if what
comes of it has a counterpart.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from parity.errors import first_line
from parity.evidence.faults import FirstOperation, Isolated, Isolation, SourceLine, Spot
from parity.evidence.fingerprints import Fingerprint, Table, apart, comparable, fingerprint, same_layout
from parity.evidence.isolation import Isolator
from parity.evidence.numerics import finite_scale
from parity.evidence.tape import Step, Tape, TooLongError, Value
from parity.evidence.trial import Place, Trial, is_array

# Wrong modules of one comparison into which is looked.
NAMED = 3
# Two fingerprints that far apart, in units of the scale, are those of other numbers; nearer than the least, none are.
# Between the two the difference that is to be found decides: what is a small part of it counts as the same.
LARGEST, LEAST, PART = 1e-9, 1e-14, 1 / 30
# What draws random numbers, by a part of its name.
RANDOM = ("bernoulli", "dropout", "rand", "normal_", "multinomial", "threefry", "rng_", "random_", "exponential_")


def named(isolator: Isolator, isolation: Isolation) -> Isolation:
    """The same, with the first operation that differs in each of the first wrong modules."""
    chosen = {(one.path, one.call) for one in isolation.faults[:NAMED]}
    return replace(isolation, modules=tuple(with_operation(isolator, one, chosen) for one in isolation.modules))


def with_operation(isolator: Isolator, one: Isolated, chosen: set[tuple[str, int]]) -> Isolated:
    trial = isolator.trials.get((one.path, one.call))
    if one.status != "differs" or (one.path, one.call) not in chosen or trial is None or trial.error:
        return one
    try:
        found = first_operation(isolator, trial, [d.where for d in one.differences])
    except TooLongError as error:
        found = unnamed(f"the module computes {error}: they were not compared one by one")
    except Exception as error:
        found = unnamed(f"its operations could not be compared: {type(error).__name__}: {first_line(error)}")
    return replace(one, operation=found)


def unnamed(why: str, where: str = "") -> FirstOperation:
    return FirstOperation(None, None, where, why)


def first_operation(isolator: Isolator, trial: Trial, differing: Iterable[str]) -> FirstOperation:
    """The first operation that differs in a call that was run alone."""
    if isolator.dtype != "float64":
        return unnamed(f"the two are the same in float64 and part in {trial_dtype(trial)} by rounding, not at one operation")
    places = in_order(isolator, trial, set(differing))
    if not places:
        return unnamed("what differs is no value that both sides compute")
    mine, theirs = tapes(isolator, trial)
    found = unnamed("")
    for place in places:
        found = Alignment(isolator, trial, place, mine, theirs).run()
        if found.torch or found.flax:
            return found
    return found


def trial_dtype(trial: Trial) -> str:
    return next((str(a.dtype) for a in trial.expected.values() if is_array(a) and a.dtype.kind != "b"), "the models' dtype")


def in_order(isolator: Isolator, trial: Trial, differing: set[str]) -> list[Place]:
    """The differing places that are arrays on both sides: what is given to modules below in the order of their calls first."""
    calls = [key[0] for key in isolator.children.get(trial.torch.key, ())]
    both = [p for p, a in trial.expected.items() if str(p) in differing and is_array(a) and is_array(trial.actual.get(p))]
    return sorted(both, key=lambda p: nth(calls, p.child, p.call) if p.child is not None else len(calls))


def nth(calls: list[str], name: str, number: int) -> int:
    """Where a name stands for the time `number`, from 0."""
    found = [i for i, other in enumerate(calls) if other == name]
    return found[number] if number < len(found) else len(calls)


def tapes(isolator: Isolator, trial: Trial) -> tuple[Tape, Tape]:
    """What both sides compute in one call, each in float64 with the modules below answering as torch's did."""
    subject, one = isolator.subject, trial.torch
    mine, theirs = subject.torch.Recorder(), subject.flax.Recorder()
    with subject.torch.pinned():
        subject.torch.alone(subject.torch_model, one.path, one.args, one.kwargs, trial.replies, dtype=isolator.dtype, watch=mine)
    told = {n: calls for n, calls in isolator.told(one).items() if n in trial.replies}
    replies = {isolator.partners[n].path: [reply for _, reply in calls] for n, calls in told.items()}
    isolator.run_flax(trial, replies, watch=theirs)
    return mine.tape, theirs.tape


@dataclass(frozen=True)
class Found:
    """An operation of one side whose result has no counterpart, although its operands have one.

    Attributes:
        step: its number.
        inputs: the numbers of those operands, but for plain numbers.
    """

    step: int
    inputs: tuple[int, ...]


class Side:
    """One side's tape, and which of its values the other has.

    Args:
        tape: of this side.
        other: of the other.
        tolerance: below which fingerprints are the same.
    """

    def __init__(self, tape: Tape, other: Tape, tolerance: float):
        self.tape, self.other, self.tolerance = tape, other, tolerance
        self.table = Table([value.print for value in other.values])
        self.counterparts: dict[int, list[int]] = {}

    def value(self, number: int) -> Value:
        return self.tape.values[number]

    def step(self, number: int) -> Step:
        return self.tape.steps[number]

    def alike(self, number: int) -> list[int]:
        """The values of the other side that hold the same numbers."""
        if number not in self.counterparts:
            self.counterparts[number] = self.table.like(self.value(number).print, self.tolerance)
        return self.counterparts[number]

    def settled(self, number: int) -> bool:
        """Whether nothing before this value needs to be looked at: it is given, a plain number, or the other side has it."""
        value = self.value(number)
        if value.source is None or (value.constant and value.print.uniform) or self.alike(number):
            return True
        same = next((i for i in self.step(value.source).inputs if not apart_by(self, i, number)), None)
        return same is not None and self.settled(same)

    def made(self, wanted: Fingerprint) -> int | None:
        """The last value of these numbers in this arrangement; in another if there is none. None if no operation saw it."""
        fitting = Table([v.print for v in self.tape.values]).like(wanted, LEAST)
        laid = [n for n in fitting if same_layout(self.value(n).print, wanted, LEAST)]
        return max(laid or fitting, default=None)

    def frontier(self, start: int) -> list[Found]:
        """The operations at which the numbers of a value part from the other side's, in the order in which they ran."""
        found: dict[int, Found] = {}
        seen, waiting = set[int](), [start]
        while waiting:
            number = waiting.pop()
            source = self.value(number).source
            if number in seen or source is None or (number != start and self.settled(number)):
                continue
            seen.add(number)
            open_ = [i for i in self.step(source).inputs if not self.settled(i)]
            if not open_:
                inputs = tuple(i for i in self.step(source).inputs if not plain(self.value(i)))
                found[source] = Found(source, inputs)
            elif self.is_constant(open_) and all(not self.step(f.step).inputs for i in open_ for f in self.frontier(i)):
                # Made of nothing that the other side has: it may well be right, and be made there beforehand.
                found[source] = Found(source, tuple(i for i in self.step(source).inputs if self.alike(i)))
            else:
                waiting += open_
        return sorted(found.values(), key=lambda f: f.step)

    def is_constant(self, numbers: list[int]) -> bool:
        return all(self.value(i).constant for i in numbers)

    def rearranged(self, number: int) -> int | None:
        """The first operation on the way to a value that only arranges numbers, and as the other side does nowhere."""
        found: int | None = None
        while (source := self.value(number).source) is not None and not self.laid_alike(number):
            before = [i for i in self.step(source).inputs if not apart_by(self, i, number)]
            if not before:
                break
            found, number = source, before[0]
        return found

    def laid_alike(self, number: int) -> bool:
        one = self.value(number).print
        return any(same_layout(one, self.other.values[n].print, self.tolerance) for n in self.alike(number))


def apart_by(side: Side, one: int, other: int) -> bool:
    return apart(side.value(one).print, side.value(other).print) > side.tolerance


def plain(value: Value) -> bool:
    return value.print.uniform and (value.constant or value.source is None)


class Alignment:
    """Both sides of one call, seen from one place at which they differ."""

    def __init__(self, isolator: Isolator, trial: Trial, place: Place, mine: Tape, theirs: Tape):
        self.isolator, self.trial, self.place = isolator, trial, place
        self.expected, self.actual = fingerprint(trial.expected[place]), fingerprint(trial.actual[place])
        self.gap = apart(self.expected, self.actual)
        noise = trial.bounds.get(place, 0.0) / (finite_scale(trial.expected[place]) or 1.0)
        self.least = max(LEAST, noise)
        tolerance = min(LARGEST, max(self.least, self.gap * PART if np.isfinite(self.gap) else LARGEST))
        if self.gap <= self.least:
            tolerance = LARGEST
        self.torch, self.flax = Side(mine, theirs, tolerance), Side(theirs, mine, tolerance)

    def run(self) -> FirstOperation:
        """What differs first."""
        mine, theirs = self.torch.made(self.expected), self.flax.made(self.actual)
        if mine is None or theirs is None:
            return self.passed_on(mine, theirs)
        if self.gap <= self.least:
            return self.arranged(mine, theirs)
        torch_found, flax_found = self.parting(self.torch, mine), self.parting(self.flax, theirs)
        pair = self.best(torch_found, flax_found)
        if pair is None:
            return self.passed_on(mine, theirs)
        first, second = pair
        moved = self.moved(first, second)
        if moved is not None:
            return moved
        return self.told(self.spot(self.torch, first.step), self.spot(self.flax, second.step))

    def parting(self, side: Side, number: int) -> list[Found]:
        """Where the numbers of a value part from the other side's; nowhere if the other side has them."""
        return [] if side.alike(number) else side.frontier(number)

    def best(self, mine: list[Found], theirs: list[Found]) -> tuple[Found, Found] | None:
        """The two operations that take the same operands; the first of those that share most, None if none does."""
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
                one, other = self.torch.value(a).print, self.flax.value(b).print
                if b not in self.torch.alike(a) or not comparable(one, other):
                    continue
                if not same_layout(one, other, self.torch.tolerance):
                    return self.arranged(a, b, mine.step, theirs.step)
        return None

    def arranged(self, a: int, b: int, mine: int | None = None, theirs: int | None = None) -> FirstOperation:
        """The operations that arrange two values of the same numbers otherwise."""
        first, second = self.torch.rearranged(a), self.flax.rearranged(b)
        spots = []
        for side, found, default, number in ((self.torch, first, mine, a), (self.flax, second, theirs, b)):
            source = side.value(number).source
            step = next((s for s in (found, default, source) if s is not None), None)
            spots.append(self.passed(side) if step is None else self.spot(side, step))
        return self.told(*spots, note="the same numbers, in another arrangement")

    # --- where one side does nothing --------------------------------------------------------------

    def passed_on(self, mine: int | None, theirs: int | None) -> FirstOperation:
        """One side or both hand on a value that the other has too, or that was given to them."""
        spots, notes = [], []
        for side, number, name in ((self.torch, mine, "torch"), (self.flax, theirs, "Flax")):
            found = [] if number is None else self.parting(side, number)
            source = None if number is None else side.value(number).source
            if found:
                spots.append(self.spot(side, found[0].step))
            else:
                spots.append(self.passed(side) if source is None else self.spot(side, source))
                notes.append(f"{name} hands on a value that the other side has too")
        return self.told(*spots, note="; ".join(notes) if len(notes) < 2 else "another value is handed on")

    def passed(self, side: Side) -> Spot:
        """A value that is handed on as it is: the line that calls the module which it is given to."""
        return Spot("", "", self.call_line(side))

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

    def call_line(self, side: Side) -> SourceLine | None:
        """The line that calls the module below to which the value is given."""
        name = self.place.child
        if name is None:
            return self.own_line(side)
        keys = [k for k in self.isolator.children.get(self.trial.torch.key, ()) if k[0] == name]
        key = keys[self.place.call] if self.place.call < len(keys) else (name, 0)
        if side is self.torch:
            return self.isolator.calls[key].line
        own = self.isolator.own.get((self.isolator.partners[name].path, key[1]))
        return own.line if own else None

    def told(self, mine: Spot, theirs: Spot, note: str = "") -> FirstOperation:
        drawn = [s.operation for s in (mine, theirs) if any(part in s.operation for part in RANDOM)]
        note = f"{drawn[0]} draws random numbers" if drawn else note
        return FirstOperation(mine, theirs, str(self.place), note)
