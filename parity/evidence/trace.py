"""Outputs of every module on both sides, paired by path, and the first place where they part."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from parity.errors import InputError, NotRecordedError, first_line
from parity.evidence.calls import Captured
from parity.evidence.conventions import USUAL, Convention, convention
from parity.evidence.judging import in_parts, swallowed
from parity.evidence.numerics import (
    APART,
    SEMANTICS_FACTOR,
    UNIT,
    finite_scale,
    largest_gap,
    rounding,
    same_specials,
    semantics_bound,
    wide,
    worst_part,
)
from parity.evidence.operations import isolated
from parity.evidence.partners import known_names
from parity.evidence.pictures import Picture, picture
from parity.evidence.result import Divergence, Step, Trace
from parity.evidence.sampling import Sample, at_same_places, shape_of
from parity.evidence.shelf import PASSING, Shelf
from parity.evidence.subject import Subject
from parity.evidence.trees import in_words
from parity.evidence.trial import broadcasts_alike, is_array

# Cosine above which two arrays are taken for the same values in another order of axes.
ALIKE = 0.7
# So many values of an array, in no step with its axes, show in which order those are.
LOOKED_AT = 2**14
# Times what rounding explains by torch's float32 noise. A recurrent net that doubles what goes in at each step, and so its
# rounding, was seen at 7 (benchmarks/clean_trials.py).
DOUBTFUL = 1e3
# Of the value it is seen at. What both models make of whole numbers is float32 in a float64 run too, and the same in both of
# torch's runs, so that these show no noise: the sine of a time step of 1000 was seen to part by 1e-5.
FINE = 2.0**-10
# Values that are looked at together, few enough to stay near the processor.
BLOCK = 2**16
# Values of an output that agrees of which a picture is drawn; one that differs is drawn whatever its size.
DRAWN = 2**17


def trace(
    torch_model: Any,
    flax_model: Any,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    rename: Mapping[str, str] | None = None,
    ignore: Iterable[str] = (),
    seed: int = 0,
) -> Trace:
    """Find the first module at which two models part, without touching their code.

    Both run in float64 on the same numbers; a module agrees if its outputs differ by no more
    than rounding explains, judged by torch's own float32 noise at that place.

    Args:
        torch_model: a `torch.nn.Module` in eval mode.
        flax_model: an `nnx.Module` in eval mode, or a `parity.Linen`.
        args: positional arguments for both.
        kwargs: keyword arguments for both.
        rename: as in `parity.transfer`.
        ignore: as in `parity.transfer`.
        seed: unused by the trace itself; part of the report.

    Returns:
        One step for each call of each torch module, in the order in which torch finished them.

    Raises:
        InputError: a model or an argument cannot be compared as it stands, the torch model refuses it, or they differ and
            one of them returns other numbers when it is run again ('not repeatable').
    """
    subject = Subject(torch_model, flax_model, args, kwargs or {}, rename=rename, ignore=ignore, seed=seed, gradients=False)
    subject.renew()
    return replace(trace_subject(subject), isolate=lambda: isolated(subject))


def trace_subject(subject: Subject) -> Trace:
    """`trace` for models that are already checked."""
    shelf, plain = Shelf(), None
    try:
        with subject.torch.pinned():
            _, plain = subject.torch.capture(subject.torch_model, subject.call, keep=shelf.put)
            _, expected = subject.torch.capture(subject.torch_model, subject.call, dtype="float64", keep=shelf.put)
    except Exception as error:
        refuses = "refuses these inputs" if plain is None else "does not run in float64, in which modules are compared"
        raise InputError(f"the torch model {refuses}: {type(error).__name__}: {first_line(error)}") from error
    desk = Desk(subject, expected, plain)
    try:
        actual = flax_modules(subject, desk)
    except NotRecordedError:
        raise
    except Exception as error:
        what = f"Flax raises {type(error).__name__}: {first_line(error)}"
        return Trace((Step("", 0, False, divergence=Divergence("", 0, "", None, reason=what)),))
    steps, unpaired = paired(expected, plain, actual, desk)
    if any(step.divergence for step in steps):
        # Before what torch draws counts for its rounding.
        subject.check_repeatable()
    if any(doubtful(step) for step in steps):
        # A second look, as at the level `identical`: it costs four runs, so only what little parts is looked at twice.
        steps, _ = paired(expected, plain, actual, desk, shaken(subject, shelf))
    return Trace(settled(steps), unpaired)


def doubtful(step: Step) -> bool:
    """Whether a module parts by so little that float64's own noise may be it, or that of what is float32 even then."""
    found = step.divergence
    if found is None or not found.elements:
        return False
    return found.ratio < DOUBTFUL or found.difference <= FINE * max(abs(found.flax), abs(found.torch))


