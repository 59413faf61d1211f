"""How a model is trained, besides its optimizer, its loss and its data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from parity.errors import InputError, listed

# A function of torch and one of Flax, each of its model and the arrays of a batch; or a name of `LOSSES`.
Loss = tuple[Callable[..., Any], Callable[..., Any]] | str

# Each takes what the model returns; all but the last take the last array of a batch as the target, and not as an argument.
LOSSES = {
    "cross_entropy": "classes on the last axis, targets whole numbers, -100 counts for nothing; the mean",
    "mse": "the mean of squared differences",
    "l1": "the mean of absolute differences",
    "square": "the mean of the squares of every output; no target",
}


@dataclass(frozen=True)
class Recipe:
    """What happens in a step besides the optimizer's own.

    Attributes:
        scheduler: of the optimizer, a pair of a class of them and a dict of its options, or a function that makes one for
            it; stepped once in `every` steps, also where a step was skipped. One without a formula, such as LambdaLR, is
            rehearsed.
        every: steps to each step of the scheduler.
        max_norm: of `clip_grad_norm_`, over all that the optimizer moves, before each step; None clips nothing.
        max_value: of `clip_grad_value_` likewise.
        accumulate: batches whose gradients, each of its loss divided by their number, are summed for one step.
            An `optax.MultiSteps` given as `transformation` sees each of them alone, undivided.
        scaler: a `torch.amp.GradScaler`, or a dict of its options: the loss is multiplied, gradients are divided
            again, a step is skipped where one is not finite, and the scale grows and shrinks.
        transformation: of the Flax model, in place of `parity.to_optax(optimizer, ...)`: the one to be examined.
        state: of that transformation, where the run goes on from an earlier one; None is what `init` gives.
        train: whether the copies are put into train mode first, False into eval mode; None leaves them as they are in
            `parity.train_both`, and trains in `parity.compare`, to which models come in eval mode. Layers that only
            their owner keeps in eval mode need a `train` method that does so, in torch and NNX alike. Of a `parity.Linen`
            keyword arguments are set: `train`, `training`, `is_training` to it, `deterministic`,
            `use_running_average` to its contrary.
        dropout: whether the masks that torch draws are replayed in Flax.
        mode: how Flax runs: `compiled` or `eager`.
    """

    scheduler: Any = None
    every: int = 1
    max_norm: float | None = None
    max_value: float | None = None
    accumulate: int = 1
    scaler: Any = None
    transformation: Any = None
    state: Any = None
    train: bool | None = None
    dropout: bool = True
    mode: Literal["compiled", "eager"] = "compiled"

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be a whole number of at least 1, got {value!r}"
            for name, value in (("every", self.every), ("accumulate", self.accumulate))
            if not isinstance(value, int) or isinstance(value, bool) or value < 1
        ]
        problems += [
            f"{name} must be a number above 0, got {value!r}"
            for name, value in (("max_norm", self.max_norm), ("max_value", self.max_value))
            if value is not None and (not isinstance(value, int | float) or not value > 0)
        ]
        if self.max_norm is not None and self.max_value is not None:
            problems.append("max_norm and max_value are two ways to clip; give one")
        if self.state is not None and self.transformation is None:
            problems.append("state belongs to a transformation; give that too")
        tx = self.transformation
        if tx is not None and not (hasattr(tx, "init") and hasattr(tx, "update")):
            problems.append(f"transformation must be one of optax, got {tx!r}; parity.to_optax makes one of a torch optimizer")
        if self.mode not in ("compiled", "eager"):
            problems.append(f"mode must be 'compiled' or 'eager', got {self.mode!r}")
        if self.scaler is not None and not isinstance(self.scaler, Mapping) and not hasattr(self.scaler, "get_backoff_factor"):
            problems.append(f"scaler must be a torch.amp.GradScaler or a dict of its options, got {self.scaler!r}")
        if problems:
            raise InputError(listed("recipe", problems))


def checked_loss(loss: Any) -> Loss:
    """A loss that can be used.

    Raises:
        InputError: it cannot.
    """
    if isinstance(loss, str) and loss in LOSSES:
        return loss
    if isinstance(loss, tuple | list) and len(loss) == 2 and all(callable(one) for one in loss):
        return loss[0], loss[1]
    raise InputError(
        f"loss must be a pair of functions, torch's and Flax's, each of a model and the arrays of a batch, or one of "
        f"{', '.join(map(repr, LOSSES))}; got {loss!r}"
    )
