"""Normalisation: epsilons, running statistics, the batch counter, and what has no counterpart."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from helpers import random
from rule_cases import FlaxLayer, TorchLayer, agree, evaluated, gap, levels, randomised, rngs
from torch import nn
from transfer_helpers import bits, snapshot

import parity

EXACT = dict(use_fast_variance=False)


def values(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.from_numpy((scale * random("norm", shape).standard_normal(shape)).astype(np.float32))


def settings(torch_layer: nn.Module, flax_layer: nnx.Module) -> tuple[str, ...]:
    return parity.transfer(TorchLayer(torch_layer), FlaxLayer(flax_layer)).settings


@pytest.mark.parametrize(
    ("torch_layer", "flax_layer", "sentence"),
    [
        (
            nn.LayerNorm(8),
            nnx.LayerNorm(8, **EXACT, rngs=rngs()),
            "eps=1e-05 in torch, epsilon=1e-06 in Flax; set epsilon=1e-05",
        ),
        (
            nn.GroupNorm(2, 8),
            nnx.GroupNorm(8, 2, **EXACT, rngs=rngs()),
            "eps=1e-05 in torch, epsilon=1e-06 in Flax; set epsilon=1e-05",
        ),
        (
            nn.RMSNorm(8),
            nnx.RMSNorm(8, rngs=rngs()),
            "eps=None (the machine epsilon) in torch, epsilon=1e-06 in Flax; set epsilon=1.1920928955078125e-07",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_epsilon_left_at_flaxs_default_is_told_and_shows_on_small_inputs(torch_layer, flax_layer, sentence):
    assert settings(torch_layer, flax_layer) == (f"layer: {sentence}",)
    errors = [gap(torch_layer, flax_layer, values(4, 8, scale=scale), None) for scale in (1.0, 1e-2, 1e-3)]
    assert errors[0] < 1e-3
    assert errors[1] > 5e-3
    assert errors[2] > 0.1
    flax_layer.epsilon = 2.0**-23 if isinstance(torch_layer, nn.RMSNorm) else 1e-5
    assert settings(torch_layer, flax_layer) == ()
    assert max(gap(torch_layer, flax_layer, values(4, 8, scale=scale), None) for scale in (1.0, 1e-2, 1e-3)) < 1e-6


def test_an_epsilon_given_by_position_is_told():
    # The first argument of Linen's LayerNorm is epsilon; whoever writes 12 there gets this.
    told = settings(nn.LayerNorm(12), nnx.LayerNorm(12, epsilon=12, **EXACT, rngs=rngs()))
    assert told == ("layer: eps=1e-05 in torch, epsilon=12 in Flax; set epsilon=1e-05",)


def test_the_axes_of_a_norm_are_told_where_no_shape_tells_them():
    plain = dict(use_bias=False, use_scale=False, epsilon=1e-5, **EXACT, rngs=rngs())
    torch_layer, x = nn.LayerNorm((5, 6), elementwise_affine=False), values(3, 5, 6) * torch.arange(1.0, 6.0)[:, None]
    last, both = nnx.LayerNorm(6, **plain), nnx.LayerNorm(6, reduction_axes=(-2, -1), **plain)
    assert settings(torch_layer, last) == (
        "layer: normalized_shape=(5, 6) in torch, reduction_axes=-1 in Flax; set reduction_axes=(-2, -1)",
    )
    assert gap(torch_layer, last, x, None) > 0.1
    assert settings(torch_layer, both) == ()
    assert gap(torch_layer, both, x, None) < 1e-5
    assert settings(nn.LayerNorm(6, elementwise_affine=False), both) == (
        "layer: normalized_shape=(6,) in torch, reduction_axes=(-2, -1) in Flax; set reduction_axes=-1",
    )
    turned = nnx.RMSNorm(6, epsilon=2.0**-23, feature_axes=-2, rngs=rngs())
    assert settings(nn.RMSNorm(6), turned) == (
        "layer: normalized_shape=(6,) in torch, feature_axes=-2 in Flax; set feature_axes=-1",
    )


@pytest.mark.parametrize(
    ("torch_options", "flax_options", "sentence"),
    [
        (dict(), dict(momentum=0.1), "momentum=0.1 in torch, momentum=0.1 in Flax; set momentum=0.9"),
        (dict(), dict(), "momentum=0.1 in torch, momentum=0.99 in Flax; set momentum=0.9"),
        (dict(momentum=None), dict(momentum=0.9), "momentum=None in torch averages all batches alike"),
        (dict(eps=1e-3), dict(momentum=0.9), "eps=0.001 in torch, epsilon=1e-05 in Flax; set epsilon=0.001"),
        (dict(), dict(momentum=0.9, use_fast_variance=True), "use_fast_variance=True in Flax"),
        (dict(), dict(momentum=0.9, axis=1), "axis=1 in Flax, wanted -1: the channels are last in Flax"),
    ],
)
def test_a_planted_setting_of_batch_norm_is_told(torch_options, flax_options, sentence):
    flax_layer = nnx.BatchNorm(8, **(EXACT | flax_options), rngs=rngs())
    told = settings(nn.BatchNorm2d(8, **torch_options), flax_layer)
    assert len(told) == 1
    assert sentence in told[0]
    report = parity.compare(
        *(TorchLayer(nn.BatchNorm2d(8, **torch_options)).eval(), evaluated(FlaxLayer(flax_layer)), values(2, 8, 3, 2)),
        levels=("weights",),
    )
    assert levels(report) == {"weights": "failed"}


def test_planted_groups_are_told():
    told = settings(nn.GroupNorm(4, 8, 1e-6), nnx.GroupNorm(8, 2, **EXACT, rngs=rngs()))
    assert told == ("layer: num_groups=4 in torch, num_groups=2 in Flax; set num_groups=4",)


def trained() -> TorchLayer:
    layer = randomised(TorchLayer(nn.BatchNorm1d(3)), "trained").train()
    layer.layer.running_mean.zero_()
    layer.layer.running_var.fill_(1)
    layer(values(4, 3))
    return layer.eval()


def flax_batch_norm() -> FlaxLayer:
    return FlaxLayer(nnx.BatchNorm(3, momentum=0.9, **EXACT, rngs=rngs()), None)


def test_running_statistics_travel_and_the_counter_is_told_of_and_kept():
    source, target = trained(), evaluated(flax_batch_norm())
    done = parity.transfer(source, target)
    assert done.passed
    counter = "layer.num_batches_tracked is left out: nnx.BatchNorm counts no batches"
    assert [sentence for sentence in done.alone if sentence.startswith(counter)]
    assert f"  {counter}" in str(done)
    x = values(4, 3)
    agree(source, target, x)
    target.layer.mean.set_value(jnp.zeros(3))
    target.layer.var.set_value(jnp.ones(3))
    assert gap(source.layer, target.layer, x, None) > 1e-2
    report = parity.compare(source, target, x, levels=("weights",))
    assert {finding.where for finding in report.levels[0].findings} == {"layer.running_mean", "layer.running_var"}
    assert any(note.startswith(counter) for note in report.levels[0].notes)


def test_the_counter_stays_on_the_way_back_in_a_module_and_in_a_state_dict():
    source, target = trained(), flax_batch_norm()
    parity.transfer(source, target)
    before = snapshot(source)
    assert bits(source.layer.num_batches_tracked) == bits(torch.tensor(8))
    for back in (source, source.state_dict()):
        done = parity.transfer(target, back)
        assert snapshot(done.value) == before
        assert any("layer.num_batches_tracked stays as it is" in sentence for sentence in done.alone)


def test_a_counter_that_flax_has_travels():
    class Counting(nnx.BatchNorm):
        def __init__(self):
            super().__init__(3, momentum=0.9, **EXACT, rngs=rngs())
            self.num_batches_tracked = nnx.BatchStat(jnp.zeros((), jnp.int32))

    target = FlaxLayer(Counting(), None)
    parity.transfer(trained(), target, cast="target")
    assert int(target.layer.num_batches_tracked[...]) == 8


def test_a_flax_training_step_stores_the_biased_variance_and_that_is_told():
    x, source, target = values(4, 3), trained().train(), flax_batch_norm()
    done = parity.transfer(source, target)
    assert any("stores the biased variance" in sentence for sentence in done.alone)
    before = source.layer.running_var.numpy().copy()
    expected, actual = source(x).detach().numpy(), np.asarray(target.layer(jnp.asarray(x.numpy())))
    assert np.abs(expected - actual).max() < 1e-5
    theirs, ours = np.asarray(target.layer.var[...]), source.layer.running_var.numpy()
    assert np.abs(theirs - ours).max() > 1e-3
    np.testing.assert_allclose(0.9 * before + (theirs - 0.9 * before) * 4 / 3, ours, rtol=1e-5)


@pytest.mark.parametrize(
    ("torch_layer", "flax_layer", "sentence"),
    [
        (
            nn.BatchNorm1d(3, track_running_stats=False),
            nnx.BatchNorm(3, rngs=rngs()),
            "track_running_stats=False in torch, wanted True: nnx.BatchNorm always keeps running statistics",
        ),
        (
            nn.InstanceNorm1d(3, track_running_stats=True),
            nnx.InstanceNorm(3, rngs=rngs()),
            "layer.running_mean has no counterpart: nnx.InstanceNorm keeps no running statistics",
        ),
        (nn.PReLU(3), nnx.PReLU(), r"layer.weight has shape \(3,\), so layer.negative_slope must have \(3,\), but it has \(\)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_counterpart_is_refused(torch_layer, flax_layer, sentence):
    with pytest.raises(parity.TransferError, match=sentence):
        settings(torch_layer, flax_layer)


@pytest.mark.parametrize("shift", [1000.0])
def test_fast_variance_is_told_for_it_loses_digits(shift):
    torch_layer, fast = nn.LayerNorm(16), nnx.LayerNorm(16, epsilon=1e-5, rngs=rngs())
    assert "use_fast_variance=True in Flax" in settings(torch_layer, fast)[0]
    assert gap(torch_layer, fast, values(6, 16) + shift, None) > 10 * gap(
        torch_layer, nnx.LayerNorm(16, epsilon=1e-5, **EXACT, rngs=rngs()), values(6, 16) + shift, None
    )
