"""What layers of torch.nn return otherwise than their twins in Flax, so that a trace compares what is the same in both.

Channels stand behind the batch in torch and last in Flax; recurrent layers and attention return a tuple in torch and
its first part alone in Flax.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from parity.evidence.calls import Captured
from parity.evidence.numerics import largest_gap, same_specials
from parity.weights.leaf import Layer

# Layers of torch.nn that take their channels behind the batch; the ends are Flax's or the port's to choose.
SPATIAL = (
    *(
        f"torch.nn.{name}{n}d"
        for name in (
            *("Conv", "ConvTranspose", "BatchNorm", "InstanceNorm", "Dropout"),
            *("MaxPool", "AvgPool", "LPPool", "AdaptiveMaxPool", "AdaptiveAvgPool"),
            *("ConstantPad", "ReflectionPad", "ReplicationPad", "ZeroPad", "CircularPad"),
        )
        for n in (1, 2, 3)
    ),
    *(f"torch.nn.{name}" for name in ("GroupNorm", "SyncBatchNorm", "LocalResponseNorm", "Upsample", "PixelShuffle")),
)
CONVOLUTIONS = tuple(name for name in SPATIAL if "Conv" in name)


# Layers whose first result is all that Flax's return.
FURTHER = tuple(f"torch.nn.{name}" for name in ("RNN", "LSTM", "GRU", "MultiheadAttention"))


@dataclass(frozen=True)
class Conventions:
    """Paths of the modules of a torch model for which conventions differ.

    Attributes:
        spatial: their channels may stand elsewhere in Flax.
        further: they may return more than Flax's.
    """

    spatial: frozenset[str] = frozenset()
    further: frozenset[str] = frozenset()

    def alike(self, expected: Captured, actual: Captured) -> tuple[Captured, Captured]:
        """Both sides of one call, as far as they can be compared, in torch's words."""
        if expected.path in self.further and set(actual.outputs) == {""} and "[0]" in expected.outputs:
            actual = replace(actual, outputs={"[0]": actual.outputs[""]})
            expected = replace(expected, outputs={"[0]": expected.outputs["[0]"]})
        if expected.path in self.spatial:
            outputs = {name: moved(array, expected.outputs.get(name)) for name, array in actual.outputs.items()}
            inputs = {number: moved(array, expected.inputs.get(number)) for number, array in actual.inputs.items()}
            actual = replace(actual, outputs=outputs, inputs=inputs)
        return expected, actual


def conventions(layers: Iterable[Layer]) -> Conventions:
    """Those of the layers of a torch model; the whole model keeps the axes that it is called with.

    Channels may stand elsewhere in layers that have them, in what holds such a layer, and where there is
    a convolution in the elementwise layers of torch.nn too, which stand between convolutions.
    """
    layers = list(layers)
    spatial = {layer.own_path for layer in layers if any(kind in SPATIAL for kind in layer.kinds)}
    if any(kind in CONVOLUTIONS for layer in layers for kind in layer.kinds):
        spatial |= {layer.own_path for layer in layers if layer.kinds and elementwise(layer.kinds[0])}
    holders = {".".join(parts[:n]) for path in spatial for parts in [path.split(".")] for n in range(1, len(parts))}
    further = {layer.own_path for layer in layers if any(kind in FURTHER for kind in layer.kinds)}
    return Conventions(frozenset(spatial | holders) - {""}, frozenset(further))


def elementwise(kind: str) -> bool:
    """Whether a class of torch.nn is an activation, dropout or nothing at all."""
    names = (
        "ReLU",
        "GELU",
        "SiLU",
        "Mish",
        "Tanh",
        "Sigmoid",
        "ELU",
        "Softplus",
        "Hardswish",
        "Hardtanh",
        "Dropout",
        "Identity",
    )
    return kind.startswith("torch.nn.") and kind.removeprefix("torch.nn.").endswith(names)


def moved(actual: Any, expected: Any) -> Any:
    """An array as it is, or with its last axis behind the batch (in front, without one): what is nearest to torch's."""
    if not isinstance(actual, np.ndarray) or not isinstance(expected, np.ndarray) or actual.ndim != expected.ndim:
        return actual
    # Axis 1, or 0 where there is no batch: as it is comes first, so that it wins where both are as near.
    ways = [actual, *(np.moveaxis(actual, -1, axis) for axis in (1, 0) if actual.ndim > axis + 1)]
    fitting = [way for way in ways if way.shape == expected.shape]
    return nearest(fitting, expected) if len(fitting) > 1 else (fitting or ways)[0]


def nearest(ways: Sequence[np.ndarray], expected: np.ndarray) -> np.ndarray:
    """The array with the fewest NaNs and infinities elsewhere; of those, what differs least."""
    return min(ways, key=lambda way: (int((~same_specials(way, expected)).sum()), largest_gap(way, expected)))
