"""The ledger: which leaves a layer has in each framework, and which settings must agree.

One row serves both directions. A composite of mirrored names needs no row; a new leaf layer
is one row here and one row in its test.
"""

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from parity.weights.computed import WEIGHT_NORM
from parity.weights.layouts import (
    AS_IS,
    GENERAL,
    HEADS_BIAS,
    HEADS_IN,
    HEADS_OUT,
    NORMS,
    ONE_NUMBER,
    SPLIT,
    TRANSPOSED,
    Family,
    Shape,
    channels_last,
    flipped_kernel,
)
from parity.weights.leaf import ROOT, Layer
from parity.weights.settings import (
    Agree,
    Check,
    Remark,
    Require,
    attention_dropout_agrees,
    batches_are_shared,
    cell_agrees,
    dilations_agree,
    directions_are_joined,
    dropout_between_layers,
    einsum_agrees,
    general_axes_agree,
    groups_agree,
    momentum_agrees,
    norm_axes_agree,
    normalised_axes_agree,
    one_width_for_keys_and_values,
    padding_agrees,
    rms_epsilon_agrees,
    sequence_agrees,
    strides_agree,
    time_axis_agrees,
    transposed_padding_agrees,
)

Side = Literal["torch", "flax"]
Setting = Agree | Require | Check | Remark


@dataclass(frozen=True)
class LeafRule:
    """One array of a layer: its name in torch, its name in Flax, and the layout between them.

    Attributes:
        torch: the array's name in the layer; a dotted one lies in a layer inside it, and
            `in_proj_weight[q]` is the block q of rows of `in_proj_weight`. Blocks are equal, and
            come in the order in which their entries stand in the row.
        flax: likewise, without blocks.
        layout: from torch's layout to Flax's.
        when: a setting of the Flax layer and its value, if the entry holds only then.
        zero_if: a setting of the torch layer and the value with which it has no such array, where Flax's
            layer has one in any case: that is all 0 then.
    """

    torch: str
    flax: str
    layout: Family = AS_IS
    when: tuple[str, object] | None = None
    zero_if: tuple[str, object] | None = None


@dataclass(frozen=True)
class Alone:
    """An array that only the torch layer has.

    Attributes:
        torch: its name.
        because: why Flax has no counterpart, what is lost, and what to do instead.
        fate: `kept` leaves it as it is on the way back and is only told of; `zero` may be left
            out exactly if all of it is 0, and is filled with 0 on the way back; `refused` lets
            nothing travel.
        new: the dtype and shape with which it is written, all 0, into a file for torch that has none yet.
    """

    torch: str
    because: str
    fate: Literal["kept", "zero", "refused"] = "kept"
    new: tuple[str, Shape] | None = None


@dataclass(frozen=True)
class Rule:
    """A pair of leaf layers.

    Attributes:
        torch: public name of the torch class; subclasses follow it.
        flax: public name of the Flax class; subclasses follow it.
        leaves: its arrays.
        settings: what must agree.
        alone: arrays of the torch layer without counterpart.
        note: what equal weights and settings do not make equal; told with every transfer.
    """

    torch: str
    flax: str
    leaves: tuple[LeafRule, ...] = ()
    settings: tuple[Setting, ...] = ()
    alone: tuple[Alone, ...] = ()
    note: str = ""

    @property
    def linen(self) -> str:
        """Public name of the Linen class that has the same arrays and settings, '' if there is none."""
        return LINEN.get(self.flax, "")

    def to_dict(self) -> dict[str, object]:
        """The row for machines."""
        arrays = [
            {"torch": leaf.torch, "flax": leaf.flax, "layout": leaf.layout.name, "when": leaf.when, "zero_if": leaf.zero_if}
            for leaf in self.leaves
        ]
        alone = [{"torch": one.torch, "fate": one.fate, "because": one.because} for one in self.alone]
        settings = [str(one) for one in self.settings]
        return {
            "torch": self.torch,
            "flax": self.flax,
            "linen": self.linen,
            "arrays": arrays,
            "alone": alone,
            "settings": settings,
            "note": self.note,
        }

    def entries(self, name: str, side: Side) -> list[LeafRule]:
        """The entries for an array, by its name on one side."""
        return self.by_name[side].get(name, [])

    @functools.cached_property
    def by_name(self) -> dict[str, dict[str, list[LeafRule]]]:
        """The entries by the name of their array on either side."""
        found: dict[str, dict[str, list[LeafRule]]] = {"torch": {}, "flax": {}}
        for leaf in self.leaves:
            found["torch"].setdefault(leaf.torch, []).append(leaf)
            found["flax"].setdefault(leaf.flax, []).append(leaf)
        return found

    @functools.cached_property
    def blocks(self) -> list[tuple[str, tuple[str, ...]]]:
        """The torch arrays that the row cuts, each with the names of its blocks: first those that only torch has."""
        found: dict[str, list[str]] = {}
        for torch in (*(one.torch for one in self.alone), *(leaf.torch for leaf in self.leaves)):
            whole, bracket, name = torch.partition("[")
            if bracket and name[:-1] not in found.setdefault(whole, []):
                found[whole].append(name[:-1])
        return [(whole, tuple(names)) for whole, names in found.items()]


