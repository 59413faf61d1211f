"""Convolutions: padding in numbers, kernels turned round, settings that do not agree, and what is refused."""

import numpy as np
import pytest
import torch
from flax import nnx
from helpers import random
from rule_cases import FlaxLayer, TorchLayer, gap, levels, randomised, rngs
from torch import nn
from transfer_helpers import bits

import parity
from parity.weights.layouts import channels_last, flipped_kernel


def image(*shape: int) -> torch.Tensor:
    return torch.from_numpy(random("image", shape).standard_normal(shape).astype(np.float32))


def settings(torch_layer: nn.Module, flax_layer: nnx.Module) -> tuple[str, ...]:
    return parity.transfer(TorchLayer(torch_layer), FlaxLayer(flax_layer)).settings


def flax_conv(kernel: int = 3, **options: object) -> nnx.Conv:
    return nnx.Conv(4, 6, (kernel, kernel), rngs=rngs(), **options)


@pytest.mark.parametrize(("kernel", "size"), [(3, 8), (7, 16)])
def test_same_padding_at_stride_two_is_not_torchs_and_is_reported(kernel, size):
    p = kernel // 2
    torch_layer = randomised(nn.Conv2d(4, 6, kernel, 2, p), "same", kernel)
    same, exact = flax_conv(kernel, strides=2), flax_conv(kernel, strides=2, padding=((p, p), (p, p)))
    told = settings(torch_layer, same)
    assert len(told) == 1
    assert f"padding=({p}, {p}), padding_mode='zeros' in torch, padding='SAME'" in told[0]
    assert f"set padding=(({p}, {p}), ({p}, {p}))" in told[0]
    assert settings(torch_layer, exact) == ()
    x = image(2, 4, size, size)
    assert gap(torch_layer, same, x) > 0.5
    assert gap(torch_layer, exact, x) < 1e-4
    report = parity.compare(TorchLayer(torch_layer), FlaxLayer(same), x, levels=("weights",))
    assert levels(report) == {"weights": "failed"}


def test_an_odd_size_hides_what_same_padding_does_but_not_from_the_settings():
    torch_layer = randomised(nn.Conv2d(4, 6, 3, 2, 1), "odd")
    same = flax_conv(strides=2)
    assert len(settings(torch_layer, same)) == 1
    assert gap(torch_layer, same, image(2, 4, 7, 7)) < 1e-5


@pytest.mark.parametrize(
    ("torch_options", "flax_options"),
    [
        (dict(padding=1), dict(padding="SAME")),
        (dict(padding="same"), dict(padding="SAME")),
        (dict(padding="same", dilation=2), dict(padding=2, kernel_dilation=(2, 2))),
        (dict(padding="valid"), dict(padding="VALID")),
        (dict(padding=0, padding_mode="circular"), dict(padding="VALID")),
        (dict(padding=1, padding_mode="circular", stride=2), dict(padding="CIRCULAR", strides=(2, 2))),
        (dict(padding=1, padding_mode="reflect"), dict(padding="REFLECT")),
        (dict(padding=(2, 0)), dict(padding=((2, 2), 0))),
        (dict(), dict(padding=0, strides=None, input_dilation=(1, 1))),
    ],
    ids=str,
)
def test_settings_that_mean_the_same_agree(torch_options, flax_options):
    assert settings(nn.Conv2d(4, 6, 3, **torch_options), flax_conv(**flax_options)) == ()


