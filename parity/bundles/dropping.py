"""Dropout on the record: the masks that torch drew, and a Flax model that drops by them."""

import contextlib
from collections.abc import Iterator
from typing import Any

from parity import frameworks
from parity.dropout.masks import Drop, DropoutMasks
from parity.dropout.player import Player
from parity.errors import DivergenceError
from parity.evidence.subject import Subject


@contextlib.contextmanager
def drawn_once(side: Subject) -> Iterator[DropoutMasks]:
    """Draw a torch model's masks by random numbers of the subject's seed, and run it with them inside."""
    torch = frameworks.load("torch.dropout")
    with side.torch.pinned():
        masks = torch.masks_of(side.torch_model, side.call, side.seed)
    player = Player(masks, None, torch.modules_of(side.torch_model), "torch", repeats=True)
    # What moves its results by roundings draws numbers of its own, which are no mask.
    with contextlib.suppress(DivergenceError), torch.replaying(side.torch_model, player):
        yield masks


@contextlib.contextmanager
def replayed_in_flax(subject: Subject, masks: DropoutMasks) -> Iterator[None]:
    """Let a Flax model drop by recorded masks inside. What does not fit is kept in `subject.dropping`."""
    flax = frameworks.load(f"{subject.flax.__name__.rpartition('.')[2]}.dropout")
    renames = subject.pairing.renames
    player = Player(
        *(masks, None, flax.modules_of(subject.flax_model), "flax"),
        rename=lambda path: renames.apply(path)[0],
        repeats=True,
    )
    subject.dropping = player.problems
    # What does not fit is for the levels to tell.
    with contextlib.suppress(DivergenceError), flax.replaying(subject.flax_model, player):
        yield


def as_facts(masks: DropoutMasks | None) -> dict[str, Any] | None:
    """Masks as values that a bundle keeps."""
    if masks is None:
        return None
    return {"modules": masks.modules, "convolutional": masks.convolutional, "drops": [vars(drop) for drop in masks.drops]}


def from_facts(facts: dict[str, Any] | None) -> DropoutMasks | None:
    """Masks as they were recorded."""
    if facts is None:
        return None
    return DropoutMasks("torch", facts["modules"], facts["convolutional"], [Drop(**told) for told in facts["drops"]])
