"""The suite's cases of the Transformer can fail: a fault planted in the Flax wing is found, at the place where it is."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl import masks, positions
from parity import suite
from parity.cases import DECODER, ENCODER, MODERN, PAPER, TRANSFORMER, Case

ENCODER_CASE = Case(ENCODER, MODERN, mask="n1qk", pattern="padding and causal")
DECODER_CASE = Case(DECODER, PAPER, mask="n1qk", pattern="padding and causal")
WHOLE = Case(TRANSFORMER, PAPER, mask="ids", pattern="padding")


def tiled(heads, shared, axis):
    return jnp.tile(heads, [shared if i == axis else 1 for i in range(heads.ndim)])


def turned_the_other_way(self, x, offset=0):
    turned = positions.angles(self.max_len, self.width, self.base)[: x.shape[2]]
    cos, sin = (jnp.asarray(f(turned), x.dtype) for f in (np.cos, np.sin))
    first, second = x[..., : self.width // 2], x[..., self.width // 2 :]
    return jnp.concatenate([first * cos + second * sin, second * cos - first * sin], axis=-1)


def with_the_norms_swapped(self, x, attended):
    x = x + self.dropout1(attended)
    return self.norm2(x)


FAULTS = {
    "embedding not scaled": (WHOLE, "jax_impl.transformer.multiply", lambda x, factor: x, "positions"),
    "positions begin at one": (
        WHOLE,
        "jax_impl.positions.sinusoids",
        lambda length, width, plain=positions.sinusoids: plain(length + 1, width)[1:],
        "positions",
    ),
    "a token sees the next": (
        WHOLE,
        "jax_impl.transformer.causal_mask",
        lambda lq, lk, like, offset=0, plain=masks.causal_mask: plain(lq, lk, like, offset + 1),
        "decoder.layers.0.self_attention.attention",
    ),
    "padding not hidden": (
        WHOLE,
        "jax_impl.transformer.padding_mask",
        lambda tokens, pad, plain=masks.padding_mask: plain(tokens, -1),
        "encoder.layers.0.self_attention.attention",
    ),
    "heads shared in turns": (ENCODER_CASE, "jax_impl.multi_head_attention.jnp.repeat", tiled, "self_attention.attention"),
    "turned the other way": (
        ENCODER_CASE,
        "jax_impl.positions.RotaryPositions.__call__",
        turned_the_other_way,
        "self_attention.rotary",
    ),
    "norms swapped": (
        DECODER_CASE,
        "jax_impl.decoder.DecoderLayer.after_self_attention",
        with_the_norms_swapped,
        # The norm that did not run cannot be compared; what comes next is given other numbers.
        "cross_attention.W_q",
    ),
}


@pytest.fixture
def no_program_kept():
    """A program compiled for the clean module must not be found again, nor the faulty one later."""
    suite.load("nnx").cached_functional.cache_clear()
    yield
    suite.load("nnx").cached_functional.cache_clear()


@pytest.mark.parametrize(("case", "where", "fault", "place"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found_at_its_place(case, where, fault, place, monkeypatch, no_program_kept):
    monkeypatch.setattr(where, fault)
    result = suite.run_case(case, ("identical",))
    assert not result.error
    assert not result.passed
    first = str(result.report).split("first divergence")[0].split()[-1]
    assert first == place, str(result.report)
