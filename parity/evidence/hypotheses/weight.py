"""An array of torch's and its counterpart in Flax, laid side by side."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from parity.weights.leaf import gathered
from parity.weights.pairs import Pair


@dataclass(frozen=True, eq=False)
class Weight:
    """A torch array and Flax's counterpart.

    Attributes:
        path: of torch's array.
        pairs: the leaves of which it is made up, as the transfer pairs them.
    """

    path: str
    pairs: list[Pair]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of torch's array."""
        return self.torch.shape if len(self.pairs) > 1 else self.pairs[0].source.shape

    @cached_property
    def torch(self) -> np.ndarray:
        """Torch's array."""
        return self.whole([p.source.read() for p in self.pairs])

    @cached_property
    def flax(self) -> np.ndarray:
        """Flax's, in torch's layout."""
        return self.whole([np.asarray(p.layout.inverse().apply(p.target.read())) for p in self.pairs])

    def whole(self, blocks: list[np.ndarray]) -> np.ndarray:
        """The blocks of the array put together; a lone one as it is."""
        if len(blocks) == 1:
            return blocks[0]
        return gathered([(p.source, block) for p, block in zip(self.pairs, blocks, strict=True)])[self.path]

    @cached_property
    def raw(self) -> np.ndarray | None:
        """Flax's as it lies, if it is one array."""
        return self.pairs[0].target.read() if len(self.pairs) == 1 else None

    @property
    def equal(self) -> bool:
        a, b = self.torch, self.flax
        return bool(((a == b) | ((a != a) & (b != b))).all())


def weights_of(pairs: Iterable[Pair]) -> dict[str, Weight]:
    """Torch's arrays by path, each with Flax's counterpart."""
    found: dict[str, list[Pair]] = {}
    for one in pairs:
        found.setdefault(one.source.array_path, []).append(one)
    return {path: Weight(path, those) for path, those in found.items()}


@dataclass(frozen=True)
class Arrays:
    """The arrays of one torch module.

    Attributes:
        kinds: public names of the module's classes.
        own: its arrays.
        every: those of the whole model, by path.
    """

    kinds: tuple[str, ...]
    own: Sequence[Weight]
    every: Mapping[str, Weight]

    def of_shape(self, shape: tuple[int, ...]) -> list[Weight]:
        """Arrays of that shape, the module's own first."""
        paths = [weight.path for weight in self.own]
        others = [weight for path, weight in self.every.items() if path not in paths]
        return [weight for weight in (*self.own, *others) if weight.shape == shape]
