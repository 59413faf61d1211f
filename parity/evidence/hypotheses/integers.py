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
