"""Layers that are called in another order, too often, or in place of each other."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from parity.evidence.calls import ModuleCall
from parity.evidence.hypotheses.suspect import Suspect, Values, Variant
from parity.evidence.judging import torch_again
from parity.evidence.trial import Place, is_array

# Layers of one module beyond which not every one is tried for every other.
MANY = 16
# Layers in a row that are tried in every order.
CHAIN = 5


def order_of_calls(suspect: Suspect) -> Iterator[Variant]:
    """Layers that take what the one before returns, called in another order."""
    for chain in chains(suspect):
        for start, length in parts_of(len(chain)):
            part = chain[start : start + length]
            for order in itertools.permutations(range(length)):
                # What stays where it is at an end is a shorter part.
                if order[0] == 0 or order[-1] == length - 1:
                    continue
                said = " and ".join(part[i].path for i in order)
                new = [*chain[:start], *(part[i] for i in order), *chain[start + length :]]
                right = ", ".join(one.path for one in part)
                yield Variant(f"Flax calls {said} in this order", f"call them in torch's: {right}", rewired(suspect, chain, new))


def parts_of(count: int) -> Iterator[tuple[int, int]]:
    """Beginnings and lengths of what may be in another order: all of a short chain, neighbours in a long one."""
    for length in range(2, min(count, CHAIN) + 1):
        for start in range(count - length + 1):
            if length == 2 or count <= CHAIN:
                yield start, length


def children(suspect: Suspect) -> list[ModuleCall]:
    return [suspect.isolator.calls[key] for key in suspect.isolator.children.get(suspect.trial.torch.key, ())]


def whole(one: ModuleCall) -> tuple[np.ndarray, np.ndarray] | None:
    """What a layer of one argument takes and returns."""
    if len(one.args) == 1 and not one.kwargs and is_array(one.args[0]) and is_array(one.output):
        return one.args[0], one.output
    return None


def chains(suspect: Suspect) -> Iterator[list[ModuleCall]]:
    """Layers each of which takes what the one before it returns."""
    left = [one for one in children(suspect) if whole(one) and one.path in suspect.trial.replies]
    while left:
        chain = [left.pop(0)]
        while left and np.array_equal(left[0].args[0], chain[-1].output):
            chain.append(left.pop(0))
        if len(chain) > 1:
            yield chain


def rewired(suspect: Suspect, chain: list[ModuleCall], new: list[ModuleCall]) -> Callable[[], Values]:
    """What each layer is given if those of a chain take each other's answers in another order."""

    def values() -> Values:
        given = [chain[0].args[0], *(one.output for one in new)]
        found: dict[Place, Any] = {}
        for place, mine in suspect.trial.expected.items():
            number = next((i for i, one in enumerate(new) if one.path == place.child), None)
            if number is not None and place.path == "args[0]":
                found[place] = given[number]
            elif is_array(mine) and is_array(chain[-1].output) and np.array_equal(mine, chain[-1].output):
                found[place] = new[-1].output
        return found

    return values


# ---------------------------------------------------------------- one layer in place of another


def another_layer(suspect: Suspect) -> Iterator[Variant]:
    """A layer called in place of another of its kind, or once more on what it has returned."""
    answering = [one for one in children(suspect) if whole(one)]
    alike = [
        (a, b)
        for a, b in itertools.permutations({one.path: one for one in answering}.values(), 2)
        if kind_of(suspect, a) == kind_of(suspect, b)
    ]
    for a, b in alike if len(answering) <= MANY else ():
        yield Variant(
            f"{b.path} is called where torch calls {a.path}",
            f"call {a.path}",
            partial(answered_by, suspect, a, b, a.args[0]),
        )
    for one in answering:
        if one.args[0].shape == one.output.shape:
            yield Variant(
                f"{one.path} is called once more, on what it has returned",
                f"call {one.path} as often as torch",
                partial(answered_by, suspect, one, one, one.output),
            )


def kind_of(suspect: Suspect, one: ModuleCall) -> tuple[Any, ...]:
    layer = suspect.isolator.torch_layers[one.path]
    return layer.kinds[0], one.args[0].shape[-1], one.output.shape[-1]


def answered_by(suspect: Suspect, a: ModuleCall, b: ModuleCall, given: np.ndarray) -> Values:
    """The module's values if one layer answers, from what it is given, where another does."""
    with suspect.subject.torch.pinned():
        run = suspect.subject.torch.alone(suspect.subject.torch_model, b.path, (given,), {}, dtype=suspect.isolator.dtype)
    answers = [run.outputs[""] if one is a else one.output for one in children(suspect) if one.path == a.path]
    return torch_again(suspect.trial, suspect.subject, replies={**suspect.trial.replies, a.path: answers})
