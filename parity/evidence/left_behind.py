"""What a run leaves in a model's buffers: a moving average, a counter, a cache."""

import numpy as np

from parity.evidence.numerics import comparable, identity, semantics_bound, wide
from parity.evidence.result import Finding
from parity.evidence.subject import Subject


def compared_buffers(subject: Subject) -> tuple[list[Finding], list[str]]:
    """The buffers that torch's float64 run changes, against their counterparts after Flax's.

    Returns:
        Those that differ; and which were not compared, and why, one sentence each.
    """
    changed = subject.torch_wide.buffers
    if not changed:
        return [], []
    pairs = {p.source.path: p for p in subject.pairing.pairs if p.source.part is None and p.target.part is None}
    try:
        after = subject.flax.left_behind(subject.flax_model, subject.call, "float64")
    except Exception:
        # A Linen model returns what it changes, and one that needs to be compiled keeps it inside.
        after = {}
    findings, missing = [], []
    for path, expected in changed.items():
        p = pairs.get(path)
        if p is None or p.target.path not in after:
            missing.append(path)
            continue
        actual = p.layout.inverse().apply(after[p.target.path])
        native = subject.torch_native.buffers.get(path, expected)
        found = difference(actual, expected, native)
        findings += [Finding(path, f"{found} after the run")] if found else []
    told = ", ".join(missing)
    notes = [f"the torch model changes buffers as it runs, and what they hold then was not compared: {told}"] if missing else []
    return findings, notes


def difference(actual: np.ndarray, expected: np.ndarray, native: np.ndarray) -> str:
    """How a buffer differs, '' if it does not."""
    if not comparable(actual, expected):
        return f"expected (torch) {expected.shape} {expected.dtype}, actual (flax) {actual.shape} {actual.dtype}"
    if expected.dtype.kind in "biuc":
        wrong = actual != expected
    else:
        bound = semantics_bound(wide(native) if native.shape == expected.shape else wide(expected), wide(expected))
        result, wrong = identity(wide(actual), wide(expected), bound)
        wrong = np.zeros(expected.shape, bool) if result.passed else wrong
    if not wrong.any():
        return ""
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    values = f"first at {at}: expected (torch) {expected[at]:.9g}, actual (flax) {actual[at]:.9g}"
    return f"{int(wrong.sum())} of {wrong.size} values differ, {values}"
