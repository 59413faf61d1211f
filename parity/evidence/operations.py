"""The first operation of a wrong module that differs: torch's operations aligned with Flax's by fingerprints.

A value of one side has a counterpart if the other side computes the same numbers anywhere, in
whatever arrangement. From the value that differs, both sides are walked backwards as long as
values have none: where all operands have one, there stands the operation that differs. What
only one side computes on its way, as a softmax in five steps does, is never reached if what
comes of it has a counterpart.
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from parity.errors import NotRecordedError, first_line
from parity.evidence.alignment import Alignment, call_lines
from parity.evidence.faults import FirstOperation, Isolated, Isolation, Spot
from parity.evidence.isolation import Isolator
from parity.evidence.isolation_recorded import isolator_of
from parity.evidence.numerics import finite_scale, largest_gap
from parity.evidence.partings import LARGEST
from parity.evidence.subject import Subject
from parity.evidence.tape import Tape, TooLongError
from parity.evidence.trial import Place, Trial, is_array

# Wrong modules of one comparison into which is looked.
NAMED = 3


def named(isolator: Isolator, isolation: Isolation) -> Isolation:
    """The same, with the first operation that differs in each of the first wrong modules."""
    chosen = {(one.path, one.call) for one in isolation.faults[:NAMED]}
    return replace(isolation, modules=tuple(with_operation(isolator, one, chosen) for one in isolation.modules))


def isolated(subject: Subject) -> Isolation:
    """Every pair of modules run alone, with the first operation that differs in each of the first wrong ones.

    Raises:
        InputError: the torch model refuses its inputs.
    """
    isolator = isolator_of(subject)
    return named(isolator, isolator.run())


def with_operation(isolator: Isolator, one: Isolated, chosen: set[tuple[str, int]]) -> Isolated:
    trial = isolator.trials.get((one.path, one.call))
    if one.status != "differs" or (one.path, one.call) not in chosen or trial is None or trial.error:
        return one
    try:
        found = first_operation(isolator, trial, [d.where for d in one.differences])
    except TooLongError as error:
        found = unnamed(f"the module computes {error}: they were not compared one by one")
    except NotRecordedError:
        found = unnamed("its operations could not be compared: one of the sides was recorded")
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
        return handed(isolator, trial, set(differing)) or unnamed("what differs is what the two return, not the numbers in it")
    mine, theirs = tapes(isolator, trial)
    found = unnamed("")
    for place, expected, actual in places:
        found = Alignment(isolator, trial, place, (mine, theirs), (expected, actual)).run()
        if found.torch or found.flax:
            return found
    return found


def handed(isolator: Isolator, trial: Trial, differing: set[str]) -> FirstOperation | None:
    """The calls that hand a module below another number or word; no operation computes what is written there."""
    for place, setting in trial.expected.items():
        if place.child is not None and str(place) in differing and not is_array(setting):
            mine, theirs = call_lines(isolator, trial, place.child, place.call)
            return FirstOperation(Spot("", "", mine), Spot("", "", theirs), str(place), "another setting is handed on")
    return None


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
