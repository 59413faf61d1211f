"""What must agree between two layers besides their arrays, and how each disagreement is told."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

# Reads a setting of one layer by its name.
Settings = Callable[[str], Any]


@dataclass(frozen=True)
class Agree:
    """A setting that must be equal on both sides.

    Attributes:
        torch: its name in torch.
        flax: its name in Flax.
        convert: torch's value in Flax's terms; None if both mean the same.
    """

    torch: str
    flax: str
    convert: Callable[[Any], Any] | None = None
    fate: ClassVar[str] = "disagree"

    def __str__(self) -> str:
        return self.torch if self.torch == self.flax else f"{self.torch}, {self.flax}"

    def problems(self, torch: Settings, flax: Settings) -> list[str]:
        """The disagreement in one sentence, if there is one."""
        given, got = torch(self.torch), flax(self.flax)
        wanted = self.convert(given) if self.convert else given
        return [] if equal(wanted, got) else [told(self.torch, given, self.flax, got, wanted)]


@dataclass(frozen=True)
class Require:
    """A setting of one side without which there is no counterpart on the other.

    Attributes:
        side: whose setting it is.
        setting: its name.
        equals: what it must be.
        because: what would be lost, and what to do instead.
        refuse: whether nothing may travel at all, rather than the disagreement be reported.
    """

    side: Literal["torch", "flax"]
    setting: str
    equals: Any
    because: str
    refuse: bool = False

    @property
    def fate(self) -> str:
        """What becomes of a problem."""
        return "refuse" if self.refuse else "disagree"

    def __str__(self) -> str:
        return f"{self.side}: {self.setting}={self.equals!r}"

    def problems(self, torch: Settings, flax: Settings) -> list[str]:
        """The disagreement in one sentence, if there is one."""
        got = (torch if self.side == "torch" else flax)(self.setting)
        if equal(self.equals, got):
            return []
        where, fix = ("torch", "") if self.side == "torch" else ("Flax", f"; set {self.setting}={self.equals!r}")
        return [f"{self.setting}={got!r} in {where}, wanted {self.equals!r}: {self.because}{fix}"]


@dataclass(frozen=True)
class Check:
    """What more than one setting of a side decides.

    Attributes:
        about: the settings in words, for the table of rules.
        ask: the disagreements of two layers, one sentence each.
        refuse: as in `Require`.
    """

    about: str
    ask: Callable[[Settings, Settings], Iterable[str]]
    refuse: bool = False

    @property
    def fate(self) -> str:
        """What becomes of a problem."""
        return "refuse" if self.refuse else "disagree"

    def __str__(self) -> str:
        return self.about

    def problems(self, torch: Settings, flax: Settings) -> list[str]:
        """The disagreements, one sentence each."""
        return list(self.ask(torch, flax))


@dataclass(frozen=True)
class Remark:
    """What is only told of two layers, because no setting of Flax's could show it.

    Attributes:
        about: in words, for the table of rules.
        ask: what is to be told of two layers, one sentence each.
    """

    about: str
    ask: Callable[[Settings, Settings], Iterable[str]]
    fate: ClassVar[str] = "remark"

    def __str__(self) -> str:
        return self.about

    def problems(self, torch: Settings, flax: Settings) -> list[str]:
        """The sentences."""
        return list(self.ask(torch, flax))


def told(torch_name: str, torch_value: Any, flax_name: str, flax_value: Any, wanted: Any) -> str:
    return f"{torch_name}={torch_value!r} in torch, {flax_name}={flax_value!r} in Flax; set {flax_name}={wanted!r}"


def equal(wanted: Any, got: Any) -> bool:
    """Whether two settings are the same; 1 - 0.1 and 0.9 are."""
    if type(wanted) is float and isinstance(got, float):
        return math.isclose(wanted, got, rel_tol=1e-12)
    return bool(wanted == got)


# ---------------------------------------------------------------- linear layers


def general_axes_agree(torch: Settings, flax: Settings) -> list[str]:
    """Whether a general linear layer contracts the last axes in their order, as torch does the flattened ones."""
    axis, batch = flax("axis"), flax("batch_axis") or flax("batch_dims")
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    wanted = tuple(range(-len(axes), 0))
    found = [] if axes == wanted else [f"axis={axes} in Flax, torch takes the last axes in their order; set axis={wanted}"]
    return found + ([f"batch axes {batch} in Flax, torch has one weight for all; leave it out"] if batch else [])


def einsum_agrees(torch: Settings, flax: Settings) -> list[str]:
    """Whether an einsum contracts the last axes of its input, and gives new ones at the end, in the kernel's order."""
    text = str(flax("einsum_str"))
    operands, output = text.split("->")
    given, kernel = operands.split(",")
    new = "".join(letter for letter in kernel if letter not in given)
    gone = kernel.removesuffix(new)
    kept = given.removesuffix(gone)
    if new and gone and kernel == gone + new and given == kept + gone and output == kept + new:
        return []
    return [
        f"einsum_str={text!r} in Flax is no linear layer as torch has it: the kernel's axes must be the last ones of the "
        "input, then the last ones of the output, as in '...i,io->...o'; use parity.add_rule for a class of your own"
    ]


