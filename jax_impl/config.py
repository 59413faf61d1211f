"""The sizes and options that all layers of a Transformer share, and the parts made from them."""

from dataclasses import KW_ONLY, dataclass

from flax import nnx

from jax_impl.checks import choice_problems, raise_all, rate_problems, sharing_problems, size_problems
from jax_impl.feed_forward_network import FeedForwardNetwork
from jax_impl.layers import LayerNorm, RMSNorm
from jax_impl.multi_head_attention import MultiHeadAttention
from jax_impl.positions import RotaryPositions


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and options; the defaults are the documents' and, where they are silent, the paper's.

    Attributes:
        d_model: width of the model.
        n_heads: number of heads, each of width d_model / n_heads.
        n_layers: number of encoder layers, and of decoder layers.
        d_ff: width inside the feed-forward networks; None is 4 * d_model.
        max_len: the longest sequence.
        p_drop: probability that an element is zeroed in train mode: behind the embedding, behind each
            sublayer, and inside the feed-forward network.
        p_attention: probability that an attention weight is zeroed in train mode.
        bias: whether the projections of the attentions have a bias.
        n_kv_heads: number of key and value heads; None is n_heads.
        norm_first: whether each sublayer is normalised before it (pre-norm) or its sum after it (post-norm, the paper).
        final_norm: whether the last layer's output is normalised; None does so with norm_first.
        norm: "layer" or "rms".
        eps: of the normalisations.
        activation: "relu", "gelu" or "gelu_tanh".
        positions: "sinusoidal", added to the embedding, or "rotary", which turn queries and keys of
            self-attention.

    Raises:
        InputError: a size is no positive whole number, the heads do not share d_model, or the key and value
            heads the heads, the positions need an even width, a rate is not in [0, 1], or an option is unknown.

    Source:
        Vaswani et al. 2017, "Attention is all you need"; pre-norm: Xiong et al. 2020, "On layer normalization
        in the Transformer architecture".
    """

    d_model: int = 512
    n_heads: int = 8
    n_layers: int = 6
    d_ff: int | None = None
    max_len: int = 1024
    _: KW_ONLY
    p_drop: float = 0.1
    p_attention: float = 0.0
    bias: bool = False
    n_kv_heads: int | None = None
    norm_first: bool = False
    final_norm: bool | None = None
    norm: str = "layer"
    eps: float = 1e-5
    activation: str = "relu"
    positions: str = "sinusoidal"

    def __post_init__(self) -> None:
        raise_all("TransformerConfig", [*self._size_problems(), *self._option_problems()])

    def _size_problems(self) -> list[str]:
        names = ("d_model", "n_heads", "n_layers", "d_ff", "max_len", "n_kv_heads")
        sizes = {name: getattr(self, name) for name in names}
        problems = size_problems(**{name: size for name, size in sizes.items() if size is not None})
        if problems:
            return problems
        problems = sharing_problems(d_model=self.d_model, n_heads=self.n_heads)
        if self.n_kv_heads is not None:
            problems += sharing_problems(n_heads=self.n_heads, n_kv_heads=self.n_kv_heads)
        # Sine and cosine come in pairs.
        if self.positions == "sinusoidal" and self.d_model % 2:
            problems.append(f"d_model must be even for sinusoidal positions, got {self.d_model}")
        if self.positions == "rotary" and self.d_model % (2 * self.n_heads):
            problems.append(
                f"d_model / n_heads must be even for rotary positions, got d_model={self.d_model}, n_heads={self.n_heads}"
            )
        return problems

    def _option_problems(self) -> list[str]:
        return [
            *rate_problems("p_drop", self.p_drop),
            *rate_problems("p_attention", self.p_attention),
            *choice_problems("norm", self.norm, ("layer", "rms")),
            *choice_problems("activation", self.activation, ("relu", "gelu", "gelu_tanh")),
            *choice_problems("positions", self.positions, ("sinusoidal", "rotary")),
        ]


def make_attention(config: TransformerConfig, *, rotary: bool, rngs: nnx.Rngs) -> MultiHeadAttention:
    """An attention of a layer.

    Args:
        config: sizes and options.
        rotary: whether queries and keys may be turned by their positions; those of another sequence may not.

    Returns:
        The attention.
    """
    width = config.d_model // config.n_heads
    return MultiHeadAttention(
        config.d_model,
        config.n_heads,
        *(width, width, width),
        bias=config.bias,
        n_kv_heads=config.n_kv_heads,
        p_drop=config.p_attention,
        rotary=RotaryPositions(width, config.max_len) if rotary and config.positions == "rotary" else None,
        rngs=rngs,
    )


def make_feed_forward(config: TransformerConfig, *, rngs: nnx.Rngs) -> FeedForwardNetwork:
    """The feed-forward network of a layer.

    Args:
        config: sizes and options.

    Returns:
        The network.
    """
    return FeedForwardNetwork(config.d_model, config.d_ff, config.p_drop, activation=config.activation, rngs=rngs)


def make_norm(config: TransformerConfig, *, rngs: nnx.Rngs) -> LayerNorm | RMSNorm:
    """A normalisation of a layer.

    Args:
        config: sizes and options.

    Returns:
        The normalisation.
    """
    if config.norm == "rms":
        return RMSNorm(config.d_model, config.eps, rngs=rngs)
    return LayerNorm(config.d_model, config.eps, rngs=rngs)


def make_final_norm(config: TransformerConfig, *, rngs: nnx.Rngs) -> LayerNorm | RMSNorm | None:
    """The normalisation behind the last layer, if the model has one.

    Args:
        config: sizes and options.

    Returns:
        The normalisation, or None.
    """
    wanted = config.norm_first if config.final_norm is None else config.final_norm
    return make_norm(config, rngs=rngs) if wanted else None
