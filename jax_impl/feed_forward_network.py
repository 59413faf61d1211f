"""Feed-forward network of the third source document."""

from flax import nnx
from jax import Array
from jaxtyping import Float

from jax_impl.checks import check_choices, check_features, check_sizes
from jax_impl.layers import GELU, Dropout, Linear, ReLU


class FeedForwardNetwork(nnx.Module):
    """Widen, clip at zero, drop, narrow, drop: `Dropout(W2 Dropout(ReLU(W1 x + b1)) + b2)`.

    Quirk of the document, kept: dropout stands behind both projections, the second included.

    Parameters, in this order: model.0 `(d_model -> d_ff)` and model.3 `(d_ff -> d_model)`,
    weight then bias.

    Args:
        d_model: width of input and output.
        d_ff: width between; None is 4 * d_model.
        p_drop: probability that an element is zeroed in train mode.
        activation: "relu", the document's, or "gelu" or "gelu_tanh".

    Raises:
        InputError: a size is no positive whole number, p_drop is not in [0, 1], or the activation is
            none of the three.

    Source:
        the third document; Vaswani et al. 2017, section 3.3.
    """

    def __init__(
        self, d_model: int = 512, d_ff: int | None = None, p_drop: float = 0.1, *, activation: str = "relu", rngs: nnx.Rngs
    ):
        d_ff = 4 * d_model if d_ff is None else d_ff
        check_sizes("FeedForwardNetwork", d_model=d_model, d_ff=d_ff)
        self.d_model = d_model
        self.model = nnx.Sequential(
            Linear(d_model, d_ff, rngs=rngs),
            make_activation(activation),
            Dropout(p_drop, rngs=rngs),
            Linear(d_ff, d_model, rngs=rngs),
            Dropout(p_drop, rngs=rngs),
        )

    def __call__(self, x: Float[Array, "*n e"]) -> Float[Array, "*n e"]:
        """Apply the network to each position alone.

        Args:
            x: `(..., d_model)`, as a rule `(n, l, d_model)`.

        Returns:
            The same shape.

        Raises:
            InputError: width, dtype or device is not that of the weights.
        """
        check_features("FeedForwardNetwork", x, self.d_model, self.model.layers[0].kernel[...])  # type: ignore[attr-defined]
        return self.model(x)


def make_activation(name: str) -> ReLU | GELU:
    """The layer between the projections, by its name.

    Args:
        name: "relu", "gelu" or "gelu_tanh".

    Returns:
        The layer.

    Raises:
        InputError: the name is another one.
    """
    check_choices("FeedForwardNetwork", "activation", name, ("relu", "gelu", "gelu_tanh"))
    if name == "relu":
        return ReLU()
    return GELU("tanh" if name == "gelu_tanh" else "none")
