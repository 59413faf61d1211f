"""What inputs and weights of a kind cannot show. A lint turns no verdict."""

from collections.abc import Callable, Iterator
from itertools import combinations

import numpy as np

from parity.evidence.notes import Note
from parity.evidence.numerics import wide
from parity.evidence.subject import Subject, arrays_of
from parity.evidence.unseen import is_denormal, shown
from parity.weights.leaf import Leaf

# Mean and variance of normalised rows differ from 0 and 1 by less; random rows of a model's width by more.
NORMALISED = 1e-3
# A product of two such numbers does not fit in 32 bits.
WIDE = 2**16
NORMS = ("LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm", "InstanceNorm")


def lint(subject: Subject, ids: frozenset[str]) -> tuple[Note, ...]:
    """Everything that the arguments and the torch model's parameters cannot show.

    Args:
        subject: the pair and its call.
        ids: paths of the arguments that are looked up in a table.
    """
    return (*lint_inputs(subject, ids), *lint_weights(subject.torch.leaves(subject.torch_model)))


# ------------------------------------------------------------------------------ arguments


def lint_inputs(subject: Subject, ids: frozenset[str] = frozenset()) -> Iterator[Note]:
    """Each argument by itself, then those that are the same."""
    call = subject.call
    for path, array in arrays_of(call):
        masklike = path.startswith(call.masks) or array.dtype == bool
        floating = "float" in str(array.dtype)
        if not array.size:
            yield Note("empty", path, "is empty: nothing is computed from it, and nothing shown")
        elif masklike:
            yield from lint_mask(path, array)
        elif floating or path in ids:
            yield from lint_numbers(path, array, floating)
            yield from lint_axes(path, array, floating)
        if array.dtype.kind in "iu" and path not in ids and not subject.flax.x64_enabled():
            yield from lint_width(path, array)
    yield from lint_equal(subject.values())


def lint_numbers(path: str, array: np.ndarray, floating: bool) -> Iterator[Note]:
    """The values themselves; the first that holds is told."""
    if array.size < 2:
        return
    values = wide(array) if floating else array
    finite = np.isfinite(values)
    if not finite.all():
        text = f"holds NaN or infinity at {int((~finite).sum())} of {values.size} places: what they reach shows no fault"
        yield Note("not-finite", path, text)
        return
    denormal = is_denormal(array)
    if (values == 0).all():
        yield Note("zeros", path, "is all zeros: what multiplies it does not show, and as a query it attends evenly")
    elif (values == values.flat[0]).all():
        yield Note("constant", path, f"is constant ({array.flat[0]!s}): a wrong scale, order or axis may not show")
    elif floating and (np.abs(values) == np.abs(values.flat[0])).all():
        text = f"has one magnitude ({np.abs(values.flat[0]):g}): what depends on the scale may not show"
        yield Note("one-magnitude", path, text)
    elif floating and (values == np.round(values)).all() and np.abs(values).max() < 2**24:
        yield Note("whole-numbers", path, "holds whole numbers only: lost precision (bfloat16, TF32) may not show")
    elif floating and normalised(values):
        text = "has rows of mean 0 and variance 1: a missing or doubled normalisation may not show, nor its epsilon"
        yield Note("normalised", path, text)
    elif floating and denormal.any():
        text = f"holds {int(denormal.sum())} denormal numbers: torch keeps them, XLA on the CPU turns them to zero"
        yield Note("denormal", path, text)


def normalised(values: np.ndarray) -> bool:
    """Whether every row has mean 0 and variance 1 (of either estimate)."""
    if values.ndim < 2 or values.shape[-1] < 4 or values.size == values.shape[-1]:
        return False
    centred = np.abs(values.mean(-1)).max() < NORMALISED
    return bool(centred and any(np.abs(values.var(-1, ddof=d) - 1).max() < NORMALISED for d in (0, 1)))


def lint_axes(path: str, array: np.ndarray, floating: bool) -> Iterator[Note]:
    """Batch and positions: (batch, length, width) of values, (batch, length) of ids, (batch, width) too."""
    sequence = array.ndim == (3 if floating else 2)
    if array.ndim > 1 and array.shape[0] == 1:
        yield Note("batch-of-one", path, "has a batch of one: mixed-up batch entries do not show")
    elif array.ndim > 1 and not constant(array) and all_equal(array, 0):
        yield Note("equal-entries", path, "holds the same for every batch entry: mixed-up entries do not show")
    if sequence and array.shape[1] == 1:
        text = "has a single position: attention is 1 whatever its scores; order, positions and masks do not show"
        yield Note("single-token", path, text)
    elif sequence and not constant(array) and all_equal(array, 1):
        yield Note("equal-positions", path, "holds the same at every position: order, attention and masks do not show")
    if sequence and array.shape[0] == array.shape[1] > 1:
        text = f"has batch and length alike ({array.shape[0]}): what mixes them up runs here and fails at other sizes"
        yield Note("equal-sizes", path, text)