BATCHES = "nnx.BatchNorm counts no batches; torch uses the count only where momentum is None"

SLOW_VARIANCE = Require(
    "flax", "use_fast_variance", False, "E[x^2] - E[x]^2 loses digits on shifted rows; torch does not use it"
)

NORMALISED_AXES = Check("normalized_shape, reduction_axes, feature_axes", normalised_axes_agree)


def convolution(ndim: int) -> Rule:
    """The row of a convolution over so many spatial axes."""
    return Rule(
        f"torch.nn.Conv{ndim}d",
        "flax.nnx.Conv",
        (LeafRule("weight", "kernel", channels_last(ndim)), LeafRule("bias", "bias")),
        (
            Check("stride, strides", strides_agree),
            Check("padding, padding_mode, padding in numbers", padding_agrees),
            Check("dilation, kernel_dilation", dilations_agree),
            Agree("groups", "feature_group_count"),
            Check("input_dilation=1", lambda torch, flax: spread(flax("input_dilation"))),
            Require("flax", "mask", None, "torch multiplies its kernel by no mask"),
        ),
    )


def spread(input_dilation: object) -> list[str]:
    given = input_dilation if isinstance(input_dilation, Iterable) else (input_dilation,)
    return (
        []
        if set(given) <= {1, None}
        else [f"input_dilation={input_dilation!r} in Flax, torch spreads no input; set input_dilation=1"]
    )


def transposed_convolution(ndim: int) -> Rule:
    """The row of a transposed convolution over so many spatial axes."""
    return Rule(
        f"torch.nn.ConvTranspose{ndim}d",
        "flax.nnx.ConvTranspose",
        (
            # What is a convolution for the gradient: its outputs are the inputs here.
            LeafRule("weight", "kernel", channels_last(ndim), when=("transpose_kernel", True)),
            LeafRule("weight", "kernel", flipped_kernel(ndim), when=("transpose_kernel", False)),
            LeafRule("bias", "bias"),
        ),
        (
            Check("stride, strides", strides_agree),
            Check("padding, output_padding, padding in numbers (k - 1 - p)", transposed_padding_agrees),
            Check("dilation, kernel_dilation", dilations_agree),
            Require("torch", "groups", 1, "nnx.ConvTranspose has no groups; use one for each group", refuse=True),
            Require("flax", "mask", None, "torch multiplies its kernel by no mask"),
        ),
    )


def batch_norm(torch: str) -> Rule:
    """The row of a batch normalisation; the number of spatial axes makes no difference."""
    return Rule(
        f"torch.nn.{torch}",
        "flax.nnx.BatchNorm",
        (
            LeafRule("weight", "scale"),
            LeafRule("bias", "bias"),
            LeafRule("running_mean", "mean"),
            LeafRule("running_var", "var"),
        ),
        (
            Require(
                *("torch", "track_running_stats", True),
                "nnx.BatchNorm always keeps running statistics; normalise by the batch's own in a module of your own",
                refuse=True,
            ),
            Agree("eps", "epsilon"),
            Check("momentum, 1 - momentum", momentum_agrees),
            SLOW_VARIANCE,
            Require("flax", "axis", -1, "the channels are last in Flax"),
            *((Remark("axis_name", batches_are_shared),) if torch == "SyncBatchNorm" else ()),
        ),
        (Alone("num_batches_tracked", BATCHES, new=("int64", ())),),
        "in training nnx.BatchNorm stores the biased variance, torch n / (n - 1) times it; evaluation is equal",
    )


