"""Both models of a comparison in train mode, with the masks that torch drew once."""

import contextlib
from collections.abc import Iterator

from parity import frameworks
from parity.dropout.player import Player
from parity.errors import DivergenceError
from parity.evidence.subject import Subject


@contextlib.contextmanager
def replayed(subject: Subject) -> Iterator[None]:
    """Draw torch's masks once, by random numbers of the subject's seed, and run both models with them inside.

    What does not fit is kept in `subject.dropping`.
    """
    torch = frameworks.load("torch.dropout")
    flax = frameworks.load(f"{subject.flax.__name__.rpartition('.')[2]}.dropout")
    mine, theirs = subject.torch_model, subject.flax_model
    with subject.torch.pinned():
        masks = torch.masks_of(mine, subject.call, subject.seed)
    again = Player(masks, None, torch.modules_of(mine), "torch", repeats=True)
    renames = subject.pairing.renames
    player = Player(masks, None, flax.modules_of(theirs), "flax", rename=lambda path: renames.apply(path)[0], repeats=True)
    subject.dropping = player.problems
    # What does not fit is for the levels to tell.
    with contextlib.suppress(DivergenceError), torch.replaying(mine, again), flax.replaying(theirs, player):
        yield
