"""The leaf layers: torch's semantics, with errors that name the values.

A layer's parameters, their names and their initial distributions are `torch.nn`'s.
"""

from jaxtyping import Float, Int
from torch import Tensor, nn

from torch_impl.checks import check_choices, check_features, check_probability, check_sizes, check_tokens
from torch_impl.operations import matmul


class Linear(nn.Linear):
    """Affine map of the last axis, `x W^T + b`.

    Initialised like `torch.nn.Linear`: weight and bias uniform within 1 / sqrt(in_features).
    In float16 and bfloat16 the products are summed in float32, the bias is added there,
    and the result is rounded once.

    Args:
        in_features: width of the input.
        out_features: width of the output.
        bias: whether b exists.

    Raises:
        InputError: a size is no positive whole number.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True):
        check_sizes("Linear", in_features=in_features, out_features=out_features)
        super().__init__(in_features, out_features, bias=bias)

    def forward(self, input: Float[Tensor, "*n i"]) -> Float[Tensor, "*n o"]:
        """Map the last axis.

        Args:
            input: `(..., in_features)` in the dtype of the weights.

        Returns:
            `(..., out_features)`.

        Raises:
            InputError: width, dtype or device is not that of the weights.
        """
        check_features("Linear", input, self.in_features, self.weight)
        return super().forward(input)


class ReLU(nn.ReLU):
    """`max(x, 0)`, with gradient 0 at 0; NaN stays NaN, and has gradient 1."""

    def forward(self, input: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        """Clip at zero.

        Args:
            input: any shape.

        Returns:
            The same shape and dtype.
        """
        return super().forward(input)


class Dropout(nn.Dropout):
    """Zero each element with probability p in train mode and scale the others by 1 / (1 - p).

    One draw for every element: no axis shares a mask. The input is multiplied by the mask,
    so NaN and infinity in a dropped place come out as NaN. In eval mode the input passes
    unchanged.

    Args:
        p: probability that an element is zeroed.

    Raises:
        InputError: p is not in [0, 1].
    """

    def __init__(self, p: float = 0.5):
        check_probability("Dropout", p)
        super().__init__(p)

    def forward(self, input: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        """Drop, in train mode.

        Args:
            input: any shape.

        Returns:
            The same shape and dtype.
        """
        return super().forward(input)


class GELU(nn.GELU):
    """`x Phi(x)` with the normal distribution function Phi, or its approximation by tanh.

    Args:
        approximate: "none" for Phi itself, "tanh" for the approximation.

    Raises:
        InputError: approximate is neither.

    Source:
        Hendrycks and Gimpel 2016, "Gaussian error linear units".
    """

    def __init__(self, approximate: str = "none"):
        check_choices("GELU", "approximate", approximate, ("none", "tanh"))
        super().__init__(approximate)

    def forward(self, input: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        """Weigh each element.

        Args:
            input: any shape; float16 and bfloat16 are computed in float32 and rounded once.

        Returns:
            The same shape and dtype.
        """
        return super().forward(input)


class LayerNorm(nn.LayerNorm):
    """Bring the last axis to mean 0 and variance 1, then scale and shift it.

    The variance is the mean square about the mean, over n, not n - 1.

    Args:
        width: of the last axis.
        eps: added to the variance.
        bias: whether there is a shift.

    Raises:
        InputError: the width is no positive whole number.

    Source:
        Ba et al. 2016, "Layer normalization".
    """

    def __init__(self, width: int, eps: float = 1e-5, *, bias: bool = True):
        check_sizes("LayerNorm", width=width)
        super().__init__(width, eps=eps, bias=bias)
        self.width = width

    def forward(self, input: Float[Tensor, "*n w"]) -> Float[Tensor, "*n w"]:
        """Normalise the last axis.

        Args:
            input: `(..., width)` in the dtype of the weights.

        Returns:
            The same shape and dtype.

        Raises:
            InputError: width, dtype or device is not that of the weights.
        """
        check_features("LayerNorm", input, self.width, self.weight)
        return super().forward(input)


class RMSNorm(nn.RMSNorm):
    """Divide the last axis by its root mean square, then scale it.

    Args:
        width: of the last axis.
        eps: added to the mean square.

    Raises:
        InputError: the width is no positive whole number.

    Source:
        Zhang and Sennrich 2019, "Root mean square layer normalization".
    """

    def __init__(self, width: int, eps: float = 1e-6):
        check_sizes("RMSNorm", width=width)
        super().__init__(width, eps=eps)
        self.width = width

    def forward(self, input: Float[Tensor, "*n w"]) -> Float[Tensor, "*n w"]:
        """Normalise the last axis.

        Args:
            input: `(..., width)` in the dtype of the weights.

        Returns:
            The same shape and dtype.

        Raises:
            InputError: width, dtype or device is not that of the weights.
        """
        check_features("RMSNorm", input, self.width, self.weight)
        return super().forward(input)


class Embedding(nn.Embedding):
    """A row of numbers for every token. Initialised like `torch.nn.Embedding`: standard normal.

    Args:
        n_tokens: number of rows.
        width: of a row.

    Raises:
        InputError: a size is no positive whole number.
    """

    def __init__(self, n_tokens: int, width: int):
        check_sizes("Embedding", n_tokens=n_tokens, width=width)
        super().__init__(n_tokens, width)
        self.n_tokens = n_tokens
        self.width = width

    def forward(self, input: Int[Tensor, "*n"]) -> Float[Tensor, "*n w"]:
        """Look rows up.

        Args:
            input: ids, any shape.

        Returns:
            `(..., width)` in the dtype of the weights.

        Raises:
            InputError: the ids are no integers, or one is outside [0, n_tokens).
        """
        check_tokens("Embedding", input, self.n_tokens)
        return super().forward(input)

    def attend(self, input: Float[Tensor, "*n w"]) -> Float[Tensor, "*n v"]:
        """Multiply with every row: the output projection that is tied to the embedding.

        Args:
            input: `(..., width)` in the dtype of the weights.

        Returns:
            `(..., n_tokens)`.

        Raises:
            InputError: width, dtype or device is not that of the weights.
        """
        check_features("Embedding", input, self.width, self.weight)
        return matmul(input, self.weight.T)
