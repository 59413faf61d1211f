"""Values that leave the range of the dtype in which a model is deployed, in torch itself."""

import ml_dtypes
import numpy as np

from parity.evidence.numerics import finite_scale, numpy_float, wide
from parity.evidence.subject import Subject
from parity.said import Said

# An output of which the largest value in float64 lies this near the end of the range, or beyond: sums on the way to it
# overflow, and whether an infinity or a NaN comes of it is a matter of the order of their terms.
NEAR = 2.0**-10


def left_range(subject: Subject, path: str, actual: np.ndarray) -> np.ndarray | None:
    """Where an output in the deployed dtype says nothing, because torch's own values overflow in it; None if nowhere.

    A NaN of torch's in an output of moderate size, as of a mask that float16 turns to infinity, is what torch returns, and
    is compared.

    Args:
        subject: the pair.
        path: of the output.
        actual: Flax's, in torch's shape.
    """
    native = subject.torch_native.outputs[path]
    if "float" not in str(native.dtype) or np.isfinite(wide(native)).all():
        return None
    try:
        oracle = wide(subject.torch_wide.outputs[path])
    except Exception:
        # A torch model that does not run in float64: there is nothing to tell an overflow by.
        return None
    if oracle.shape != native.shape or finite_scale(oracle) < NEAR * largest(str(native.dtype)):
        return None
    if not overflown(native, oracle).any():
        return None
    return overflown(native, oracle) | overflown(actual, oracle)


def overflown(own: np.ndarray, oracle: np.ndarray) -> np.ndarray:
    """Where a value is finite in float64 and not in the dtype of a run."""
    return np.isfinite(wide(oracle)) & ~np.isfinite(wide(own))


def largest(dtype: str) -> float:
    """The largest finite number of a dtype."""
    return float(ml_dtypes.finfo(numpy_float(dtype)).max)


def left_range_note(where: str, gone: np.ndarray, dtype: str) -> Said:
    """That values were not compared in a dtype."""
    text = f"{where}: {int(gone.sum())} values overflow {dtype} in torch itself and were compared in float64 only"
    return Said("overflows", text)


def overflows(subject: Subject) -> int:
    """How many of torch's outputs and gradients are finite in float64 and not in its dtype.

    Which infinities become NaN on the way back is then a matter of the order of products.
    """
    native, wide_run = subject.torch_native, subject.torch_wide
    pairs = [(native.gradients[path], oracle) for path, oracle in wide_run.gradients.items() if path in native.gradients]
    pairs += [(native.outputs[path], oracle) for path, oracle in wide_run.floats.items()]
    return sum(int(overflown(own, oracle).sum()) for own, oracle in pairs)