def instance_norm(ndim: int) -> Rule:
    """The row of an instance normalisation."""
    return Rule(
        f"torch.nn.InstanceNorm{ndim}d",
        "flax.nnx.InstanceNorm",
        (LeafRule("weight", "scale"), LeafRule("bias", "bias")),
        (
            Agree("eps", "epsilon"),
            SLOW_VARIANCE,
            Require("flax", "feature_axes", -1, "the channels are last in Flax"),
            Require(
                *("torch", "track_running_stats", False),
                "nnx.InstanceNorm keeps no running statistics; use nnx.BatchNorm arithmetic in a module of your own",
                refuse=True,
            ),
        ),
        tuple(
            Alone(name, "nnx.InstanceNorm keeps no running statistics, without which evaluation differs", "refused")
            for name in ("running_mean", "running_var", "num_batches_tracked")
        ),
    )


def gated(torch: str, flax: str, end: str, cell: str, *, dense_bias: str = "", split: str = "") -> Rule:
    """The row of a recurrent cell, or of a layer that runs one over a sequence.

    Args:
        torch: the torch class.
        flax: the Flax class.
        end: what torch puts behind the names of its arrays.
        cell: where the cell stands in the Flax layer.
        dense_bias: which of the two dense layers has the bias, if the gates are in one array in Flax too.
        split: names of the gates, if Flax has a dense layer for each.
    """
    leaves: list[LeafRule] = []
    if dense_bias:
        leaves += [
            LeafRule(f"weight_ih{end}", f"{cell}dense_i.kernel", TRANSPOSED),
            LeafRule(f"weight_hh{end}", f"{cell}dense_h.kernel", TRANSPOSED),
            LeafRule(f"bias_ih{end}", f"{cell}{dense_bias}.bias", zero_if=("bias", False)),
        ]
    for side in "ih" if split else "":
        # `if` is a word of Python, so Flax calls that layer `if_`.
        names = {gate: {"if": "if_"}.get(f"{side}{gate}", f"{side}{gate}") for gate in split}
        leaves += [LeafRule(f"weight_{side}h{end}[{g}]", f"{cell}{names[g]}.kernel", TRANSPOSED) for g in split]
    leaves += [LeafRule(f"bias_ih{end}[{gate}]", f"{cell}h{gate}.bias", zero_if=("bias", False)) for gate in split]
    return Rule(
        f"torch.nn.{torch}", f"flax.nnx.{flax}", tuple(leaves), recurrent_settings(torch, cell), (second_bias(torch, end),)
    )


def recurrent_settings(torch: str, cell: str) -> tuple[Setting, ...]:
    """What must agree between recurrent layers; more where a layer runs over a sequence."""
    found: tuple[Setting, ...] = (Check("nonlinearity, gate_fn, activation_fn, residual", cell_agrees(torch, cell)),)
    if not cell:
        return found
    return (
        *found,
        Check("batch_first, time_major; reverse=False", sequence_agrees),
        *whole_layers(torch, "nnx.RNN"),
        Require("torch", "bidirectional", False, "nnx.RNN runs one way; put two in an nnx.Bidirectional", refuse=True),
        Remark("dropout between layers", dropout_between_layers),
    )


def whole_layers(torch: str, flax: str) -> tuple[Require, ...]:
    """What a layer of torch may not have where Flax has a single one."""
    instead = "use one for each layer, in an nnx.List under the name of the torch layer"
    layers = Require("torch", "num_layers", 1, f"{flax} runs one layer; {instead}", refuse=True)
    projected = Require("torch", "proj_size", 0, "the cells of Flax project no output", refuse=True)
    return (layers, projected) if torch == "LSTM" else (layers,)


def both_ways(torch: str) -> Rule:
    """The row of a layer in both directions; their arrays are those of the two `nnx.RNN` inside."""
    return Rule(
        f"torch.nn.{torch}",
        "flax.nnx.Bidirectional",
        (),
        (
            *whole_layers(torch, "nnx.Bidirectional"),
            Require("torch", "bidirectional", True, "nnx.Bidirectional runs both ways; use an nnx.RNN alone", refuse=True),
            Check("batch_first, time_major", time_axis_agrees),
            Check("merge_fn", directions_are_joined),
            Remark("dropout between layers", dropout_between_layers),
        ),
    )


