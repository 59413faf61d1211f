"""Some values of an array in the place of all, at places that its shape alone decides."""

import math
import zlib
from dataclasses import replace
from typing import Any

import numpy as np

from parity.bundles.encoding import Sample
from parity.evidence.calls import Evaluation, ModuleCall
from parity.evidence.trees import mapped

# Values that are kept of an array: enough that a fault which touches a hundredth of them is seen, few enough for a file.
KEPT = 512


def places(shape: tuple[int, ...]) -> np.ndarray:
    """The flat indices of the values that are kept of an array of a shape, in order."""
    size = math.prod(shape)
    if size <= KEPT:
        return np.arange(size)
    rng = np.random.default_rng([zlib.crc32(str(shape).encode()), 7])
    return np.sort(rng.choice(size, KEPT, replace=False))


def sampled(array: np.ndarray) -> Sample:
    """Some values of an array; of a sample itself those that it holds."""
    if isinstance(array, Sample):
        return array
    found = np.ascontiguousarray(array).reshape(-1)[places(array.shape)].view(Sample)
    found.whole = tuple(array.shape)
    return found


def shortened(value: Any, keep: str) -> Any:
    """An answer with as much of its arrays as is to be kept: outputs of the model always whole."""
    if keep == "all":
        return value
    if isinstance(value, Evaluation):
        return replace(value, gradients={path: sampled(array) for path, array in value.gradients.items()})
    if isinstance(value, list) and value and all(isinstance(one, ModuleCall) for one in value):
        return [shortened_call(one) for one in value]
    return value


def shortened_call(one: ModuleCall) -> ModuleCall:
    def short(tree: Any) -> Any:
        return mapped(lambda _, leaf: sampled(leaf) if isinstance(leaf, np.ndarray) else leaf, tree)

    return replace(one, args=short(one.args), kwargs=short(dict(one.kwargs)), output=short(one.output))
