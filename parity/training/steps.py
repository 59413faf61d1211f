"""Train both models from the same state on the same data in float64, and say where they part.

In float64 two right implementations stay together: rounding grows from 1e-16 by what the model and the
optimizer magnify, while a wrong default shows from the first step on with 1e-6 and more. What counts as the
same is 1e-10 of an array's largest value; where more than that differs, torch's run is held against itself,
begun on parameters that are moved by half an ulp, and only what that does not explain is a difference.

An element whose gradient is zero in exact arithmetic (a key bias) is moved by rounding errors alone, which
Adam scales to full steps. Elements whose gradient never rises above `NOISE` times the largest one are left
out of the verdict, and named.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from types import ModuleType
from typing import Any

import numpy as np

from parity import frameworks
from parity.errors import InputError, listed
from parity.evidence.faults import Cause
from parity.evidence.trees import mapped
from parity.training.convert import clip_grad_norm, clip_grad_value, moves, to_optax
from parity.training.following import Follower, compared, sample
from parity.training.native import NativeFollower
from parity.training.outcome import Drift, NativeStep, Training
from parity.training.pairs import which
from parity.training.ports import Port
from parity.training.recipe import Recipe, checked_loss
from parity.training.states import transfer_optimizer
from parity.weights.pairing import Pairing, pair

# Largest difference of two right runs, as a part of an array's largest value; see above.
ALLOWED = 1e-10
# Places of dropout that are tried one by one where train mode is to blame.
TRIED = 32

Arrays = Mapping[str, np.ndarray]


def train_both(
    torch_model: Any,
    flax_model: Any,
    optimizer: Any,
    batches: Iterable[Sequence[Any]],
    loss: Any,
    *,
    recipe: Recipe | None = None,
    native: bool = False,
    allowed: float = ALLOWED,
    rename: Mapping[str, str] | None = None,
    ignore: Iterable[str] = (),
) -> Training:
    """Train copies of both models in float64 from the same state on the same batches, step by step.

    Models, optimizer and scheduler stay as they are. Running statistics are compared like parameters.
    Where the models part and the gradients before do not, what ports of optimizers get wrong is tried on Flax's
    own gradients: `causes` of the result names what would make its steps.

    Args:
        torch_model: a torch.nn.Module.
        flax_model: its twin with the same parameters, an nnx.Module or a `parity.Linen`; see `parity.transfer`.
        optimizer: of the torch model, whose state goes along; or a class of torch.optim, a pair of one and a dict of
            its options, or a function of the model's parameters.
        batches: each a sequence of arrays, as the loss takes them; as many as there are steps, times
            `recipe.accumulate`.
        loss: a function of torch and one of Flax; each takes its model and a batch's arrays, and gives one
            number. Of a `parity.Linen` the model is a function that applies it. Or a name: `cross_entropy`,
            `mse`, `l1`, `square`.
        recipe: what else happens in a step.
        native: whether each step is taken in the dtype of the models too, from torch's state before it.
        allowed: largest difference, as a part of an array's largest value.
        rename: as in `parity.transfer`.
        ignore: as in `parity.transfer`.

    Returns:
        The drift, the first step and the arrays that part, and why.

    Raises:
        InputError: the models do not start from the same parameters, the optimizer has no twin, the batches make no step, or
            a loss is no number or NaN from the start.
        TransferError: the models do not fit.
    """
    if not isinstance(allowed, int | float) or not 0 < allowed < np.inf:
        raise InputError(f"allowed must be a number above 0, a part of an array's largest value, got {allowed!r}")
    pairs = Twins(torch_model, flax_model, optimizer, loss, recipe or Recipe(), rename, ignore)
    known, size = checked_batches(batches), pairs.recipe.accumulate
    if len(known) < size:
        raise InputError(f"batches holds {len(known)}, and one step takes {size}: no step would be taken; give more")
    found = pairs.whole(list(chunks(known, size)), allowed, native)
    over = len(known) % size
    return (
        replace(found, notes=(*found.notes, f"the last {over} of {len(known)} batches make no whole step")) if over else found
    )


class Twins:
    """Two models that are to be trained alike, checked.

    Args:
        torch_model: as of `train_both`, and so the others.
        flax_model: the twin.
        optimizer: of the torch model.
        loss: of both.
        recipe: what else happens in a step.
        rename: as in `parity.transfer`.
        ignore: as in `parity.transfer`.
        silent: paths of torch's dropout modules that drop nothing on either side.
    """

    def __init__(
        self,
        torch_model: Any,
        flax_model: Any,
        optimizer: Any,
        loss: Any,
        recipe: Recipe,
        rename: Any,
        ignore: Iterable[str],
        silent: tuple[str, ...] = (),
    ):
        self.silent, self.changing = silent, False
        self.room, self.torch = frameworks.load("torch.training"), frameworks.load("torch")
        self.flax, self.flax_training = flax_rooms(flax_model)
        if not self.torch.is_model(torch_model):
            raise InputError(f"the first model must be a torch.nn.Module, got {frameworks.describe(torch_model)}")
        if frameworks.load("torch.schedulers").owns(optimizer):
            raise InputError(
                "the third argument must be the torch optimizer; pass its scheduler as recipe=parity.Recipe(scheduler=...)"
            )
        self.torch_model, self.flax_model, self.recipe = torch_model, flax_model, recipe
        self.optimizer = self.room.made(optimizer, torch_model)
        self.scheduler = self.room.scheduler_of(recipe.scheduler, self.optimizer)
        which(self.optimizer)
        if recipe.scaler is not None and self.torch.model_dtype(torch_model) == "float16":
            raise InputError(
                "torch's GradScaler takes no gradients of float16 parameters; keep them in float32, and let the losses compute "
                "in float16: torch.autocast, and dtype=jnp.float16 of Flax's layers"
            )
        self.loss = checked_loss(loss)
        self.named = {"rename": rename, "ignore": (ignore,) if isinstance(ignore, str) else tuple(ignore)}
        self.pairing: Pairing = pair(torch_model, flax_model, names=("torch model", "Flax model"), **self.named)

    @property
    def losses(self) -> tuple[Any, Any]:
        return (self.loss, self.loss) if isinstance(self.loss, str) else self.loss

    def run_of_torch(self, dtype: str | None) -> Any:
        """Torch's run on copies."""
        given = self.torch_model, self.optimizer, self.scheduler, self.losses[0], self.recipe
        return self.room.Run(*given, dtype, self.silent)

    def run_of_flax(self, mine: Any, dtype: str | None, unused: tuple[str, ...], count: int) -> Any:
        """Flax's run on copies, with the twin of an optimizer or the transformation that is on trial."""
        recipe = self.recipe
        theirs = self.flax_training.Run(self.flax_model, self.losses[1], recipe, dtype, self.named["rename"], self.silent)
        scaling = None if recipe.scaler is None else self.room.scaling_of(recipe.scaler)
        if recipe.transformation is not None:
            theirs.train_by(recipe.transformation, recipe.state, scaling)
            return theirs
        theirs.train_by(self.twin(mine, unused, count), None, scaling)
        if mine.optimizer.state:
            told = transfer_optimizer(mine.optimizer, theirs.state, mine.model, self.flax_model, **self.options(mine))
            theirs.state = told.value
        return theirs

    def twin(self, mine: Any, unused: tuple[str, ...], count: int) -> Any:
        """The transformation with so many steps of torch's optimizer."""
        recipe = self.recipe
        clip = None if recipe.max_norm is None else clip_grad_norm(recipe.max_norm)
        clip = clip if recipe.max_value is None else clip_grad_value(recipe.max_value)
        # A copied optimizer is not wrapped by its scheduler any more; an optimizer without one has none.
        options = self.options(mine) | ({} if mine.scheduler is not None else {"scheduler": False})
        options |= {"steps": self.rehearsed(mine.scheduler, count)}
        return to_optax(mine.optimizer, mine.model, self.flax_model, clip=clip, unused=unused, **options)

    def rehearsed(self, scheduler: Any, count: int) -> int | None:
        """Steps of a scheduler that are taken from torch's own code, for it has no formula; None if it has one."""
        if scheduler is None:
            return None
        try:
            moves(scheduler, self.recipe.every, None)
        except InputError:
            # One more than is used: the causes look one step ahead.
            return (count - 1) // self.recipe.every + 2
        return None

    def options(self, mine: Any) -> dict[str, Any]:
        return {"scheduler": mine.scheduler, "every": self.recipe.every, **self.named}

    def port(self, mine: Any, unused: tuple[str, ...], count: int) -> Port | None:
        """Torch's optimizer in the words of no framework; None if it has no twin."""
        try:
            known = mine.scheduler, self.recipe.every, self.rehearsed(mine.scheduler, count)
            found = port_of(mine.optimizer, mine.names, *known)
        except InputError:
            return None
        return replace(found, norm=self.recipe.max_norm, value=self.recipe.max_value, unused=frozenset(unused))

    def whole(self, steps: list[Any], allowed: float, native: bool) -> Training:
        """Both runs in float64, and single steps in the dtype of the models if they are asked for."""
        found = self.trained(steps, allowed)
        # What has a gradient in some steps only has no state that could travel in the others.
        if not native or found.dropout or self.changing:
            return found
        return replace(found, native=self.native_steps(steps, found.unused))

    def native_steps(self, steps: list[Any], unused: tuple[str, ...]) -> tuple[NativeStep, ...]:
        """Single steps in the dtype of the models; none if that is float64, where there is nothing to add."""
        dtype = self.torch.model_dtype(self.torch_model) or "float32"
        if dtype == "float64":
            return ()
        with self.torch.pinned(), self.flax.pinned():
            mine = self.run_of_torch(None)
            theirs = self.run_of_flax(mine, None, unused, len(steps))
            twin = self.recipe.transformation is None
            options = self.options(mine)
            follower = NativeFollower(
                *(mine, theirs, self.flax_model, self.pairing, dtype, options, twin),
                begun=begun(mine.scheduler, self.recipe.every),
            )
            for batch in steps:
                follower.step(batch)
            return tuple(follower.steps)

    def trained(self, steps: list[Any], allowed: float) -> Training:
        """Both runs in float64."""
        follower, unused = self.followed(steps, allowed)
        self.changing = follower.changing
        refuse_no_number(follower.drift)
        found = follower.outcome(unused, self.recipe.mode)
        if found.first != 1 or found.causes or found.dropout or not found.drift[0].gradients > allowed:
            return found
        return replace(found, causes=self.causes_of_mode(found, steps[0], follower.places, allowed))

    def followed(self, steps: list[Any], allowed: float) -> tuple[Follower, tuple[str, ...]]:
        """Both runs in float64, not judged yet, and the parameters that get no gradient."""
        with self.torch.pinned(), self.flax.pinned(double=True):
            mine = self.run_of_torch("float64")
            unused = mine.unused(steps[0])
            theirs = self.run_of_flax(mine, "float64", unused, len(steps))
            refuse_other_start(self.pairing, mine.values(), theirs.values())
            follower = Follower(
                *(mine, theirs, self.pairing, self.recipe.every, allowed),
                port=self.port(mine, unused, len(steps)),
                momenta=mine.momenta(),
            )
            for batch in steps:
                follower.step(batch)
                if follower.dropout:
                    break
            return follower, unused

    def causes_of_mode(self, found: Training, batches: list[Any], places: Sequence[str], allowed: float) -> tuple[Cause, ...]:
        """What train mode does otherwise, if the gradients before the first step agree in eval mode."""
        gap = found.drift[0].gradients
        off = np.inf if self.recipe.train is False else self.first_gap(batches, allowed, train=False)
        if not off <= allowed:
            return ()

        def cause(name: str, what: str, change: str, left: float) -> tuple[Cause, ...]:
            return (Cause(name, "the model", what, change, gap / allowed, left / allowed, found.parted, True),)

        silenced = self.room.droppers(self.torch_model, places)
        quiet = self.first_gap(batches, allowed, silent=silenced) if silenced else gap
        wrong = self.misplaced(batches, allowed, silenced) if quiet <= allowed else ()
        if wrong:
            return cause(
                "place of dropout",
                f"Dropout at {', '.join(wrong)} is applied to another value than in torch: with "
                f"{'it' if len(wrong) == 1 else 'each of them'} alone in train mode the gradients differ, with none they agree",
                "drop the value that torch drops there: parity.compare(..., dropout='replay') shows the first that differs",
                quiet,
            )
        if len(silenced) == len(set(places)):
            return cause(
                "train mode",
                "In eval mode the gradients agree, in train mode they do not, dropout left out or not: the statistics of the "
                "batch are taken otherwise",
                "take mean and biased variance over the axes over which torch takes them, without use_fast_variance",
                off,
            )
        return cause(
            "train mode",
            "In eval mode the gradients agree, in train mode, with torch's masks, they do not: dropout is at another place, or "
            "the statistics of the batch are taken otherwise",
            "parity.compare(..., dropout='replay') names the module in which they part",
            off,
        )

    def first_gap(self, batches: list[Any], allowed: float, train: bool | None = None, silent: tuple[str, ...] = ()) -> float:
        """How far the gradients before the first step are apart in another mode, or with some dropout left out."""
        recipe = self.recipe if train is None else replace(self.recipe, train=train)
        other = Twins(*(self.torch_model, self.flax_model, self.optimizer, self.loss, recipe), **self.named, silent=silent)
        follower, _ = other.followed([batches], allowed)
        return follower.drift[0].gradients if follower.drift else np.inf

    def misplaced(self, batches: list[Any], allowed: float, places: tuple[str, ...]) -> tuple[str, ...]:
        """The modules that drop another value than torch's: each with all others left out."""
        return tuple(
            place
            for place in places[:TRIED]
            if not self.first_gap(batches, allowed, silent=tuple(p for p in places if p != place)) <= allowed
        )


