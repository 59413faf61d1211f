"""The initial parameters that torch draws, as arguments for the layers of Flax, NNX and Linen alike.

```python
nnx.Linear(5, 7, **parity.initializers.linear(5), rngs=rngs)
```

The distributions are torch's, the numbers are not: no seed gives the same in both. For equal numbers
initialise a torch model and `parity.transfer` it. U(b) is uniform in [-b, b).

| layer of torch | torch draws | Flax draws unless told |
|---|---|---|
| Linear | weight and bias U(1 / sqrt(in)) | kernel: normal of variance 1 / in cut at 2 deviations, bias 0 |
| Conv | weight and bias U(1 / sqrt(in / groups * positions)) | likewise, with in / groups * positions |
| ConvTranspose | the same with out for in: torch counts the second axis of its weight | likewise, with in |
| Embedding | N(0, 1), the padding row 0 | normal of variance 1 / features |
| LayerNorm, GroupNorm, BatchNorm, RMSNorm | scale 1, bias 0 | the same |
| MultiheadAttention, all widths E | inputs U(sqrt(6 / (4 E))), output U(1 / sqrt(E)), biases 0 | as Linear |
| MultiheadAttention, others | each input U(sqrt(6 / (E + width))), the rest likewise | as Linear |
| RNN, LSTM, GRU | everything U(1 / sqrt(hidden)) | as Linear, recurrent kernels orthogonal, bias 0 |
| PReLU | 0.25 | 0.01 |

torch's `kaiming_uniform_(a=sqrt(5))` is U(1 / sqrt(fan_in)): gain sqrt(2 / 6) times sqrt(3 / fan_in).
"""

import math
from collections.abc import Sequence
from typing import Any

from parity import frameworks
from parity.errors import InputError

Arguments = dict[str, Any]


def room() -> Any:
    return frameworks.load("jax.initializers")


def positive(**sizes: Any) -> None:
    """Refuse sizes that are none, all at once.

    Raises:
        InputError: a size is no whole number of at least 1.
    """
    wrong = [f"{n}={s!r}" for n, s in sizes.items() if not isinstance(s, int) or isinstance(s, bool) or s < 1]
    if wrong:
        raise InputError(f"sizes must be whole numbers of at least 1, got {', '.join(wrong)}")


def linear(in_features: int) -> Arguments:
    """`kernel_init` and `bias_init` of torch.nn.Linear: both uniform within 1 / sqrt(in_features)."""
    positive(in_features=in_features)
    init = room().uniform(1 / math.sqrt(in_features))
    return {"kernel_init": init, "bias_init": init}


def conv(in_features: int, kernel_size: int | Sequence[int], groups: int = 1) -> Arguments:
    """`kernel_init` and `bias_init` of torch.nn.Conv1d, Conv2d and Conv3d.

    Args:
        in_features: channels that come in.
        kernel_size: one length for each axis of space; a single number is that of a single axis.
        groups: `feature_group_count` in Flax.
    """
    lengths = (kernel_size,) if isinstance(kernel_size, int) else tuple(kernel_size)
    positive(in_features=in_features, groups=groups, **{f"kernel_size[{i}]": size for i, size in enumerate(lengths)})
    init = room().uniform(1 / math.sqrt(in_features // groups * math.prod(lengths)))
    return {"kernel_init": init, "bias_init": init}


def conv_transpose(out_features: int, kernel_size: int | Sequence[int], groups: int = 1) -> Arguments:
    """`kernel_init` and `bias_init` of torch.nn.ConvTranspose: torch takes the channels that go out for those that come in.

    Args:
        out_features: channels that go out.
        kernel_size: one length for each axis of space; a single number is that of a single axis.
        groups: of torch's layer.
    """
    return conv(out_features, kernel_size, groups)


def embedding(padding_idx: int | None = None) -> Arguments:
    """`embedding_init` of torch.nn.Embedding: standard normal; the padding row is 0."""
    return {"embedding_init": room().normal(padding_idx)}


def norm(bias: bool = True) -> Arguments:
    """`scale_init` and `bias_init` of torch's normalisations: 1 and 0; RMSNorm takes `bias=False`."""
    return {"scale_init": room().constant(1.0)} | ({"bias_init": room().constant(0.0)} if bias else {})


def multi_head_attention(embed_dim: int, kdim: int | None = None, vdim: int | None = None) -> Arguments:
    """`kernel_init`, `bias_init`, `out_kernel_init` and `out_bias_init` of torch.nn.MultiheadAttention.

    Where all widths are one, torch draws queries, keys and values as one kernel, three times as wide.

    Args:
        embed_dim: width of queries and outputs.
        kdim: width of keys; None for `embed_dim`.
        vdim: width of values; None for `embed_dim`.
    """
    positive(embed_dim=embed_dim, kdim=kdim or embed_dim, vdim=vdim or embed_dim)
    joint = (kdim or embed_dim) == (vdim or embed_dim) == embed_dim
    return {
        "kernel_init": room().uniform(math.sqrt(6 / (4 * embed_dim))) if joint else room().uniform_by_rows(),
        "bias_init": room().constant(0.0),
        "out_kernel_init": room().uniform(1 / math.sqrt(embed_dim)),
        "out_bias_init": room().constant(0.0),
    }


def recurrent(hidden_size: int, kind: str = "LSTM") -> Arguments:
    """`kernel_init`, `recurrent_kernel_init` and `bias_init` of torch's recurrent layers and cells.

    torch adds two biases where Flax has one; the one of Flax is drawn as their sum. nnx.GRUCell has
    no bias inside its reset gate, where torch draws one.

    Args:
        hidden_size: width of the state.
        kind: `LSTM`, `RNN` (nnx.SimpleCell) or `GRU` (NNX only).

    Raises:
        InputError: a kind of another name; and, when it is called, the bias of a Linen GRU.
    """
    positive(hidden_size=hidden_size)
    bound = 1 / math.sqrt(hidden_size)
    if kind not in ("LSTM", "RNN", "GRU"):
        raise InputError(f'kind must be "LSTM", "RNN" or "GRU", got {kind!r}')
    bias = room().gates_of_gru(bound, hidden_size) if kind == "GRU" else room().sum_of_two(bound)
    return {"kernel_init": room().uniform(bound), "recurrent_kernel_init": room().uniform(bound), "bias_init": bias}


def prelu() -> Arguments:
    """`negative_slope_init` of torch.nn.PReLU."""
    return {"negative_slope_init": 0.25}
