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
from parity.evidence.numerics import finite_scale, largest_gap
from parity.evidence.subject import Subject
from parity.evidence.tape import TURN, Step, Tape, TooLongError, Value
from parity.evidence.trees import flatten
from parity.evidence.trial import Place, Trial, is_array

# Wrong modules of one comparison into which is looked.
NAMED = 3
# Two fingerprints that far apart, in units of the scale, are those of other numbers; nearer than the least, none are.
# Between the two the difference that is to be found decides: what is a small part of it counts as the same.
LARGEST, LEAST, PART = 1e-9, 1e-14, 1 / 30
# What the two call an operation of one sort.
KINDS = {
    "masking": ("masked_fill", "where", "select_n"),
    "scaling": ("div", "mul"),
    "sum": ("add", "sub", "add_any"),
    "taking": ("select", "slice", "split", "split_with_sizes", "unbind", "narrow", "dynamic_slice", "squeeze"),
    "product": ("mm", "bmm", "addmm", "baddbmm", "mv", "dot_general", "convolution", "conv_general_dilated"),
}
# Masks and scales, and what may come between them.
COMMUTING = ("masking", "scaling", "sum", "product")
# Operations after which what a scale or a mask does can no longer be made up for.
WHOLE = ("masking", "reduce_max", "reduce_sum", "product", "exp", "max", "sum")
# What draws random numbers, by a part of its name.
RANDOM = ("bernoulli", "dropout", "rand", "normal_", "multinomial", "threefry", "rng_", "random_", "exponential_")


def named(isolator: Isolator, isolation: Isolation) -> Isolation:
    """The same, with the first operation that differs in each of the first wrong modules."""
    chosen = {(one.path, one.call) for one in isolation.faults[:NAMED]}
    return replace(isolation, modules=tuple(with_operation(isolator, one, chosen) for one in isolation.modules))


def isolated(subject: Subject) -> Isolation:
    """Every pair of modules run alone, with the first operation that differs in each of the first wrong ones.

    Raises:
        InputError: the torch model refuses its inputs.
    """
    isolator = Isolator(subject)
    return named(isolator, isolator.run())


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
    places = in_order(isolator, trial, set(differing)) or unlike(trial)
    if not places:
        return unnamed("what differs is what the two return, not the numbers in it")
    mine, theirs = tapes(isolator, trial)
    found = unnamed("")
    for place, expected, actual in places:
        found = Alignment(isolator, trial, place, (mine, theirs), (expected, actual)).run()
        if found.torch or found.flax:
            return found
    return found


# A place that differs, and what torch and Flax have there.
Pair = tuple[Place, np.ndarray, np.ndarray]


def unlike(trial: Trial) -> list[Pair]:
    """The first output of each side, where the two return trees of another form."""
    mine, theirs = (
        {p: a for p, a in side.items() if p.child is None and is_array(a)} for side in (trial.expected, trial.actual)
    )
    for place, array in mine.items():
        fitting = next((a for p, a in theirs.items() if p not in mine and sorted(a.shape) == sorted(array.shape)), None)
        same = (
            fitting is not None
            and fitting.shape == array.shape
            and largest_gap(fitting, array) <= LARGEST * finite_scale(array)
        )
        if place not in theirs and fitting is not None and not same:
            return [(place, array, fitting)]
    return []


def trial_dtype(trial: Trial) -> str:
    return next((str(a.dtype) for a in trial.expected.values() if is_array(a) and a.dtype.kind != "b"), "the models' dtype")


def in_order(isolator: Isolator, trial: Trial, differing: set[str]) -> list[Pair]:
    """The differing places that are arrays on both sides: what is given to modules below in the order of their calls first."""
    calls = [key[0] for key in isolator.children.get(trial.torch.key, ())]
    both = [p for p, a in trial.expected.items() if str(p) in differing and is_array(a) and is_array(trial.actual.get(p))]
    ordered = sorted(both, key=lambda p: nth(calls, p.child, p.call) if p.child is not None else len(calls))
    return [(place, trial.expected[place], trial.actual[place]) for place in ordered]


def nth(calls: list[str], name: str, number: int) -> int:
    """Where a name stands for the time `number`, from 0."""
    found = [i for i, other in enumerate(calls) if other == name]
    return found[number] if number < len(found) else len(calls)