def flax_rooms(flax_model: Any) -> tuple[ModuleType, ModuleType]:
    """The room of a Flax model, and that of its training.

    Raises:
        InputError: it is no Flax model.
    """
    for name in ("linen", "nnx"):
        room = frameworks.load(name)
        if room.is_model(flax_model):
            return room, frameworks.load(f"{name}.training")
    raise InputError(f"the second model must be a flax.nnx.Module or a parity.Linen, got {frameworks.describe(flax_model)}")


def port_of(optimizer: Any, names: Mapping[int, str], scheduler: Any = None, every: int = 1, steps: int | None = None) -> Port:
    """A torch optimizer, its state sampled, in the words of no framework.

    Args:
        optimizer: of torch.optim.
        names: of its parameters, by `id`.
        scheduler: of it.
        every: steps to each step of the scheduler.
        steps: of the scheduler, to be taken from torch's own code; None for its formula.

    Raises:
        InputError: it has no twin.
    """
    room = frameworks.load("torch.optimizers")
    known = room.read(optimizer, names, moves(scheduler, every, steps) if scheduler is not None else None)
    state = {
        name: {key: sample(name, value) if isinstance(value, np.ndarray) else value for key, value in entries.items()}
        for name, entries in room.read_state(optimizer, names).items()
    }
    return Port(known.kind, known.groups, state, begun=begun(scheduler, every))