def second_bias(torch: str, end: str) -> Alone:
    """Torch adds two biases where Flax has one: exact only if the second is 0, for their sum would be rounded."""
    ask = (
        'pass merge="recurrent biases" to send the rounded sum, or, for models that pass every level, '
        "add bias_hh to bias_ih in torch and set bias_hh to 0"
    )
    if torch.startswith("GRU"):
        why = "nnx.GRUCell has no bias inside the reset gate (b_hn), which would be lost and cannot be folded into another"
        how = f"where that last third is 0, {ask}; where it is not, write a cell of your own"
        formula = "n = tanh(W_in x + b_in + r * (W_hn h + b_hn))"
        return Alone(f"bias_hh{end}", f"{why}; {how}: {formula}; in training torch moves both biases", "zero")
    why = "Flax has one bias, and the rounded sum of two would be another function"
    return Alone(f"bias_hh{end}", f"{why}; {ask}; in training torch moves both biases", "zero")


def weight_norm() -> Rule:
    """The row of a layer that keeps the norm of its weight apart; the direction is an array of the layer inside."""
    return Rule(
        WEIGHT_NORM,
        "flax.nnx.WeightNorm",
        (
            LeafRule("weight_g", "scales.kernel", NORMS),
            LeafRule("weight_g", "scales.embedding", NORMS),
        ),
        (
            Check("dim, feature_axes", norm_axes_agree),
            Require("flax", "epsilon", 0.0, "torch adds nothing to the squares that it sums"),
            Require("flax", "use_scale", True, "torch multiplies by the norm"),
        ),
        (),
        "each call of nnx.WeightNorm writes the normalised kernel over the direction (the same function, but other numbers "
        "on the way back), and its scales are no nnx.Param: an optimizer does not train them",
    )


def gates_apart(torch: str, linen: str, end: str, cell: str) -> Rule:
    """The row of a recurrent cell of Linen's, which has a dense layer for each gate, or of a layer that runs one.

    Args:
        torch: the torch class.
        linen: the Linen class.
        end: what torch puts behind the names of its arrays.
        cell: where the cell stands in the Linen layer.
    """
    kind = torch.removesuffix("Cell")
    gates = {"LSTM": tuple("ifgo"), "GRU": tuple("rzn"), "RNN": ("",)}[kind]
    biased = "h" if kind == "LSTM" else "i"

    def block(name: str, gate: str) -> str:
        return f"{name}{end}[{gate}]" if gate else f"{name}{end}"

    leaves = [LeafRule(block(f"weight_{s}h", g), f"{cell}{s}{g}.kernel", TRANSPOSED) for s in "ih" for g in gates]
    leaves += [LeafRule(block("bias_ih", gate), f"{cell}{biased}{gate}.bias", zero_if=("bias", False)) for gate in gates]
    alone: tuple[Alone, ...] = (second_bias(torch, end),)
    if kind == "GRU":
        leaves.append(LeafRule(f"bias_hh{end}[n]", f"{cell}hn.bias", zero_if=("bias", False)))
        fold = (
            'pass merge="recurrent biases" to send the rounded sum, or, for models that pass every level, '
            f"add the first two thirds of bias_hh{end} to bias_ih{end} in torch and set them to 0"
        )
        why = "Flax has one bias in this gate, and the rounded sum of two would be another function"
        alone = tuple(
            Alone(f"bias_hh{end}[{gate}]", f"{why}; {fold}; in training torch moves both biases", "zero") for gate in "rz"
        )
    return Rule(f"torch.nn.{torch}", f"flax.linen.{linen}", tuple(leaves), recurrent_settings(torch, cell), alone)


LINEN_CELLS = (
    ("GRUCell", "GRUCell"),
    ("LSTMCell", "LSTMCell"),
    ("LSTMCell", "OptimizedLSTMCell"),
    ("RNNCell", "SimpleCell"),
)
PROJECTIONS = (("q", "query"), ("k", "key"), ("v", "value"))

