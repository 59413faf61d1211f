"""An array of torch's and its counterpart in Flax, laid side by side."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from parity.weights.leaf import Leaf, gathered
from parity.weights.pairs import Pair


@dataclass(frozen=True, eq=False)
class Weight:
    """A torch array and Flax's counterpart.

    Attributes:
        path: of torch's array.
        pairs: the leaves of which it is made up, as the transfer pairs them.
        partly: torch's array, if Flax has no counterpart for some of it, such as the biases that a gate adds once.
    """

    path: str
    pairs: list[Pair]
    partly: Leaf | None = None

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of torch's array."""
        return self.torch.shape if len(self.pairs) > 1 or self.partly else self.pairs[0].source.shape

    @cached_property
    def torch(self) -> np.ndarray:
        """Torch's array."""
        return self.whole([p.source.read() for p in self.pairs])

    @cached_property
    def flax(self) -> np.ndarray:
        """Flax's, in torch's layout."""
        return self.whole([np.asarray(p.layout.inverse().apply(p.target.read())) for p in self.pairs])

    def whole(self, blocks: list[np.ndarray]) -> np.ndarray:
        """The blocks of the array put together, with torch's own values where there is none; a lone one as it is."""
        if self.partly:
            found = np.array(self.partly.read())
            for pair, block in zip(self.pairs, blocks, strict=True):
                pair.source.of(found)[...] = block
            return found
        if len(blocks) == 1:
            return blocks[0]
        return gathered([(p.source, block) for p, block in zip(self.pairs, blocks, strict=True)])[self.path]

    @cached_property
    def raw(self) -> np.ndarray | None:
        """Flax's as it lies, if it is one array."""
        return self.pairs[0].target.read() if len(self.pairs) == 1 and not self.partly else None

    @property
    def equal(self) -> bool:
        a, b = self.torch, self.flax
        return bool(((a == b) | ((a != a) & (b != b))).all())


def weights_of(pairs: Iterable[Pair], leaves: Iterable[Leaf]) -> dict[str, Weight]:
    """Torch's arrays by path, each with Flax's counterpart; `leaves` are torch's arrays whole."""
    found: dict[str, list[Pair]] = {}
    for one in pairs:
        found.setdefault(one.source.array_path, []).append(one)
    wholes = {leaf.path: leaf for leaf in leaves}
    return {path: Weight(path, those, missing_some(those, wholes.get(path))) for path, those in found.items()}


def missing_some(pairs: Iterable[Pair], whole: Leaf | None) -> Leaf | None:
    """The array, if these pairs are not all of it."""
    parts = [one.source.part for one in pairs]
    if whole is None or any(part is None or part.before for part in parts):
        return None
    covered = sum(math.prod(part.own_shape) for part in parts if part)
    return whole if covered < math.prod(whole.shape) else None


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
