"""What every framework is reduced to: arrays under dotted paths, read when they are needed."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Literal

import ml_dtypes
import numpy as np

# Every dtype that an array may have on its way, by name.
DTYPES: dict[str, np.dtype] = {
    **{name: np.dtype(name) for name in ("float64", "float32", "float16", "complex64", "complex128", "bool")},
    **{f"{sign}int{width}": np.dtype(f"{sign}int{width}") for sign in ("", "u") for width in (8, 16, 32, 64)},
    **{
        name: np.dtype(getattr(ml_dtypes, name))
        for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    },
}


@dataclass(frozen=True)
class Shared:
    """An array that speaks DLPack, and the permutation of its axes that the reader has to make."""

    array: Any
    axes: tuple[int, ...]


Role = Literal["parameter", "buffer", "random state"]


@dataclass(frozen=True)
class Leaf:
    """One array of a model or tree, not yet read.

    Attributes:
        path: dotted path in the framework's own words, such as `model.layers.0.kernel`.
        owner: dotted path of the layer that holds it, in torch's words: without the
            `layers` of an `nnx.Sequential`. Empty at the root.
        name: the array's name in its layer, such as `kernel`.
        kinds: public names of the layer's classes along its MRO; empty in a tree of arrays.
        shape: its shape.
        dtype: its dtype's name, such as `bfloat16`.
        role: random state has no counterpart elsewhere and never travels.
        identity: equal for two leaves exactly if they are one array under two names.
        read: the array as NumPy, not to be written into; it may share the model's memory.
        share: the array with its axes permuted, lent where the framework can lend it, otherwise as NumPy.
        unreadable: why the array has no values that could be read; empty if it has.
        from_file: whether it is read from a file.
    """

    path: str
    owner: str
    name: str
    kinds: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    role: Role
    identity: Hashable
    read: Callable[[], np.ndarray] = field(compare=False, repr=False)
    share: Callable[[tuple[int, ...]], Shared | np.ndarray] = field(compare=False, repr=False)
    unreadable: str = ""
    from_file: bool = False


@dataclass(frozen=True)
class Layer:
    """One layer of a model, for its settings.

    Attributes:
        path: dotted path in torch's words.
        kinds: public names of its classes along the MRO.
        settings: its attributes.
        own_path: dotted path in the framework's own words.
    """

    path: str
    kinds: tuple[str, ...]
    settings: Callable[[str], Any] = field(compare=False, repr=False)
    own_path: str = ""