def begun(scheduler: Any, every: int) -> int:
    """Updates that schedules have had."""
    return 0 if scheduler is None else frameworks.load("torch.schedulers").position(scheduler) * every


def chunks(batches: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """As many batches as are accumulated, step by step; what is left over at the end is left out."""
    rest = iter(batches)
    while len(chunk := list(islice(rest, size))) == size:
        yield chunk


def checked_batches(batches: Any) -> list[tuple[Any, ...]]:
    """Batches with their arrays in NumPy.

    Raises:
        InputError: they are none; all problems at once.
    """
    if not isinstance(batches, Iterable) or isinstance(batches, str | Mapping):
        raise InputError(
            f"batches must be an iterable of batches, each a tuple of arrays, got {frameworks.describe(batches)}; a single one "
            "is [(x, y)]"
        )
    known = list(batches)
    problems = [
        f"batch {number} is {frameworks.describe(batch)}; put it into a tuple, as in (batch,)"
        for number, batch in enumerate(known)
        if not isinstance(batch, tuple | list)
    ]
    if problems:
        raise InputError(listed("each batch must be a tuple of what the loss takes behind the model", problems))
    return [plain(batch) for batch in known]


def plain(batch: Sequence[Any]) -> tuple[Any, ...]:
    """A batch with its arrays in NumPy."""
    rooms = (frameworks.load("torch"), frameworks.load("nnx"))

    def array(path: str, value: Any) -> Any:
        room = next((room for room in rooms if room.is_array(value)), None)
        return np.array(room.to_numpy(value)) if room else np.array(value) if isinstance(value, np.ndarray) else value

    return mapped(array, tuple(batch))


def refuse_no_number(drift: Sequence[Drift]) -> None:
    """Refuse runs that show nothing, for the loss is no number on either side from the start.

    Raises:
        InputError: that is so.
    """
    if drift and not np.isfinite(drift[0].loss) and not np.isfinite(drift[0].flax_loss):
        raise InputError(
            f"the loss is {drift[0].loss} in torch and {drift[0].flax_loss} in Flax in the first step already: there is "
            "nothing to compare; look at the first batch and the parameters"
        )


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
