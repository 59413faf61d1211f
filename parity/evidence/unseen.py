"""What outputs and gradients cannot show of a pair: parameters that nothing depends on, ties, denormal numbers."""

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

from parity.evidence.calls import Evaluation
from parity.evidence.notes import Note
from parity.evidence.numerics import finite_scale, largest_gap, numpy_float, precision, semantics_bound, wide
from parity.evidence.subject import Subject, changed

# A gradient that much smaller than those beside it is zero in exact arithmetic, and so is a change of an output.
NOTHING = 1e-10
# Names in a note: enough to see which they are.
SHOWN = 4
# Values are moved by up to this part of themselves where a tie or a kink is to be left.
MOVED = 2.0**-16


def unseen_parameters(subject: Subject, scales: dict[str, float]) -> list[Note]:
    """Parameters whose gradient is zero: those on which no output depends, and the others.

    A zero gradient may come of these inputs alone (a dead unit), so the parameters are changed too.

    Args:
        subject: the pair, its gradients computed.
        scales: the magnitude by which each gradient is judged.
    """
    gradients = subject.torch_wide.gradients
    largest = max(scales.values(), default=0.0)
    suspects = [
        path
        for path, gradient in gradients.items()
        if not path.startswith("input ") and finite_scale(gradient) <= NOTHING * (scales.get(path) or largest)
    ]
    # All at once first: in most models there are none, or all of them are unseen.
    blind = suspects if not suspects or unmoved(subject, suspects) else [p for p in suspects if unmoved(subject, [p])]
    still = [path for path in suspects if path not in blind]
    notes = []
    if blind:
        text = f"the outputs do not depend on: {shown(blind)}; only the level weights compares them"
        notes.append(Note("unseen-parameters", "", text, {"paths": blind}))
    if still:
        text = f"the gradient is zero on these inputs, though the outputs depend on: {shown(still)}"
        notes.append(Note("zero-gradients", "", text, {"paths": still}))
    return notes


def shown(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def unmoved(subject: Subject, paths: list[str]) -> bool:
    """Whether torch's outputs in float64 stay the same if these parameters become others."""
    rng = np.random.default_rng([subject.seed, 5])
    leaves = subject.torch.leaves(subject.torch_model)
    chosen = {leaf.identity for leaf in leaves if leaf.path in paths}
    made: dict[object, np.ndarray] = {}
    for leaf in leaves:
        if leaf.identity in chosen and leaf.identity not in made:
            values = wide(leaf.read())
            made[leaf.identity] = values + rng.standard_normal(values.shape) * (finite_scale(values) or 1.0)
    weights = {leaf.path: made[leaf.identity] for leaf in leaves if leaf.identity in made}
    with subject.torch.pinned():
        run = subject.torch.evaluate(subject.torch_model, subject.call, dtype="float64", weights=weights)
    outputs = subject.padding.blank(run.outputs)
    return all(
        np.array_equal(array, outputs[path])
        if array.dtype.kind in "biu"
        else largest_gap(outputs[path], array) <= NOTHING * finite_scale(array)
        for path, array in subject.torch_wide.outputs.items()
        if isinstance(array, np.ndarray)
    )


def flushed(subject: Subject) -> list[Note]:
    """Outputs that are denormal in torch and zero in Flax: XLA flushes them on the CPU."""
    found = []
    for path, mine in subject.torch_native.outputs.items():
        theirs = subject.flax_native.outputs.get(path)
        if isinstance(mine, np.ndarray) and isinstance(theirs, np.ndarray) and theirs.shape == mine.shape:
            count = int(((theirs == 0) & is_denormal(mine)).sum())
            if count:
                text = f"holds {count} denormal numbers in torch that are zero in Flax: XLA flushes them on the CPU"
                found.append(Note("flushed", f"output {path}" if path else "the output", text, {"values": count}))
    return found


def is_denormal(array: np.ndarray) -> np.ndarray:
    """Where an array holds numbers below the smallest normal one."""
    if "float" not in str(array.dtype):
        return np.zeros(array.shape, bool)
    magnitude = np.abs(wide(array))
    return (magnitude > 0) & (magnitude < float(ml_dtypes.finfo(numpy_float(str(array.dtype))).tiny))


def explained_by_flushing(
    subject: Subject, path: str, actual: np.ndarray, runs: list[np.ndarray], oracle: np.ndarray, seen: object
) -> str:
    """The end of a sentence about an imprecise output, if it is precise once torch flushes denormal numbers too."""
    with subject.torch.pinned(), subject.torch.flushing() as possible:
        if not possible:
            return ""
        other = subject.torch.evaluate(subject.torch_model, subject.call).outputs[path][seen]
    if np.array_equal(other, runs[0], equal_nan=True):
        return ""
    result = precision(actual, [*runs, other], oracle, subject.dtype)
    if not result.passed:
        return ""
    return (
        "; denormal numbers explain it: torch keeps them, XLA on the CPU turns them to zero, and with torch doing so too the "
        f"error is {max(result.max_ratio, result.rms_ratio):.2g} times the allowed"
    )


def explained_by_ties(subject: Subject, path: str, counterpart: Callable[[Evaluation, np.ndarray], np.ndarray | None]) -> str:
    """The end of a sentence about a gradient, if it agrees once the inputs are moved off ties and kinks.

    Args:
        subject: the pair.
        path: of the gradient.
        counterpart: Flax's gradient in torch's layout, from a run of Flax and torch's own gradient.
    """
    if not subject.exact_ties:
        return ""
    rng = np.random.default_rng([subject.seed, 6])

    def off(_: str, array: np.ndarray) -> np.ndarray:
        moved = wide(array) + rng.uniform(-1, 1, array.shape) * MOVED * (finite_scale(array) or 1.0)
        return np.asarray(moved.astype(array.dtype))

    call = changed(subject.call, off)
    with subject.torch.pinned():
        mine = subject.torch.evaluate(subject.torch_model, call, dtype="float64", cotangents=subject.cotangents)
        near = subject.torch.evaluate(subject.torch_model, call, cotangents=subject.cotangents)
    theirs = subject.flax.evaluate(subject.flax_model, call, dtype="float64", cotangents=subject.cotangents, quick=True)
    other = counterpart(theirs, mine.gradients[path])
    bound = semantics_bound(wide(near.gradients[path]), mine.gradients[path])
    if other is None or largest_gap(other, mine.gradients[path]) > bound:
        return ""
    return (
        f"; {subject.exact_ties} values lie exactly on a kink or tie for a maximum, where frameworks choose other gradients: "
        "on inputs moved off them it agrees"
    )


def undecided_integers(subject: Subject, path: str, wrong: np.ndarray, dtype: str | None) -> np.ndarray:
    """Where whole numbers that differ hang on a tie: torch's own change there when its roundings are moved."""
    runs = subject.shaken_wide if dtype == "float64" else [*subject.ensemble, *subject.shaken]
    plain = (subject.torch_wide if dtype == "float64" else subject.torch_native).outputs[path]
    moved = np.zeros(wrong.shape, bool)
    for run in runs:
        moved |= run.outputs[path] != plain
    return wrong & moved