RULES: list[Rule] = [
    Rule(
        "torch.nn.Linear",
        "flax.nnx.Linear",
        (LeafRule("weight", "kernel", TRANSPOSED), LeafRule("bias", "bias")),
    ),
    Rule(
        "torch.nn.Linear",
        "flax.nnx.LinearGeneral",
        (LeafRule("weight", "kernel", GENERAL), LeafRule("bias", "bias", SPLIT)),
        (Check("axis: the last ones, batch_axis: none", general_axes_agree, refuse=True),),
    ),
    Rule(
        "torch.nn.Linear",
        "flax.nnx.Einsum",
        (LeafRule("weight", "kernel", GENERAL), LeafRule("bias", "bias", SPLIT)),
        (Check("einsum_str: ...inputs, inputs outputs -> ...outputs", einsum_agrees, refuse=True),),
    ),
    Rule(
        "torch.nn.LayerNorm",
        "flax.nnx.LayerNorm",
        (LeafRule("weight", "scale"), LeafRule("bias", "bias")),
        (
            Agree("eps", "epsilon"),
            SLOW_VARIANCE,
            NORMALISED_AXES,
        ),
    ),
    Rule(
        "torch.nn.Embedding",
        "flax.nnx.Embed",
        (LeafRule("weight", "embedding"),),
        (
            Require("torch", "padding_idx", None, "flax.nnx.Embed gives that row a gradient, torch gives it none"),
            Require("torch", "max_norm", None, "flax.nnx.Embed does not renormalise the rows that it looks up"),
            Require("torch", "scale_grad_by_freq", False, "flax.nnx.Embed does not scale gradients by frequency"),
        ),
    ),
    Rule(
        "torch.nn.Dropout",
        "flax.nnx.Dropout",
        (),
        (
            Agree("p", "rate"),
            Require("flax", "broadcast_dims", (), "torch draws a mask of its own for every element"),
        ),
    ),
    *(convolution(ndim) for ndim in (1, 2, 3)),
    *(transposed_convolution(ndim) for ndim in (1, 2, 3)),
    *(batch_norm(f"{kind}BatchNorm{end}") for kind, end in (("", "1d"), ("", "2d"), ("", "3d"), ("Sync", ""))),
    *(instance_norm(ndim) for ndim in (1, 2, 3)),
    Rule(
        "torch.nn.GroupNorm",
        "flax.nnx.GroupNorm",
        (LeafRule("weight", "scale"), LeafRule("bias", "bias")),
        (
            Check("num_groups, group_size", groups_agree),
            Agree("eps", "epsilon"),
            SLOW_VARIANCE,
            Require("flax", "reduction_axes", None, "torch takes the mean over all axes but the batch"),
        ),
    ),
    Rule(
        "torch.nn.RMSNorm",
        "flax.nnx.RMSNorm",
        (LeafRule("weight", "scale"),),
        (
            Check("eps, epsilon", rms_epsilon_agrees),
            NORMALISED_AXES,
        ),
    ),
    Rule("torch.nn.PReLU", "flax.nnx.PReLU", (LeafRule("weight", "negative_slope", ONE_NUMBER),)),
    Rule(
        "torch.nn.MultiheadAttention",
        "flax.nnx.MultiHeadAttention",
        (
            # torch keeps the three projections in one array where all widths are the same, and apart where not.
            *(LeafRule(f"in_proj_weight[{one}]", f"{name}.kernel", HEADS_OUT) for one, name in PROJECTIONS),
            *(LeafRule(f"{one}_proj_weight", f"{name}.kernel", HEADS_OUT) for one, name in PROJECTIONS),
            *(LeafRule(f"in_proj_bias[{one}]", f"{name}.bias", HEADS_BIAS) for one, name in PROJECTIONS),
            LeafRule("out_proj.weight", "out.kernel", HEADS_IN),
            LeafRule("out_proj.bias", "out.bias"),
        ),
        (
            Agree("num_heads", "num_heads"),
            Agree("num_heads", "num_kv_heads"),
            Check("kdim=vdim", one_width_for_keys_and_values, refuse=True),
            Require("torch", "add_zero_attn", False, "nnx.MultiHeadAttention adds no key of zeros", refuse=True),
            Require(
                "torch", "batch_first", True, "nnx.MultiHeadAttention takes (batch, length, width); swap the first two axes"
            ),
            Require("flax", "normalize_qk", False, "torch does not normalise queries and keys"),
            Check("dropout, dropout_rate, broadcast_dropout", attention_dropout_agrees),
        ),
        tuple(
            Alone(name, "nnx.MultiHeadAttention adds no learned key and value; append them in a module of your own", "refused")
            for name in ("bias_k", "bias_v")
        ),
    ),
]

