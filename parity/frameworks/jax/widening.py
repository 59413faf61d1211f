"""Letting a Flax model run in a wider dtype although it asks for the one in which it is deployed."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import primitives


class Widening(threading.local):
    """The dtype of this thread's wide run, and those to which it must not be cut; none outside of such a run."""

    run: Any = None
    kept_from: tuple[Any, ...] = ()


WIDENING = Widening()

# How many threads are inside; jax is left as it was found when the last one leaves.
INSIDE: list[None] = []

LOCK = threading.Lock()

# Operations by which a model asks for a dtype, and the name of the parameter that says which.
CASTS = {
    primitives.convert_element_type_p: "new_dtype",
    primitives.dot_general_p: "preferred_element_type",
    primitives.conv_general_dilated_p: "preferred_element_type",
}


@contextlib.contextmanager
def widened(deployed: str, dtype: str | None) -> Iterator[None]:
    """Leave out casts that would cut a run to the dtype in which the model is deployed, or a wider one.

    Where the model is deployed such a cast does nothing: `jax.nn.dot_product_attention` computes
    its softmax in float32 whatever it is given. A cast to a narrower dtype rounds there too, and stays.

    Args:
        deployed: the dtype of the model's parameters.
        dtype: of the run; None is the model's own.
    """
    own, run = jnp.dtype(deployed), jnp.dtype(dtype or deployed)
    if own.itemsize >= run.itemsize:
        yield
        return
    with LOCK:
        INSIDE.append(None)
        for primitive, name in CASTS.items() if len(INSIDE) == 1 else ():
            primitive.bind = widening_bind(primitive.bind, name)
    before = WIDENING.run, WIDENING.kept_from
    WIDENING.run, WIDENING.kept_from = run, tuple({own, jnp.dtype("float32")} - {run})
    try:
        # Functions that jax traced before under another setting are not found again, nor these by others:
        # "float32" means what "highest" means, but is kept apart.
        with jax.default_matmul_precision("float32"):
            yield
    finally:
        WIDENING.run, WIDENING.kept_from = before
        with LOCK:
            INSIDE.pop()
            for primitive in CASTS if not INSIDE else ():
                # The method of the class shows again.
                del primitive.bind


def widening_bind(bind: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(bind)
    def bound(*operands: Any, **parameters: Any) -> Any:
        run = WIDENING.run
        wide = any(getattr(operand, "dtype", None) == run and not weak(operand) for operand in operands)
        if run is not None and wide and parameters.get(name) in WIDENING.kept_from:
            parameters[name] = run
        return bind(*operands, **parameters)

    return bound


def weak(operand: Any) -> bool:
    """Whether an operand is a number of Python's, which takes on the dtype of what it meets: that may be float32."""
    return bool(getattr(getattr(operand, "aval", operand), "weak_type", False))
