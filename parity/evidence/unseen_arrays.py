"""Arrays that are not torch's although what was run does not show it: a row that no id takes, a module that is never called."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from parity.evidence.faults import Cause, Difference, Isolated, Isolation
from parity.evidence.hypotheses.parameters import ways_of
from parity.evidence.hypotheses.weight import Arrays, Weight
from parity.evidence.isolation import Isolator


def with_unseen(isolator: Isolator, isolation: Isolation) -> tuple[Isolation, list[Cause]]:
    """The modules that hold wrong arrays are wrong, whether these inputs show it or not.

    Returns:
        The isolation with such modules in it, and for each its cause.
    """
    found: dict[str, list[Weight]] = {}
    for path, weight in isolator.unequal.items():
        owner = unseen_owner(path, isolator, isolation)
        if owner is not None:
            found.setdefault(owner, []).append(weight)
    causes, modules = [], list(isolation.modules)
    for owner, weights in found.items():
        places = tuple(f"array {weight.path}" for weight in weights)
        kinds = isolator.torch_layers[owner].kinds
        own = [weight for path, weight in isolator.weights.items() if path.rpartition(".")[0] == owner]
        causes.append(
            Cause("weights", owner, *ways_of(weights, Arrays(kinds, own, isolator.weights)), np.inf, 0.0, places, True)
        )
        known = [number for number, one in enumerate(modules) if one.path == owner]
        partner = weights[0].pairs[0].target.owner
        one = modules[known[0]] if known else Isolated(owner, 0, partner, "plan", "differs")
        wrong = replace(one, status="differs", ratio=np.inf, differences=tuple(map(difference, weights)), between=False)
        where = slice(known[0], known[0] + 1) if known else slice(len(modules), None)
        modules[where] = [wrong]
    return replace(isolation, modules=tuple(modules)), causes


def unseen_owner(path: str, isolator: Isolator, isolation: Isolation) -> str | None:
    """The module that holds an array; None if one that it is part of is found wrong, and its arrays are looked at there."""
    above = path.split(".")
    holders = [".".join(above[:count]) for count in range(len(above) - 1, -1, -1)]
    called = next((name for name in holders if any(one.path == name for one in isolation.modules)), None)
    judged: Sequence[Isolated] = [one for one in isolation.modules if one.path == called]
    if any(one.status in ("differs", "follows") for one in judged):
        return None
    return next(name for name in holders if name in isolator.torch_layers)


def difference(weight: Weight) -> Difference:
    wrong = ~((weight.torch == weight.flax) | ((weight.torch != weight.torch) & (weight.flax != weight.flax)))
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    mine, theirs = float(weight.torch[at]), float(weight.flax[at])
    count = f"{int(wrong.sum())} of {wrong.size} values differ, expected (torch) {mine:.6g}, actual (flax) {theirs:.6g} at {at}"
    figures = (int(wrong.sum()), wrong.size, at, theirs, mine, abs(theirs - mine))
    return Difference(f"array {weight.path}", np.inf, *figures, reason=f"{count}; what was run does not show it")
