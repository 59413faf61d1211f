"""Optimizers, schedulers and gradient clipping of torch as optax transformations and schedules."""

from collections.abc import Iterable, Mapping
from typing import Any

from parity import frameworks
from parity.errors import InputError, TransferError, listed
from parity.training.optimizers import Optimizer
from parity.training.pairs import Matched, chosen, homeless, matched, which
from parity.training.schedules import Every, Moved


def to_optax(
    source: Any,
    torch_model: Any = None,
    flax_model: Any = None,
    *,
    scheduler: Any = None,
    every: int = 1,
    steps: int | None = None,
    clip: Any = None,
    unused: Iterable[str] = (),
    scaler: Any = None,
    group: int | None = None,
    rename: Mapping[str, str] | None = None,
    ignore: Iterable[str] = (),
) -> Any:
    """Give the optax transformation that takes the steps of a torch optimizer, or the schedule of a scheduler.

    In float64 parameters and state stay within 1e-13 of torch's over 100 steps (the table in
    `parity.training.optimizers` says which parts are optax's own and why others are not). The
    transformation is made for gradients of the loss, to be used as any other of optax's: in
    `nnx.Optimizer`, in a chain, compiled.

    optax's count is the number of updates so far, 0 at the first; a schedule's value at t is the
    rate after t calls of `scheduler.step()`, so that the two go together unshifted if that is called
    behind every `optimizer.step()`. A scheduler that has taken steps already keeps its place: its
    schedule still counts from its beginning, as the state that `parity.transfer_optimizer` brings.

    Args:
        source: an optimizer of torch.optim: SGD, Adam, AdamW, NAdam, RAdam, Adagrad, Adadelta,
            RMSprop, Adamax, ASGD, Rprop, with all options; or a scheduler of
            torch.optim.lr_scheduler, for its schedule alone. Neither is changed.
        torch_model: the model that the optimizer moves. Needed, with `flax_model`, where leaves are
            treated differently: several groups, parameters that the optimizer does not have or that
            need no gradient (both are left alone, as torch does).
        flax_model: its twin, as in `parity.transfer`.
        scheduler: of that optimizer; moves its rate, and its momentum where it cycles. False keeps both as they
            are now, although there is one.
        every: updates to each step of the scheduler: 1, or the updates of an epoch.
        steps: take that many values of the scheduler from a rehearsal of torch's own code: bit-equal, and
            possible for whatever scheduler (LambdaLR, one of your own); NaN behind the last. Without
            it the formula is used, which has no end.
        clip: `parity.clip_grad_norm(...)` or another transformation of the gradients; it comes first
            and sees only gradients of what the optimizer moves.
        unused: patterns of torch's names (`*` stands for anything) of parameters that get no gradient in
            torch (`grad` is None): torch leaves them alone, weight decay and all, where JAX has a gradient of 0.
        scaler: a `torch.amp.GradScaler`, or a dict of its options: the transformation then takes gradients of a loss that
            was multiplied by `parity.loss_scale(state)`, divides them again before all else, moves nothing where one is
            not finite, and lets the scale grow and shrink as torch does. optax's own schedules go on in a step that
            is skipped, as a torch loop's scheduler does.
        group: of which parameter group, for a schedule alone where groups differ.
        rename: as in `parity.transfer`.
        ignore: as in `parity.transfer`; Flax leaves without counterpart are left alone.

    Returns:
        An `optax.GradientTransformation`, or a function from a count to a value.

    Raises:
        InputError: the optimizer, an option or the scheduler has no twin; the message says what to do instead.
        TransferError: the models do not fit.
        MissingFrameworkError: a framework is not installed.
    """
    if not isinstance(every, int) or isinstance(every, bool) or every < 1 or (steps is not None and steps < 1):
        raise InputError(f"every and steps must be whole numbers of at least 1, got every={every!r}, steps={steps!r}")
    if clip is not None and not (hasattr(clip, "init") and hasattr(clip, "update")):
        raise InputError(f"clip must be a transformation of optax, got {clip!r}; pass parity.clip_grad_norm({clip!r})")
    if which(source) == "scheduler":
        return schedule_alone(source, every, steps, group)
    room = frameworks.load("torch.optimizers")
    if scheduler is None and room.is_scheduled(source):
        raise InputError(
            "a scheduler moves this optimizer; pass scheduler=..., or scheduler=False to keep the rate as it is now"
        )
    if scheduler and getattr(scheduler, "optimizer", None) is not source:
        raise InputError("the scheduler belongs to another optimizer; give the one that was made for this one")
    if (torch_model is None) != (flax_model is None):
        raise InputError("torch_model and flax_model go together: give both or neither")
    moved = moves(scheduler, every, steps) if scheduler else None
    if torch_model is None:
        optimizer = room.read(source, None, moved)
        alike(optimizer, room.still(source), tuple(unused))
        return with_scale(frameworks.load("optax").twin(optimizer, None, clip), scaler)
    found = matched(source, torch_model, flax_model, rename, ignore)
    optimizer = room.read(source, found.names, moved)
    twin = frameworks.load("optax").twin(optimizer, groups_of(optimizer, found, room.still(source), unused), clip)
    return with_scale(twin, scaler)


