"""Train the Transformer of 2017 in both wings on a real text with dropout on, and draw both loss curves.

Both start from the same parameters, see the same words, and drop by the same masks, in float64. What is left of
a difference behind the last step is rounding: 1e-10 of a parameter's largest value at most, or this fails.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import train_on_text
from flax import nnx

import jax_impl
import parity
import torch_impl

SIZES = dict(d_model=16, n_heads=2, max_len=16, p_drop=0.1, bias=True)
ADAMW = dict(lr=3e-3, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.01)
BATCH = 16


def models(layers: int) -> tuple[torch_impl.Transformer, jax_impl.Transformer]:
    """Both wings with torch's parameters."""
    torch.manual_seed(0)
    tokens = train_on_text.n_tokens()
    ours = torch_impl.Transformer(tokens, tokens, torch_impl.TransformerConfig(**SIZES, n_layers=layers))
    theirs = jax_impl.Transformer(tokens, tokens, jax_impl.TransformerConfig(**SIZES, n_layers=layers), rngs=nnx.Rngs(0))
    parity.transfer(ours, theirs)
    return ours, theirs


def batches(steps: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Words, the same backwards as far as the decoder is given them, and what it is to say next: -100 counts for nothing."""
    for source, target in train_on_text.batches(steps):
        given, wanted = target[:BATCH, :-1], target[:BATCH, 1:]
        yield source[:BATCH], given, np.where(wanted == train_on_text.PAD, -100, wanted)


def trained(layers: int, steps: int, mode: str) -> parity.Training:
    """Both wings side by side."""
    recipe = parity.Recipe(train=True, mode=mode)
    return parity.train_both(*models(layers), (torch.optim.AdamW, ADAMW), batches(steps), "cross_entropy", recipe=recipe)


def draw(runs: dict[str, parity.Training], place: Path) -> None:
    """Both loss curves on one picture, and beside them how far the wings are apart."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    drift = next(iter(runs.values())).drift
    steps = [one.step for one in drift]
    left.plot(steps, [one.loss for one in drift], color="tab:orange", linewidth=4, alpha=0.5, label="torch_impl")
    flax = [one.loss + one.loss_difference for one in drift]
    left.plot(steps, flax, color="tab:blue", linewidth=1, linestyle="--", label="jax_impl")
    left.set(xlabel="step", ylabel="loss", title="cross entropy, dropout 0.1, AdamW")
    for (mode, run), color in zip(runs.items(), ("tab:green", "tab:purple"), strict=False):
        floor = 1e-17
        losses = [max(abs(one.loss_difference), floor) for one in run.drift]
        right.semilogy(steps, losses, color=color, linewidth=0.7, alpha=0.6, label=f"loss, {mode}")
        right.semilogy(steps, [one.values for one in run.drift], color=color, linewidth=1.6, label=f"parameters, {mode}")
    right.axhline(next(iter(runs.values())).allowed, color="black", linewidth=0.8, linestyle=":")
    right.set(xlabel="step", ylabel="largest difference", title="jax_impl against torch_impl, float64")
    left.legend(frameon=False)
    right.legend(frameon=False, loc="center left", bbox_to_anchor=(0.02, 0.75))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(place, dpi=90)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--modes", default="compiled,eager", help="how Flax runs; eager takes some ten times as long")
    parser.add_argument("--picture", type=Path, default=None, help="draw the curves there; needs matplotlib")
    given = parser.parse_args()
    runs = {}
    for mode in given.modes.split(","):
        start = time.perf_counter()
        runs[mode] = trained(given.layers, given.steps, mode)
        first, last = runs[mode].drift[0].loss, np.mean([one.loss for one in runs[mode].drift[-20:]])
        print(f"{mode}: loss {first:.2f} to {last:.2f}, {time.perf_counter() - start:.0f} s\n{runs[mode]}\n", flush=True)
    if given.picture:
        draw(runs, given.picture)
    return 0 if all(run.passed for run in runs.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