RULES += [
    gated("GRUCell", "GRUCell", "", "", dense_bias="dense_i"),
    gated("LSTMCell", "LSTMCell", "", "", split="ifgo"),
    gated("LSTMCell", "OptimizedLSTMCell", "", "", dense_bias="dense_h"),
    gated("RNNCell", "SimpleCell", "", "", dense_bias="dense_i"),
    gated("GRU", "RNN", "_l0", "cell.", dense_bias="dense_i"),
    gated("LSTM", "RNN", "_l0", "cell.", dense_bias="dense_h", split="ifgo"),
    gated("RNN", "RNN", "_l0", "cell.", dense_bias="dense_i"),
    *(gates_apart(torch, cell, "", "") for torch, cell in LINEN_CELLS),
    *(gates_apart(torch, "RNN", "_l0", "cell.") for torch in ("GRU", "LSTM", "RNN")),
    weight_norm(),
    *(both_ways(torch) for torch in ("GRU", "LSTM", "RNN")),
]

# What Linen calls a layer whose arrays and settings are those of NNX.
LINEN = {
    "flax.nnx.Linear": "flax.linen.Dense",
    "flax.nnx.LinearGeneral": "flax.linen.DenseGeneral",
    "flax.nnx.Einsum": "flax.linen.Einsum",
    "flax.nnx.Bidirectional": "flax.linen.Bidirectional",
    "flax.nnx.MultiHeadAttention": "flax.linen.MultiHeadDotProductAttention",
    **{
        f"flax.nnx.{name}": f"flax.linen.{name}"
        for name in (
            *("Embed", "Dropout", "Conv", "ConvTranspose", "PReLU"),
            *("LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm", "BatchNorm"),
        )
    },
}


def in_words_of(layer: Layer | None, sentence: str) -> str:
    """A sentence that names layers of NNX in the names that a Linen user knows, if the layer is one of Linen's."""
    if layer is None or not any(kind.startswith("flax.linen.") for kind in layer.kinds):
        return sentence

    def own(found: re.Match[str]) -> str:
        name = LINEN.get(f"flax.nnx.{found[2]}", f"flax.linen.{found[2]}").removeprefix("flax.")
        return f"{'a ' if found[1] else ''}{name}"

    return re.sub(r"\b(an )?nnx\.(\w+)", own, sentence)


# What a leaf of a tree, where no layer is known, is called in torch, by its name in Flax.
TORCH_NAMES = {"kernel": "weight", "scale": "weight", "embedding": "weight", "mean": "running_mean", "var": "running_var"}


class Index:
    """The rows of a ledger by the class that they are for, torch's or Flax's, and what they come to for its arrays."""

    def __init__(self, rows: list[Rule]):
        self.rows, self.count = rows, len(rows)
        self.by_class: dict[str, list[Rule]] = {}
        for rule in rows:
            for name in {rule.torch, rule.flax, rule.linen} - {""}:
                self.by_class.setdefault(name, []).append(rule)
        # Asked some twenty times for each leaf, of a few classes and names; those of trees may be any.
        kept = functools.lru_cache(maxsize=4096)
        self.nearest = kept(self.find_nearest)
        self.entries = kept(self.find_entries)
        self.names = kept(self.find_names)
        self.shared_entries = kept(self.find_shared_entries)
        self.inner_names = kept(self.find_inner_names)
        self.row_of = kept(self.find_row_of)
        self.has_more = kept(self.find_has_more)

    def find_nearest(self, kinds: tuple[str, ...]) -> list[Rule]:
        """The rows of the first class that has any."""
        return next((self.by_class[kind] for kind in kinds if kind in self.by_class), [])

    def find_entries(self, kinds: tuple[str, ...], name: str, side: Side) -> list[LeafRule]:
        """The entries of those rows for an array, by its name on one side."""
        return [entry for rule in self.nearest(kinds) for entry in rule.entries(name, side)]

    def find_names(self, kinds: tuple[str, ...], name: str, side: Side) -> list[str]:
        """The names of an array in its layer, likeliest first: its own and those that it has on the other side."""
        entries = self.entries(kinds, name, side)
        found = [name, *(entry.flax for entry in entries)] if side == "torch" else [*(entry.torch for entry in entries), name]
        return list(dict.fromkeys(found))

    def find_shared_entries(
        self, torch_kinds: tuple[str, ...], torch_name: str, flax_kinds: tuple[str, ...], flax_name: str
    ) -> list[LeafRule]:
        """The entries of rows of both layers that name both arrays."""
        theirs = self.nearest(flax_kinds)
        rows = [rule for rule in self.nearest(torch_kinds) if rule in theirs]
        return [entry for rule in rows for entry in rule.entries(torch_name, "torch") if entry.flax == flax_name]

    def find_row_of(self, torch_kinds: tuple[str, ...], flax_kinds: tuple[str, ...]) -> Rule | None:
        """The first row of both layers."""
        theirs = self.nearest(flax_kinds)
        return next((rule for rule in self.nearest(torch_kinds) if rule in theirs), None)

    def find_inner_names(self, kinds: tuple[str, ...]) -> set[str]:
        """The names of arrays in layers inside a layer that its rows give."""
        names = (name for rule in self.nearest(kinds) for leaf in rule.leaves for name in (leaf.torch, leaf.flax))
        return {name.partition("[")[0] for name in names if "." in name}

    def find_has_more(self, kinds: tuple[str, ...]) -> bool:
        """Whether torch's layer has arrays of which Flax's has none, or that Flax's has in blocks."""
        return any(rule.blocks or rule.alone for rule in self.nearest(kinds))