def shaken(subject: Subject, shelf: Shelf) -> list[list[Captured]]:
    """Torch's modules in float64 with every result moved by half an ulp; nothing where torch was recorded."""
    try:
        return subject.shaken_modules(shelf.put)
    except Exception:
        return []


def flax_modules(subject: Subject, desk: "Desk") -> list[Captured]:
    """What every module returned, by torch's paths; of the model alone where modules run inside a transformation of jax."""
    try:
        # Compared while it comes in: only what differs is put aside.
        keep = Shelf(PASSING).put
        found = subject.flax.capture(subject.flax_model, subject.call, dtype="float64", keep=keep, each=desk.arrived)[1]
    except NotRecordedError:
        raise
    except Exception:
        run = subject.flax.evaluate(subject.flax_model, subject.call, dtype="float64", quick=True)
        return [Captured("", 0, run.outputs)]
    return in_torchs_words(found, desk)


def in_torchs_words(found: list[Captured], desk: "Desk") -> list[Captured]:
    """Flax's calls by the paths that torch has for them; those of several modules with one array are counted through.

    Where torch calls its module as often as Flax the one of the same path, the others stand for code of torch's that is no
    module, as a head that takes the table of an embedding.
    """
    own, seen, named = Counter(one.path for one in found), Counter[str](), list[Captured]()
    for one in found:
        path = desk.known(one.path)
        if path not in desk.shared:
            named.append(replace(one, path=path))
        elif own[path] == desk.calls[path]:
            named.append(one)
        else:
            named.append(replace(one, path=path, call=seen[path]))
            seen[path] += 1
    return named