def with_scale(twin: Any, scaler: Any) -> Any:
    """A transformation inside a loss scale, if there is one."""
    if scaler is None:
        return twin
    return frameworks.load("optax").scaled(twin, **frameworks.load("torch.training").scaling_of(scaler))


def loss_scale(state: Any) -> Any:
    """The number by which the loss is to be multiplied, in the state of `to_optax(..., scaler=...)`; 1 in any other.

    Args:
        state: what `init` or `update` of the transformation gave; may be traced.

    Returns:
        A float32 array without axes.
    """
    return frameworks.load("optax").loss_scale(state)


def moves(scheduler: Any, every: int, steps: int | None) -> list[Moved]:
    """What a scheduler moves in each group, by updates."""
    found = frameworks.load("torch.schedulers").read(scheduler, steps)
    return found if every == 1 else [{name: Every(form, every) for name, form in moved.items()} for moved in found]


def schedule_alone(scheduler: Any, every: int, steps: int | None, group: int | None) -> Any:
    """The schedule of a rate.

    Raises:
        InputError: groups differ, and none was chosen.
    """
    found = [moved["lr"] for moved in moves(scheduler, every, steps)]
    if group is None and any(form != found[0] for form in found):
        raise InputError(f"the {len(found)} parameter groups have rates of their own; pass group=0 or another")
    if group is not None and not 0 <= group < len(found):
        raise InputError(f"group must be from 0 to {len(found) - 1}, got {group}")
    return frameworks.load("optax").schedule(found[group or 0])


def alike(optimizer: Optimizer, still: list[int], unused: tuple[str, ...]) -> None:
    """Without models all leaves are treated alike.

    Raises:
        InputError: they are not to be.
    """
    reasons = [f"it has {len(optimizer.groups)} parameter groups"] if len(optimizer.groups) > 1 else []
    reasons += [f"{len(still)} of its parameters need no gradient"] if still else []
    reasons += ["unused names parameters"] if unused else []
    if reasons:
        raise InputError(f"{' and '.join(reasons)}: pass torch_model and flax_model too, to tell which leaf is which")


def groups_of(optimizer: Optimizer, found: Matched, still: list[int], unused: Iterable[str]) -> dict[str, int | None]:
    """The group of each Flax leaf, by its path; None for those that are left alone.

    Raises:
        TransferError: torch moves what Flax does not have.
    """
    alone = {found.names[number] for number in still} | chosen(unused, (n for g in optimizer.groups for n in g.names))
    problems = homeless(found, (group.names for group in optimizer.groups), alone)
    if problems:
        raise TransferError(listed("no optax twin of this optimizer", problems), problems)
    number = {name: i for i, group in enumerate(optimizer.groups) for name in group.names if name not in alone}
    groups: dict[str, int | None] = dict.fromkeys(found.others)
    stacked: dict[str, dict[int | None, str]] = {}
    for name, pairs in found.pairs.items():
        for p in pairs:
            stacked.setdefault(p.target.array_path, {}).setdefault(number.get(name), name)
    split = [
        f"{path} stacks {' and '.join(names.values())}, which torch treats differently; optax moves an array as a whole: put "
        "them into one group, or keep the layers apart in Flax"
        for path, names in stacked.items()
        if len(names) > 1
    ]
    if split:
        raise TransferError(listed("no optax twin of this optimizer", split), split)
    return groups | {path: next(iter(names)) for path, names in stacked.items()}


def clip_grad_norm(max_norm: float, norm_type: float = 2.0) -> Any:
    """Give `torch.nn.utils.clip_grad_norm_` as an optax transformation.

    All gradients are multiplied by `min(max_norm / (norm + 1e-6), 1)`; optax.clip_by_global_norm has no
    1e-6 and multiplies nothing below the bound. A norm of NaN makes every gradient NaN, as in torch.

    Args:
        max_norm: the largest norm.
        norm_type: of the norm of all norms, `inf` for the largest value.

    Returns:
        An `optax.GradientTransformation`, for `to_optax(..., clip=...)` or a chain.
    """
    return frameworks.load("optax").clip_grad_norm(float(max_norm), float(norm_type))


def clip_grad_value(clip_value: float) -> Any:
    """Give `torch.nn.utils.clip_grad_value_` as an optax transformation: every element into `[-clip_value, clip_value]`."""
    return frameworks.load("optax").clip_grad_value(float(clip_value))
