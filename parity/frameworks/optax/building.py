"""The optax transformation for an optimizer of torch."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from parity.errors import InputError
from parity.frameworks.optax import transformations as own
from parity.training.optimizers import Group, Optimizer
from parity.training.schedules import Hyper, Schedule

# The labels of parameters; `states` finds the groups of a state by them.
GROUP, STILL = "torch group ", "torch leaves alone"


def schedule(form: Schedule) -> Callable[[Any], jax.Array]:
    """A schedule of optax: the value at a count."""

    def at(count: Any) -> jax.Array:
        return jnp.asarray(form.at(jnp.asarray(count), jnp), float)

    return at


def twin(optimizer: Optimizer, groups: Mapping[str, int | None] | None, clip: Any = None) -> optax.GradientTransformation:
    """The transformation with an optimizer's steps.

    Args:
        optimizer: what is to be done.
        groups: for each leaf's dotted path the number of its group, or None to leave it alone; None
            if all leaves are in the only group.
        clip: a transformation of the gradients that comes first and sees those of the groups alone.
    """
    parts = {f"{GROUP}{number}": chain(optimizer, group) for number, group in enumerate(optimizer.groups)}
    labels = labelled(groups)
    moved = optax.multi_transform(parts | {STILL: optax.set_to_zero()}, labels)
    if clip is None:
        return moved
    # A gradient of zero changes no norm.
    silent = optax.multi_transform({STILL: optax.set_to_zero()} | dict.fromkeys(parts, optax.identity()), labels)
    return optax.chain(silent, clip, moved)


def labelled(groups: Mapping[str, int | None] | None) -> Callable[[Any], Any]:
    """A function from a tree of parameters to the tree of their labels."""

    def labels(params: Any) -> Any:
        paths = [dotted(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        strange = [path for path in paths if groups is not None and known(path, groups) is None]
        if strange:
            raise InputError(
                f"{', '.join(strange[:4])}{' and others' if len(strange) > 4 else ''}: no such parameter in flax_model; "
                "give init and update the parameters alone, as nnx.state(model, nnx.Param) does"
            )
        return jax.tree_util.tree_map_with_path(lambda path, _: label(dotted(path)), params)

    def label(path: str) -> str:
        number = 0 if groups is None else groups[known(path, groups) or path]
        return STILL if number is None else f"{GROUP}{number}"

    return labels


def known(path: str, paths: Mapping[str, Any]) -> str | None:
    """The name under which a leaf is known: Linen's tree of variables may be given whole, or its `params` alone."""
    return next((name for name in (path, f"params.{path}") if name in paths), None)


def dotted(path: tuple[Any, ...]) -> str:
    """The dotted path of a leaf; that of a variable, not of the value in it."""
    names = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
    inside = path and isinstance(path[-1], jax.tree_util.GetAttrKey) and names[-1] == "value"
    return ".".join(names[:-1] if inside else names)


def chain(optimizer: Optimizer, group: Group) -> optax.GradientTransformation:
    """The steps for one group."""
    decay = optax.add_decayed_weights(group.options["weight_decay"]) if group.options.get("weight_decay") else None
    parts = [
        optax.scale(-1.0) if group.options.get("maximize") else None,
        None if group.decoupled else decay,
        core(optimizer, group),
        decay if group.decoupled else None,
        None if optimizer.kind in ("ASGD", "Rprop") else rate(group.hyper("lr")),
    ]
    return optax.chain(*(part for part in parts if part is not None))


def rate(lr: Hyper) -> optax.GradientTransformation:
    return optax.scale_by_learning_rate(lr if isinstance(lr, int | float) else schedule(lr))


def core(optimizer: Optimizer, group: Group) -> optax.GradientTransformation:
    """What is between the weight decay and the rate: optax's own part where it is the same."""
    options = group.options
    if optimizer.kind == "SGD":
        return sgd(group)
    if optimizer.kind == "Adadelta":
        return optax.scale_by_adadelta(rho=options["rho"], eps=options["eps"])
    if optimizer.kind == "RMSprop":
        return rmsprop(group)
    if optimizer.kind in ("NAdam", "ASGD"):
        return {"NAdam": own.nadam, "ASGD": own.asgd}[optimizer.kind](group, optimizer.scalar_dtype)
    made: dict[str, Callable[[Group], optax.GradientTransformation]] = {
        "Adam": own.adam,
        "AdamW": own.adam,
        "RAdam": own.radam,
        "Adagrad": own.adagrad,
        "Adamax": own.adamax,
        "Rprop": own.rprop,
    }
    return made[optimizer.kind](group)


def sgd(group: Group) -> optax.GradientTransformation:
    momentum = group.hyper("momentum")
    if not isinstance(momentum, int | float) or (momentum and group.options["dampening"]):
        return own.sgd(group)
    return optax.trace(momentum, nesterov=bool(group.options["nesterov"])) if momentum else optax.identity()


def rmsprop(group: Group) -> optax.GradientTransformation:
    options = group.options
    scale = optax.scale_by_stddev if options["centered"] else optax.scale_by_rms
    scaled = scale(decay=options["alpha"], eps=options["eps"], eps_in_sqrt=False)
    momentum = group.hyper("momentum")
    if not isinstance(momentum, int | float):
        raise InputError("RMSprop whose momentum a scheduler moves has no twin; pass cycle_momentum=False to the scheduler")
    return optax.chain(scaled, optax.trace(momentum)) if momentum > 0 else scaled
