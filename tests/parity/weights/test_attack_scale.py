"""What real checkpoints have thousands of is looked at in time that grows with their number, not with its square."""

import time

import pytest
import torch

from parity.frameworks.torch.leaves import leaves
from parity.weights.computed import computed

N = 3000
PIECES = {
    "lora": ("base_layer.weight", "lora_A.default.weight", "lora_B.default.weight"),
    "spectral_norm": ("parametrizations.weight.original", "parametrizations.weight.0._u", "parametrizations.weight.0._v"),
    "weight_norm": ("weight_g", "weight_v"),
    "recurrent biases": ("weight_hh_l0", "bias_ih_l0", "bias_hh_l0"),
}


@pytest.mark.parametrize("kind", PIECES)
@pytest.mark.parametrize("front", ["", "h.7."])
def test_thousands_of_computed_weights(kind, front):
    state = {f"{front}{i}.{name}": torch.ones(1, 1) for i in range(N) for name in PIECES[kind]}
    given = leaves(state)
    before = time.process_time()
    found = computed(given)
    # Each path against all others took minutes.
    assert time.process_time() - before < 5
    assert [(one.kind, one.owner) for one in found] == [(kind, f"{front}{i}") for i in range(N)]
    assert set(found[-1].paths) == {f"{front}{N - 1}.{name}" for name in PIECES[kind]}


def test_pieces_of_the_root_itself():
    for kind, names in PIECES.items():
        (found,) = computed(leaves({name: torch.ones(1, 1) for name in names}))
        assert (found.kind, found.owner, set(found.paths)) == (kind, "", set(names))