def constant(array: np.ndarray) -> bool:
    # Two ends that differ spare looking at the rest.
    return bool(array.flat[0] == array.flat[-1] and (array == array.flat[0]).all())


def all_equal(array: np.ndarray, axis: int) -> bool:
    first = np.take(array, [0], axis)
    return array.shape[axis] > 1 and bool((array == first).all())


def lint_mask(path: str, array: np.ndarray) -> Iterator[Note]:
    """A mask that could be any other, and one whose meaning is open."""
    if constant(array):
        text = f"is a mask of one value ({array.flat[0]!s}): whether it is used, shifted or misaligned does not show"
        yield Note("constant-mask", path, text)
    elif "float" in str(array.dtype) and bool(((array == 0) | (array == 1)).all()):
        text = "is a floating point mask of 0 and 1: some layers add such a mask, others switch by it"
        yield Note("float-mask", path, text)
    denormal = is_denormal(array)
    if denormal.any():
        text = f"holds {int(denormal.sum())} denormal numbers: XLA on the CPU turns them to zero, and so may turn the mask"
        yield Note("denormal", path, text)


def lint_width(path: str, array: np.ndarray) -> Iterator[Note]:
    """Whole numbers of 64 bits, of which jax makes 32."""
    largest = int(np.abs(array.astype(np.float64)).max(initial=0))
    if array.dtype.itemsize == 8 and largest >= WIDE:
        text = f"is {array.dtype} up to {largest}: jax holds 32 bits, so sums and products beyond 2^31 wrap there"
        yield Note("wide-integers", path, text)


def lint_equal(values: list[tuple[str, np.ndarray]]) -> Iterator[Note]:
    """Values that are given twice: whether they were swapped cannot be seen."""
    groups: list[list[str]] = []
    arrays = {path: array for path, array in values if array.ndim and array.size > 1}
    for one, other in combinations(arrays, 2):
        a, b = arrays[one], arrays[other]
        if a.shape == b.shape and a.dtype == b.dtype and np.array_equal(a, b, equal_nan=True):
            group = next((g for g in groups if one in g), None)
            if group is None:
                groups.append([one, other])
            elif other not in group:
                group.append(other)
    for group in groups:
        text = f"and {group[-1]} hold the same: whether they are swapped, or one is used for all, does not show"
        yield Note("same-arrays", ", ".join(group[:-1]), text)


# ------------------------------------------------------------------------------ parameters


def lint_weights(leaves: list[Leaf]) -> Iterator[Note]:
    """Parameters as a new layer has them."""
    found: dict[str, list[str]] = {}
    for leaf in leaves:
        code = kind_of_leaf(leaf)
        if code:
            found.setdefault(code, []).append(leaf.path)
    told = {
        "zero-biases": "zero: a bias that is missing, doubled or given to another layer does not show",
        "plain-norms": "1 (or biases 0), as in a new layer: a scale or bias that is left out or swapped does not show",
        "initial-statistics": "those of a new layer (0 and 1): statistics that are not used or not carried over do not show",
        "constant-kernels": "one number throughout: a transposed or permuted kernel does not show",
        "not-finite": "NaN or infinity in places: what they reach shows no fault",
        "denormal": "denormal numbers in places: torch keeps them, XLA on the CPU turns them to zero",
    }
    names = {"zero-biases": "biases", "plain-norms": "scales of norms", "initial-statistics": "running statistics"}
    for code, text in told.items():
        if paths := found.get(code):
            verb = "hold" if code in ("denormal", "not-finite") else "are"
            yield Note(code, "", f"{names.get(code, 'parameters')} {verb} {text}: {shown(paths)}", {"paths": paths})


def kind_of_leaf(leaf: Leaf) -> str:
    """The code of what a parameter or buffer cannot show, '' if it can show all."""
    if leaf.unreadable or "float" not in leaf.dtype or leaf.role not in ("parameter", "buffer"):
        return ""
    array = leaf.read()
    if not array.size:
        return ""
    value, same = array.flat[0], constant(array)
    norm = any(f".{name}" in kind for kind in leaf.kinds for name in NORMS)
    if same:
        for holds, code in CONSTANT:
            if holds(leaf, float(value), norm):
                return code
    if not np.isfinite(array).all():
        return "not-finite"
    return "denormal" if is_denormal(array).any() else ""


# What a constant parameter is, the first that holds.
CONSTANT: tuple[tuple[Callable[[Leaf, float, bool], bool], str], ...] = (
    (lambda leaf, value, _: leaf.name == "running_mean" and value == 0, "initial-statistics"),
    (lambda leaf, value, _: leaf.name == "running_var" and value == 1, "initial-statistics"),
    (
        lambda leaf, value, norm: norm and leaf.name in ("weight", "bias") and value == float(leaf.name == "weight"),
        "plain-norms",
    ),
    (lambda leaf, value, _: "bias" in leaf.name and value == 0 and len(leaf.shape) == 1, "zero-biases"),
    (
        lambda leaf, value, _: leaf.role == "parameter" and len(leaf.shape) > 1 and int(np.prod(leaf.shape)) > 1,
        "constant-kernels",
    ),
)