INDEX = Index([])


def index() -> Index:
    """The ledger as it is now, by class."""
    global INDEX
    # It only ever grows.
    if INDEX.rows is not RULES or INDEX.count != len(RULES):
        INDEX = Index(RULES)
    return INDEX


def rows_for(kinds: tuple[str, ...]) -> list[Rule]:
    """The rows of the nearest class along an MRO, torch's or Flax's; a class of one side may have several of the other."""
    return index().nearest(kinds)


def entries_for(kinds: tuple[str, ...], name: str, side: Side) -> list[LeafRule]:
    """The entries of the rows of a layer for one of its arrays, by its name on one side."""
    return index().entries(kinds, name, side)


def row_of(torch_kinds: tuple[str, ...], flax_kinds: tuple[str, ...]) -> Rule | None:
    """The row of a pair of layers; None if they are no pair of the ledger."""
    return index().row_of(torch_kinds, flax_kinds)


def layout_by_name(torch_name: str, flax_name: str, ndim: int) -> Family:
    """The layout of a leaf of a tree, where only its names and rank are known."""
    if (torch_name, flax_name) != ("weight", "kernel"):
        return AS_IS
    return TRANSPOSED if ndim == 2 else AS_IS


def disagreements(rule: Rule | None, torch_layer: Layer, flax_layer: Layer) -> list[str]:
    """The settings of a pair of layers that do not agree by their row, one sentence each."""
    found = told(rule, torch_layer, flax_layer, "disagree")
    # A composite's dtype, if it has one, says nothing of the layers in it.
    computes = flax_layer.settings("dtype") if rows_for(torch_layer.kinds) else None
    holds = torch_layer.settings("parameter dtype") if computes is not None else None
    if computes is not None and holds is not None and computes != holds:
        # Without a dtype nnx.Embed writes down that of its table, once, when it is made.
        fix = f"set dtype={holds}" if "flax.nnx.Embed" in flax_layer.kinds else "leave dtype out"
        found.append(f"dtype={computes} makes the Flax layer compute in {computes}, torch computes in {holds}; {fix}")
    return [f"{torch_layer.path or ROOT}: {sentence}" for sentence in found]


def refusals(rule: Rule | None, torch_layer: Layer, flax_layer: Layer) -> list[str]:
    """The settings of a pair of layers for which the other side has nothing, one sentence each."""
    found = told(rule, torch_layer, flax_layer, "refuse")
    return [f"{torch_layer.path or ROOT}: {sentence}" for sentence in found]


def remarks(rule: Rule | None, torch_layer: Layer, flax_layer: Layer) -> list[str]:
    """What the row of a pair of layers tells of it although all agrees, one sentence each."""
    found = ([rule.note] if rule and rule.note else []) + told(rule, torch_layer, flax_layer, "remark")
    return [f"{torch_layer.path or ROOT}: {sentence}" for sentence in found]


def told(rule: Rule | None, torch_layer: Layer, flax_layer: Layer, fate: str) -> list[str]:
    if rule is None or not rule.settings:
        return []
    return [
        sentence
        for setting in rule.settings
        if setting.fate == fate
        for sentence in setting.problems(torch_layer.settings, flax_layer.settings)
    ]
