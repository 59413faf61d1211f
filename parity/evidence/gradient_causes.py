"""Why gradients differ although outputs agree: what the numbers of one gradient show."""

from collections.abc import Iterator
from itertools import combinations

import numpy as np

from parity.evidence.numerics import wide
from parity.evidence.subject import Subject
from parity.weights.paths import split

# Difference that counts as none, as a part of the largest gradient: float64 on both sides.
SAME = 1e-9
# Uses of one parameter of which subsets are tried.
USES = 6


def explained(subject: Subject, path: str, actual: np.ndarray, expected: np.ndarray) -> str:
    """One sentence on why a gradient differs; '' if its numbers do not tell.

    Args:
        subject: the pair, which agrees forwards.
        path: torch's name of a parameter, or `input ...`.
        actual: Flax's gradient in float64, in torch's layout.
        expected: torch's.
    """
    return next(sentences(subject, path, wide(actual), wide(expected)), "")


def same(a: np.ndarray, b: np.ndarray) -> bool:
    scale = max(float(np.abs(b).max(initial=0.0)), float(np.abs(a).max(initial=0.0)))
    return bool((np.abs(a - b) <= SAME * scale).all())


def sentences(subject: Subject, path: str, actual: np.ndarray, expected: np.ndarray) -> Iterator[str]:
    # What agrees in float64 differs in the dtype of the models alone, and float64 does not show why.
    if actual.shape != expected.shape or same(actual, expected):
        return
    if not actual.any() and expected.any():
        yield "Flax has a gradient of 0: something stops it, such as jax.lax.stop_gradient or jnp.round"
    if not expected.any() and actual.any():
        yield "torch has a gradient of 0: something stops it, such as .detach(): jax.lax.stop_gradient does so in Flax"
    row = padding(subject, path)
    if row is not None and same(np.delete(actual, row, axis=0), np.delete(expected, row, axis=0)):
        yield f"row {row} is torch's padding_idx={row}, to which a lookup gives no gradient; Flax's gives it one"
    yield from by_use(subject, path, actual, expected)
    live = np.abs(expected) > SAME * np.abs(expected).max(initial=0.0)
    if live.any():
        factor = float(np.median(actual[live] / expected[live]))
        if np.isfinite(factor) and factor and same(actual, factor * expected):
            yield f"Flax's gradient is {factor:.6g} times torch's everywhere: a factor on the way back"


def padding(subject: Subject, path: str) -> int | None:
    """The row of an embedding that stands for padding."""
    owner = split(path)[0]
    layer = next((layer for layer in subject.torch.layers(subject.torch_model) if layer.path == owner), None)
    return layer.settings("padding_idx") if layer is not None and "torch.nn.Embedding" in layer.kinds else None


def by_use(subject: Subject, path: str, actual: np.ndarray, expected: np.ndarray) -> Iterator[str]:
    """Whether Flax's gradient is the sum over some of a parameter's uses."""
    if path.startswith("input ") or not subject.cotangents:
        return
    try:
        with subject.torch.pinned():
            uses = subject.torch.gradients_by_use(subject.torch_model, subject.call, subject.cotangents, path, dtype="float64")
    except Exception:
        return
    uses = [np.asarray(use) for use in uses if use.shape == expected.shape and use.any()]
    if not 1 < len(uses) <= USES or not same(np.sum(uses, axis=0), expected):
        return
    for count in range(len(uses) - 1, 0, -1):
        for chosen in combinations(range(len(uses)), count):
            if same(np.sum([uses[i] for i in chosen], axis=0), actual):
                told = " and ".join(str(i + 1) for i in chosen)
                yield (
                    f"the parameter is used {len(uses)} times, and Flax's gradient is that of use {told} alone, in the order "
                    "of the forward pass: torch sums over all; tie the array itself, and let no use stop its gradient"
                )
                return
