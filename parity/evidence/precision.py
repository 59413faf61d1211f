"""Which modules lose precision in the dtype of the models, and why: for pairs that are the same function in float64."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from parity.evidence.faults import Cause, Difference, Isolated, Isolation
from parity.evidence.hypotheses.integers import wrapped
from parity.evidence.hypotheses.suspect import Suspect, Values
from parity.evidence.isolation import Isolator
from parity.evidence.judging import torch_again
from parity.evidence.numerics import UNIT, Precision, largest_gap, precision, same_specials, wide
from parity.evidence.subject import JITTERED_RUNS, Subject
from parity.evidence.trees import mapped
from parity.evidence.trial import Place, Trial, is_array

# What is left of a loss counts as gone below so many times the noise of torch's own module.
GONE = 1.0
FALL = 0.5
# A formula whose error is more than so many times Flax's is not the one that Flax has.
LIKELY = 8.0


class PrecisionIsolator(Isolator):
    """Runs pairs alone as users run them; a pair differs if Flax's error is beyond the noise of torch's own."""

    def __init__(self, subject: Subject):
        super().__init__(subject, None)
        self.allowed: dict[tuple[str, int], dict[Place, float]] = {}

    def compared(self, trial: Trial) -> tuple[tuple[Difference, ...], float]:
        """The places at which Flax loses precision, worst first, and the largest error over the allowed one."""
        if trial.error:
            return (), float("inf")
        floats = [place for place in trial.expected if self.measurable(trial, place)]
        oracle = in_float64(trial, self.subject)
        runs = [trial.expected, *(self.shaken(trial, number) for number in range(JITTERED_RUNS))]
        found, worst = [], 0.0
        allowed = self.allowed.setdefault(trial.torch.key, {})
        for place in floats:
            result = self.measured(trial.actual[place], [run[place] for run in runs], oracle[place])
            ratio = max(result.max_ratio, result.rms_ratio)
            allowed[place] = result.max_error / result.max_ratio if result.max_ratio else 0.0
            worst = max(worst, ratio)
            if ratio > 1:
                found.append(described(place, trial, oracle[place], result, ratio))
        found += wrapped_places(trial)
        worst = max([worst, *(difference.ratio for difference in found)])
        return tuple(sorted(found, key=lambda d: -d.ratio)), worst

    def measured(self, actual: Any, runs: list[Any], oracle: Any) -> Precision:
        return precision(actual, runs, wide(oracle), self.subject.dtype)

    def measurable(self, trial: Trial, place: Place) -> bool:
        mine, theirs = trial.expected[place], trial.actual.get(place)
        if not is_array(mine) or not is_array(theirs) or str(mine.dtype) != self.subject.dtype:
            return False
        return mine.shape == theirs.shape and bool(same_specials(mine, theirs).all())

    def shaken(self, trial: Trial, number: int) -> Values:
        """Torch's module as users run it, with every intermediate result moved by at most half an ulp."""
        watch = self.subject.torch.Shaken(UNIT, self.subject.seed * 101 + number)
        return torch_again(trial, self.subject, dtype=None, watch=watch)


def in_float64(trial: Trial, subject: Subject) -> Values:
    """Torch's module in float64 on the same numbers: the oracle."""

    def widened(tree: Any) -> Any:
        return mapped(lambda _, leaf: leaf.astype(np.float64) if is_array(leaf) and floating(leaf) else leaf, tree)

    replies = {name: [widened(reply) for reply in answers] for name, answers in trial.replies.items()}
    one = trial.torch
    return torch_again(trial, subject, args=widened(one.args), kwargs=widened(dict(one.kwargs)), replies=replies)


