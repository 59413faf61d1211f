"""The built-in regression suite: every module of the two wings against its twin. The only room that knows them."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from parity.cases import (
    ATTENTIONS,
    CONFIGURED,
    DECODER,
    ENCODER,
    FFN,
    MHA,
    N_SOURCE,
    N_TARGET,
    SA,
    SDPA,
    TRANSFORMER,
    Case,
    default_cases,
    full_cases,
    ids_for,
    mask_for,
    values,
)
from parity.errors import InputError
from parity.evidence.compare import checked_levels, climb, with_training
from parity.evidence.numerics import numpy_float
from parity.evidence.result import LEVELS, TRAINING, Report
from parity.evidence.subject import Subject
from parity.frameworks import load, load_both
from parity.surroundings import Environment, surroundings
from parity.trained import LAYERS, SENTENCES, SIZES, WIDTH, attention_parameters, hidden_states, why_missing
from parity.training.level import Plan, planned
from parity.weights.transfer import transfer


@dataclass(frozen=True)
class CaseResult:
    """One case: its report, or why it was skipped.

    Attributes:
        name: of the case.
        module: class name, `real` beside it for trained parameters.
        device: `cpu` or `gpu`.
        report: None if the case was skipped or refused as it should be.
        seconds: it took.
        skipped: why it did not run; '' if it did.
        refused: both sides refused the inputs, as they must.
        error: what was raised instead; '' if nothing was.
        code: of that error, one of `parity.REFUSALS` or `parity.VERDICTS`; '' if nothing was raised.
    """

    name: str
    module: str
    device: str
    report: Report | None = None
    seconds: float = 0.0
    skipped: str = ""
    refused: bool = False
    error: str = ""
    code: str = ""

    @property
    def passed(self) -> bool:
        return self.refused or (self.report is not None and self.report.passed)


@dataclass(frozen=True)
class SuiteResult:
    """All cases.

    Attributes:
        cases: in the order in which they ran.
        levels: that were climbed.
        seed: of the whole run.
        seconds: it took.
        environment: versions, devices and what was pinned.
        title: what was compared.
    """

    cases: tuple[CaseResult, ...]
    levels: tuple[str, ...] = LEVELS
    seed: int = 0
    seconds: float = 0.0
    environment: Mapping[str, str] = field(default_factory=lambda: Environment({}))
    title: str = "torch_impl against jax_impl"

    @property
    def ran(self) -> tuple[CaseResult, ...]:
        return tuple(case for case in self.cases if not case.skipped)

    @property
    def passed(self) -> bool:
        """Whether cases ran and every one of them passed. A skipped case is neither."""
        return bool(self.ran) and all(case.passed for case in self.ran)

    def figures(self) -> dict[str, int]:
        """Sums over all cases of the level `identical`."""
        names = ("elements", "equal", "ties", "cancelled", "unexplained")
        levels = [level for case in self.ran if case.report for level in case.report.levels if level.level == "identical"]
        return {name: sum(int(level.figures.get(name, 0)) for level in levels) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """The result for machines."""
        from parity.report.data import document

        return document("suite", self, figures=self.figures())

    def save_html(self, path: str | os.PathLike[str]) -> Path:
        """Write all cases as one page that needs no network; as `Report.save_html`.

        Raises:
            InputError: the packages that draw are not installed, or the page cannot be written.
        """
        from parity.report.html import save_suite

        return save_suite(self, path)


def check(
    *,
    levels: Iterable[str] | None = None,
    module: str | None = None,
    device: str = "cpu",
    full: bool = False,
    seed: int = 0,
    steps: int = 0,
    progress: Callable[[int, int, str], None] | None = None,
) -> SuiteResult:
    """Run the suite.

    Args:
        levels: as in `parity.compare`.
        module: only cases whose class name contains this, whatever the case of its letters.
        device: `cpu`, `gpu` or `all`. A missing device gives a skipped row that says why.
        full: every dtype, eager and compiled, for every program and mask.
        seed: of parameters, inputs, masks, probes and jitter.
        steps: of AdamW, for which every case with parameters is trained on its own inputs: the level `training`.
        progress: called before each case with its number, how many there are, and its name.

    Returns:
        One result for each case.

    Raises:
        InputError: no such level, module or device.
        MissingFrameworkError: a framework is not installed.
    """
    chosen = checked_levels(levels, bool(steps))
    if device not in ("cpu", "gpu", "all"):
        raise InputError(f"device must be cpu, gpu or all, got {device!r}", "no-device")
    if seed < 0:
        raise InputError(f"seed must be at least 0, got {seed}")
    if steps < 0:
        raise InputError(f"steps must be at least 0, got {steps}")
    torch_room, flax_room = load_both()
    cases = [*(full_cases if full else default_cases)(seed), *trained_cases(seed)]
    if module:
        cases = [case for case in cases if module.lower() in case.module.lower()]
        if not cases:
            raise InputError(
                f"no module is called like {module!r}; there are {', '.join((*ATTENTIONS, FFN, *CONFIGURED))}", "no-such-case"
            )
    SPOILED.clear()
    start, results = time.perf_counter(), list(missing_parts(torch_room, flax_room, device))
    devices = [d for d in ("cpu", "gpu") if device in (d, "all") and not (d == "gpu" and no_gpu(torch_room, flax_room))]
    every = [replace(case, device=d) for d in devices for case in cases]
    # Pinned once around all threads: what is set for the whole process must not be restored by one of them.
    with torch_room.pinned(threads=1) as torch_settings, flax_room.pinned() as jax_settings:
        results += run_all(every, chosen, progress, steps)
    levels, seconds = (*chosen, *([TRAINING] if steps else [])), time.perf_counter() - start
    # Outside of what is pinned: settings are told as the caller has them.
    found = surroundings(torch_room, flax_room, pinned={**torch_settings, **jax_settings})
    return SuiteResult(tuple(results), levels, seed, seconds, found)


def run_all(
    cases: list[Case],
    levels: tuple[str, ...],
    progress: Callable[[int, int, str], None] | None = None,
    steps: int = 0,
) -> list[CaseResult]:
    """All cases, those of one pair of models one after another, pairs side by side: most of the time XLA compiles."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for number, case in enumerate(cases):
        groups.setdefault((case.module, tuple(case.sizes.items()), case.device), []).append(number)
    results: dict[int, CaseResult] = {}

    def run_group(numbers: list[int]) -> None:
        for number in numbers:
            if progress:
                progress(len(results), len(cases), cases[number].name)
            results[number] = run_case(cases[number], levels, steps)

    # Largest first, so that no thread is left alone with a large group at the end.
    ordered = sorted(groups.values(), key=len, reverse=True)
    # Masks are recorded and replayed by what is set for the whole process.
    workers = 1 if steps or any(case.device == "gpu" for case in cases) else min(os.cpu_count() or 1, 4)
    with ThreadPoolExecutor(workers) as pool:
        for done in [pool.submit(run_group, numbers) for numbers in ordered]:
            done.result()
    return [results[number] for number in range(len(cases))]


