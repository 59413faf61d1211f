"""Whether random keys reach what a model returns."""

from typing import Any

import jax

from parity.frameworks.jax.recording import alive
from parity.frameworks.jax.running import Prepared, functional


def reached(prepared: Prepared, rest: Any) -> bool:
    """Whether what a program returns can depend on arrays that are others in `rest`; nothing is computed.

    Of an operation that holds a program of its own everything that it takes counts. What cannot be traced, and what has
    effects beside its results, can depend on all.

    Args:
        prepared: a program with its arrays.
        rest: what may stand in the place of its third part; an array that is the same is the same object.
    """
    program, parameters, own, arguments = prepared
    body = functional(program, arguments.skeleton, None)
    given, other = ((parameters, one, arguments.values, arguments.others) for one in (own, rest))
    try:
        jaxpr = jax.make_jaxpr(lambda *args: body(*args, {})[0])(*given).jaxpr
    except Exception:
        return True
    used = {id(atom) for atom in jaxpr.outvars} | {id(atom) for eqn in alive(jaxpr) for atom in eqn.invars}
    changed = [a is not b for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(other), strict=True)]
    return bool(jaxpr.effects) or any(new and id(atom) in used for atom, new in zip(jaxpr.invars, changed, strict=True))
