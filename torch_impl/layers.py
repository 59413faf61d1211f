"""The leaf layers: torch's semantics, with errors that name the values.

A layer's parameters, their names and their initial distributions are `torch.nn`'s.
"""

from jaxtyping import Float
from torch import Tensor, nn

from torch_impl.checks import check_features, check_probability, check_sizes


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
    """`max(x, 0)`, with gradient 0 at 0; NaN stays NaN."""

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
