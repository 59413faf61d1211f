"""Pairs of which Flax's side was recorded: torch's module is run alone on what Flax's took, and must return what that did.

In `isolation` it is the other way round. Either way each is judged for itself, and either way torch's module can
be run again under a hypothesis, so that the diagnosis is the same.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from parity.errors import NotRecordedError, first_line
from parity.evidence.calls import Alone, ModuleCall
from parity.evidence.conventions import MASK, Axes
from parity.evidence.isolation import Isolator, aligned, arrays_by_path
from parity.evidence.numerics import numpy_float
from parity.evidence.subject import Subject
from parity.evidence.trees import flatten, mapped
from parity.evidence.trial import NotComparableError, Trial, by_argument, is_array, like, spoken, turned_back

# The calls of one module below, each with what Flax's returned there as torch's would have; None where that is not known.
Answered = Mapping[str, list[tuple[ModuleCall, Any]]]


def isolator_of(subject: Subject) -> Isolator:
    """What runs the pairs of two models alone, as far as they can be run.

    Raises:
        NotRecordedError: of a recorded side too little is known.
    """
    if subject.sampled:
        raise NotRecordedError("modules cannot be run alone: the bundle does not keep all that they take and return")
    return TorchIsolator(subject) if "flax" in subject.recorded else Isolator(subject)


class TorchIsolator(Isolator):
    """Runs torch's modules on what the recorded Flax modules were given."""

    def attempt(self, one: ModuleCall, axes: Axes) -> Trial:
        """Run the torch module alone on Flax's arguments, its children answering as Flax's did."""
        partner, rule = self.partners[one.path], self.rule(one.path)
        own = self.own.get((partner.path, one.call))
        if own is None:
            raise NotComparableError("its call is not in the recording: it ran inside a transformation of jax, or not at all")
        answers = self.answers(one)
        given = self.given(one, own, axes)
        wide, plain = self.run_torch(one, given, answers, "float64"), self.run_torch(one, given, answers, None)
        trial = Trial(wide[0], plain[0], partner, axes, rule)
        trial.args, trial.kwargs = own.args, own.kwargs
        trial.replies = replies(answers)
        # What Flax never calls cannot be what is wrong there: the module's own code does without it.
        called = {path for path, _ in self.own}
        trial.free = tuple(n for n, _ in self.below(one) if n not in answers and self.partners[n].path in called)
        self.fed = {call.key: call for calls in plain[1].values() for call, _ in calls}
        outputs = dict(flatten(own.output, is_array))
        self.collect(trial, Alone(outputs, self.given_below(one, answers)), wide[1])
        return trial

    def plain_call(self, call: ModuleCall) -> ModuleCall | None:
        """A call of a module below as torch's own run alone makes it, in the dtype of the model."""
        return self.fed.get(call.key)

    def given(self, one: ModuleCall, own: ModuleCall, axes: Axes) -> tuple[Any, Any]:
        """Torch's arguments with Flax's values in the places where they belong.

        Raises:
            NotComparableError: the arguments do not fit.
        """
        wanted = self.arguments(one, axes, self.rule(one.path))
        theirs = {spoken(path): leaf for path, leaf in flatten((own.args, dict(own.kwargs)), is_array)}
        back = {torch: theirs[flax] for flax, torch in wanted.sources.items() if torch != MASK and is_array(theirs.get(flax))}
        mine = by_argument(one, self.rule(one.path))
        if MASK in mine and is_array(theirs.get(MASK)) and not same_mask(mine[MASK], theirs[MASK]):
            raise NotComparableError("the Flax model gives it another mask than torch's, of which torch's own cannot be made")
        # What torch is given several times, Flax may be given once.
        for path, array in by_argument(one).items():
            twin = next((known for known in back if path not in back and same_array(mine.get(known), array)), None)
            back |= {path: back[twin]} if twin is not None else {}

        def filled(path: str, leaf: Any) -> Any:
            array = back.get(spoken(path))
            if array is None or not is_array(leaf):
                return leaf
            turned = turned_back(axes, array, leaf)
            if turned.shape != leaf.shape:
                raise NotComparableError(f"the Flax model gives it {turned.shape}, torch {leaf.shape}")
            return turned.astype(leaf.dtype)

        args, kwargs = mapped(filled, (one.args, dict(one.kwargs)))
        return args, kwargs

    def answers(self, one: ModuleCall) -> Answered:
        """What the modules below returned in Flax, in torch's layout and tree; without those that were not seen called."""
        found: dict[str, list[tuple[ModuleCall, Any]]] = {}
        paths = [self.partners[name].path for name, _ in self.below(one)]
        for name, calls in self.below(one):
            told = [(call, self.answer(call)) for call in calls]
            # Two torch modules that are one in Flax cannot be told apart.
            if paths.count(self.partners[name].path) == 1 and all(reply is not None for _, reply in told):
                found[name] = told
        return found

    def answer(self, call: ModuleCall) -> Any:
        """What Flax's module returned in one call, as torch's would have."""
        own, rule = self.own.get((self.partners[call.path].path, call.call)), self.rule(call.path)
        if own is None:
            return None
        axes, outputs = self.axes_of(call), arrays_by_path(own.output)
        names = rule.names(outputs) if rule and rule.outputs else aligned(call, outputs, axes)

        def turned(path: str, leaf: Any) -> Any:
            where = path if names is None else names.get(path)
            theirs = outputs.get(where) if where is not None else None
            if not is_array(leaf) or theirs is None:
                return leaf
            back = turned_back(axes, theirs, leaf)
            return back if back.shape == leaf.shape else leaf

        return mapped(turned, call.output)

    def run_torch(self, one: ModuleCall, given: tuple[Any, Any], answers: Answered, dtype: str | None) -> tuple[Any, Answered]:
        """Torch's module alone: its call as it then is, and the calls that it makes of the modules below.

        Raises:
            NotComparableError: it raises.
        """
        native = self.subject.dtype

        def cast(tree: Any) -> Any:
            return mapped(lambda _, leaf: narrowed(leaf, native) if dtype is None and is_array(leaf) else leaf, tree)

        args, kwargs = cast(given)
        torch = self.subject.torch
        try:
            with torch.pinned():
                run = torch.alone(self.subject.torch_model, one.path, args, kwargs, cast(replies(answers)), dtype=dtype)
        except NotRecordedError:
            raise
        except Exception as error:
            raise NotComparableError(
                f"called alone as Flax's module was called, torch raises {type(error).__name__}: {first_line(error)}"
            ) from error
        output = mapped(run.outputs.get, one.output)
        below = {
            name: [(fed(call, run, name, number), reply) for number, (call, reply) in enumerate(calls)]
            for name, calls in answers.items()
        }
        return replace(one, args=args, kwargs=kwargs, output=output), below

    def given_below(self, one: ModuleCall, answers: Answered) -> dict[tuple[str, int, str], Any]:
        """What Flax's module gave the modules below, by their path, their call within it and the path of the argument."""
        found = {}
        for name, calls in answers.items():
            flax = self.partners[name].path
            for number, (call, _) in enumerate(calls):
                own = self.own[flax, call.call]
                for path, leaf in flatten((own.args, dict(own.kwargs)), is_array):
                    found[flax, number, spoken(path)] = leaf
        return found


def same_array(one: Any, other: Any) -> bool:
    return is_array(one) and is_array(other) and one.shape == other.shape and bool(np.array_equal(one, other, equal_nan=True))


def same_mask(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two masks show the same, however much of it is spelled out."""
    wide = like(one, other), like(other.astype(bool), one)
    return same_array(*wide)


def replies(answers: Answered) -> dict[str, list[Any]]:
    return {name: [reply for _, reply in calls] for name, calls in answers.items()}


def narrowed(array: np.ndarray, dtype: str) -> np.ndarray:
    """An array of floating point numbers in the dtype of the model."""
    return array.astype(numpy_float(dtype)) if array.dtype == np.float64 else array


def fed(call: ModuleCall, run: Alone, name: str, number: int) -> ModuleCall:
    """A call of a module below with what it is given in another run."""
    args, kwargs = mapped(lambda path, leaf: run.given.get((name, number, spoken(path)), leaf), (call.args, dict(call.kwargs)))
    return replace(call, args=args, kwargs=kwargs)
