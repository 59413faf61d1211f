"""Train the Transformer in both wings to spell words backwards, and let each decode with the other's weights.

The text: Shakespeare's sonnets 18, 29, 73, 116 and 130 (Thorpe's quarto of 1609, in modern spelling). Their
author died in 1616: they are in the public domain everywhere.
"""

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx

import jax_impl
import parity
import torch_impl

TEXT = Path(__file__).parent / "sonnets.txt"
PAD, START, STOP, FIRST_LETTER = 0, 1, 2, 3
SIZES = dict(d_model=32, n_heads=4, n_layers=1, max_len=16, p_drop=0.0)
STEPS, BATCH = 300, 64
ADAMW = dict(lr=3e-3, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.01)
# What both wings reach in these steps; guessing among the letters costs log(27) = 3.3.
LOSS = 0.2


def words() -> list[str]:
    """The different words of the text, in order, in small letters."""
    return list(dict.fromkeys(re.findall("[a-z']+", TEXT.read_text().lower())))


def letters() -> str:
    return "".join(sorted(set("".join(words()))))


def n_tokens() -> int:
    return FIRST_LETTER + len(letters())


def spelled(given: list[str]) -> np.ndarray:
    """Ids of words, `(n, longest + 2)`: start, letters, stop, padding."""
    index = {letter: FIRST_LETTER + i for i, letter in enumerate(letters())}
    ids = np.full((len(given), max(map(len, words())) + 2), PAD, np.int32)
    for row, word in zip(ids, given, strict=True):
        row[: len(word) + 2] = [START, *(index[letter] for letter in word), STOP]
    return ids


def read(ids: np.ndarray) -> list[str]:
    """The words that rows of ids spell."""
    return ["".join(letters()[i - FIRST_LETTER] for i in row if i >= FIRST_LETTER) for row in ids.tolist()]


def batches(steps: int, seed: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Sources and targets, the same for both wings."""
    rng, every = np.random.default_rng(seed), words()
    for _ in range(steps):
        drawn = [every[i] for i in rng.integers(len(every), size=BATCH)]
        yield spelled(drawn), spelled([word[::-1] for word in drawn])


def torch_model(seed: int = 0) -> torch_impl.Transformer:
    torch.manual_seed(seed)
    return torch_impl.Transformer(n_tokens(), n_tokens(), torch_impl.TransformerConfig(**SIZES), pad=PAD)


def flax_model(seed: int = 0) -> jax_impl.Transformer:
    config = jax_impl.TransformerConfig(**SIZES)
    return jax_impl.Transformer(n_tokens(), n_tokens(), config, pad=PAD, rngs=nnx.Rngs(seed))


def train_torch(model: torch_impl.Transformer, steps: int = STEPS) -> list[float]:
    """Train in place; the loss of every step."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), **ADAMW), []
    for source, target in batches(steps):
        given, wanted = torch.from_numpy(target[:, :-1]), torch.from_numpy(target[:, 1:]).long()
        scores = model(torch.from_numpy(source), given)
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), wanted.flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_flax(model: jax_impl.Transformer, steps: int = STEPS) -> list[float]:
    """Train in place; the loss of every step."""
    b1, b2 = ADAMW["betas"]
    adamw = optax.adamw(ADAMW["lr"], b1, b2, eps=ADAMW["eps"], weight_decay=ADAMW["weight_decay"])
    optimizer = nnx.Optimizer(model, adamw, wrt=nnx.Param)

    def loss_of(model: jax_impl.Transformer, source: jax.Array, target: jax.Array) -> jax.Array:
        wanted = target[:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(model(source, target[:, :-1]), wanted)
        return losses.mean(where=wanted != PAD)

    @nnx.jit
    def step(model: jax_impl.Transformer, optimizer: nnx.Optimizer, source: jax.Array, target: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(loss_of)(model, source, target)
        optimizer.update(model, gradients)
        return loss

    return [float(step(model, optimizer, jnp.asarray(source), jnp.asarray(target))) for source, target in batches(steps)]


def decoded(model: torch_impl.Transformer | jax_impl.Transformer, given: list[str]) -> np.ndarray:
    """What a model makes of words, in ids."""
    options = dict(start=START, stop=STOP, max_new=max(map(len, words())) + 1)
    if isinstance(model, torch.nn.Module):
        return torch_impl.greedy_decode(model.eval(), torch.from_numpy(spelled(given)), **options).numpy()
    model.eval()
    return np.asarray(jax_impl.greedy_decode(model, jnp.asarray(spelled(given)), **options))


def main() -> int:
    ours, theirs = torch_model(), flax_model()
    agreed = True
    for name, model, train, other in (
        ("torch", ours, train_torch, flax_model(1)),
        ("flax", theirs, train_flax, torch_model(1)),
    ):
        start = time.perf_counter()
        losses = train(model)
        seconds = time.perf_counter() - start
        parity.transfer(model, other)
        given = words()
        found, again = decoded(model, given), decoded(other, given)
        right = np.mean([a == b[::-1] for a, b in zip(read(found), given, strict=True)])
        same = np.array_equal(found, again)
        agreed &= same and np.mean(losses[-20:]) < LOSS
        print(
            f"{name}: loss {losses[0]:.2f} to {np.mean(losses[-20:]):.3f} in {len(losses)} steps and {seconds:.0f} s; "
            f"{right:.0%} of {len(given)} words backwards; "
            f"the other wing decodes {'the same' if same else 'OTHER'} tokens with these weights"
        )
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(main())
