"""Train both models from the same state on the same data in float64, and say where they part.

In float64 two right implementations stay together: rounding grows from 1e-16 by what the model
and the optimizer magnify. Measured with AdamW, attention and layer norms, 200 steps stay within
1e-12 of a parameter's largest value; a wrong default shows from the first step on with 1e-6 and more.

An element whose gradient is zero in exact arithmetic (a key bias) is moved by rounding errors alone, which
Adam scales to full steps. Elements whose gradient never rises above `NOISE` times the largest one are left
out of the verdict, and named.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parity import frameworks
from parity.errors import DivergenceError, InputError, listed
from parity.training.convert import clip_grad_norm, to_optax
from parity.training.pairs import which
from parity.training.states import transfer_optimizer
from parity.weights.leaf import gathered
from parity.weights.pairing import Pair, Pairing, pair

# Largest difference of two right runs, as a part of an array's largest value; see above.
ALLOWED = 1e-10
# What is left of a gradient that is zero in exact arithmetic, as a part of the largest gradient.
NOISE = 1e-13
TINY = float(np.finfo(np.float64).tiny)

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Drift:
    """How far two runs are apart in one step.

    Attributes:
        step: counted from 1.
        loss: torch's, before the step.
        loss_difference: Flax's less torch's.
        gradients: largest difference of a gradient before the step, as a part of the largest gradient.
        values: largest difference of a parameter or buffer after it, as a part of its largest value.
        worst: torch's name of that one.
    """

    step: int
    loss: float
    loss_difference: float
    gradients: float
    values: float
    worst: str


@dataclass(frozen=True)
class Training:
    """The outcome of training both models.

    Attributes:
        drift: step by step.
        allowed: the largest difference that counts as the same.
        parted: torch's names of what differs in the first step that shows a difference, worst first: gradients
            before it, or if they agree, values after it.
        first: that step; None if there is none.
        noise: torch's names of arrays that hold elements whose gradient is rounding alone, with their number.
        unused: torch's names of parameters that get no gradient, and are left alone on both sides.
    """

    drift: tuple[Drift, ...]
    allowed: float
    parted: tuple[str, ...] = ()
    first: int | None = None
    noise: tuple[tuple[str, int], ...] = ()
    unused: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the runs stayed together to the end."""
        return self.first is None

    def raise_for_divergence(self) -> None:
        """Raise what parts, if anything does.

        Raises:
            DivergenceError: the runs part.
        """
        if not self.passed:
            raise DivergenceError(str(self))

    def __str__(self) -> str:
        from parity.report.training import training_text

        return training_text(self)

    def to_dict(self) -> dict[str, Any]:
        """The result for machines."""
        from parity.report.data import as_data

        return as_data(self)


def train_both(
    torch_model: Any,
    flax_model: Any,
    optimizer: Any,
    batches: Iterable[Sequence[Any]],
    loss: tuple[Callable[..., Any], Callable[..., Any]],
    *,
    scheduler: Any = None,
    every: int = 1,
    max_norm: float | None = None,
    transformation: Any = None,
    allowed: float = ALLOWED,
    rename: Mapping[str, str] | None = None,
    ignore: Iterable[str] = (),
) -> Training:
    """Train copies of both models in float64 from the same state on the same batches, step by step.

    Models, optimizer and scheduler stay as they are. Nothing random may be in the models: dropout is off,
    or they are in eval mode. Running statistics are compared like parameters.

    Args:
        torch_model: a torch.nn.Module.
        flax_model: its twin, an nnx.Module with the same parameters; see `parity.transfer`.
        optimizer: of the torch model; its state goes along.
        batches: as many as there are steps, each a sequence of arrays: values, targets.
        loss: a function of torch and one of Flax; each takes its model and a batch, and gives one number.
        scheduler: of the optimizer.
        every: steps to each step of the scheduler.
        max_norm: of `clip_grad_norm_`, before each step.
        transformation: for the Flax model, in place of `parity.to_optax(optimizer, ...)`: the one to be examined.
        allowed: largest difference, as a part of an array's largest value.
        rename: as in `parity.transfer`.
        ignore: as in `parity.transfer`.

    Returns:
        The drift, and the first step and the arrays that part.

    Raises:
        InputError: the models do not start from the same parameters, or the optimizer has no twin.
        TransferError: the models do not fit.
    """
    if which(optimizer) != "optimizer":
        raise InputError("the third argument must be the torch optimizer; pass its scheduler as scheduler=")
    torch, nnx = frameworks.load("torch"), frameworks.load("nnx")
    pairing = pair(torch_model, flax_model, rename=rename, ignore=ignore, names=("torch model", "Flax model"))
    with torch.pinned(), nnx.pinned(double=True):
        mine = frameworks.load("torch.training").Run(torch_model, optimizer, scheduler, loss[0], max_norm)
        theirs = frameworks.load("nnx.training").Run(flax_model, loss[1])
        refuse_other_start(pairing, mine.values(), theirs.values())
        batches = [tuple(map(plain, batch)) for batch in batches]
        unused = mine.unused(batches[0]) if batches else ()
        options = {"scheduler": mine.scheduler, "every": every, "rename": rename, "ignore": ignore}
        if transformation is None:
            clip = None if max_norm is None else clip_grad_norm(max_norm)
            twin = to_optax(mine.optimizer, mine.model, flax_model, clip=clip, unused=unused, **options | scheduled(mine))
        theirs.train_by(transformation if transformation is not None else twin)
        if transformation is None and mine.optimizer.state:
            told = transfer_optimizer(mine.optimizer, theirs.state, mine.model, flax_model, **options)
            theirs.state = told.value
        return followed(mine, theirs, pairing, batches, every, allowed, unused)


