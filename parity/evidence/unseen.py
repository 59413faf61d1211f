"""What outputs and gradients cannot show of a pair: parameters that nothing depends on, ties, denormal numbers."""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from parity.evidence.notes import Note
from parity.evidence.numerics import Noise, alike, finite_scale, largest_gap, noise_of, precision, wide
from parity.evidence.subject import Subject

# A gradient that much smaller than those beside it is zero in exact arithmetic, and so is a change of an output.
NOTHING = 1e-10
# By how many times itself a parameter is changed, to see whether anything depends on it.
FAR = (1.0, 1e3)
# Names in a note: enough to see which they are.
SHOWN = 4


def unseen_parameters(subject: Subject) -> list[Note]:
    """Parameters whose gradient is zero: those on which no output depends, and the others.

    A zero gradient may come of these inputs alone (a unit that is off), so the parameters are changed too.
    """
    scales = {path: finite_scale(gradient) for path, gradient in subject.torch_wide.gradients.items()}
    largest = max(scales.values(), default=0.0)
    suspects = [path for path, scale in scales.items() if not path.startswith("input ") and scale <= NOTHING * largest]
    # All at once first: in most models there are none, or all of them are unseen.
    blind = suspects if not suspects or unmoved(subject, suspects) else [p for p in suspects if unmoved(subject, [p])]
    still = [path for path in suspects if path not in blind and scales[path] == 0]
    notes = []
    if blind:
        text = f"the outputs do not depend on: {shown(blind)}; only the level weights compares them"
        notes.append(Note("unseen-parameters", "", text, {"paths": blind}))
    if still:
        text = f"the gradient is zero on these inputs, though the outputs depend on: {shown(still)}"
        notes.append(Note("zero-gradients", "", text, {"paths": still}))
    return notes


def unreached(subject: Subject) -> list[Note]:
    """Bounds of an activation, such as the 6 of relu6, beyond which none of its values lies."""
    bounds = [f"{bound:g} of {name}" for (name, bound), reached in subject.watched_kinks.bounds.items() if not reached]
    if not bounds:
        return []
    text = f"no value goes beyond the bound {shown(bounds)}: whether Flax has it does not show; give larger inputs"
    return [Note("bound-unreached", "", text, {"bounds": bounds})]


def shown(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def unmoved(subject: Subject, paths: list[str]) -> bool:
    """Whether torch's outputs in float64 stay the same if these parameters become others, near by and far off."""
    return all(same_outputs(subject, paths, size) for size in FAR)


def same_outputs(subject: Subject, paths: list[str], size: float) -> bool:
    rng = np.random.default_rng([subject.seed, 5])
    leaves = subject.torch.leaves(subject.torch_model)
    chosen = {leaf.identity for leaf in leaves if leaf.path in paths}
    made: dict[object, np.ndarray] = {}
    for leaf in leaves:
        if leaf.identity in chosen and leaf.identity not in made:
            values = wide(leaf.read())
            made[leaf.identity] = values + rng.standard_normal(values.shape) * size * (finite_scale(values) or 1.0)
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
    smallest = np.asarray(ml_dtypes.finfo(array.dtype).tiny, array.dtype)
    # Of bfloat16, NumPy warns where there is NaN.
    with np.errstate(invalid="ignore"):
        return (np.abs(array) < smallest) & (array != 0)


def explained_by_flushing(subject: Subject, path: str, actual: np.ndarray, noise: Noise, oracle: np.ndarray, seen: Any) -> str:
    """The end of a sentence about an imprecise output, if it is precise once torch flushes denormal numbers too."""
    with subject.torch.pinned(), subject.torch.flushing() as possible:
        if not possible:
            return ""
        other = subject.torch.evaluate(subject.torch_model, subject.call).outputs[path][seen]
    if np.array_equal(other, subject.torch_native.outputs[path][seen], equal_nan=True):
        return ""
    result = precision(actual, noise.joined(noise_of([other], oracle, alike(oracle))), oracle, subject.dtype)
    if not result.passed:
        return ""
    return (
        "; denormal numbers explain it: torch keeps them, XLA on the CPU turns them to zero, and with torch doing so too the "
        f"error is {max(result.max_ratio, result.rms_ratio):.2g} times the allowed"
    )


def undecided_integers(subject: Subject, path: str, wrong: np.ndarray, dtype: str | None) -> np.ndarray:
    """Where whole numbers that differ hang on a tie: torch's own change there, or it is gone on inputs without ties."""
    side = "wide" if dtype == "float64" else "native"
    moved = subject.unsettled(side, path)
    if (wrong & ~moved).any() and subject.ties:
        mine, theirs = (getattr(subject.off_ties, f"{name}_{side}").outputs.get(path) for name in ("torch", "flax"))
        if isinstance(mine, np.ndarray) and isinstance(theirs, np.ndarray) and np.array_equal(mine, theirs):
            return wrong
    return wrong & moved
