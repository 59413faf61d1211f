"""A recurrent layer of torch as the single layers that Flax runs one after the other.

torch keeps several layers and both directions in one module (`rnn.weight_ih_l1_reverse`). Flax has
an `nnx.RNN` for each, the two directions in an `nnx.Bidirectional`, and several layers in a list
under the name of the torch layer (`rnn.1.backward_rnn.cell`). The rows of the ledger are those of a
single layer; here torch's layer is shown to them as such.
"""

import re
from dataclasses import replace
from typing import Any

from parity.weights.leaf import Claim, Layer, Leaf
from parity.weights.paths import join

NAME = re.compile(r"((?:weight|bias)_(?:ih|hh))_l(\d+)(_reverse)?$")
RECURRENT = ("torch.nn.RNN", "torch.nn.GRU", "torch.nn.LSTM")


def unrolled(leaves: list[Leaf]) -> list[Leaf]:
    """The leaves, each of a recurrent layer of torch with the single layers that may hold it in Flax."""
    return [replace(leaf, claims=(*leaf.claims, *found)) if (found := single(leaf)) else leaf for leaf in leaves]


def single(leaf: Leaf) -> list[Claim]:
    """A torch leaf as an array of a layer that has one direction and no other layers."""
    match = NAME.match(leaf.name)
    if not match or (leaf.kinds and not set(RECURRENT) & set(leaf.kinds)):
        return []
    number, way = match[2], "backward_rnn" if match[3] else "forward_rnn"
    places = [f"{number}.{way}"] + ([] if match[3] else [number]) + ([way] if number == "0" else [])
    return [Claim(join(leaf.owner, place), f"{match[1]}_l0", leaf.kinds) for place in places]


def single_layers(layers: list[Layer]) -> list[Layer]:
    """The layers, and those of which torch's recurrent ones consist, under the paths that they have in Flax."""
    found = list(layers)
    for layer in layers:
        if set(RECURRENT) & set(layer.kinds):
            count = layer.settings("num_layers") or 1
            ways = ("forward_rnn", "backward_rnn") if layer.settings("bidirectional") else ()
            for number in range(count):
                last = number == count - 1
                found.append(part(layer, str(number), num_layers=1, dropout=0.0 if last else layer.settings("dropout")))
                found += [one_way(layer, f"{number}.{way}") for way in ways]
            found += [one_way(layer, way) for way in ways if count == 1]
    return found


def one_way(layer: Layer, place: str) -> Layer:
    """One direction. `nnx.Bidirectional` decides over which axis it runs, so that its own setting means nothing."""
    return part(layer, place, num_layers=1, bidirectional=False, batch_first=None, dropout=0.0)


def part(layer: Layer, place: str, **settings: Any) -> Layer:
    """A layer inside a recurrent layer: its settings are that layer's but for those given."""

    def read(name: str) -> Any:
        return settings[name] if name in settings else layer.settings(name)

    return Layer(join(layer.path, place), layer.kinds, read, join(layer.own_path, place))
