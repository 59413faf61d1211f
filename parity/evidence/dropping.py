"""Models in train mode, with the masks that torch drew once."""

import contextlib
from collections.abc import Iterator

from parity import frameworks
from parity.dropout.masks import DropoutMasks
from parity.dropout.player import Player
from parity.errors import DivergenceError
from parity.evidence.subject import Subject


@contextlib.contextmanager
def replayed(subject: Subject) -> Iterator[None]:
    """Draw torch's masks once, and run both models with them inside."""
    with drawn_once(subject) as masks, replayed_in_flax(subject, masks):
        yield


@contextlib.contextmanager
def drawn_once(subject: Subject) -> Iterator[DropoutMasks]:
    """Draw a torch model's masks by random numbers of the subject's seed, and run it with them inside."""
    torch = frameworks.load("torch.dropout")
    with subject.torch.pinned():
        masks = torch.masks_of(subject.torch_model, subject.call, subject.seed)
    player = Player(masks, None, torch.modules_of(subject.torch_model), "torch", repeats=True)
    # What moves torch's results by roundings draws numbers of its own, which are no mask.
    with contextlib.suppress(DivergenceError), torch.replaying(subject.torch_model, player):
        yield masks


@contextlib.contextmanager
def replayed_in_flax(subject: Subject, masks: DropoutMasks) -> Iterator[None]:
    """Let the Flax model drop by torch's masks inside. What does not fit is kept in `subject.dropping`."""
    flax = frameworks.load(f"{subject.flax.__name__.rpartition('.')[2]}.dropout")
    renames = subject.pairing.renames
    modules = flax.modules_of(subject.flax_model)
    player = Player(masks, None, modules, "flax", rename=lambda path: renames.apply(path)[0], repeats=True)
    subject.dropping = player.problems
    # What does not fit is for the levels to tell.
    with contextlib.suppress(DivergenceError), flax.replaying(subject.flax_model, player):
        yield