def tapes(isolator: Isolator, trial: Trial) -> tuple[Tape, Tape]:
    """What both sides compute in one call, each in float64 with the modules below answering as torch's did."""
    subject, one = isolator.subject, trial.torch
    mine, theirs = subject.torch.Recorder(), subject.flax.Recorder()
    with subject.torch.pinned():
        subject.torch.alone(
            subject.torch_model, one.path, one.args, one.kwargs, trial.replies, dtype=isolator.dtype, watch=mine
        )
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
        self.takers: dict[int, list[int]] = {}
        for number, step in enumerate(tape.steps):
            for taken in step.inputs:
                self.takers.setdefault(taken, []).append(number)

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
        now: int | None = number
        while now is not None:
            value = self.value(now)
            if value.source is None or (value.constant and value.print.uniform) or self.alike(now):
                return True
            now = self.before(now)
        return False

    def made(self, wanted: Fingerprint) -> int | None:
        """The last value of these numbers in this arrangement; in another if there is none. None if no operation saw it."""
        table = Table([v.print for v in self.tape.values])
        # Two programs of the same code may round otherwise.
        fitting = table.like(wanted, LEAST) or table.like(wanted, self.tolerance)
        laid = [n for n in fitting if same_layout(self.value(n).print, wanted, self.tolerance)]
        return max(laid or fitting, default=None)

    def operands(self, number: int) -> list[int]:
        """What the operation that made a value takes; nothing for a value that was given.

        What was written into the same memory since is later than the value.
        """
        source = self.value(number).source
        return [] if source is None else [i for i in self.step(source).inputs if i < number]

    def before(self, number: int) -> int | None:
        """The operand of which a value is a mere rearrangement; None if it is computed, or given."""
        operands = self.operands(number)
        if operands and self.step(self.value(number).source or 0).name == TURN:
            # What one turn of a loop takes of an array: the other side may take all turns at once.
            return operands[0]
        return next((i for i in operands if self.equal(i, number)), None)

    def equal(self, one: int, other: int) -> bool:
        """Whether two values of this side hold the same numbers."""
        return apart(self.value(one).print, self.value(other).print) <= self.tolerance

    def stages(self, number: int) -> list[int]:
        """A value, and what it was before it was rearranged and repeated, the last first."""
        found = [number]
        while (before := self.before(found[-1])) is not None:
            found.append(before)
        return found

    def maker(self, number: int) -> int | None:
        """The operation that computed a value, whatever rearranged it since; None if it was given."""
        while (before := self.before(number)) is not None:
            number = before
        return self.value(number).source

    def parting(self, start: int) -> "Parting":
        """Where the numbers of a value part from the other side's; nowhere if the other side has them."""
        if self.alike(start):
            return Parting(self, (), ())
        found: dict[int, Found] = {}
        seen, waiting, steps = set[int](), [start], set[int]()
        while waiting:
            number = waiting.pop()
            source = self.value(number).source
            if number in seen or source is None or (number != start and self.settled(number)):
                continue
            seen.add(number)
            steps.add(source)
            inputs = self.operands(number)
            open_ = [i for i in inputs if not self.settled(i)]
            rootless = [i for i in open_ if self.rootless(i)]
            waiting += [i for i in open_ if i not in rootless]
            for maker in [maker for maker in map(self.maker, rootless) if maker is not None]:
                # It may well be right, and be made beforehand on the other side.
                found[maker] = Found(maker, ())
            if not open_:
                found[source] = Found(source, tuple(i for i in inputs if not plain(self.value(i))))
        ordered = sorted(found.values(), key=lambda f: f.step)
        guilty = [one for one in ordered if not self.vindicated(one.step)]
        return Parting(self, tuple(guilty or ordered), tuple(sorted(steps)))

    def vindicated(self, first: int) -> bool:
        """Whether something that is computed from an operation's result has a counterpart: then it did no harm there.

        An operation whose like the other side has in another order, as sums are taken, feeds both what
        is right and what is wrong for another reason, as the later steps of a recurrent layer are.
        """
        seen, waiting = set[int](), list(self.step(first).outputs[:1])
        while waiting:
            for taker in self.takers.get(waiting.pop(), ()):
                if taker in seen or taker <= first:
                    continue
                seen.add(taker)
                result = self.step(taker).outputs[0]
                if self.alike(result) and not plain(self.value(result)) and self.value(result).dtype != "bool":
                    return True
                waiting.append(result)
        return False

    def draws(self, step: int) -> bool:
        """Whether random numbers go into an operation."""
        seen, waiting = set[int](), [step]
        while waiting:
            number = waiting.pop()
            if any(part in self.step(number).name for part in RANDOM):
                return True
            sources = {self.value(i).source for i in self.step(number).inputs}
            new = {s for s in sources if s is not None and s < number} - seen
            seen |= new
            waiting += new
        return False

    def rootless(self, number: int) -> bool:
        """Whether a value is made of counted and plain numbers alone, and of none that the other side has."""
        value = self.value(number)
        if value.source is None or not value.constant or self.settled(number):
            return False
        return all(self.rootless(i) for i in self.operands(number) if not plain(self.value(i)))

    def rearranged(self, number: int) -> int | None:
        """The first operation on the way to a value that arranges numbers as the other side does nowhere."""
        found: int | None = None
        now: int | None = number
        while now is not None and self.laid_otherwise(now):
            found = self.value(now).source
            now = next((i for i in self.operands(now) if self.laid_otherwise(i)), None)
        return found

    def laid_otherwise(self, number: int) -> bool:
        """Whether the other side has these numbers along the same axes, and nowhere in this arrangement."""
        one, others = self.value(number).print, [self.other.values[n].print for n in self.alike(number)]
        if any(same_layout(one, other, self.tolerance) for other in others):
            return False
        return any(comparable(one, other) for other in others)


