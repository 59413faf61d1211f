"""What must agree where Flax has no class for a layer of torch: a function in its place, or a module of the user's own.

torch's activations are modules, Flax's are functions, and torch's Transformer layers have no twin in Flax at
all. A module of the user's own that mirrors one is paired child by child; of its settings those are
compared that it shows under torch's name or Flax's.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from parity.weights.leaf import ROOT, Layer
from parity.weights.settings import Settings, equal, told


@dataclass(frozen=True)
class Shown:
    """A setting that is compared if the Flax side shows it.

    Attributes:
        torch: its name in torch; a dotted one is that of a layer inside.
        flax: the names under which Flax may show it.
        means: torch's values in Flax's terms, where they are others.
    """

    torch: str
    flax: tuple[str, ...]
    means: Mapping[Any, Any] = field(default_factory=dict)

    def problems(self, torch: Settings, flax: Settings) -> list[str]:
        """The disagreement in one sentence, if there is one."""
        given = torch(self.torch)
        found = {name: value for name in self.flax if plain(value := flax(name))}
        for name, got in found.items():
            wanted = self.means.get(given, given) if isinstance(got, bool) and isinstance(given, str) else given
            if not plain(given) or equal(wanted, got) or not comparable(given, got):
                continue
            return [told(self.torch, given, name, got, wanted)]
        return []


def plain(value: Any) -> bool:
    """Whether a value is one that can be compared: a layer or an array is not."""
    return isinstance(value, bool | int | float | str)


def comparable(given: Any, got: Any) -> bool:
    """Whether two axes can be told apart: one counted from the front and one from the end cannot."""
    both = all(isinstance(axis, int) and not isinstance(axis, bool) for axis in (given, got))
    return not both or (given < 0) is (got < 0)


@dataclass(frozen=True)
class Activation:
    """The function of jax that is a module of torch.

    Attributes:
        function: its public name.
        shown: what must agree.
        fixed: settings of torch that the function has not, and the only value that it computes.
    """

    function: str
    shown: tuple[Shown, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)


def same(name: str) -> tuple[Shown, ...]:
    """A setting of one name."""
    return (Shown(name, (name,)),)


AXIS = (Shown("dim", ("axis", "dim")),)
GELU = {"none": False, "tanh": True}

ACTIVATIONS = {
    "torch.nn.GELU": Activation("jax.nn.gelu", (Shown("approximate", ("approximate",), GELU),)),
    "torch.nn.LeakyReLU": Activation("jax.nn.leaky_relu", same("negative_slope")),
    "torch.nn.ELU": Activation("jax.nn.elu", same("alpha")),
    "torch.nn.CELU": Activation("jax.nn.celu", same("alpha")),
    "torch.nn.Softmax": Activation("jax.nn.softmax", AXIS),
    "torch.nn.LogSoftmax": Activation("jax.nn.log_softmax", AXIS),
    "torch.nn.GLU": Activation("jax.nn.glu", AXIS),
    "torch.nn.Softplus": Activation("jax.nn.softplus", (*same("beta"), *same("threshold")), {"beta": 1.0}),
    "torch.nn.Hardtanh": Activation(
        "jax.nn.hard_tanh", (*same("min_val"), *same("max_val")), {"min_val": -1.0, "max_val": 1.0}
    ),
    "torch.nn.ReLU": Activation("jax.nn.relu"),
    "torch.nn.ReLU6": Activation("jax.nn.relu6"),
    "torch.nn.SiLU": Activation("jax.nn.silu"),
    "torch.nn.Mish": Activation("jax.nn.mish"),
    "torch.nn.SELU": Activation("jax.nn.selu"),
    "torch.nn.Sigmoid": Activation("jax.nn.sigmoid"),
    "torch.nn.LogSigmoid": Activation("jax.nn.log_sigmoid"),
    "torch.nn.Softsign": Activation("jax.nn.soft_sign"),
    "torch.nn.Hardsigmoid": Activation("jax.nn.hard_sigmoid"),
    "torch.nn.Hardswish": Activation("jax.nn.hard_silu"),
    "torch.nn.Tanh": Activation("jax.numpy.tanh"),
}

TRANSFORMER_LAYER = (
    *same("norm_first"),
    Shown("self_attn.batch_first", ("batch_first",)),
    Shown("self_attn.num_heads", ("nhead", "num_heads")),
    Shown("norm1.eps", ("layer_norm_eps",)),
    Shown("dropout.p", ("dropout", "dropout_rate")),
    Shown("linear1.out_features", ("dim_feedforward",)),
)

MIRRORS = {
    "torch.nn.TransformerEncoderLayer": TRANSFORMER_LAYER,
    "torch.nn.TransformerDecoderLayer": TRANSFORMER_LAYER,
    "torch.nn.TransformerEncoder": same("num_layers"),
    "torch.nn.TransformerDecoder": same("num_layers"),
    "torch.nn.Transformer": (*same("d_model"), *same("nhead"), *same("batch_first")),
}

# Layers with parameters that no class of Flax stands for, and what to write instead.
NO_COUNTERPART = {
    "torch.nn.Bilinear": "Flax has no such layer; write a module with an nnx.Param weight and bias in torch's shapes, which "
    "are paired by name: jnp.einsum('...i,oij,...j->...o', x1, weight, x2) + bias",
    "torch.nn.EmbeddingBag": "Flax has no such layer; write a module with an nnx.Param weight in torch's shape, which is "
    "paired by name: weight[indices].sum(1) (mode='mean': .mean(1), mode='max': .max(1)) for bags of one length",
}


def mirror_problems(torch_layer: Layer, flax_layer: Layer) -> list[str]:
    """The settings of a layer without a row in the ledger that do not agree with what stands for it in Flax."""
    sentences: list[str] = []
    for kind in torch_layer.kinds:
        if kind in ACTIVATIONS:
            sentences = activation_problems(kind, torch_layer, flax_layer)
            break
        if kind in MIRRORS:
            sentences = [one for shown in MIRRORS[kind] for one in shown.problems(torch_layer.settings, flax_layer.settings)]
            sentences += function_problems(torch_layer.settings("activation"), flax_layer.settings("activation"))
            sentences += fast_path_problems(torch_layer.settings)
            break
    return [f"{torch_layer.path or ROOT}: {sentence}" for sentence in sentences]


def activation_problems(kind: str, torch_layer: Layer, flax_layer: Layer) -> list[str]:
    """What is wrong with the function, or the user's own module, that stands for an activation of torch."""
    wanted, got = ACTIVATIONS[kind], flax_layer.kinds[0]
    functions = {one.function for one in ACTIVATIONS.values()}
    if got in functions and got != wanted.function:
        return [f"{kind} in torch, {got} in Flax; set {wanted.function}"]
    found = [one for shown in wanted.shown for one in shown.problems(torch_layer.settings, flax_layer.settings)]
    for name, value in wanted.fixed.items() if got == wanted.function else ():
        given = torch_layer.settings(name)
        if not equal(value, float(given)):
            found.append(f"{name}={given!r} in torch, {got} computes {name}={value!r}; write the function out")
    return found


