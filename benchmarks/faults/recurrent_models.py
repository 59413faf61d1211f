"""Pairs of recurrent nets: a GRU and a net that reads in both directions, ported by hand with torch's names."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from torch import Tensor, nn

from benchmarks.faults.planting import Model, Plan, swap

GIVEN, HELD, CLASSES = 6, 8, 5


class TorchTagger(nn.Module):
    """A GRU, a plain recurrent layer in both directions over it, a class for each token and one for all."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(GIVEN, HELD, batch_first=True)
        self.both = nn.RNN(HELD, 4, batch_first=True, bidirectional=True)
        self.head, self.whole = nn.Linear(8, CLASSES), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of the tokens, and of the whole."""
        states, last = self.both(self.gru(x)[0])
        return self.head(states), self.whole(last.transpose(0, 1).flatten(1))


class Gru(nnx.Module):
    """The port of a GRU by hand, with torch's names and its gates r, z, n."""

    def __init__(self, plan: Plan):
        self.weight_ih_l0, self.weight_hh_l0 = nnx.Param(jnp.zeros((24, GIVEN))), nnx.Param(jnp.zeros((24, HELD)))
        self.bias_ih_l0, self.bias_hh_l0 = nnx.Param(jnp.zeros(24)), nnx.Param(jnp.zeros(24))
        self.order, self.summed = plan("", "gates in the order z, r, n"), plan("", "biases summed outside the reset gate")
        self.early, self.turned = plan("", "reset before the product"), plan("", "update gate the other way round")
        self.one_bias, self.relu = plan("", "second bias left out"), plan("", "activation relu for tanh")
        self.back, self.exchanged = plan("", "run backwards"), plan("", "length and batch exchanged")

    def __call__(self, x: jax.Array) -> jax.Array:
        """All states, `(n, l, 8)`."""

        def step(h: jax.Array, given: jax.Array) -> tuple[jax.Array, jax.Array]:
            second = jnp.zeros(24, x.dtype) if self.one_bias else self.bias_hh_l0[...]
            a, b = given @ self.weight_ih_l0[...].T + self.bias_ih_l0[...], h @ self.weight_hh_l0[...].T
            (ra, za, na), (rb, zb, nb) = jnp.split(a, 3, -1), jnp.split(b, 3, -1)
            rc, zc, nc = jnp.split(second, 3, -1)
            r, z = jax.nn.sigmoid(ra + rb + rc), jax.nn.sigmoid(za + zb + zc)
            r, z = (z, r) if self.order else (r, z)
            inner = r * nb + nc if self.summed else r * (nb + nc)
            if self.early:
                inner = (r * h) @ self.weight_hh_l0[...][2 * HELD :].T + nc
            n = jax.nn.relu(na + inner) if self.relu else jnp.tanh(na + inner)
            h = z * n + (1 - z) * h if self.turned else (1 - z) * n + z * h
            return h, h

        steps = x if self.exchanged else x.swapaxes(0, 1)
        steps = steps[::-1] if self.back else steps
        states = jax.lax.scan(step, jnp.zeros((steps.shape[1], HELD), x.dtype), steps)[1]
        return states if self.exchanged else states.swapaxes(0, 1)


class Both(nnx.Module):
    """The port of a recurrent layer in both directions."""

    def __init__(self, plan: Plan):
        for end in ("", "_reverse"):
            setattr(self, f"weight_ih_l0{end}", nnx.Param(jnp.zeros((4, HELD))))
            setattr(self, f"weight_hh_l0{end}", nnx.Param(jnp.zeros((4, 4))))
            setattr(self, f"bias_ih_l0{end}", nnx.Param(jnp.zeros(4)))
            setattr(self, f"bias_hh_l0{end}", nnx.Param(jnp.zeros(4)))
        self.exchanged, self.same = plan("", "order of the directions"), plan("", "both directions forwards")
        self.kept = plan("", "backward states not turned back")

    def one_way(self, steps: jax.Array, end: str) -> jax.Array:
        """The states of one direction, `(l, n, 4)`."""

        def array(name: str) -> jax.Array:
            return getattr(self, f"{name}_l0{end}")[...]

        def step(h: jax.Array, given: jax.Array) -> tuple[jax.Array, jax.Array]:
            y = given @ array("weight_ih").T + array("bias_ih") + h @ array("weight_hh").T + array("bias_hh")
            return jnp.tanh(y), jnp.tanh(y)

        return jax.lax.scan(step, jnp.zeros((steps.shape[1], 4), steps.dtype), steps)[1]

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """All states, and the last of each direction."""
        steps = x.swapaxes(0, 1)
        ahead, back = self.one_way(steps, ""), self.one_way(steps if self.same else steps[::-1], "_reverse")
        last = jnp.stack([ahead[-1], back[-1]])
        back = back if self.kept or self.same else back[::-1]
        return jnp.concatenate([back, ahead] if self.exchanged else [ahead, back], -1).swapaxes(0, 1), last


class Tagger(nnx.Module):
    """The port."""

    def __init__(self, plan: Plan):
        rngs = nnx.Rngs(0)
        self.gru, self.both = Gru(plan.under("gru")), Both(plan.under("both"))
        self.head, self.whole = nnx.Linear(8, CLASSES, rngs=rngs), nnx.Linear(8, CLASSES, rngs=rngs)
        self.end, self.turned = plan("", "last token for the first of the way back"), plan("", "last states side by side")

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Scores of the tokens, and of the whole."""
        states, last = self.both(self.gru(x))
        pair = last.reshape(x.shape[0], -1) if self.turned else last.swapaxes(0, 1).reshape(x.shape[0], -1)
        return self.head(states), self.whole(states[:, -1] if self.end else pair)


def tagger_weights(model: Any, plan: Plan) -> None:
    """What goes wrong with recurrent weights on their way."""
    if plan("both", "weights of the directions exchanged"):
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            swap(getattr(model.both, f"{name}_l0"), getattr(model.both, f"{name}_l0_reverse"))
    if plan("gru", "recurrent kernel transposed"):
        kernel = model.gru.weight_hh_l0
        kernel[...] = jnp.concatenate([block.T for block in jnp.split(kernel[...], 3)])


def signals(rng: np.random.Generator) -> tuple[np.ndarray]:
    """`(4, 4, 6)`: as many signals as steps, so that they can be taken for each other."""
    return (rng.normal(size=(4, 4, GIVEN)).astype(np.float32),)


MODELS = (Model("tagger", TorchTagger, Tagger, signals, tagger_weights),)