@dataclass(frozen=True)
class Parting:
    """Where one side parts from the other on the way to a value.

    Attributes:
        side: this one.
        found: the operations that part, in the order in which they ran.
        steps: these and all after them whose results the other side has not.
    """

    side: Side
    found: tuple[Found, ...]
    steps: tuple[int, ...]

    def after(self, first: int) -> list[int]:
        """The operations that work on what one of them makes, itself the first, as long as their order does not matter."""
        made, after = set[int](), list[int]()
        for step in self.steps:
            if step == first or made & set(self.side.step(step).inputs):
                moves = self.side.before(self.side.step(step).outputs[0]) is not None
                if step != first and self.kind(step) not in COMMUTING and not moves:
                    continue
                after += [step] if step == first or not moves else []
                made |= set(self.side.step(step).outputs)
        return after

    def kind(self, step: int) -> str:
        """What sort of operation it is, in words that both sides have in common."""
        name = self.side.step(step).name
        return next((kind for kind, names in KINDS.items() if name in names), name)

    def past_taking(self, step: int, other: str) -> int:
        """The operation after those that only take a part of an array, where the other side takes none."""
        while self.kind(step) == "taking" and other != "taking":
            outputs = set(self.side.step(step).outputs)
            after = next((s for s in self.steps if s > step and outputs & set(self.side.step(s).inputs)), None)
            if after is None:
                break
            step = after
        return step

    def roots(self, step: int) -> list[int]:
        """What an operation works on, as it was before it was scaled."""
        found, waiting = list[int](), list(self.side.step(step).inputs)
        while waiting:
            number = waiting.pop()
            source = self.side.value(number).source
            moves = self.side.before(number)
            if moves is not None:
                waiting.append(moves)
            elif source in self.steps and self.kind(source) == "scaling":
                waiting += self.side.operands(number)
            elif not plain(self.side.value(number)):
                found.append(number)
        return found

    def hides(self, step: int) -> tuple[float, ...]:
        """The shares of its result that are huge or NaN."""
        return self.side.value(self.side.step(step).outputs[0]).print.shares


def plain(value: Value) -> bool:
    return value.print.uniform and (value.constant or value.source is None)


class Alignment:
    """Both sides of one call, seen from one place at which they differ."""

    def __init__(
        self, isolator: Isolator, trial: Trial, place: Place, tapes: tuple[Tape, Tape], arrays: tuple[np.ndarray, np.ndarray]
    ):
        self.isolator, self.trial, self.place = isolator, trial, place
        self.expected, self.actual = map(fingerprint, arrays)
        self.gap = apart(self.expected, self.actual)
        noise = trial.bounds.get(place, 0.0) / (finite_scale(arrays[0]) or 1.0)
        self.least = max(LEAST, noise)
        tolerance = min(LARGEST, max(self.least, self.gap * PART if np.isfinite(self.gap) else LARGEST))
        if self.gap <= self.least:
            tolerance = LARGEST
        self.torch, self.flax = Side(*tapes, tolerance), Side(*reversed(tapes), tolerance)

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
        return self.told(*spots, note="the same numbers, in another arrangement")

    # --- where one side does nothing --------------------------------------------------------------

    def passed_on(self, mine: int | None, theirs: int | None) -> FirstOperation:
        """One side or both hand on a value that the other has too, or that was given to them."""
        spots, notes = [], []
        for side, number, name, other in ((self.torch, mine, "torch", "Flax"), (self.flax, theirs, "Flax", "torch")):
            found = () if number is None else side.parting(number).found
            step = found[0].step if found else None if number is None else side.maker(number)
            spots.append(self.passed(side, number) if step is None else self.spot(side, step))
            notes += [] if found else [f"{name} hands on what {other} goes on computing with"]
        return self.told(*spots, note=notes[0] if len(notes) == 1 else "another value is handed on")

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
        keys = [k for k in self.isolator.children.get(self.trial.torch.key, ()) if k[0] == name]
        if name is None or number >= len(keys):
            return None
        if side is self.torch:
            return self.isolator.calls[keys[number]].line
        own = self.isolator.own.get((self.isolator.partners[name].path, keys[number][1]))
        return own.line if own else None

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