# ---------------------------------------------------------------- convolutions


def each(value: Any, count: int) -> tuple[Any, ...]:
    """A setting for every spatial axis; None and a single number stand for all of them."""
    if value is None or isinstance(value, int):
        return (1 if value is None else value,) * count
    return tuple(value)


def strides_agree(torch: Settings, flax: Settings) -> list[str]:
    """Whether both move their window alike."""
    return per_axis("stride", "strides", torch, flax)


def dilations_agree(torch: Settings, flax: Settings) -> list[str]:
    """Whether both spread their kernel alike."""
    return per_axis("dilation", "kernel_dilation", torch, flax)


def per_axis(torch_name: str, flax_name: str, torch: Settings, flax: Settings) -> list[str]:
    wanted, got = tuple(torch(torch_name)), flax(flax_name)
    return [] if each(got, len(wanted)) == wanted else [told(torch_name, wanted, flax_name, got, wanted)]


def padding_agrees(torch: Settings, flax: Settings) -> list[str]:
    """Whether a convolution sees the same border on both sides, in numbers."""
    mode, wanted = torch("padding_mode"), torch_padding(torch)
    got = flax_padding(flax("padding"), tuple(torch("kernel_size")), tuple(torch("stride")), tuple(torch("dilation")))
    if isinstance(got, tuple) and got == (mode, wanted):
        return []
    if not any(map(any, wanted)) and isinstance(got, tuple) and not any(map(any, got[1])):
        return []
    there = f"padding={torch('padding')!r}, padding_mode={mode!r}"
    here = f"padding={flax('padding')!r}" + (f" ({got})" if isinstance(got, str) else f", that is {got[1]!r}")
    return [f"{there} in torch, {here} in Flax; {way_out(mode, wanted, torch)}"]


def way_out(mode: str, wanted: tuple[tuple[int, int], ...], torch: Settings) -> str:
    """What to write in Flax for torch's padding."""
    if mode == "zeros":
        return f"set padding={wanted!r}"
    named = {"circular": "CIRCULAR", "reflect": "REFLECT"}.get(mode)
    sizes = tuple(torch("kernel_size")), tuple(torch("stride")), tuple(torch("dilation"))
    if named and flax_padding(named, *sizes) == (mode, wanted):
        return f"set padding={named!r}"
    numpy_mode = {"circular": "wrap", "reflect": "reflect", "replicate": "edge"}[mode]
    pad = f"jnp.pad(x, ..., mode={numpy_mode!r})"
    return f"nnx.Conv cannot pad so; pad its input by {pad} with {wanted!r} and set padding='VALID'"


