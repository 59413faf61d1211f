"""Causes that can be tried where torch's module cannot be run: Flax's module again, with what torch has.

A recording holds torch's arrays and the settings of its layers, and what its modules returned. Flax's module that
then returns the same is explained by what was changed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.errors import first_line
from parity.evidence.faults import Cause
from parity.evidence.hypotheses.norms import EPSILONS
from parity.evidence.hypotheses.parameters import ways_of
from parity.evidence.hypotheses.suspect import FALL, GONE, Suspect
from parity.evidence.trial import Place
from parity.weights.leaf import gathered
from parity.weights.mirrors import comparable, plain
from parity.weights.rules import row_of
from parity.weights.settings import Agree, Require, equal

# Flax's names of what torch calls otherwise, for layers without a row in the ledger.
SAME = {"epsilon": "eps", "eps": "epsilon", "negative_slope": "alpha"}


@dataclass(frozen=True)
class Try:
    """One change of Flax's module.

    Attributes:
        name: of the cause, in reports.
        what: what Flax's module does.
        change: what to write instead.
        changes: how it is run to see.
    """

    name: str
    what: str
    change: str
    changes: Mapping[str, Any]


class FlaxSearch:
    """Looks for the causes of one suspect by running Flax's module with torch's arrays and settings.

    Args:
        suspect: the pair.
        seconds: unused: the tries are few.
    """

    def __init__(self, suspect: Suspect, seconds: float = 0.0):
        self.suspect, self.tried, self.late = suspect, 0, False
        self.notes: list[str] = []

    def run(self) -> list[Cause]:
        """The causes, best first."""
        found = [cause for one in self.tries() if (cause := self.judged(one))]
        return sorted(found, key=lambda cause: (not cause.complete, -len(cause.explains)))

    def left(self, causes: list[Cause]) -> list[str]:
        """The places that no cause explains."""
        known = {place for cause in causes for place in cause.explains}
        return [str(place) for place in self.suspect.differing if str(place) not in known]

    def tries(self) -> Iterator[Try]:
        """Torch's arrays, torch's settings, and epsilons as they are usual."""
        suspect = self.suspect
        unequal = [weight for weight in suspect.weights if not weight.equal]
        if unequal:
            pairs = [pair for weight in unequal for pair in weight.pairs]
            arrays = gathered((p.target, np.asarray(p.layout.apply(p.source.read()))) for p in pairs)
            yield Try("weights", *ways_of(unequal, suspect.arrays), {"weights": arrays})
        tried = set()
        for name, got, mine, wanted in (*self.ruled(), *self.named()):
            if name not in tried:
                tried.add(name)
                what = f"Flax has {name}={got!r} where torch has {mine!r}"
                yield Try(cause_of(name), what, f"set {name}={wanted!r}", {"settings": {name: wanted}})
        for name in suspect.flax_layer.named():
            got = suspect.flax_layer.settings(name)
            if name not in tried and "eps" in name and type(got) is float:
                for number in EPSILONS:
                    yield Try("epsilon", f"Flax has {name}={got:g}", f"set {name}={number:g}", {"settings": {name: number}})

    def ruled(self) -> Iterator[tuple[str, Any, Any, Any]]:
        """Settings that the ledger says must agree, and do not: Flax's name and value, torch's, and what Flax's must be."""
        torch, flax = self.suspect.torch_layer, self.suspect.flax_layer
        row = row_of(torch.kinds, flax.kinds)
        for one in row.settings if row else ():
            if isinstance(one, Agree):
                mine, got = torch.settings(one.torch), flax.settings(one.flax)
                wanted = one.convert(mine) if one.convert else mine
            elif isinstance(one, Require) and one.side == "flax":
                got, wanted, mine = flax.settings(one.setting), one.equals, one.equals
            else:
                continue
            if not equal(wanted, got):
                yield one.flax if isinstance(one, Agree) else one.setting, got, mine, wanted

    def named(self) -> Iterator[tuple[str, Any, Any, Any]]:
        """Settings of one name that differ, for modules of the user's own."""
        torch, flax = self.suspect.torch_layer, self.suspect.flax_layer
        for name in flax.named():
            got = flax.settings(name)
            for other in (name, SAME.get(name, "")) if plain(got) else ():
                mine = torch.settings(other) if other else None
                if plain(mine) and type(mine) is type(got) and not equal(mine, got) and comparable(mine, got):
                    yield name, got, mine, mine

    def judged(self, one: Try) -> Cause | None:
        """The cause, if Flax's module then does what torch's did."""
        self.tried += 1
        suspect = self.suspect
        try:
            values = suspect.flax_again(**one.changes)
        except Exception as error:
            self.notes.append(f"{one.what}: could not be tried ({type(error).__name__}: {first_line(error)})")
            return None
        after = {place: suspect.distance(place, mine, values.get(place)) for place, mine in suspect.trial.expected.items()}
        gone = {p: after[p] for p in suspect.differing if after.get(p, np.inf) <= min(GONE, suspect.before[p] * FALL)}
        if not gone or any(ratio > GONE for place, ratio in after.items() if place not in suspect.differing):
            return None
        return cause(one, suspect, gone)


def cause(one: Try, suspect: Suspect, gone: Mapping[Place, float]) -> Cause:
    """A try that explains something."""
    before = max(suspect.before[place] for place in gone)
    places, complete = tuple(map(str, gone)), len(gone) == len(suspect.differing)
    return Cause(one.name, suspect.path, one.what, one.change, before, max(gone.values()), places, complete, "flax")


def cause_of(setting: str) -> str:
    """What a cause is called by which a setting differs."""
    return "epsilon" if "eps" in setting else "setting"
