"""Flax runs in another mode than torch: it draws random numbers."""

from collections.abc import Iterator

from parity.evidence.hypotheses.suspect import Suspect, Variant
from parity.evidence.numerics import same_bits
from parity.evidence.trial import is_array


def random_numbers(suspect: Suspect) -> Iterator[Variant]:
    """Other random keys give other results."""
    if not suspect.subject.flax.draws(suspect.subject.flax_model):
        return
    one, other = (suspect.flax_again(reseed=seed) for seed in (1, 2))
    drawn = {
        place
        for place, array in one.items()
        if is_array(array) and is_array(other.get(place)) and not same_bits(array, other[place]).all()
    }
    if drawn:
        yield Variant(
            "Flax returns other numbers with other random keys: dropout is left on",
            "call .eval() on the model, or pass deterministic=True",
            # Whatever Flax drew, it drew: nothing of torch's can be put beside it.
            lambda: {place: array for place, array in suspect.trial.actual.items() if place in drawn},
        )


# What jax calls the operations that make random numbers.
DRAWING = ("random_bits", "threefry2x32", "random_gamma")


def key_of_its_own(suspect: Suspect) -> Iterator[Variant]:
    """Random numbers from a key that the code makes: the same in each run, and never torch's."""
    one = suspect.subject
    try:
        program, _ = one.flax.traced(one.flax_model, one.call)
    except Exception:
        # What cannot be traced shows nothing.
        return
    if any(name in program for name in DRAWING):
        yield Variant(
            "Flax draws random numbers with a key that its code makes, as a dropout that ignores the mode does",
            "draw nothing in eval mode",
            # As above: nothing of torch's can be put beside what is drawn.
            lambda: {place: suspect.trial.actual[place] for place in suspect.differing if place in suspect.trial.actual},
        )
