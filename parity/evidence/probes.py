"""Numbers that make a wiring fault visible bit for bit: few significant bits, saturated scores."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from parity.evidence.calls import Call
from parity.evidence.trees import mapped
from parity.weights.leaf import Leaf

# Scores times 2^14 leave softmax nothing but one-hot and tied rows.
SATURATION = 7
# Wide values show where products are cut to bfloat16 (8 bits) or TF32 (11 bits); narrow ones
# keep deep sums exact. The first that can be proved exact is used.
BITS = (12, 6, 3, 2)
# Products summed in one output of a projection: enough to see every axis, few enough to stay exact.
TERMS = 4


def dyadic(shape: tuple[int, ...], bits: int, rng: np.random.Generator) -> np.ndarray:
    """Whole numbers of at most so many bits, either sign, none of them 0, as float64."""
    magnitude = rng.integers(1, 2**bits, shape, endpoint=False)
    return (magnitude * rng.choice((-1, 1), shape)).astype(np.float64)


def sparse(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """A weight of torch's layout (outputs first) with `TERMS` entries of 1 to 3 in each output."""
    rows, fan_in = shape[0], int(np.prod(shape[1:]))
    terms = min(TERMS, fan_in)
    # Each row starts at its own input, so that none stays unused, and goes on in random steps
    # that together stay below one round, so that no input is taken twice.
    steps = rng.integers(1, max(2, fan_in // terms + 1), (rows, terms))
    steps[:, 0] = np.arange(rows)
    columns = np.cumsum(steps, axis=1) % fan_in
    weight = np.zeros((rows, fan_in))
    np.put_along_axis(weight, columns, dyadic((rows, terms), 2, rng), axis=1)
    return weight.reshape(shape)


def probe_weights(leaves: Iterable[Leaf], seed: int) -> dict[str, np.ndarray]:
    """Exact values for every floating point parameter and buffer of a torch model, tied ones alike."""
    rng = np.random.default_rng([seed, 1])
    made: dict[object, np.ndarray] = {}
    found = {}
    for leaf in leaves:
        if "float" not in leaf.dtype:
            continue
        if leaf.identity not in made:
            made[leaf.identity] = sparse(leaf.shape, rng) if len(leaf.shape) > 1 else dyadic(leaf.shape, 2, rng)
        found[leaf.path] = made[leaf.identity]
    return found


def probe_call(call: Call, bits: Mapping[str, int], seed: int) -> Call:
    """The call with its values replaced by whole numbers; masks, indices and flags stay."""
    rng = np.random.default_rng([seed, 2])

    def replaced(path: str, value: object) -> object:
        if path not in call.castable:
            return value
        assert isinstance(value, np.ndarray)
        return dyadic(value.shape, bits[path], rng).astype(np.float32)

    return replace(call, args=mapped(replaced, call.args, "args"), kwargs=mapped(replaced, dict(call.kwargs), "kwargs"))
