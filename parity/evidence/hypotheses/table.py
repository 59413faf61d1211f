"""The table of hypotheses, and the door by which users add theirs."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from parity.errors import InputError
from parity.evidence.hypotheses import (
    activations,
    attention,
    connections,
    integers,
    layers,
    masks,
    mode,
    norms,
    orders,
    parameters,
    positions,
    recurrence,
    reductions,
    rounding,
    sums,
    tensors,
    windows,
)
from parity.evidence.hypotheses.suspect import Suspect, Variant


@dataclass(frozen=True)
class Hypothesis:
    """One way in which a port goes wrong.

    Attributes:
        name: in reports.
        variants: what torch's module would compute if the Flax module were wrong in that way; any number
            of ways to be so, none if it does not apply.
        resort: tried only where no cause before it explains all that differs.
        cheap: whether it runs nothing, so that it is tried before those that run torch's module.
    """

    name: str
    variants: Callable[[Suspect], Iterable[Variant]]
    resort: bool = False
    cheap: bool = False


# Arrays that differ are a cause by themselves: all else is tried with Flax's own arrays in torch's module.
WEIGHTS = Hypothesis("weights", parameters.not_torchs)
# What is named where Flax draws random numbers.
LEFT_ON = "dropout left on"

# In the order in which causes that fit equally well are told: the simplest and likeliest first.
HYPOTHESES: list[Hypothesis] = [
    Hypothesis(LEFT_ON, mode.random_numbers),
    Hypothesis("epsilon", norms.epsilon),
    Hypothesis("variance", norms.variance),
    Hypothesis("number of groups", norms.groups_of_channels),
    Hypothesis("train mode", norms.batch_statistics),
    Hypothesis("running statistics", parameters.statistics),
    Hypothesis("activation", activations.activation),
    Hypothesis("softmax scale", attention.softmax_scale),
    Hypothesis("mask", attention.masking),
    Hypothesis("mask that is passed on", masks.given_masks, cheap=True),
    Hypothesis("ids", masks.ids, cheap=True),
    Hypothesis("whole numbers", integers.wrapped),
    Hypothesis("whole numbers", integers.rounded_otherwise),
    Hypothesis("setting that is passed on", masks.settings, cheap=True),
    Hypothesis("fully hidden rows", attention.hidden_rows),
    Hypothesis("arguments exchanged", tensors.exchanged),
    Hypothesis("arguments exchanged", connections.answers_exchanged),
    Hypothesis("part of a value", tensors.part_of_a_value, cheap=True),
    # An axis of one operation is likelier than the same axes of all that is given.
    Hypothesis("axis", orders.softmax_axis),
    Hypothesis("axes of arguments", tensors.batch_for_length, cheap=True),
    Hypothesis("axes of arguments", tensors.axes_of_arguments),
    Hypothesis("order of heads", orders.heads),
    Hypothesis("flatten order", orders.flattened),
    Hypothesis("order of axes", orders.permuted),
    Hypothesis("positions", orders.rolled),
    Hypothesis("directions", recurrence.directions),
    Hypothesis("order of pieces", orders.pieces),
    Hypothesis("fused projection", parameters.per_head),
    Hypothesis("gates", parameters.gate_order),
    Hypothesis("gates", recurrence.formulas),
    Hypothesis("bias", parameters.bias),
    Hypothesis("kernel layout", parameters.transposed_in_code),
    Hypothesis("convolution", windows.convolving),
    Hypothesis("padding", windows.padding_in_code),
    Hypothesis("pooling", windows.pooling),
    Hypothesis("resizing", windows.resizing),
    Hypothesis("pixel shuffle", windows.shuffling),
    Hypothesis("reduction", reductions.reduction),
    Hypothesis("reduction", reductions.losses),
    Hypothesis("first state", reductions.first_state),
    Hypothesis("weight norm", parameters.weight_norm),
    Hypothesis("scale", parameters.unused),
    Hypothesis("norm placement", tensors.norm_placement, cheap=True),
    Hypothesis("another layer", layers.another_layer),
    Hypothesis("residual", tensors.residual, cheap=True),
    Hypothesis("residual", tensors.known_term),
    Hypothesis("guard", sums.unguarded),
    Hypothesis("factor", sums.scaling),
    Hypothesis("factor", connections.term_factors),
    Hypothesis("another value", tensors.another_value, cheap=True),
    Hypothesis("another value", tensors.not_given, cheap=True),
    Hypothesis("another value", connections.left_out),
    Hypothesis("another value", connections.answers_moved),
    Hypothesis("another value", tensors.another_operand),
    Hypothesis("part of a value", orders.summaries),
    Hypothesis("rotary pairs", tensors.pairs_of_channels),
    Hypothesis("rotary pairs", positions.halves_or_neighbours),
    Hypothesis("positions", positions.positions),
    Hypothesis("terms", sums.summing),
    Hypothesis(LEFT_ON, mode.key_of_its_own, resort=True),
    Hypothesis("another layer", layers.never_called, resort=True),
    Hypothesis("order of modules", connections.connected, resort=True),
    Hypothesis("precision", rounding.pinned),
    Hypothesis("order of axes", tensors.axes, resort=True),
    Hypothesis("NaN on one side", sums.one_sided, resort=True, cheap=True),
    Hypothesis("precision", rounding.precision, resort=True),
    Hypothesis("size of rounding", rounding.size_of_rounding, resort=True),
]

BUILT_IN = frozenset(hypothesis.name for hypothesis in HYPOTHESES)


def add_hypothesis(name: str, variants: Callable[[Suspect], Iterable[Variant]]) -> Hypothesis:
    """Add a way in which ports go wrong to those that `parity.diagnose` tries.

    Args:
        name: of the cause, in reports; new.
        variants: gets a pair that differs when run alone, and yields what torch's module would compute
            if the Flax module were wrong in that way. A variant whose values are Flax's, where torch's
            own are not, is a cause.

    Returns:
        The hypothesis.

    Raises:
        InputError: the name is taken or empty, or `variants` cannot be called.
    """
    problems = []
    if not isinstance(name, str) or not name:
        problems.append(f"name must be some words, got {name!r}")
    if any(one.name == name for one in HYPOTHESES):
        problems.append(f"there is a hypothesis {name!r} already; choose another name{taken_back(name)}")
    if not callable(variants):
        problems.append(f"variants must be a function of a suspect, got {variants!r}")
    elif not takes_one(variants):
        problems.append(f"variants must take one argument, the suspect; it takes {inspect.signature(variants)}")
    if problems:
        raise InputError("add_hypothesis: " + "; ".join(problems))
    HYPOTHESES.append(Hypothesis(name, variants))
    return HYPOTHESES[-1]


def takes_one(function: Callable[..., object]) -> bool:
    """Whether a function can be called with one argument, as far as it tells."""
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:
        # What is written in C tells nothing.
        return True
    return True


def taken_back(name: str) -> str:
    return ", or take it back by parity.remove_hypothesis" if name in added_names() else ""


def added_names() -> list[str]:
    """What users added, in their order."""
    return [one.name for one in HYPOTHESES if one.name not in BUILT_IN]


def remove_hypothesis(name: str) -> None:
    """Take back what `add_hypothesis` added, as before it is added again in a notebook.

    Args:
        name: of a hypothesis that was added.

    Raises:
        InputError: none of that name was added.
    """
    if name not in added_names():
        added = ", ".join(map(repr, added_names())) or "none"
        raise InputError(f"remove_hypothesis: no hypothesis {name!r} was added; added are: {added}")
    HYPOTHESES[:] = [one for one in HYPOTHESES if one.name != name]