def no_gpu(torch_room: Any, flax_room: Any) -> str:
    """Why no GPU can be used by both frameworks, '' if one can."""
    return "; ".join(why for why in (torch_room.gpu_missing(), flax_room.gpu_missing()) if why)


def missing_parts(torch_room: Any, flax_room: Any, device: str) -> Iterator[CaseResult]:
    why = no_gpu(torch_room, flax_room)
    if device in ("gpu", "all") and why:
        yield CaseResult("all cases on gpu", "all modules", "gpu", skipped=why)
    absent = why_missing()
    if absent:
        yield CaseResult("trained encoder", "MultiHeadAttention, real", "cpu", skipped=absent)


def trained_cases(seed: int) -> list[Case]:
    if why_missing():
        return []
    lengths = (len(SENTENCES), WIDTH, WIDTH)
    return [
        Case(MHA, SIZES, lengths, mask="n11k", pattern="padding", seed=seed, style="real", weights=f"trained layer {layer}")
        for layer in range(LAYERS)
    ]


def run_case(case: Case, levels: tuple[str, ...] = LEVELS, steps: int = 0) -> CaseResult:
    """One case, whatever happens in it."""
    start = time.perf_counter()

    def result(**found: Any) -> CaseResult:
        return CaseResult(case.name, case.group, case.device, seconds=time.perf_counter() - start, **found)

    flax_room = load("nnx")
    with flax_room.on_device(case.device), flax_room.pinned(double=case.dtype == "float64"):
        torch_model, flax_model, args = prepared(case)
        try:
            wanted = "gradients" in levels
            fresh = first_time(case)
            subject = Subject(
                *(torch_model, flax_model, args, {}),
                seed=case.seed,
                gradients=wanted,
                native_gradients=case.native_gradients,
                pins_checked=not fresh,
            )
            plan = training_of(torch_model, flax_model, args, steps)
            report = climb(subject, levels, case.modes, strict=True, spoil=fresh)
            report = report if plan is None else with_training(report, plan)
        except InputError as error:
            refused = case.refused and "both models refuse" in str(error)
            return result(refused=refused, error="" if refused else str(error), code="" if refused else error.code)
    if case.refused:
        return result(error="both sides must refuse these inputs, but neither did", code="not-refused")
    return result(report=report)


def training_of(torch_model: Any, flax_model: Any, args: tuple[Any, ...], steps: int) -> Plan | None:
    """How a case is trained; None if it is not, or has nothing to train."""
    import torch

    if not steps or not any(True for _ in torch_model.parameters()):
        return None
    options: dict[str, Any] = {"optimizer": torch.optim.AdamW, "loss": "square", "batches": None, "recipe": None}
    return planned(torch_model, flax_model, args, {}, steps=steps, rename=None, ignore=(), **options)


