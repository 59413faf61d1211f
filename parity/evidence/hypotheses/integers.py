"""Whole numbers that are narrower in Flax than in torch."""

from collections.abc import Iterator

from parity.evidence.hypotheses.suspect import Suspect, Variant

ARITHMETIC = ("mul", "add", "sub", "pow", "cumsum", "sum", "bitwise_left_shift", "__lshift__", "cumprod", "prod")


def wrapped(suspect: Suspect) -> Iterator[Variant]:
    """64-bit arithmetic that runs over in 32 bits: JAX has no wider whole numbers unless it is told to."""
    chosen = [op for op in suspect.named(*ARITHMETIC) if "int64" in op.dtypes]
    if chosen:
        yield Variant(
            "whole numbers run over: Flax computes in int32, torch in int64",
            'keep them below 2**31, as by reducing before multiplying, or call jax.config.update("jax_enable_x64", True)',
            suspect.edited(chosen, "wrapped"),
        )


# What each operation takes of a number or of a quotient; torch's own way, by its name and its rounding_mode.
WHOLE = {"floor_divide": "floor", "remainder": "floor", "fmod": "trunc", "floor": "floor", "trunc": "trunc", "ceil": "ceil"}
WHOLE |= {"round": "round"}
WAYS = {
    "floor": "downwards",
    "trunc": "towards zero",
    "round": "to the nearest, halves to even",
    "half up": "to the nearest, halves upwards",
    "half away": "to the nearest, halves away from zero",
    "ceil": "upwards",
}
IN_JAX = {
    "floor": "jnp.floor, // or %",
    "trunc": "jnp.trunc, jax.lax.div or jnp.fmod",
    "ceil": "jnp.ceil",
    "round": "jnp.round",
}


def rounded_otherwise(suspect: Suspect) -> Iterator[Variant]:
    """Whole numbers got by rounding another way, which shows with negative numbers or with halves."""
    for op in suspect.operations:
        mine = op.kwargs.get("rounding_mode") if op.name == "div" else WHOLE.get(op.name)
        if mine is None:
            continue
        for way in ("floor", "trunc") if op.name in ("remainder", "fmod") else WAYS:
            if way != mine:
                yield Variant(
                    f"Flax rounds {WAYS[way]} where torch's {op.name} rounds {WAYS[mine]}",
                    f"use {IN_JAX[mine]}, which rounds {WAYS[mine]}",
                    suspect.edited([op], "rounded to whole", way=way),
                )