@pytest.mark.parametrize(
    ("torch_options", "flax_options", "sentence"),
    [
        (dict(stride=2), dict(padding=0), "stride=(2, 2) in torch, strides=1 in Flax; set strides=(2, 2)"),
        (dict(dilation=2), dict(padding=0), "dilation=(2, 2) in torch, kernel_dilation=1 in Flax; set kernel_dilation=(2, 2)"),
        (dict(), dict(), "that is ((1, 1), (1, 1)) in Flax; set padding=((0, 0), (0, 0))"),
        (dict(padding=1, padding_mode="circular"), dict(padding=1), "set padding='CIRCULAR'"),
        (dict(padding=2, padding_mode="circular"), dict(padding="CIRCULAR"), "jnp.pad(x, ..., mode='wrap')"),
        (dict(padding=1, padding_mode="replicate"), dict(padding=1), "jnp.pad(x, ..., mode='edge')"),
        (dict(), dict(padding=0, input_dilation=2), "torch spreads no input; set input_dilation=1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_planted_setting_is_told(torch_options, flax_options, sentence):
    told = settings(nn.Conv2d(4, 6, 3, **torch_options), flax_conv(**flax_options))
    assert len(told) == 1
    assert told[0].startswith("layer: ")
    assert sentence in told[0]


def test_groups_that_the_shapes_do_not_tell_are_told():
    # One input channel for each output: (6, 1, 3, 3) is a depthwise kernel, and one of a single channel.
    told = settings(nn.Conv2d(1, 6, 3), nnx.Conv(6, 6, (3, 3), padding=0, feature_group_count=6, rngs=rngs()))
    assert told == ("layer: groups=1 in torch, feature_group_count=6 in Flax; set feature_group_count=1",)


def test_a_kernel_of_another_size_is_refused():
    with pytest.raises(parity.TransferError, match=r"so layer.kernel must have \(3, 3, 4, 6\), but it has \(5, 5, 4, 6\)"):
        settings(nn.Conv2d(4, 6, 3), flax_conv(5))


@pytest.mark.parametrize(("k", "s", "p"), [(4, 4, 0), (3, 2, 1), (4, 2, 1), (3, 1, 1)])
def test_a_transposed_convolution_is_turned_round_in_both_ways(k, s, p):
    torch_layer, x = randomised(nn.ConvTranspose2d(4, 4, k, s, p), "turned", k, s), image(2, 4, 6, 5)
    for transposed in (True, False):
        flax_layer = nnx.ConvTranspose(4, 4, (k, k), s, padding=k - 1 - p, transpose_kernel=transposed, rngs=rngs())
        done = parity.transfer(TorchLayer(torch_layer), FlaxLayer(flax_layer))
        assert done.plan[1].layout == ("channels last" if transposed else "flipped")
        assert gap(torch_layer, flax_layer, x) < 1e-4
    flax_layer.kernel.set_value(flax_layer.kernel[...][::-1, ::-1])
    assert gap(torch_layer, flax_layer, x) > 0.5


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize(("k", "s", "d"), [(3, 2, 1), (2, 3, 1), (3, 1, 2), (4, 2, 1)])
def test_the_numbers_of_a_named_transposed_padding_are_those_of_jax(padding, k, s, d):
    flax_layer = nnx.ConvTranspose(4, 6, (k,), s, padding=padding, kernel_dilation=d, transpose_kernel=True, rngs=rngs())
    told = settings(nn.ConvTranspose1d(4, 6, k, s, 0, 0, dilation=d), flax_layer)
    if told:
        low, high = eval(told[0].partition("that is ((")[2].partition("),")[0])
        p = d * (k - 1) - low
        torch_layer = (
            nn.ConvTranspose1d(4, 6, k, s, p, high - low, dilation=d) if 0 <= high - low < max(s, d) and p >= 0 else None
        )
    else:
        torch_layer = nn.ConvTranspose1d(4, 6, k, s, dilation=d)
    if torch_layer is None:
        # torch has no such padding, so that there is nothing to compare with; that it is told is all.
        return
    torch_layer = randomised(torch_layer, "named")
    assert settings(torch_layer, flax_layer) == ()
    assert gap(torch_layer, flax_layer, image(2, 4, 6)) < 1e-5


def test_torchs_padding_taken_literally_is_told():
    told = settings(nn.ConvTranspose2d(4, 6, 4, 2, 1), nnx.ConvTranspose(4, 6, (4, 4), 2, padding=1, rngs=rngs()))
    assert told == (
        "layer: padding=(1, 1), output_padding=(0, 0) in torch, padding=1, that is ((1, 1), (1, 1)) in Flax; "
        "set padding=((2, 2), (2, 2))",
    )


def test_groups_of_a_transposed_convolution_are_refused():
    with pytest.raises(parity.TransferError, match=r"layer: groups=2 in torch, wanted 1: nnx.ConvTranspose has no groups"):
        settings(nn.ConvTranspose2d(4, 6, 3, groups=2), nnx.ConvTranspose(4, 6, (3, 3), rngs=rngs()))


@pytest.mark.parametrize("layout", [channels_last(2), flipped_kernel(3), flipped_kernel(1)], ids=str)
def test_a_layout_and_its_inverse_give_the_kernel_back(layout):
    shape = tuple(range(2, 2 + len(layout.axes)))
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    there = layout.apply(array)
    assert there.shape == layout.shape(shape)
    assert layout.between(shape, there.shape) is layout
    np.testing.assert_array_equal(layout.inverse().apply(there), array)
    np.testing.assert_array_equal(
        layout.apply(layout.inverse().apply(array.copy().reshape(there.shape))), array.reshape(there.shape)
    )


def test_memory_is_shared_only_where_the_layout_is_a_permutation():
    for transposed in (True, False):
        source = TorchLayer(nn.ConvTranspose2d(4, 6, 3))
        target = FlaxLayer(nnx.ConvTranspose(4, 6, (3, 3), padding=2, transpose_kernel=transposed, rngs=rngs()))
        done = parity.transfer(source, target, copy=False)
        assert done.plan[1].shared is transposed
        assert bits(target.layer.bias[...]) == bits(source.layer.bias)