def wrapped_places(trial: Trial) -> list[Difference]:
    """The whole numbers that differ: in float64 runs jax has 64 bits for them too, as users run it 32."""
    found = []
    for place, mine in trial.expected.items():
        theirs = trial.actual.get(place)
        if not is_array(mine) or not is_array(theirs) or mine.shape != theirs.shape:
            continue
        if {mine.dtype.kind, theirs.dtype.kind} - set("iu") or np.array_equal(mine, theirs):
            continue
        wrong = mine != theirs
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        figures = (int(wrong.sum()), wrong.size, at, float(theirs[at]), float(mine[at]))
        found.append(Difference(str(place), float("inf"), *figures))
    return found


def floating(array: np.ndarray) -> bool:
    return "float" in str(array.dtype)


def described(place: Place, trial: Trial, oracle: Any, result: Precision, ratio: float) -> Difference:
    gap = np.nan_to_num(np.abs(wide(trial.actual[place]) - wide(oracle)))
    at = tuple(int(i) for i in np.unravel_index(int(gap.argmax()), gap.shape))
    text = f"error {result.max_error:.3g} where torch's own is {result.torch_error:.3g}: {ratio:.3g} times what is allowed"
    figures = (int((gap > result.torch_error).sum()), gap.size, at, float(trial.actual[place][at]), float(oracle[at]))
    return Difference(str(place), ratio, *figures, float(gap[at]), text)


# ---------------------------------------------------------------- causes


@dataclass(frozen=True)
class Loss:
    """One way in which precision is lost.

    Attributes:
        name: in reports.
        what: what the Flax module does.
        change: what to write instead.
        left: computes what is left of the error at each place, in units of what is allowed.
    """

    name: str
    what: str
    change: str
    left: Callable[[], Mapping[Place, float]] = field(compare=False, repr=False)


# Settings of a Flax layer that cost digits, and what they must be.
SETTINGS = {
    "use_fast_variance": (False, "fast variance", "E[x^2] - E[x]^2 is computed in place of E[(x - E[x])^2]"),
    "precision": ("highest", "precision of products", "products are computed with fewer digits"),
    "dtype": (None, "dtype", "the layer computes in a dtype of its own"),
    "preferred_element_type": (None, "accumulation", "sums are kept in a narrower dtype"),
    "force_fp32_for_softmax": (True, "softmax dtype", "softmax is computed in a narrower dtype"),
}
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "convolution")
ROUNDED = (*PRODUCTS, "softmax", "native_layer_norm", "gelu", "exp")


def losses(suspect: Suspect, isolator: PrecisionIsolator) -> Iterator[Loss]:
    """Ways in which a module may have lost precision: settings of Flax's layer, then cuts in torch's operations."""
    allowed = isolator.allowed[suspect.trial.torch.key]

    def with_setting(name: str, value: Any) -> Mapping[Place, float]:
        values = suspect.flax_again(settings={name: value})
        other = Trial(**{**vars(suspect.trial), "actual": {**suspect.trial.actual, **values}})
        found, worst = PrecisionIsolator.compared(isolator, other)
        left = dict.fromkeys(suspect.differing, worst)
        return left | {place: d.ratio for place in suspect.differing for d in found if d.where == str(place)}

    for name, (value, loss, what) in SETTINGS.items():
        given = suspect.flax_layer.settings(name)
        if given is not None and given != value:
            change = f"set {name}={value!r}" if value is not None else f"leave out {name}={given}"
            yield Loss(loss, what, change, lambda n=name, v=value: with_setting(n, v))

    def with_edits(edits: Any) -> Mapping[Place, float]:
        values = torch_again(suspect.trial, suspect.subject, dtype=None, watch=suspect.subject.torch.Edited(edits))
        return {
            place: largest_gap(suspect.trial.actual[place], values[place]) / allowed[place]
            for place in suspect.differing
            if is_array(values.get(place)) and allowed.get(place)
        }

    def as_noisy(edits: Any) -> Mapping[Place, float]:
        """What is left if torch's noise were that of the edited module, which adds up in another order than Flax."""
        values = torch_again(suspect.trial, suspect.subject, dtype=None, watch=suspect.subject.torch.Edited(edits))
        oracle, left = in_float64(suspect.trial, suspect.subject), dict[Place, float]()
        for place in suspect.differing:
            theirs, right = suspect.trial.actual[place], wide(oracle[place])
            if is_array(values.get(place)) and largest_gap(values[place], right) <= LIKELY * largest_gap(theirs, right):
                result = precision(theirs, [values[place]], right, suspect.subject.dtype)
                left[place] = max(result.max_ratio, result.rms_ratio)
        return left

    yield from overrun(suspect)
    text, mend = SETTINGS["use_fast_variance"][2], "compute jnp.var(x), or set use_fast_variance=False"
    fast = [{op.number: ("norm", {"way": "fast variance"})} for op in suspect.named("native_layer_norm")]
    for edits in fast:
        yield Loss("fast variance", text, mend, lambda e=edits: with_edits(e))
    for dtype, said in (("tf32", "TF32, 10 bits of a product's operands"), ("bfloat16", "bfloat16"), ("float16", "float16")):
        for where in ("operands", "result"):
            for ops, name in cut_at(suspect, PRODUCTS if dtype == "tf32" else ROUNDED):
                edits = {op.number: ("rounded", {"dtype": dtype, "where": where}) for op in ops}
                change = "set precision='highest'" if dtype == "tf32" else f"leave out the cast to {dtype}"
                yield Loss("precision", f"{name}: {where} in {said}", change, lambda e=edits: with_edits(e))
    for edits in fast:
        yield Loss("fast variance", text, mend, lambda e=edits: as_noisy(e))


