"""Adapters and norms that are not what `merge` can compute, and numbers that are no numbers."""

import numpy as np
import pytest
import torch

import parity
from parity.errors import InputError

BASE = {"l.base_layer.weight": torch.eye(3), "l.lora_A.a.weight": torch.ones(1, 3), "l.lora_B.a.weight": torch.ones(3, 1)}
MORE = {
    "DoRA": {"l.lora_magnitude_vector.a.weight": torch.ones(3)},
    "a bias": {"l.lora_B.a.bias": torch.ones(3)},
    "an adapter of an odd name": {"l.lora_A.x-1.weight": torch.ones(1, 3), "l.lora_B.x-1.weight": torch.ones(3, 1)},
    "an embedding's": {"l.lora_embedding_A.a": torch.ones(1, 3)},
}


@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("file", [True, False])
def test_an_adapter_of_which_more_is_there_is_not_merged_in_part(more, file, tmp_path):
    state = BASE | MORE[more]
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(InputError, match="one adapter of two matrices can be merged"):
        parity.transfer(tmp_path / "a.pt" if file else state, tmp_path / "b.pt", merge="lora=2")
    assert not (tmp_path / "b.pt").exists()


@pytest.mark.parametrize("file", [True, False])
def test_an_adapter_may_have_any_name(file, tmp_path):
    state = {name.replace(".a.", ".my-ad.v2."): array for name, array in BASE.items()}
    torch.save(state, tmp_path / "a.pt")
    done = parity.transfer(tmp_path / "a.pt" if file else state, {"l.weight": torch.zeros(3, 3)}, merge="lora=2")
    assert torch.equal(done.value["l.weight"], torch.eye(3) + 2)


def test_a_state_dict_in_half_precision_is_multiplied_in_float32_too():
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.randn(array.shape, generator=generator).bfloat16() for name, array in BASE.items()}
    base, a, b = state.values()
    done = parity.transfer(state, {"l.weight": torch.zeros(3, 3).bfloat16()}, merge="lora=3.3")
    assert torch.equal(done.value["l.weight"], base + (b.float() @ a.float() * 3.3).bfloat16())


def half(number: float, *shape: int) -> torch.Tensor:
    return torch.full(shape, number, dtype=torch.float16)


LARGE = {"l.base_layer.weight": half(6e4, 2, 2), "l.lora_A.a.weight": half(1, 1, 2), "l.lora_B.a.weight": half(6e4, 2, 1)}
RECURRENT = {"weight_ih_l0": half(1, 8, 3), "weight_hh_l0": half(1, 8, 2)}


@pytest.mark.parametrize("file", [True, False])
@pytest.mark.parametrize(
    ("state", "target", "merge", "gone"),
    [
        (
            {"l.weight_g": torch.ones(2, 1), "l.weight_v": torch.zeros(2, 3)},
            {"l.weight": torch.zeros(2, 3)},
            "weight_norm",
            "6 of 6",
        ),
        (LARGE, {"l.weight": half(0, 2, 2)}, "lora=2", "4 of 4"),
        (
            {**RECURRENT, "bias_ih_l0": half(6e4, 8), "bias_hh_l0": half(6e4, 8)},
            {**RECURRENT, "bias_ih_l0": half(0, 8)},
            "recurrent biases",
            "8 of 8",
        ),
    ],
    ids=["a norm of 0", "an adapter too large", "biases too large"],
)
def test_what_becomes_infinite_or_nan_is_told(file, state, target, merge, gone, tmp_path):
    torch.save(state, tmp_path / "a.pt")
    done = parity.transfer(tmp_path / "a.pt" if file else state, target, merge=merge)
    assert f"{gone} values became infinite or NaN" in done.notes[0]
    name = done.plan[[bool(entry.merged) for entry in done.plan].index(True)].target
    assert not np.isfinite(done.value[name].numpy()).any()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"merge": 5}, "merge takes names such as 'weight_norm', got 5"),
        ({"merge": "lora=..e--"}, "lora=SCALING for a file, got 'lora=..e--'"),
        ({"merge": "lora=1e999"}, "lora=SCALING for a file, got 'lora=1e999'"),
        ({"ignore": 5}, r"ignore takes patterns of names, got \(5,\)"),
        ({"ignore": [5]}, r"ignore takes patterns of names, got \(5,\)"),
    ],
)
def test_options_of_the_wrong_type_are_named(options, sentence):
    with pytest.raises(InputError, match=sentence):
        parity.transfer(BASE, {"l.weight": torch.zeros(3, 3)}, **options)