SPOILED: set[tuple[Any, ...]] = set()


def first_time(case: Case) -> bool:
    """Whether a program has not been given bad inputs yet. They depend on shapes and dtypes, not on numbers."""
    key = (case.module, tuple(case.sizes.items()), case.lengths, case.mask, case.dtype, case.device)
    fresh = key not in SPOILED
    SPOILED.add(key)
    return fresh


@lru_cache(maxsize=64)
def models(module: str, sizes: tuple[tuple[str, Any], ...], device: str) -> tuple[Any, Any]:
    """One pair for each configuration, so that compiled programs are found again."""
    from flax import nnx

    import jax_impl
    import torch_impl

    torch_model = getattr(torch_impl, module)(**arguments(torch_impl, module, dict(sizes)))
    flax_class = getattr(jax_impl, module)
    given = arguments(jax_impl, module, dict(sizes))
    # Without values: initialising would compile one program for every shape, and all are transferred.
    flax_model = flax_class() if module == SDPA else nnx.eval_shape(lambda: flax_class(**given, rngs=nnx.Rngs(0)))
    torch_model.eval()
    flax_model.eval()
    return torch_model.to("cuda" if device == "gpu" else "cpu"), flax_model


def arguments(wing: Any, module: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """What a module of a wing is made from."""
    if module not in CONFIGURED:
        return sizes
    ends = {"n_source": N_SOURCE, "n_target": N_TARGET, "tied": sizes.pop("tied", False)} if module == TRANSFORMER else {}
    return {"config": wing.TransformerConfig(**sizes), **ends}


def prepared(case: Case) -> tuple[Any, Any, tuple[Any, ...]]:
    """The pair with the case's parameters on both sides, and the arguments."""
    torch_model, flax_model = models(case.module, tuple(case.sizes.items()), case.device)
    rng = np.random.default_rng([case.seed, len(case.mask), sum(map(ord, case.module))])
    parameters, args = trained(case) if case.weights else drawn(case, torch_model, rng)
    if parameters:
        torch_room = load("torch")
        state = {path: torch_room.from_numpy(array.astype(numpy_float(case.dtype))) for path, array in parameters.items()}
        transfer(state, torch_model, cast="source")
        transfer(torch_model, flax_model, cast="source")
    wanted = numpy_float(case.dtype)
    cast = tuple(a.astype(wanted) if a.dtype.kind == "f" else a for a in args[:3])
    return torch_model, flax_model, (*cast, *(args[3:] or masks(case, rng)))


def masks(case: Case, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """The masks that the module is given as arguments."""
    if case.mask in ("", "ids"):
        return ()
    hides, (n, lq, _) = case.module in (MHA, SDPA, *CONFIGURED), case.lengths
    if case.module not in CONFIGURED:
        return (mask_for(case, hides, rng),)
    own = mask_for(replace(case, lengths=(n, lq, lq)), hides, rng)
    # A target sees the whole source, but for its padding.
    over_source = replace(case, mask="n11k", pattern="padding" if "padding" in case.pattern else "random")
    return (own,) if case.module == ENCODER else (own, mask_for(over_source, hides, rng))


def drawn(case: Case, torch_model: Any, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], tuple[np.ndarray, ...]]:
    """Random parameters, biases included, and inputs in the order in which the module takes them."""
    shapes = {leaf.path: leaf.shape for leaf in load("torch").leaves(torch_model)}
    parameters = {
        path: rng.standard_normal(shape) / np.sqrt(shape[-1]) if len(shape) > 1 else 0.5 * rng.standard_normal(shape)
        for path, shape in shapes.items()
    }
    n, lq, lk = case.lengths
    if case.module == TRANSFORMER:
        return parameters, ids_for(case, rng)
    shapes_in: list[tuple[int, ...]]
    if case.module == SDPA:
        shapes_in = [(n, case.heads, lq, 8), (n, case.heads, lk, 8), (n, case.heads, lk, 5)]
    elif case.module == FFN:
        shapes_in = [(n, lq, case.sizes.get("d_model", 512))]
    elif case.module in CONFIGURED:
        shapes_in = [(n, length, case.sizes["d_model"]) for length in ((lq, lk) if case.module == DECODER else (lq,))]
    else:
        width = case.sizes.get("d_model", case.sizes.get("embed_size", 512))
        shapes_in = [(n, lq, width), (n, lk, width), (n, lk, width)]
    args = tuple(values(shape, case.style, rng) for shape in shapes_in)
    return parameters, args[::-1] if case.module == SA else args


def trained(case: Case) -> tuple[dict[str, np.ndarray], tuple[np.ndarray, ...]]:
    """A trained layer's parameters, and what reaches it when the encoder reads real sentences."""
    layer = int(case.weights.rsplit(" ", 1)[1])
    states, padding = hidden_states()
    x = states[layer]
    return attention_parameters(layer), (x, x, x, padding[:, None, None, :])