def overrun(suspect: Suspect) -> Iterator[Loss]:
    """Whole numbers beyond 32 bits, which jax has only if it is told to."""

    def left(values: Callable[[], Values]) -> Mapping[Place, float]:
        found = values()
        wide_places = [p for p in suspect.differing if is_array(found.get(p)) and found[p].dtype.kind in "iu"]
        return {p: 0.0 if np.array_equal(found[p], suspect.trial.actual[p]) else float("inf") for p in wide_places}

    for variant in wrapped(suspect):
        yield Loss("whole numbers", variant.what, variant.change, lambda v=variant: left(v.values))


def cut_at(suspect: Suspect, names: tuple[str, ...]) -> Iterator[tuple[list[Any], str]]:
    """All operations of these kinds, then each."""
    chosen = suspect.named(*names)
    if chosen:
        yield chosen, "every product" if names == PRODUCTS else "every operation"
    if len(chosen) > 1:
        yield from (([op], op.name.strip("_")) for op in chosen[:8])


def diagnose_precision(subject: Subject) -> tuple[Isolation, list[Cause]]:
    """The modules that lose precision as users run them, each with its causes, the best first."""
    isolator = PrecisionIsolator(subject)
    isolation = isolator.run()
    causes: list[Cause] = []
    for fault in isolation.faults:
        trial = isolator.trials[fault.path, fault.call]
        if trial.error:
            continue
        causes += causes_of(Suspect(isolator, trial, [d.where for d in fault.differences]), isolator, fault)
    return isolation, causes


def causes_of(suspect: Suspect, isolator: PrecisionIsolator, fault: Isolated) -> list[Cause]:
    found: list[Cause] = []
    for loss in losses(suspect, isolator):
        try:
            left = loss.left()
        except Exception:
            # The layer cannot be run with that setting: then it is not what it lacks.
            continue
        gone = {p: r for p, r in left.items() if r <= min(GONE, FALL * fault.ratio)}
        if gone and all(loss.what != cause.what for cause in found):
            complete = len(gone) == len(suspect.differing)
            text = (loss.name, fault.path, loss.what, loss.change)
            found.append(Cause(*text, fault.ratio, max(gone.values()), tuple(map(str, gone)), complete))
    return sorted(found, key=lambda c: -len(c.explains))