def torch_padding(torch: Settings) -> tuple[tuple[int, int], ...]:
    """Low and high padding of each spatial axis of a torch convolution."""
    padding, kernel, dilation = torch("padding"), torch("kernel_size"), torch("dilation")
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation)]
        return tuple((total // 2, total - total // 2) for total in totals)
    return tuple((p, p) for p in (each(0, len(kernel)) if padding == "valid" else padding))


def flax_padding(
    padding: Any, kernel: tuple[int, ...], strides: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[str, tuple[tuple[int, int], ...]] | str:
    """The mode and numbers of a Flax padding, or why they are no fixed numbers."""
    totals = [d * (k - 1) for k, d in zip(kernel, dilation)]
    if not isinstance(padding, str):
        return "zeros", in_pairs(padding, len(kernel))
    if padding == "VALID":
        return "zeros", ((0, 0),) * len(kernel)
    if padding == "CAUSAL":
        return "zeros", tuple((total, 0) for total in totals)
    if padding in ("CIRCULAR", "REFLECT"):
        return padding.lower(), tuple((total // 2, total - total // 2) for total in totals)
    if padding in ("SAME", "SAME_LOWER"):
        if any(stride > 1 and total for stride, total in zip(strides, totals)):
            return "at a stride above 1 its numbers depend on the input's size, and the larger half goes to one end"
        low = [total // 2 if padding == "SAME" else total - total // 2 for total in totals]
        return "zeros", tuple((lo, total - lo) for lo, total in zip(low, totals))
    return "not known to the ledger"


def in_pairs(padding: Any, count: int) -> tuple[tuple[int, int], ...]:
    """Padding in numbers as low and high padding of each axis; one number stands for both ends."""
    axes = (padding,) * count if isinstance(padding, int) else padding
    return tuple((p, p) if isinstance(p, int) else (p[0], p[1]) for p in axes)


def transposed_padding_agrees(torch: Settings, flax: Settings) -> list[str]:
    """Whether a transposed convolution crops alike: what torch calls p is k - 1 - p in Flax, counted on the spread input."""
    kernel, strides, dilation = tuple(torch("kernel_size")), tuple(torch("stride")), tuple(torch("dilation"))
    sizes = zip(kernel, dilation, torch("padding"), torch("output_padding"))
    wanted = tuple((d * (k - 1) - p, d * (k - 1) - p + extra) for k, d, p, extra in sizes)
    got = flax_transposed_padding(flax("padding"), kernel, strides, dilation)
    if got == wanted:
        return []
    meaning = "" if got is None else f", that is {got!r}"
    there = f"padding={torch('padding')!r}, output_padding={torch('output_padding')!r}"
    return [f"{there} in torch, padding={flax('padding')!r}{meaning} in Flax; set padding={wanted!r}"]


def flax_transposed_padding(
    padding: Any, kernel: tuple[int, ...], strides: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[tuple[int, int], ...] | None:
    """The numbers of a Flax padding of a transposed convolution; None for a periodic one.

    Source:
        `_conv_transpose_padding` of jax.lax.
    """
    if not isinstance(padding, str):
        return in_pairs(padding, len(kernel))
    found = []
    for k, s, d in zip(kernel, strides, dilation):
        spread = d * (k - 1) + 1
        total = spread + s - 2 + (max(spread - s, 0) if padding == "VALID" else 0)
        low = spread - 1 if padding == "VALID" or s > spread - 1 else -(-total // 2)
        found.append((low, total - low))
    return tuple(found) if padding in ("SAME", "VALID") else None


# ---------------------------------------------------------------- normalisation and attention


def machine_epsilon(dtype: str | None) -> float:
    """The epsilon that torch adds if none is given: that of float64, or of float32, in which half precision is computed."""
    return 2.0**-52 if dtype == "float64" else 2.0**-23


def rms_epsilon_agrees(torch: Settings, flax: Settings) -> list[str]:
    """Whether both add the same to the mean square; torch's None is the machine epsilon."""
    given, got = torch("eps"), flax("epsilon")
    wanted = machine_epsilon(torch("parameter dtype")) if given is None else given
    if equal(float(wanted), float(got)):
        return []
    name = "eps=None (the machine epsilon)" if given is None else f"eps={given!r}"
    return [f"{name} in torch, epsilon={got!r} in Flax; set epsilon={wanted!r}"]


def normalised_axes_agree(torch: Settings, flax: Settings) -> list[str]:
    """Whether both take the mean over the same axes, torch's the last ones, and scale those."""
    shape = tuple(torch("normalized_shape"))
    wanted = tuple(range(-len(shape), 0))
    names = ("reduction_axes", *(("feature_axes",) if flax("use_scale") or flax("use_bias") else ()))
    return [
        told("normalized_shape", shape, name, flax(name), wanted if len(wanted) > 1 else -1)
        for name in names
        if set(each(flax(name), 1)) != set(wanted)
    ]


def groups_agree(torch: Settings, flax: Settings) -> list[str]:
    """Whether both normalise the same channels together; Flax may be given the size of a group in place of their number."""
    groups, got, size = torch("num_groups"), flax("num_groups"), flax("group_size")
    if got is not None or size is None:
        return Agree("num_groups", "num_groups").problems(torch, flax)
    wanted = torch("num_channels") // groups
    return [] if size == wanted else [told("num_groups", groups, "group_size", size, wanted)]


def momentum_agrees(torch: Settings, flax: Settings) -> list[str]:
    """Whether running statistics move alike: torch's momentum is the share of the new, Flax's that of the old."""
    given, got = torch("momentum"), flax("momentum")
    if given is None:
        return ["momentum=None in torch averages all batches alike, nnx.BatchNorm cannot; give torch a momentum"]
    if math.isclose(1 - given, got, rel_tol=1e-9):
        return []
    return [told("momentum", given, "momentum", got, round(1 - given, 12))]


def batches_are_shared(torch: Settings, flax: Settings) -> list[str]:
    """What must be known of statistics that torch takes over all processes."""
    if flax("axis_name") is not None:
        return []
    return ["in training torch takes its statistics over all processes; set axis_name, or shard the batch under jax.jit"]


def one_width_for_keys_and_values(torch: Settings, flax: Settings) -> list[str]:
    """Whether keys and values come in one width, as Flax wants them."""
    if torch("kdim") == torch("vdim"):
        return []
    return [
        f"kdim={torch('kdim')} and vdim={torch('vdim')} in torch, but nnx.MultiHeadAttention has one in_kv_features for both; "
        "write a module with four nnx.LinearGeneral of your own"
    ]


def attention_dropout_agrees(torch: Settings, flax: Settings) -> list[str]:
    """Whether attention weights are dropped alike."""
    found = Agree("dropout", "dropout_rate").problems(torch, flax)
    if torch("dropout") and flax("broadcast_dropout"):
        found.append("broadcast_dropout=True in Flax draws one mask for the whole batch; set broadcast_dropout=False")
    return found


def norm_axes_agree(torch: Settings, flax: Settings) -> list[str]:
    """Whether the same slices of a weight have a norm of their own: torch's `dim` is an axis of its own layout."""
    dim, axes, layer = torch("dim"), flax("feature_axes"), flax("layer_instance")
    got = (axes,) if isinstance(axes, int) else tuple(axes)
    if dim is None:
        wanted: tuple[int, ...] = ()
    elif type(layer).__name__ == "Embed":
        wanted = (dim - 2,)
    else:
        # torch has outputs and inputs first, Flax inputs and outputs last; a transposed convolution has them swapped.
        swapped = type(layer).__name__ == "ConvTranspose" and not getattr(layer, "transpose_kernel", False)
        wanted = ((-2, -1) if swapped else (-1, -2))[dim : dim + 1] or (dim - 2,)
    axes_count = getattr(getattr(layer, "kernel", getattr(layer, "embedding", None)), "ndim", 0)
    if {axis % axes_count for axis in got} == {axis % axes_count for axis in wanted}:
        return []
    feature_axes = wanted[0] if wanted else None
    return [f"weight_norm with dim={dim} in torch, feature_axes={axes!r} in Flax; set feature_axes={feature_axes}"]


# ---------------------------------------------------------------- recurrence


def cell_agrees(torch_name: str, cell: str) -> Callable[[Settings, Settings], list[str]]:
    """The check of a cell's functions, for a cell that stands by itself or inside the layer that runs it."""
    kinds = {"GRU": ("GRUCell",), "LSTM": ("LSTMCell", "OptimizedLSTMCell"), "RNN": ("SimpleCell",)}
    wanted_kinds = kinds[torch_name.removesuffix("Cell")]

    def check(torch: Settings, flax: Settings) -> list[str]:
        inner = flax(cell.rstrip(".")) if cell else None

        def read(name: str) -> Any:
            return getattr(inner, name, None) if cell else flax(name)

        if cell and type(inner).__name__ not in wanted_kinds:
            return [f"cell is a {type(inner).__name__} in Flax; torch.nn.{torch_name} needs {' or '.join(wanted_kinds)}"]
        activation = torch("nonlinearity") or "tanh"
        wanted = {"activation_fn": activation} | ({} if wanted_kinds == ("SimpleCell",) else {"gate_fn": "sigmoid"})
        found = [
            f"{name} is {getattr(read(name), '__name__', read(name))} in Flax, {function} in torch; set {name}={function}"
            for name, function in wanted.items()
            if getattr(read(name), "__name__", "") != function
        ]
        return found + (["residual=True in Flax adds the state once more; set residual=False"] if read("residual") else [])

    return check


def sequence_agrees(torch: Settings, flax: Settings) -> list[str]:
    """Whether both run over the same axis, forwards."""
    if torch("batch_first") is None:
        # A direction inside nnx.Bidirectional, which says both itself.
        return []
    backwards = ["reverse=True in Flax runs backwards; set reverse=False"] if flax("reverse") else []
    return time_axis_agrees(torch, flax) + backwards


def time_axis_agrees(torch: Settings, flax: Settings) -> list[str]:
    """Whether both run over the same axis."""
    if bool(torch("batch_first")) is not bool(flax("time_major")):
        return []
    return [told("batch_first", torch("batch_first"), "time_major", flax("time_major"), not torch("batch_first"))]


def directions_are_joined(torch: Settings, flax: Settings) -> list[str]:
    """Whether the outputs of both directions stand beside each other, as in torch."""
    got = getattr(flax("merge_fn"), "__name__", str(flax("merge_fn")))
    if got == "_concatenate":
        return []
    return [f"merge_fn={got} in Flax, torch joins both directions along the last axis; leave merge_fn out"]


def dropout_between_layers(torch: Settings, flax: Settings) -> list[str]:
    """What torch does in training between two layers, which no setting of one layer of Flax's could say."""
    rate = torch("dropout") if torch("num_layers") == 1 else 0.0
    if not rate:
        return []
    return [f"in training torch drops outputs of this layer (dropout={rate}); call an nnx.Dropout({rate}) behind it"]
