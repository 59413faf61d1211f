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
