"""Recurrent layers that step, or go through a sequence, otherwise."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

from parity.evidence.hypotheses.suspect import Suspect, Values, Variant
from parity.evidence.trial import Place, is_array

Arrays = Mapping[str, np.ndarray]


def arrays_of(suspect: Suspect) -> dict[str, np.ndarray]:
    """Torch's arrays by their own names, and in place of those that are not Flax's, Flax's."""
    found = {w.name: suspect.baseline.get(w.path, w.torch) for w in suspect.weights}
    found |= {leaf.name: leaf.read() for leaf in suspect.unpaired_weights}
    return {name: array.astype(np.float64) for name, array in found.items()}


# ---------------------------------------------------------------- the step of a GRU


def formulas(suspect: Suspect) -> Iterator[Variant]:
    """A GRU whose reset gate stands elsewhere, or whose update gate means the other thing."""
    if not suspect.is_a("GRU", "GRUCell"):
        return
    named = {w.name: w.path for w in suspect.weights} | {leaf.name: leaf.path for leaf in suspect.unpaired_weights}
    arrays = arrays_of(suspect)
    turned = {named[name]: negated(array, 1, 3) for name, array in arrays.items()}
    yield Variant(
        "the update gate is the share of the new state in Flax, of the old one in torch",
        "h = (1 - z) * n + z * h",
        lambda: suspect.again(weights=turned),
    )
    for way, what, change in (
        (
            "outside",
            "the reset gate does not multiply the second bias of the new state",
            "n = tanh(W x + b_i + r * (U h + b_h))",
        ),
        ("before", "the reset gate multiplies the old state, not its product", "n = tanh(W x + b_i + r * (U h + b_h))"),
    ):
        yield Variant(what, change, partial(gru, suspect, arrays, way))


def negated(array: np.ndarray, block: int, count: int) -> np.ndarray:
    """One of the blocks of rows with the other sign: a sigmoid of that is one minus the gate."""
    rows = array.shape[0] // count
    sign = np.ones(array.shape[0])
    sign[block * rows : (block + 1) * rows] = -1
    return array * sign.reshape(-1, *(1 for _ in array.shape[1:]))


def gru(suspect: Suspect, arrays: Arrays, way: str) -> Values:
    """What a GRU of one layer and direction returns with its reset gate elsewhere.

    Raises:
        ValueError: it has more layers or directions, or gets a sequence without a batch.
    """
    cell, given = suspect.is_a("GRUCell"), suspect.trial.torch.args
    x = np.asarray(given[0], np.float64)
    end = "" if cell else "_l0"
    if x.ndim != (2 if cell else 3) or any(name.endswith(("_l1", "_reverse")) for name in arrays):
        raise ValueError("only one layer, one direction and a batch")
    steps = x[None] if cell else x.swapaxes(0, 1) if suspect.torch_layer.settings("batch_first") else x
    kernel, inner = arrays[f"weight_ih{end}"], arrays[f"weight_hh{end}"]
    none = np.zeros(kernel.shape[0])
    first, second = arrays.get(f"bias_ih{end}", none), arrays.get(f"bias_hh{end}", none)
    width = inner.shape[1]
    state = np.zeros((steps.shape[1], width))
    if len(given) > 1 and is_array(given[1]):
        state = np.asarray(given[1], np.float64).reshape(state.shape)
    states = []
    for step in steps:
        (ra, za, na), (rb, zb, nb) = np.split(step @ kernel.T + first, 3, -1), np.split(state @ inner.T, 3, -1)
        rc, zc, nc = np.split(second, 3)
        r, z = sigmoid(ra + rb + rc), sigmoid(za + zb + zc)
        held = r * nb + nc if way == "outside" else (r * state) @ inner[2 * width :].T + nc
        state = (1 - z) * np.tanh(na + held) + z * state
        states.append(state)
    if cell:
        return {Place(None, 0, ""): state}
    every = np.stack(states)
    outputs = every.swapaxes(0, 1) if suspect.torch_layer.settings("batch_first") else every
    values = {Place(None, 0, "[0]"): outputs, Place(None, 0, "[1]"): state[None]}
    return {place: values[place] for place in suspect.trial.expected if place in values}


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


# ---------------------------------------------------------------- both directions


def directions(suspect: Suspect) -> Iterator[Variant]:
    """The way back of a layer that goes both ways: not turned back, begun at the beginning, or put in front."""
    if not suspect.is_a("LSTM", "GRU", "RNN") or not suspect.torch_layer.settings("bidirectional"):
        return
    axis = 1 if suspect.torch_layer.settings("batch_first") else 0
    made = Place(None, 0, "[0]")
    if not is_array(suspect.trial.expected.get(made)) or suspect.trial.expected[made].ndim != 3:
        return

    def joined(change: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]) -> Values:
        found = dict(suspect.again())
        return {**found, made: np.concatenate(change(*np.split(found[made], 2, -1)), -1)}

    yield Variant(
        "the states of the way back are not turned back: the first of them belongs to the last step",
        "turn them round before they stand beside the others (keep_order=True)",
        lambda: joined(lambda ahead, back: (ahead, np.flip(back, axis))),
    )
    yield Variant(
        "the states of the way back stand before those of the way there",
        "put the way there first",
        lambda: joined(lambda ahead, back: (back, ahead)),
    )

    def forwards() -> Values:
        plain, other = (
            suspect.again(),
            suspect.again(args=(np.flip(suspect.trial.torch.args[0], axis), *suspect.trial.torch.args[1:])),
        )
        found = {made: np.concatenate([np.split(plain[made], 2, -1)[0], np.flip(np.split(other[made], 2, -1)[1], axis)], -1)}
        for place in suspect.trial.expected:
            if place.path.startswith("[1]") and place.child is None and is_array(plain[place]):
                found[place] = np.concatenate([part[i::2] for i, part in enumerate((plain[place], other[place]))])
        return found

    yield Variant("both directions go through the sequence forwards", "turn the input of the way back round", forwards)