def function_problems(torch: Any, flax: Any) -> list[str]:
    """Whether the activation that a layer holds is the same function, as far as both tell what it is."""
    given, got = function_name(torch), function_name(flax)
    if not given or not got or given == got or (isinstance(flax, str) and given.startswith(f"{got} ")):
        return []
    return [f"activation={given} in torch, activation={got} in Flax; set the same"]


def fast_path_problems(torch: Settings) -> list[str]:
    """What torch's fused layer does in evaluation to an activation that its module says otherwise (torch 2.13)."""
    fused = torch("activation_relu_or_gelu") == 2 and torch("self_attn.batch_first")
    if not fused or function_name(torch("activation")) != "gelu (tanh)":
        return []
    return [
        "activation=nn.GELU(approximate='tanh') in torch, whose fused path in evaluation computes the exact GELU all the same; "
        "give torch a function, activation=lambda x: F.gelu(x, approximate='tanh')"
    ]


KNOWN = ("relu", "gelu", "silu", "tanh", "sigmoid", "elu", "leaky_relu", "mish", "selu", "relu6", "softplus")


def function_name(value: Any) -> str:
    """What an activation is: a function of torch or jax, a module of torch, or a name; '' if that is not known."""
    if isinstance(value, str):
        return value
    function = value.func if isinstance(value, functools.partial) else value
    if isinstance(function, type) or not callable(function):
        return ""
    home = str(getattr(function, "__module__", "")).partition(".")[0]
    kind = type(function)
    if kind.__module__.startswith("torch.nn.modules"):
        home, name = "torch", kind.__name__.lower()
    else:
        name = getattr(function, "__name__", "")
    if home not in ("torch", "jax") or name not in KNOWN:
        return ""
    if name != "gelu":
        return name
    approximate = argument(value, "approximate", getattr(function, "approximate", "none" if home == "torch" else None))
    return f"gelu ({'tanh' if approximate in (True, 'tanh') else 'exact'})"


def argument(function: Any, name: str, otherwise: Any = None) -> Any:
    """The value that a function takes an argument to have if it is called without."""
    inner: Callable[..., Any] = function.func if isinstance(function, functools.partial) else function
    if isinstance(function, functools.partial) and name in function.keywords:
        return function.keywords[name]
    try:
        default = inspect.signature(inner).parameters[name].default
    except (KeyError, ValueError, TypeError):
        return otherwise
    return otherwise if default is inspect.Parameter.empty else default