class Desk:
    """Lays what one pair of calls recorded side by side; only there its arrays are in memory.

    Args:
        subject: the pair of models.
        expected: torch's calls in float64.
        plain: the same in the models' dtype.

    Attributes:
        rename: torch's paths in Flax's words, in the direction in which Flax's keys fit torch's names, as in the transfer.
        calls: how often torch calls a module, by path in Flax's words.
        shared: torch's paths, in Flax's words, of modules that are several in Flax, with one array.
        agreed: the steps of the calls that agreed when they came in, by Flax's path and call.
    """

    def __init__(self, subject: Subject, expected: Sequence[Captured], plain: Sequence[Captured]):
        self.blank, self.rename = subject.padding.modules, subject.pairing.renames
        self.calls = Counter(self.rename.apply(one.path)[0] for one in expected)
        self.wanted = frozenset(self.calls)
        self.names = known_names(subject, self.wanted)
        self.torch_layers = {self.rename.apply(x.path)[0]: x for x in subject.torch.layers(subject.torch_model)}
        layers = subject.flax.layers(subject.flax_model)
        self.flax_layers = {self.known(layer.path): layer for layer in layers}
        modules: dict[str, set[Hashable]] = {}
        for layer in layers:
            modules.setdefault(self.known(layer.path), set()).add(layer.path if layer.identity is None else layer.identity)
        self.shared = {path for path, ones in modules.items() if len(ones) > 1}
        noise = {(one.path, one.call): one for one in plain}
        self.partners: dict[tuple[str, int], tuple[Captured, Captured]] = {}
        for mine in expected:
            if (mine.path, mine.call) in noise:
                key = self.rename.apply(mine.path)[0], mine.call
                self.partners.setdefault(key, (mine, noise[mine.path, mine.call]))
        self.agreed: dict[tuple[str, int], Step] = {}

    def known(self, path: str) -> str:
        """The path by which torch knows a Flax module of several paths."""
        return path if path in self.wanted else self.names.get(path, path)

    def arrived(self, one: Captured) -> Captured:
        """A call of Flax's, without its arrays if they agree with torch's."""
        key = self.known(one.path), one.call
        self.agreed.pop(key, None)
        # Which call of torch's it is shows once all are known, where several modules are one there.
        if key not in self.partners or key[0] in self.shared:
            return one
        try:
            step = compare_step(*self.lay(*self.partners[key], replace(one, path=key[0])), None)
        except Exception:
            # It is compared again where nobody takes that for an error of the model.
            return one
        if not step.agrees:
            return one
        self.agreed[key] = step
        return Captured(one.path, one.call, {})

    def lay(self, *records: Captured, inputs: bool = False) -> tuple[Captured, Captured, Captured]:
        """Torch's call, its run in the models' dtype, and Flax's, as they are compared: padding blank, axes as in torch."""
        mine, own, theirs = self.blank([one.taken(inputs=inputs) for one in records])
        return mine, own, self.in_torchs_order(theirs, mine.outputs)

    def in_torchs_order(self, one: Captured, returned: Mapping[str, Any]) -> Captured:
        """What a layer takes and returns laid out as torch lays it, where the ledger tells how it is in Flax."""
        mine, theirs = self.torch_layers.get(one.path), self.flax_layers.get(one.path)
        # The models themselves are given the same by the caller.
        rule = convention(mine, theirs) if one.path and mine and theirs else None
        return laid_out(one, rule, returned) if rule else replace(one, outputs=in_shape(one, returned))


def in_shape(one: Captured, returned: Mapping[str, Any]) -> dict[str, Any]:
    """The outputs of a module that no rule knows, in torch's order of axes where shapes and values both show another."""
    found = dict(one.outputs)
    for path, theirs in one.outputs.items():
        mine = returned.get(path)
        if not one.path or not is_array(mine) or not is_array(theirs) or len(shape_of(mine)) != len(shape_of(theirs)):
            continue
        # As many channels as steps: only the values show which axis is which.
        if shape_of(mine) == shape_of(theirs) and alike_in_shape(theirs, mine):
            continue
        turned = [back for axes in USUAL if shape_of(back := axes.to_torch(theirs)) == shape_of(mine)]
        found[path] = next((back for back in turned if alike_in_shape(back, mine)), theirs)
    return found