def scheduled(mine: Any) -> dict[str, Any]:
    """A copied optimizer is not wrapped by its scheduler any more; an optimizer without one has none."""
    return {} if mine.scheduler is not None else {"scheduler": False}


def plain(array: Any) -> np.ndarray:
    """A batch's array in NumPy."""
    for room in (frameworks.load("torch"), frameworks.load("nnx")):
        if room.is_array(array):
            return np.array(room.to_numpy(array))
    return np.asarray(array)


def refuse_other_start(pairing: Pairing, mine: Arrays, theirs: Arrays) -> None:
    """Refuse models that do not start alike.

    Raises:
        InputError: some array differs.
    """
    problems = [*pairing.problems, *pairing.lost_ties]
    for names, ours, flax in compared(pairing, mine, theirs):
        if not np.array_equal(ours, flax, equal_nan=ours.dtype.kind == "f"):
            problems.append(f"{names} differs before the first step; parity.transfer the torch model into the Flax model first")
    if problems:
        raise InputError(listed("the two cannot be trained side by side", problems))


def compared(pairing: Pairing, mine: Arrays, theirs: Arrays) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Torch's name, torch's array, and Flax's in torch's layout, for every array that both have."""
    parts: dict[str, list[Pair]] = {}
    for p in pairing.pairs:
        if p.source.array_path in mine and p.target.path in theirs:
            parts.setdefault(p.source.array_path, []).append(p)
    found = []
    for name, pairs in parts.items():
        blocks = {p.source.path: (p.source, p.layout.inverse().apply(theirs[p.target.path])) for p in pairs}
        found.append((name, mine[name], next(iter(gathered(list(blocks.values())).values()))))
    return found


def followed(
    mine: Any, theirs: Any, pairing: Pairing, batches: Sequence[Any], every: int, allowed: float, unused: tuple[str, ...]
) -> Training:
    """Both runs, step by step."""
    drift: list[Drift] = []
    parted: tuple[str, ...] = ()
    first: int | None = None
    # The elements that have had a gradient so far.
    alive: dict[str, np.ndarray] = {}
    quiet: dict[str, int] = {}
    for number, batch in enumerate(batches, 1):
        value, gradients = mine.gradients(batch)
        other, flax_gradients = theirs.step(batch)
        mine.update(scheduled=number % every == 0)
        known = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        pairs = compared(pairing, known, flax_gradients)
        largest = max((np.abs(array).max(initial=0.0) for _, *both in pairs for array in both), default=0.0)
        by_gradient: dict[str, float] = {}
        for name, t, f in pairs:
            # Of either side: torch gives a padding row no gradient, Flax one.
            seen = np.maximum(np.abs(t), np.abs(f)) > NOISE * largest
            alive[name] = alive.get(name, np.zeros(t.shape, bool)) | seen
            by_gradient[name] = float(np.abs(f - t).max(initial=0.0) / max(largest, TINY))
        by_value: dict[str, float] = {}
        for name, t, f in compared(pairing, mine.values(), theirs.values()):
            by_value[name], quiet[name] = apart(f, t, alive.get(name))
        worst = max(by_value, key=by_value.__getitem__, default="")
        most = max(by_gradient.values(), default=0.0)
        drift.append(Drift(number, value, other - value, most, by_value.get(worst, 0.0), worst))
        # A step may hide what gradients show: the first of Adam is their sign.
        wrong = past(allowed, by_gradient) or past(allowed, by_value)
        if first is None and wrong:
            first, parted = number, wrong
    noise = tuple((name, count) for name, count in quiet.items() if count)
    return Training(tuple(drift), allowed, parted, first, noise, unused)


def past(allowed: float, errors: Mapping[str, float]) -> tuple[str, ...]:
    """What differs by more than is allowed, worst first; NaN does."""
    return tuple(sorted((name for name, error in errors.items() if not error <= allowed), key=lambda name: -errors[name]))


def apart(actual: np.ndarray, expected: np.ndarray, alive: np.ndarray | None) -> tuple[float, int]:
    """The largest difference as a part of the largest value, and how many elements differ that have no gradient."""
    if actual.shape != expected.shape or not actual.size:
        return (0.0 if actual.shape == expected.shape else np.inf), 0
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.abs(actual.astype(np.float64) - expected.astype(np.float64))
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    difference = np.where(same, 0.0, np.where(np.isfinite(difference), difference, np.inf))
    idle = 0
    if alive is not None:
        idle = int(((difference > 0) & ~alive).sum())
        difference = np.where(alive, difference, 0.0)
    finite = np.abs(expected[np.isfinite(expected)]).max(initial=0.0)
    return float(difference.max() / max(finite, TINY)) if difference.any() else 0.0, idle
