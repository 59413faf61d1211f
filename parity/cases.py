"""The case table of the built-in suite, and the numbers that each case is fed. No framework here."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Case:
    """One comparison of a module of `torch_impl` with its namesake of `jax_impl`.

    Attributes:
        module: class name.
        sizes: constructor arguments; those of a `TransformerConfig` for the modules that take one.
        lengths: batch n, queries lq, keys lk; for a decoder the target's and the source's length.
        mask: shape of the mask in the letters n, h, q, k and 1, such as `n11k`; '' for none; `ids` where
            the module makes it from padding among its ids.
        mask_dtype: `bool`, `int32`, `int64`, `uint8`, `float32` or `denormal` (float32 whose ones are 1e-40).
        pattern: what the mask hides.
        style: of the inputs.
        dtype: of parameters and inputs.
        modes: how Flax runs at the level `native`.
        seed: of parameters, inputs and mask.
        native_gradients: whether gradients are compared in the case's dtype too, not in float64 alone.
        refused: both sides must refuse the inputs.
        weights: name of a set of trained parameters; '' draws them.
        device: `cpu` or `gpu`.
    """

    module: str
    sizes: Mapping[str, Any]
    lengths: tuple[int, int, int] = (2, 5, 7)
    mask: str = ""
    mask_dtype: str = "bool"
    pattern: str = "random"
    style: str = "normal"
    dtype: str = "float32"
    modes: tuple[str, ...] = ("compiled",)
    seed: int = 0
    native_gradients: bool = True
    refused: bool = False
    weights: str = ""
    device: str = "cpu"

    @property
    def name(self) -> str:
        """Everything that tells this case from the others."""
        sizes = ",".join(f"{key}={value}" for key, value in self.sizes.items())
        parts = [f"{self.module}({sizes})", "n{} lq{} lk{}".format(*self.lengths)]
        if self.mask:
            parts.append(f"mask {self.mask} {self.mask_dtype} {self.pattern}")
        parts += [self.style, self.dtype, "+".join(self.modes), f"seed {self.seed}"]
        return ", ".join(parts + [self.weights] * bool(self.weights))

    @property
    def group(self) -> str:
        """The row of the table that this case counts in."""
        return f"{self.module}, real" if self.weights else self.module

    @property
    def heads(self) -> int:
        return self.sizes.get("n_heads", self.sizes.get("heads", 8 if self.module == "MultiHeadAttention" else 3))


STYLES = ("normal", "low variance", "shifted", "large", "small", "two scales")
PATTERNS = ("random", "causal", "padding", "hidden rows", "nothing hidden")
# Of a layer of the Transformer.
LAYER_PATTERNS = ("padding", "causal", "padding and causal")

MHA, FFN = "MultiHeadAttention", "FeedForwardNetwork"
MHSA, SA, SDPA = "Multi_Head_Self_Attention", "SelfAttention", "ScaledDotProductAttention"

ENCODER, DECODER, TRANSFORMER = "EncoderLayer", "DecoderLayer", "Transformer"
CONFIGURED = (ENCODER, DECODER, TRANSFORMER)

# One row for each compiled program: sizes all different, then square with n == lq, one head, one token.
PROGRAMS: tuple[Case, ...] = (
    Case(MHA, dict(d_model=24, n_heads=3, d_q=8, d_k=8, d_v=8)),
    Case(MHA, dict(d_model=24, n_heads=3, d_q=8, d_k=8, d_v=5, bias=True)),
    Case(MHA, dict(d_model=12, n_heads=1, d_q=6, d_k=6, d_v=6, output_bias=True)),
    Case(MHA, dict(d_model=16, n_heads=4, d_q=4, d_k=4, d_v=4, bias=True), (4, 4, 4)),
    Case(MHA, dict(d_model=24, n_heads=3, d_q=8, d_k=8, d_v=8, bias=True), (2, 1, 1)),
    Case(MHSA, dict(embed_size=24, heads=3)),
    Case(MHSA, dict(embed_size=16, heads=4), (4, 4, 4)),
    Case(MHSA, dict(embed_size=12, heads=1)),
    Case(MHSA, dict(embed_size=24, heads=3), (2, 1, 1)),
    Case(SA, dict(embed_size=24, heads=3)),
    Case(SA, dict(embed_size=16, heads=4), (4, 4, 4)),
    Case(SA, dict(embed_size=12, heads=1)),
    Case(SA, dict(embed_size=24, heads=3), (2, 1, 1)),
    Case(SDPA, dict(), (2, 5, 7)),
    Case(SDPA, dict(), (4, 4, 4)),
    Case(FFN, dict(d_model=24, d_ff=40)),
    Case(FFN, dict(d_model=16), (4, 4, 4)),
    Case(FFN, dict(d_model=24, d_ff=40), (2, 1, 1)),
)
# The paper's, and two sets of options that have all others between them.
PAPER = dict(d_model=24, n_heads=3, n_layers=1, d_ff=40, max_len=16)
PRE_NORM = PAPER | dict(norm_first=True, activation="gelu", bias=True)
MODERN = PAPER | dict(n_heads=4, n_kv_heads=2, norm_first=True, norm="rms", activation="gelu_tanh", positions="rotary")
# The documents' own sizes.
DEMOS: tuple[Case, ...] = (
    Case(MHA, dict(), (64, 10, 10)),
    Case(MHSA, dict(embed_size=512, heads=8), (64, 10, 10)),
    Case(SA, dict(embed_size=512, heads=8), (64, 10, 10)),
    Case(FFN, dict(), (8, 10, 10)),
)
# Every shape and dtype of a mask, each shape with one dtype and each dtype with one shape at least.
MASKS: tuple[tuple[str, str], ...] = (
    ("nhqk", "bool"),
    ("n11k", "bool"),
    ("n1qk", "int64"),
    ("11qk", "uint8"),
    ("qk", "float32"),
    ("k", "denormal"),
)
MASKED = (PROGRAMS[1], PROGRAMS[5], PROGRAMS[9], PROGRAMS[13])
ATTENTIONS = (MHA, MHSA, SA, SDPA)
N_SOURCE, N_TARGET = 11, 13


def default_cases(seed: int = 0) -> list[Case]:
    """The cases of `parity check`: each program on several sets of numbers, all levels.

    A program with gradients takes more than twice as long to compile; here gradients in the
    case's own dtype are left to the first two programs of a module, in bfloat16 and float16 to
    one. Gradients in float64 are compared for all, and `--full` leaves out nothing.
    """
    cases = []
    for program in PROGRAMS:
        plain = program.lengths == (2, 1, 1) or 1 in program.sizes.values()
        cases += [varied(program, i + seed, STYLES[i % len(STYLES)], native_gradients=not plain) for i in range(4)]
    for program in MASKED:
        for number, (shape, dtype) in enumerate(MASKS):
            for i in range(5):
                made = varied(program, number * 5 + i + seed, STYLES[i], mask=shape, mask_dtype=dtype, native_gradients=False)
                cases.append(replace(made, pattern=PATTERNS[(i + number) % len(PATTERNS)]))
    cases += [varied(program, seed, "normal") for program in DEMOS]
    for program in first_of_each():
        cases.append(varied(program, seed, "normal", modes=("compiled", "eager")))
        for dtype in ("bfloat16", "float16", "float64"):
            deep = program.module == MHA and dtype != "float64"
            cases += [varied(program, seed + i, "normal", dtype=dtype, native_gradients=deep) for i in range(2)]
    return cases + transformer_cases(seed) + refused_cases(seed)


def transformer_cases(seed: int = 0) -> list[Case]:
    """The layers under every pattern of masks in one shape, so that one program serves all; the whole model on padded ids.

    Other options, and layers without a mask, are left to `--full`: each takes a program of its own.
    """
    cases = []
    for module in (ENCODER, DECODER):
        for i, pattern in enumerate(LAYER_PATTERNS):
            cases.append(Case(module, PAPER, mask="n1qk", pattern=pattern, seed=seed + i, native_gradients=False))
    cases.append(replace(cases[-1], sizes=MODERN, seed=seed))
    for pattern in ("padding", "nothing hidden"):
        cases.append(Case(TRANSFORMER, PAPER, mask="ids", pattern=pattern, seed=seed, native_gradients=False))
    return [*cases, replace(cases[-2], sizes={**MODERN, "tied": True})]


def full_transformer_cases(seed: int = 0) -> list[Case]:
    """Every set of options under every mask in float32, eager and compiled, and in bfloat16; fewer in the other dtypes."""
    masks = (("", "random"), ("n11k", "padding"), ("11qk", "causal"), ("n1qk", "padding and causal"), ("nhqk", "random"))
    configs = (PAPER, MODERN, PRE_NORM, PAPER | dict(final_norm=True, eps=1e-2))
    cases = []
    for dtype in ("float32", "bfloat16", "float16", "float64"):
        few = dtype in ("float16", "float64")
        modes = ("compiled", "eager") if dtype == "float32" else ("compiled",)
        for sizes in configs[:2] if few else configs:
            for i, module in enumerate((ENCODER, DECODER)):
                for j, (mask, pattern) in enumerate(masks[::3] if few else masks):
                    made = Case(module, sizes, mask=mask, pattern=pattern, dtype=dtype, modes=modes, seed=seed + 40 + j)
                    cases.append(replace(made, style=STYLES[(i + j) % len(STYLES)]))
            whole = Case(TRANSFORMER, {**sizes, "n_layers": 2}, mask="ids", dtype=dtype, modes=modes)
            for j, pattern in enumerate(("padding", "nothing hidden", "hidden rows")):
                cases.append(replace(whole, pattern=pattern, seed=seed + 50 + j))
            if not few:
                cases.append(replace(whole, sizes={**whole.sizes, "tied": True}, pattern="padding", seed=seed + 53))
    # The square case, where a swapped axis keeps its shape, and one token.
    for module in CONFIGURED:
        for lengths in ((4, 4, 4), (2, 1, 1)):
            mask = "ids" if module == TRANSFORMER else ""
            cases.append(Case(module, PRE_NORM, lengths, mask=mask, pattern="nothing hidden", seed=seed + 60))
    return cases


def full_cases(seed: int = 0) -> list[Case]:
    """The cases of `parity check --full`: every dtype, eager and compiled, for every program and mask."""
    cases = default_cases(seed)
    for program in PROGRAMS:
        for dtype in ("float32", "bfloat16", "float16", "float64"):
            cases += [varied(program, seed + 10 + i, STYLES[i % 3], dtype=dtype, modes=("compiled", "eager")) for i in range(3)]
    for program in MASKED:
        for number, (shape, mask_dtype) in enumerate(MASKS):
            for dtype in ("float32", "bfloat16", "float16", "float64"):
                if program.module == SA and dtype == "float16":
                    continue
                for i, pattern in enumerate(PATTERNS):
                    made = varied(program, seed + 20 + number + i, STYLES[i % 3], mask=shape, mask_dtype=mask_dtype)
                    eager = dtype == "float32" and i == 0
                    modes = ("compiled", "eager") if eager else ("compiled",)
                    cases.append(replace(made, pattern=pattern, dtype=dtype, modes=modes))
    cases += [varied(program, seed + 30 + i, STYLES[i % len(STYLES)]) for program in DEMOS for i in range(18)]
    return cases + full_transformer_cases(seed)


def first_of_each() -> list[Case]:
    return [next(p for p in PROGRAMS if p.module == module) for module in (*ATTENTIONS, FFN)]


def refused_cases(seed: int) -> list[Case]:
    """Calls that both wings must refuse."""
    return [replace(PROGRAMS[9], mask="n11k", dtype="float16", seed=seed, refused=True)]


def varied(program: Case, seed: int, style: str, **changes: Any) -> Case:
    return replace(program, seed=seed, style=style, **changes)


def values(shape: tuple[int, ...], style: str, rng: np.random.Generator) -> np.ndarray:
    """Random values in float64; each style can show a fault that another hides."""
    x = rng.standard_normal(shape)
    if style == "low variance":
        return 1e-3 * x + rng.standard_normal((*shape[:-1], 1))
    if style == "shifted":
        return x + 30.0
    if style == "large":
        return 20.0 * x
    if style == "small":
        return 1e-4 * x
    if style == "two scales":
        return x * np.where(rng.random(shape) < 0.2, 100.0, 0.1)
    return x


def ids_for(case: Case, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Ids of source and target; where the pattern hides something, one row of each ends in padding.

    Args:
        case: the case; of pattern `hidden rows` one source is padding alone.
        rng: for the ids.
    """
    n, target_length, source_length = case.lengths
    source = rng.integers(1, N_SOURCE, (n, source_length), dtype=np.int32)
    target = rng.integers(1, N_TARGET, (n, target_length), dtype=np.int32)
    if case.pattern != "nothing hidden":
        source[0, source_length - max(1, source_length // 3) :] = 0
        target[-1, target_length - max(1, target_length // 3) :] = 0
    if case.pattern == "hidden rows":
        source[0] = 0
    return source, target


def mask_for(case: Case, hides: bool, rng: np.random.Generator) -> np.ndarray:
    """A mask of the case's shape, dtype and pattern.

    Args:
        case: the case.
        hides: whether a nonzero number hides; otherwise zero does.
        rng: for the random pattern.
    """
    n, lq, lk = case.lengths
    letters = {"n": n, "h": case.heads, "q": lq, "k": lk, "1": 1}
    shape = tuple(letters[letter] for letter in case.mask)
    hidden = rng.random(shape) < 0.35
    later = np.broadcast_to(np.triu(np.ones((lq, lk), bool), 1), shape).copy() if "q" in case.mask else hidden
    if case.pattern == "causal" and "q" in case.mask:
        hidden = later
    elif case.pattern in ("padding", "padding and causal"):
        hidden = later if case.pattern == "padding and causal" else np.zeros(shape, bool)
        hidden[..., lk - max(1, lk // 3) :] = True
    elif case.pattern == "nothing hidden":
        hidden = np.zeros(shape, bool)
    if case.pattern == "hidden rows":
        hidden[(0,) * (len(shape) - 1)] = True
    elif hidden.shape[-1] > 0:
        # No row is hidden whole by chance: that has a pattern of its own.
        hidden[..., 0] = False
    marked = hidden if hides else ~hidden
    if case.mask_dtype == "denormal":
        return np.where(marked, np.float32(1e-40), np.float32(0))
    scale = {"float32": 2.5, "int64": 2**31 - 1, "int32": 3}.get(case.mask_dtype, 1)
    return (marked * scale).astype(case.mask_dtype)
