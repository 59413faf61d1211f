"""Layers that are called in place of each other, or too often."""

import itertools
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from parity.evidence.calls import ModuleCall
from parity.evidence.hypotheses.suspect import Suspect, Values, Variant
from parity.evidence.judging import torch_again
from parity.evidence.trial import is_array

# Layers of one module beyond which not every one is tried for every other.
MANY = 16


def children(suspect: Suspect) -> list[ModuleCall]:
    return [suspect.isolator.calls[key] for key in suspect.isolator.children.get(suspect.trial.torch.key, ())]


def whole(one: ModuleCall) -> tuple[np.ndarray, np.ndarray] | None:
    """What a layer of one argument takes and returns."""
    if len(one.args) == 1 and not one.kwargs and is_array(one.args[0]) and is_array(one.output):
        return one.args[0], one.output
    return None


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
    answers = [run.outputs[""] if one.key == a.key else one.output for one in children(suspect) if one.path == a.path]
    return torch_again(suspect.trial, suspect.subject, replies={**suspect.trial.replies, a.path: answers})


def never_called(suspect: Suspect) -> Iterator[Variant]:
    """Layers that Flax never calls, where it calls another of their kind too often: a loop that takes always the first."""
    isolator = suspect.isolator
    torchs = Counter(key[0] for key in isolator.children.get(suspect.trial.torch.key, ()))
    flaxs = Counter(key[0] for key in isolator.own)
    kinds = {path: isolator.torch_layers[path].kinds[0] for path in torchs}
    counts = {path: flaxs[isolator.partners[path].path] for path in torchs}
    often = [path for path in torchs if counts[path] > torchs[path]]
    for path in often:
        never = [other for other in torchs if not counts[other] and kinds[other] == kinds[path]]
        if never:
            left = " and ".join(never)
            yield Variant(
                f"Flax never calls {left}, and calls {path} {counts[path]} times where torch calls it {torchs[path]}",
                f"call {left} where torch does",
                # What is never called answers nothing that could be put in its place: the counts are what is known.
                lambda: {place: suspect.trial.actual.get(place) for place in suspect.differing},
            )
