"""An optimizer of torch in the words of no framework, and how optax's own differ from it.

What `parity.to_optax` builds from optax's own parts, because they take the same steps (float64,
100 steps, parameters and state within 1e-13), and what it builds from parts of its own, in torch's
order of operations:

| torch | built from | why optax's own part is not the same |
|---|---|---|
| SGD | `trace` | |
| SGD, dampened | own | optax has no dampening; torch does not damp the first gradient |
| SGD, cycled | own | optax's momentum is a constant, a scheduler's moves |
| Adam, AdamW | own | in float32 `1 - b2 ** count` keeps 5 digits of 1 - 0.999; in float64 they agree |
| amsgrad | own | `scale_by_amsgrad` keeps the largest second moment behind its bias correction, torch before |
| NAdam | own | `optax.nadam` knows no `momentum_decay` and no product of the momenta |
| RAdam | own | `scale_by_radam` adds eps behind the bias correction; in float32 its average is off by 3 % |
| Adagrad | own | `scale_by_rss` adds eps inside the root, starts at 0.1, has no `lr_decay` |
| Adadelta | `scale_by_adadelta` | |
| RMSprop | `scale_by_rms(eps_in_sqrt=False)` | |
| RMSprop, centered | `scale_by_stddev(eps_in_sqrt=False)` | |
| RMSprop, momentum | `trace` before the rate | `optax.rmsprop` has it behind the rate, which differs once that moves |
| Adamax | own | in float32 as Adam; in float64 they agree |
| ASGD | own | optax has none |
| Rprop | own | `scale_by_rprop` takes its first step with another size |
| weight decay | `add_decayed_weights` | before the optimizer, but for AdamW and `decoupled_weight_decay` behind it |
| `maximize` | `scale(-1)` | before the decay, as in torch |
| `clip_grad_norm_` | own | `clip_by_global_norm` divides by the norm alone, torch by the norm + 1e-6 |
| `clip_grad_value_` | `clip` | |

Defaults differ too: `optax.adamw` decays by 1e-4, torch by 1e-2; `optax.rmsprop` has decay 0.9 and eps
inside the root, torch alpha 0.99.

`foreach` and `fused` change rounding only, but for ASGD, which is refused with `foreach`. In half
precision torch rounds after every operation; the own parts compute each step in float32 and round once.

torch keeps some numbers in float32 whatever the parameters' dtype, unless `torch.set_default_dtype`
says otherwise: NAdam's product of momenta and ASGD's rate. The twins round at the same places.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parity.training.schedules import Hyper

ADAM_LIKE = ("Adam", "AdamW", "NAdam", "RAdam")
KNOWN = (*ADAM_LIKE, "SGD", "Adagrad", "Adadelta", "RMSprop", "Adamax", "ASGD", "Rprop")

# Why others have no twin, and what to do instead.
REFUSED = {
    "LBFGS": "it calls the loss several times in a step, which no update of gradients can; optax.lbfgs searches otherwise",
    "SparseAdam": "it moves only rows that have a gradient, which a dense gradient does not tell; use Adam on dense gradients",
    "Adafactor": "it factors moments by rows and columns, which other layouts of a kernel exchange; use AdamW",
    "Muon": "it orthogonalises whole matrices in bfloat16, which other layouts of a kernel change; use AdamW",
}

# Every array that torch keeps for a parameter, by optimizer: those of the parameter's shape, and single numbers.
TENSORS: dict[str, tuple[str, ...]] = {
    "SGD": ("momentum_buffer",),
    "Adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "AdamW": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "NAdam": ("exp_avg", "exp_avg_sq"),
    "RAdam": ("exp_avg", "exp_avg_sq"),
    "Adagrad": ("sum",),
    "Adadelta": ("square_avg", "acc_delta"),
    "RMSprop": ("square_avg", "momentum_buffer", "grad_avg"),
    "Adamax": ("exp_avg", "exp_inf"),
    "ASGD": ("ax",),
    "Rprop": ("prev", "step_size"),
}
SCALARS: dict[str, tuple[str, ...]] = {"NAdam": ("mu_product",), "ASGD": ("eta", "mu")}


@dataclass(frozen=True)
class Group:
    """Parameters that share their options.

    Attributes:
        names: of the parameters, as torch's model calls them; empty where no model was given.
        options: torch's own, by torch's names; `betas` is there as `beta1` and `beta2`.
    """

    names: tuple[str, ...]
    options: Mapping[str, Any]

    def hyper(self, name: str) -> Hyper:
        """A number, or the schedule that moves it."""
        return self.options[name]

    @property
    def decoupled(self) -> bool:
        """Whether weight decay bypasses the moments."""
        return bool(self.options.get("decoupled_weight_decay", False))


@dataclass(frozen=True)
class Optimizer:
    """An optimizer of torch.

    Attributes:
        kind: the name of its class, such as `AdamW`.
        groups: its parameter groups.
        scalar_dtype: the dtype in which torch keeps single numbers of its state.
    """

    kind: str
    groups: tuple[Group, ...]
    scalar_dtype: str = "float32"
