"""Another summary along an axis: the largest for the mean, another length, a softmax where torch has its logarithm."""

from collections.abc import Iterator
from typing import Any

from parity.evidence.calls import Operation
from parity.evidence.hypotheses.orders import SUMMARIES as PLAIN_SUMMARIES
from parity.evidence.hypotheses.suspect import Suspect, Variant, groups

SUMMARIES: tuple[str, ...] = (
    "mean",
    "sum",
    "largest",
    "smallest",
    "median",
    "log of the sum of exponentials",
    "standard deviation",
    "variance",
)
SUMMARIES += ("root of the mean square", "length", "square of the length", "sum of absolute values", "largest absolute value")
SOFT = ("softmax", "log softmax", "sigmoid")

# What an operation computes, and where its axes and its keepdim stand.
REDUCING: dict[str, tuple[str, int, int]] = {
    "mean": ("mean", 1, 2),
    "sum": ("sum", 1, 2),
    "amax": ("largest", 1, 2),
    "amin": ("smallest", 1, 2),
    "max": ("largest", 1, 2),
    "min": ("smallest", 1, 2),
    "logsumexp": ("log of the sum of exponentials", 1, 2),
    "linalg_vector_norm": ("length", 2, 3),
    "norm": ("length", 2, 3),
    "softmax": ("softmax", 1, -1),
    "log_softmax": ("log softmax", 1, -1),
}
IN_JAX = {"mean": "x.mean(axis)", "sum": "x.sum(axis)", "largest": "x.max(axis)", "smallest": "x.min(axis)"}
IN_JAX |= {"length": "jnp.linalg.norm(x, axis=axis)", "softmax": "jax.nn.softmax(x)", "log softmax": "jax.nn.log_softmax(x)"}


def reduction(suspect: Suspect) -> Iterator[Variant]:
    """Another summary along the same axes."""
    kinds: dict[str, list[Operation]] = {}
    for op in suspect.operations:
        found = REDUCING.get(op.name.lstrip("_"))
        if found and len(op.args) > found[1] and op.args[found[1]] not in (None, ()) and op.shapes:
            kinds.setdefault(found[0], []).append(op)
    for mine, ops in kinds.items():
        for where, chosen in groups(ops):
            for other in SOFT if mine in SOFT else SUMMARIES:
                # Plain ones for each other are told as parts of a value.
                if other != mine and not {mine, other} <= set(PLAIN_SUMMARIES.values()):
                    yield Variant(
                        f"Flax takes the {other} where torch takes the {mine}{where}",
                        f"use {IN_JAX.get(mine, mine)}",
                        suspect.edited_each((op, "reduced", settings(op, other)) for op in chosen),
                    )


def settings(op: Operation, other: str) -> dict[str, Any]:
    _, axes, keep = REDUCING[op.name.lstrip("_")]
    return {"to": other, "dim": op.args[axes], "keep": bool(op.args[keep]) if 0 < keep < len(op.args) else False}


def first_state(suspect: Suspect) -> Iterator[Variant]:
    """Zeros that torch begins with, and that are others in Flax."""
    made = [op for op in suspect.named("zeros", "new_zeros", "zeros_like") if op.shape]
    for where, chosen in groups(made):
        if chosen:
            yield Variant(
                f"Flax begins with ones where torch begins with zeros{where}",
                "begin with jnp.zeros",
                suspect.edited(chosen, "filled", value=1.0),
            )


def losses(suspect: Suspect) -> Iterator[Variant]:
    """A loss over words that counts ignored ones, or is divided by another number."""
    for op in suspect.named("nll_loss_forward", "nll_loss"):
        mean = op.args[3] == 1
        for way, what in (
            ("all", "ids that torch ignores are counted"),
            ("count", "the sum is divided by the number of all ids, those that are ignored among them"),
            ("sum", "the sum is taken"),
        ):
            if mean or way == "all":
                yield Variant(
                    f"{what}: torch takes the mean over ids other than {op.args[4]}" if mean else f"{what}: {op.args[4]}",
                    f"(loss * shown).sum() / shown.sum(), where shown = ids != {op.args[4]}",
                    suspect.edited([op], "loss", way=way),
                )
