"""Where one side's computation parts from the other's: a tape walked backwards from a value that differs."""

from dataclasses import dataclass

from parity.evidence.fingerprints import Fingerprint, Table, apart, comparable, same_layout
from parity.evidence.tape import TURN, Step, Tape, Value

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
