"""No false alarm: faithful ports under random weights, scales, inputs and masks pass every level."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
import torch
from evidence_pairs import FlaxBlock, TorchBlock
from flax import nnx
from torch import nn

import parity
from parity.cases import ATTENTIONS, FFN, MHA, MHSA, PATTERNS, PROGRAMS, SA, SDPA, STYLES, Case, values
from parity.evidence.compare import climb
from parity.evidence.result import LEVELS
from parity.evidence.subject import Subject
from parity.suite import prepared

FIGURES = ("elements", "equal", "ties", "cancelled", "unexplained", "zero")
MASKS = (("", "bool"), ("", "bool"), ("n11k", "bool"), ("n1qk", "int64"))


class TorchEncoder(nn.Module):
    """Embedding, norm and feed-forward network: what the wings do not have."""

    def __init__(self):
        super().__init__()
        self.table, self.block, self.norm, self.head = nn.Embedding(11, 8), TorchBlock(), nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, ids):
        return self.head(self.norm(self.block(self.table(ids))))


class FlaxEncoder(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.table = nnx.Embed(11, 8, rngs=rngs)
        self.block = FlaxBlock(rngs=rngs)
        self.norm = nnx.LayerNorm(8, epsilon=1e-5, use_fast_variance=False, rngs=rngs)
        self.head = nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, ids):
        return self.head(self.norm(self.block(self.table(ids))))


def wing_trial(rng: np.random.Generator, program: Case) -> tuple[Any, Any, tuple[Any, ...]]:
    mask, dtype = MASKS[rng.integers(len(MASKS))] if program.module in ATTENTIONS else MASKS[0]
    made = replace(program, seed=int(rng.integers(2**31)), style=str(rng.choice(STYLES)), mask=mask, mask_dtype=dtype)
    return prepared(replace(made, pattern=str(rng.choice(PATTERNS))))


def own_trial(rng: np.random.Generator, pair: tuple[Any, Any]) -> tuple[Any, Any, tuple[Any, ...]]:
    with torch.no_grad():
        for p in pair[0].parameters():
            p.copy_(torch.from_numpy(np.array(rng.standard_normal(tuple(p.shape)) * p.shape[-1] ** -0.5)))
    ids = isinstance(pair[0], TorchEncoder)
    x = rng.integers(0, 11, (3, 5)) if ids else values((3, 5, 8), str(rng.choice(STYLES)), rng).astype(np.float32)
    return (*pair, (x,))


def trials(count: int, seed: int, modules: tuple[str, ...]) -> Iterator[tuple[Any, Any, tuple[Any, ...], int]]:
    """Models with random weights of random scale, and arguments."""
    rng = np.random.default_rng([seed, 4711])
    programs = [next(p for p in PROGRAMS if p.module == module) for module in modules]
    pairs = [(TorchBlock().eval(), FlaxBlock(rngs=nnx.Rngs(0))), (TorchEncoder().eval(), FlaxEncoder(rngs=nnx.Rngs(0)))]
    for number in range(count):
        choice = int(rng.integers(len(programs) + len(pairs)))
        if choice < len(programs):
            torch_model, flax_model, args = wing_trial(rng, programs[choice])
        else:
            torch_model, flax_model, args = own_trial(rng, pairs[choice - len(programs)])
        with torch.no_grad():
            for p in torch_model.parameters():
                p.mul_(2.0 ** rng.normal(0, 1))
        if any(True for _ in torch_model.parameters()):
            parity.transfer(torch_model, flax_model)
        yield torch_model, flax_model, args, number


def climbed(count: int, seed: int, modules: tuple[str, ...]) -> Counter:
    """Sums of the figures over random clean pairs, each of which must pass every level."""
    total: Counter = Counter()
    for torch_model, flax_model, args, number in trials(count, seed, modules):
        subject = Subject(torch_model, flax_model, args, {}, seed=number)
        report = climb(subject, LEVELS, ("compiled",), spoil=number < 20)
        assert report.passed, f"trial {number}, {type(torch_model).__name__}:\n{report}"
        total += Counter({level.level: 1 for level in report.levels if level.passed})
        for level in ("identical", "gradients"):
            total += Counter({f"{level} {name}": int(report.level(level).figures.get(name, 0)) for name in FIGURES})
        for level, name in (("identical", "ratio"), ("gradients", "ratio"), ("native", "ratio"), ("gradients", "native_ratio")):
            key = f"{level} {name}"
            total[key] = max(total[key], report.level(level).figures.get(name, 0.0))
    print("\n" + "\n".join(f"{name:<24} {value:,.6g}" for name, value in total.items()))
    return total


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_clean_pairs_pass_every_level(seed):
    total = climbed(60, seed, (MHSA, FFN))
    assert total["identical"] == total["gradients"] == total["native"] == 60
    assert total["wiring"] > 20
    assert total["identical unexplained"] == total["gradients unexplained"] == 0


@pytest.mark.slow
def test_a_thousand_clean_pairs_pass_every_level(seed):
    total = climbed(1000, seed + 1, (MHA, MHSA, SA, SDPA, FFN))
    assert total["identical"] == total["gradients"] == total["native"] == total["structure"] == 1000
    assert total["wiring"] > 400
    assert total["identical unexplained"] == total["gradients unexplained"] == 0


@pytest.mark.slow
def test_twenty_million_values_are_identical(seed):
    sizes = dict(d_model=64, n_heads=8, d_q=8, d_k=8, d_v=8, bias=True)
    attention = Case(MHA, sizes, (16, 64, 64), mask="n1qk", native_gradients=False)
    forward = Case(FFN, dict(d_model=64, d_ff=128), (64, 64, 64), native_gradients=False)
    total: Counter = Counter()
    number = 0
    while total["elements"] < 20_000_000:
        case = replace((attention, forward)[number % 2], seed=seed + number, style=STYLES[number // 2 % len(STYLES)])
        case = replace(case, pattern=PATTERNS[number // 2 % len(PATTERNS)])
        subject = Subject(*prepared(case), {}, seed=number, gradients=False)
        result = climb(subject, ("identical",), ("compiled",)).level("identical")
        assert result.passed, f"{case.name}: {result}"
        total += Counter({name: int(result.figures[name]) for name in FIGURES})
        number += 1
    print(f"\n{number} runs: {dict(total)}")
    assert total["unexplained"] == 0
    assert total["equal"] + total["ties"] + total["cancelled"] == total["elements"]
    assert total["ties"] + total["cancelled"] < 1e-4 * total["elements"]
    assert jax.config.jax_enable_x64 is False