def alike_in_shape(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays are plainly the same values, but for a fault. Of large ones some values are looked at."""
    x, y = (in_parts(values).reshape(-1)[:: values.size // LOOKED_AT | 1] for values in at_same_places(a, b))
    both = np.isfinite(x) & np.isfinite(y)
    x, y = x[both], y[both]
    size = float(np.linalg.norm(x) * np.linalg.norm(y))
    return size > 0 and float(x @ y) > ALIKE * size


def laid_out(one: Captured, rule: Convention, returned: Mapping[str, Any]) -> Captured:
    """What a layer took and returned, in torch's order of axes and under torch's names."""

    def turned(value: Any) -> Any:
        return rule.axes.to_torch(value) if isinstance(value, np.ndarray) else value

    # What torch returns besides, Flax does not: it cannot be compared, and is no difference.
    outputs = dict(returned) if rule.outputs else {}
    names = {flax: torch for torch, flax in (rule.names(one.outputs) or {}).items()}
    outputs |= {names.get(path, path): turned(value) for path, value in one.outputs.items() if not names or path in names}
    inputs = {} if rule.arguments is not None else {number: turned(value) for number, value in one.inputs.items()}
    return replace(one, outputs=outputs, inputs=inputs)


def paired(
    expected: list[Captured],
    plain: list[Captured],
    actual: list[Captured],
    desk: Desk,
    shaken: Sequence[list[Captured]] = (),
) -> tuple[tuple[Step, ...], tuple[str, ...]]:
    """Steps in torch's order, and what has no counterpart on the other side."""
    noise = {(c.path, c.call): c for c in plain}
    moved = [{(c.path, c.call): c for c in run} for run in shaken]
    theirs = {(c.path, c.call): c for c in actual}
    calls, their_calls = Counter(c.path for c in expected), Counter(c.path for c in actual)
    steps: list[Step] = []
    last: str | None = None
    unpaired: list[str] = []
    between: list[str] = []
    for mine in expected:
        path = desk.rename.apply(mine.path)[0]
        other = theirs.pop((path, mine.call), None)
        if other is not None and calls[mine.path] != their_calls[path]:
            # A call that ran inside a transformation goes unseen, so call 1 here may be call 2 there.
            unpaired.append(f"{mine.path} ({calls[mine.path]} calls in torch, {their_calls[path]} seen in Flax)")
            theirs = {key: c for key, c in theirs.items() if key[0] != path}
            continue
        if other is None and their_calls[path]:
            continue
        if other is None and mine.passes_on:
            continue
        if other is None or (mine.path, mine.call) not in noise:
            unpaired.append(f"{mine.path or 'the model'} (torch only)" + (f", call {mine.call + 1}" if mine.call else ""))
            between.append(mine.path)
            continue
        own = noise[(mine.path, mine.call)]
        step = desk.agreed.get((path, mine.call))
        if step is None:
            runs = [run[key].taken(inputs=False) for run in moved if (key := (mine.path, mine.call)) in run]
            step = compare_step(*desk.lay(mine, own, other), last, desk.blank(runs))
        if step.divergence:
            same = inputs_agree(*desk.lay(mine, own, other, inputs=True))
            told = replace(step.divergence, inputs=same, between=tuple(between))
            step = replace(step, divergence=told)
        steps.append(step)
        if step.agrees:
            last, between = mine.path, []
    alone = [key for key, c in theirs.items() if not c.passes_on]
    unpaired += [f"{path} (flax only)" + (f", call {call + 1}" if call else "") for path, call in alone]
    return tuple(steps), tuple(dict.fromkeys(unpaired))


def settled(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The same, where a module that only answers in another form is no divergence: what it is part of agrees in numbers.

    A recurrent layer may return its state besides, a linear one its heads apart; whoever calls it knows how to take that.
    """

    def within(path: str, step: Step) -> bool:
        return step.agrees and step.path != path and (not step.path or path.startswith(f"{step.path}."))

    def seen(number: int, step: Step) -> Step:
        form = step.divergence is not None and step.divergence.elements == 0 and "NaN" not in step.divergence.reason
        if not form or not step.divergence or not any(within(step.path, later) for later in steps[number + 1 :]):
            return step
        return Step(step.path, step.call, True, note=f"answers in another form: {step.divergence.reason}")

    return tuple(seen(number, step) for number, step in enumerate(steps))


def compare_step(
    expected: Captured, plain: Captured, actual: Captured, last: str | None, shaken: Sequence[Captured] = ()
) -> Step:
    """One module's outputs on both sides. A module that returns nothing comparable is said to be so."""
    ratio, drawn = 0.0, list[Picture]()
    actual, note = without_axes_of_one(expected, actual)
    for name in [*expected.outputs, *(n for n in actual.outputs if n not in expected.outputs)]:
        found, measured = compare_output(name, expected, plain, actual, last, shaken)
        ratio = max(ratio, measured)
        drawn += pictured(name, expected, plain, actual) if found or small(expected.outputs.get(name)) else []
        if found:
            return Step(expected.path, expected.call, False, ratio, found, pictures=tuple(drawn))
    return Step(expected.path, expected.call, True, ratio, note=note, pictures=tuple(drawn))


def small(value: Any) -> bool:
    """Whether an output is drawn also where it agrees: of a large model that would take as long as comparing it."""
    return is_array(value) and value.size <= DRAWN


def pictured(name: str, expected: Captured, plain: Captured, actual: Captured) -> list[Picture]:
    """How the difference lies in one output, if both sides return numbers of one shape there."""
    mine, theirs, own = (c.outputs.get(name) for c in (expected, actual, plain))
    if not is_array(mine) or not is_array(theirs) or not is_array(own) or not mine.shape == theirs.shape == own.shape:
        return []
    # Of some values there is no picture.
    if any(isinstance(one, Sample) for one in (mine, theirs)):
        return []
    parts = [in_parts(array) for array in (mine, theirs, own)]
    if not parts[0].shape == parts[1].shape == parts[2].shape:
        return []
    drawn = picture(name, parts[0], parts[1], semantics_bound(parts[2], parts[0]))
    return [drawn] if drawn else []


def without_axes_of_one(expected: Captured, actual: Captured) -> tuple[Captured, str]:
    """Outputs of a module inside, in torch's shape where only leading axes of length one differ, and a note that they do.

    What the model itself returns must have them.
    """
    found, notes = dict(actual.outputs), []
    for name, theirs in actual.outputs.items():
        mine = expected.outputs.get(name)
        if expected.path and mine is not None and broadcasts_alike(mine, theirs):
            found[name] = theirs.reshape(mine.shape)
            notes.append(f"output {name}".rstrip() + f" has shape {mine.shape} in torch, {theirs.shape} in flax")
    return replace(actual, outputs=found), "; ".join(notes)


def compare_output(
    name: str, expected: Captured, plain: Captured, actual: Captured, last: str | None, shaken: Sequence[Captured] = ()
) -> tuple[Divergence | None, float]:
    def reason(text: str) -> tuple[Divergence, float]:
        return Divergence(expected.path, expected.call, name, last, reason=text), float("inf")

    if name not in actual.outputs or name not in expected.outputs:
        side, other = ("torch", "flax") if name in expected.outputs else ("flax", "torch")
        return reason(f"{side} returns {name or 'a single value'}, {other} does not")
    mine, theirs = expected.outputs[name], actual.outputs[name]
    if not isinstance(mine, np.ndarray) or not isinstance(theirs, np.ndarray):
        if isinstance(mine, np.ndarray) != isinstance(theirs, np.ndarray) or mine != theirs:
            return reason(f"expected (torch) {summary(mine)}, actual (flax) {summary(theirs)}")
        return None, 0.0
    if shape_of(mine) != shape_of(theirs):
        return reason(f"expected (torch) shape {shape_of(mine)}, actual (flax) {shape_of(theirs)}")
    ratio = agreement(*at_places(theirs, mine, plain.outputs[name]))
    if ratio is not None:
        return None, ratio
    a, b, own = judged_values(theirs, mine, plain.outputs[name])
    if a.shape != b.shape:
        return reason(f"expected (torch) {mine.dtype}, actual (flax) {theirs.dtype}")
    if not same_specials(a, b).all():
        at = tuple(int(i) for i in np.argwhere(~same_specials(a, b))[0])
        text = f"NaN or infinity on one side only, first at {at}: expected (torch) {b[at]:.6g}, actual (flax) {a[at]:.6g}"
        return reason(text)
    result, where = worst_part(a, b, lambda part: semantics_bound(own[part], b[part]))
    runs = [at_places(theirs, mine, run.outputs[name])[2] for run in shaken if name in run.outputs]
    if runs and not (result.zero or result.ratio <= 1):
        moved = [in_parts(run) for run in runs]

        def loose(part: Any) -> float:
            return semantics_bound(own[part], b[part], None, max(largest_gap(run[part], b[part]) for run in moved))

        again, there = worst_part(a, b, loose)
        if not swallowed(result.ratio * result.bound, result.bound, again.bound):
            result, where = again, there
    if result.zero or result.ratio <= 1:
        return None, result.ratio
    with np.errstate(invalid="ignore"):
        gap = np.where(where, np.nan_to_num(np.abs(a - b), nan=0.0), 0.0)
    unit = UNIT.get(str(theirs.dtype), 0.0)
    if mine.dtype == np.float64 and UNIT["float64"] < unit and gap.max() <= SEMANTICS_FACTOR * unit * finite_scale(b):
        return reason(f"Flax returns {theirs.dtype} in a float64 run, torch float64: a cast or a dtype argument pins it")
    at = tuple(int(i) for i in np.unravel_index(int(gap.argmax()), gap.shape))
    differing = int((gap > result.bound).sum())
    found = Divergence(
        *(expected.path, expected.call, name, last, differing, a.size, result.ratio),
        *(spot(mine, theirs, at), float(a[at]), float(b[at]), float(gap[at]), "", largest_gap(a, b)),
    )
    return found, result.ratio


def agreement(actual: np.ndarray, expected: np.ndarray, plain: np.ndarray) -> float | None:
    """The largest difference over what rounding explains, if a look at the whole shows that it is no more than that.

    Most outputs of a large model agree, and need none of the figures that a difference is told with. They are looked at
    block by block: of arrays as large as theirs nothing else is made.
    """
    if any(array.dtype.kind == "c" or array.shape != expected.shape for array in (actual, expected, plain)):
        return None
    flat = [array.reshape(-1) for array in (actual, expected, plain)]
    gap = noise = scale = 0.0
    for start in range(0, expected.size, BLOCK):
        theirs, mine, own = (wide(array[start : start + BLOCK]) for array in flat)
        with np.errstate(invalid="ignore", over="ignore"):
            found = [float(np.abs(values).max()) for values in (theirs - mine, own - mine, mine)]
        # Infinity or NaN on any side goes through the maximum; a value that stands far out is judged apart from the others.
        if not np.isfinite(found).all() or found[2] >= APART:
            return None
        gap, noise, scale = (max(pair) for pair in zip((gap, noise, scale), found, strict=True))
    bound = rounding(noise, scale)
    return gap / bound if bound > 0 and gap <= bound else 0.0 if not gap else None


def spot(mine: np.ndarray, theirs: np.ndarray, at: tuple[int, ...]) -> tuple[int, ...]:
    """Where a value stands, in the whole array if one side is a sample of it."""
    kept = next((one for one in (mine, theirs) if isinstance(one, Sample)), None)
    return at if kept is None else tuple(int(i) for i in np.unravel_index(int(kept.at[at[0]]), kept.whole))


def at_places(actual: np.ndarray, expected: np.ndarray, plain: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values of one place, all of them or those that a recording keeps."""
    theirs, mine = at_same_places(actual, expected)
    noise, _ = at_same_places(plain, actual if isinstance(actual, Sample) else expected)
    return theirs, mine, noise


def judged_values(actual: np.ndarray, expected: np.ndarray, plain: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same in float64."""
    theirs, mine, noise = at_places(actual, expected, plain)
    return in_parts(theirs), in_parts(mine), in_parts(noise)


def inputs_agree(expected: Captured, plain: Captured, actual: Captured) -> Literal["agree", "differ", ""]:
    """Whether a module is given the same on both sides; '' if nothing it is given can be compared."""
    common = [n for n in expected.inputs if n in actual.inputs and n in plain.inputs]
    arrays = [(actual.inputs[n], expected.inputs[n], plain.inputs[n]) for n in common]
    if not arrays or any(shape_of(a) != shape_of(b) for a, b, _ in arrays):
        return ""
    pairs = [judged_values(*one) for one in arrays]
    if any(a.shape != b.shape or b.shape != own.shape for a, b, own in pairs):
        return ""
    same = (same_specials(a, b).all() and largest_gap(a, b) <= semantics_bound(own, b) for a, b, own in pairs)
    return "agree" if all(same) else "differ"


def summary(value: Any) -> str:
    return f"an array {value.shape}" if isinstance(value, np.ndarray) else in_words(value)
