"""Weights that torch keeps as several arrays: one to one where Flax does too, merged on request, refused otherwise."""

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from helpers import random
from rule_cases import agree, levels, randomised, rngs
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from transfer_helpers import bits, snapshot

import parity
from parity import cli
from parity.weights.computed import computed
from parity.weights.merging import effective


def old(make: Callable[..., nn.Module], layer: nn.Module, **options: Any) -> nn.Module:
    """The form of torch.nn.utils, of which torch says that the other one is to be used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return make(layer, **options)


class Adapted(nn.Module):
    """A linear layer with an adapter, under the names and with the arithmetic of peft."""

    def __init__(self, rank: int = 2, alpha: float = 6.0):
        super().__init__()
        self.base_layer = nn.Linear(3, 4)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(3, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, 4, bias=False)})
        self.scaling = {"default": alpha / rank}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.base_layer(x)
        return found + self.lora_B["default"](self.lora_A["default"](x)) * self.scaling["default"]


class Net(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class FlaxNet(nnx.Module):
    def __init__(self, layer: nnx.Module):
        self.layer = layer

    def __call__(self, x: Any) -> Any:
        return jnp.moveaxis(self.layer(jnp.moveaxis(x, 1, -1)), -1, 1) if x.ndim == 3 else self.layer(x)


def flax_linear() -> FlaxNet:
    return FlaxNet(nnx.Linear(3, 4, rngs=rngs()))


def flax_conv() -> FlaxNet:
    return FlaxNet(nnx.Conv(3, 4, (2,), padding="VALID", rngs=rngs()))


def spectral(make: Any, layer: nn.Module) -> nn.Module:
    """In evaluation, a few iterations from converged: the stored vectors matter."""
    made = old(make, layer)
    made(torch.zeros(2, 3, *(5,) * (not isinstance(layer, nn.Linear))))
    return made.eval()


PIECES: dict[str, tuple[str, Callable[[], nn.Module], Callable[[], FlaxNet]]] = {
    "weight_norm": ("weight_norm", lambda: parametrizations.weight_norm(nn.Linear(3, 4)), flax_linear),
    "weight_norm dim 1": ("weight_norm", lambda: parametrizations.weight_norm(nn.Conv1d(3, 4, 2), dim=1), flax_conv),
    "weight_norm of all": ("weight_norm", lambda: parametrizations.weight_norm(nn.Linear(3, 4), dim=None), flax_linear),
    "old weight_norm": ("weight_norm", lambda: old(nn.utils.weight_norm, nn.Conv1d(3, 4, 2)), flax_conv),
    "spectral_norm": ("spectral_norm", lambda: spectral(parametrizations.spectral_norm, nn.Linear(3, 4)), flax_linear),
    "old spectral_norm": ("spectral_norm", lambda: spectral(nn.utils.spectral_norm, nn.Conv1d(3, 4, 2)), flax_conv),
    "lora": ("lora", Adapted, flax_linear),
}


def source_of(name: str) -> Net:
    """The model, random in every weight; vectors of an iteration stay what it made of the first weight."""
    source = Net(PIECES[name][1]()).eval()
    rng = random("merging", name)
    with torch.no_grad():
        for path, p in source.named_parameters():
            p.copy_(torch.from_numpy(rng.standard_normal(tuple(p.shape))) if "orig" not in path or "original" in path else p)
    return source


def weight_of(source: Net, name: str) -> torch.Tensor:
    """The weight that the layer itself uses."""
    layer = source.layer
    if name == "lora":
        return layer.base_layer.weight + layer.lora_B["default"].weight @ layer.lora_A["default"].weight * 3.0
    source(torch.zeros(2, 3, *(5,) * ("Conv" in type(layer).__name__)))
    return layer.weight


def inputs(source: Net) -> torch.Tensor:
    conv = "Conv" in type(source.layer).__name__
    return torch.from_numpy(random("merging x").standard_normal((2, 3, 5) if conv else (2, 3)).astype(np.float32))


@pytest.mark.parametrize("name", PIECES)
def test_pieces_are_refused_and_the_way_out_is_named(name):
    kind, _, make = PIECES[name]
    source, target = source_of(name), make()
    with pytest.raises(parity.TransferError) as refused:
        parity.transfer(source, target)
    assert f'pass merge="{kind}" to send the computed weight, or ' in str(refused.value)
    assert "torch computes layer.weight from layer." in str(refused.value)
    assert "layer.kernel" in str(refused.value)
    with pytest.raises(parity.TransferError, match=r"cannot be told from one array of Flax's; (call torch.nn|let peft)"):
        parity.transfer(target, source)


@pytest.mark.parametrize("name", PIECES)
def test_the_merged_weight_is_torchs_own_bit_for_bit_and_the_function_is_the_same(name):
    kind, _, make = PIECES[name]
    source, target = source_of(name), make()
    before = snapshot(source)
    done = parity.transfer(source, target, merge=kind)
    assert snapshot(source) == before
    wanted = weight_of(source, name).detach()
    flat = target.layer.kernel[...]
    assert bits(jnp.transpose(flat, (2, 1, 0) if flat.ndim == 3 else (1, 0))) == bits(wanted)
    entry = next(entry for entry in done.plan if entry.source == "layer.weight")
    assert len(entry.merged) >= 2
    assert set(entry.merged) <= set(before)
    assert any(note.startswith("layer.weight is merged from layer.") and "there is no way back" in note for note in done.notes)
    assert f"merged from {entry.merged[0]}" in str(done)
    assert snapshot(source) == before
    # Its own weight is one rounding off what the layer computes, which float64 sees; the weight itself is torch's.
    plain = Net(nn.Conv1d(3, 4, 2) if flat.ndim == 3 else nn.Linear(3, 4)).eval()
    with torch.no_grad():
        plain.layer.weight.copy_(wanted)
        plain.layer.bias.copy_(source.state_dict()["layer.base_layer.bias" if kind == "lora" else "layer.bias"])
    agree(plain, target, inputs(source))
    report = parity.compare(source, target, inputs(source), levels=("native",))
    assert levels(report) == {"native": "passed"}, str(report)


@pytest.mark.parametrize("name", PIECES)
def test_a_state_dict_and_a_file_are_merged_too(name, tmp_path: Path):
    kind, _, make = PIECES[name]
    source, target = source_of(name), make()
    wanted = weight_of(source, name).detach().numpy()
    state = {path: tensor.detach().clone() for path, tensor in source.state_dict().items()}
    merge = "lora=3.0" if kind == "lora" else kind
    parity.transfer(state, target, merge=merge)
    kernel = np.asarray(target.layer.kernel[...]).transpose((2, 1, 0) if target.layer.kernel.ndim == 3 else (1, 0))
    assert bits(kernel) == bits(wanted)
    save_file(state, tmp_path / "model.safetensors")
    done = parity.transfer(tmp_path / "model.safetensors", make(), merge=[merge])
    read = np.asarray(done.value.layer.kernel[...]).transpose((2, 1, 0) if kernel.ndim == 3 else (1, 0))
    np.testing.assert_array_max_ulp(read, wanted, maxulp=4)
    assert any("computed in float64 and rounded once" in note for note in done.notes)


def test_norm_and_direction_are_told_apart():
    source = source_of("weight_norm")
    target = FlaxNet(nnx.WeightNorm(nnx.Linear(3, 4, rngs=rngs()), epsilon=0.0, rngs=rngs()))
    parity.transfer(source, target)
    agree(source, target, inputs(source))
    # g and v swapped as far as shapes allow: the norms of another row, and the direction as it is.
    target.layer.scales = nnx.data({("kernel",): target.layer.scales[("kernel",)][::-1]})
    report = parity.compare(source, target, inputs(source), levels=("weights", "identical"))
    assert levels(report) == {"weights": "failed", "identical": "failed"}
    assert "layer.parametrizations.weight.original0" in str(report)


def test_the_way_back_from_a_wrapper_is_bit_equal_until_it_is_called():
    source = source_of("weight_norm")
    target = FlaxNet(nnx.WeightNorm(nnx.Linear(3, 4, rngs=rngs()), epsilon=0.0, rngs=rngs()))
    done = parity.transfer(source, target)
    assert any("each call of nnx.WeightNorm writes the normalised kernel over the direction" in s for s in done.alone)
    back = Net(parametrizations.weight_norm(nn.Linear(3, 4)))
    parity.transfer(target, back)
    assert snapshot(back) == snapshot(source)
    target(jnp.ones((2, 3)))
    parity.transfer(target, back)
    assert bits(back.layer.parametrizations.weight.original0) == bits(source.layer.parametrizations.weight.original0)
    assert bits(back.layer.parametrizations.weight.original1) != bits(source.layer.parametrizations.weight.original1)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (dict(), "epsilon=1e-12 in Flax, wanted 0.0: torch adds nothing to the squares that it sums"),
        (dict(epsilon=0.0, feature_axes=0), "weight_norm with dim=0 in torch, feature_axes=0 in Flax; set feature_axes=-1"),
    ],
)
def test_a_planted_setting_is_told(options, sentence):
    # Square, so that no shape tells.
    source = Net(parametrizations.weight_norm(nn.Linear(4, 4)))
    target = FlaxNet(nnx.WeightNorm(nnx.Linear(4, 4, rngs=rngs()), rngs=rngs(), **options))
    assert any(sentence in told for told in parity.transfer(source, target).settings)


def test_a_wrapper_without_scales_is_refused():
    target = FlaxNet(nnx.WeightNorm(nnx.Linear(3, 4, rngs=rngs()), use_scale=False, epsilon=0.0, rngs=rngs()))
    with pytest.raises(parity.TransferError, match=r"torch computes layer\.weight from"):
        parity.transfer(source_of("weight_norm"), target)


@pytest.mark.parametrize("use_scale", [True, False])
@pytest.mark.parametrize("merge", [(), "weight_norm"])
def test_a_wrapper_around_a_layer_that_torch_does_not_normalise_is_refused(use_scale, merge):
    source = source_of("weight_norm") if merge else Net(nn.Linear(3, 4))
    wrapper = nnx.WeightNorm(nnx.Linear(3, 4, rngs=rngs()), use_scale=use_scale, epsilon=0.0, rngs=rngs())
    why = "and the torch layer keeps no norm" if use_scale else "whose use_scale=False keeps no norm"
    for given in (source, source.state_dict()):
        with pytest.raises(parity.TransferError, match=rf"layer is an nnx\.WeightNorm in Flax, {why}"):
            parity.transfer(given, FlaxNet(wrapper), merge=merge)
    if not merge:
        with pytest.raises(parity.TransferError, match=r"layer is an nnx\.WeightNorm in Flax"):
            parity.transfer(FlaxNet(wrapper), source)


def test_a_merged_weight_travels_to_torch_too():
    source, target = source_of("weight_norm"), Net(nn.Linear(3, 4))
    parity.transfer(source, target, merge="all")
    assert bits(target.layer.weight) == bits(weight_of(source, "weight_norm"))


def test_a_file_is_merged_by_the_command(tmp_path: Path, monkeypatch, capsys):
    source = source_of("weight_norm")
    save_file(source.state_dict(), tmp_path / "pieces.safetensors")
    arguments = [str(tmp_path / "pieces.safetensors"), str(tmp_path / "whole.safetensors"), "--merge", "weight_norm"]
    monkeypatch.setattr(sys, "argv", ["parity", "transfer", *arguments, "--json"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    plan = {entry["target"]: entry["merged"] for entry in json.loads(capsys.readouterr().out)["plan"]}
    assert plan["layer.weight"] == [f"layer.parametrizations.weight.original{i}" for i in (0, 1)]
    np.testing.assert_array_max_ulp(
        load_file(tmp_path / "whole.safetensors")["layer.weight"].numpy(), weight_of(source, "weight_norm").detach().numpy(), 4
    )


@pytest.mark.parametrize("rename", [None, {"base_model.model": ""}])
def test_a_model_inside_that_of_peft_is_met_and_told_of(rename):
    source, target = nn.ModuleDict({"base_model": nn.ModuleDict({"model": source_of("lora")})}), flax_linear()
    done = parity.transfer(source, target, merge="lora", rename=rename)
    assert any("peft puts that there" in note for note in done.notes) is (rename is None), done.notes
    inner = source["base_model"]["model"]
    assert bits(target.layer.kernel[...].T) == bits(weight_of(inner, "lora").detach())


def test_an_iteration_is_refused_also_by_the_wrapper_of_flax():
    target = FlaxNet(nnx.SpectralNorm(nnx.Linear(3, 4, rngs=rngs()), rngs=rngs()))
    with pytest.raises(parity.TransferError, match=r"nnx\.SpectralNorm has no place for them: it iterates once more"):
        parity.transfer(source_of("spectral_norm"), target)


def test_a_training_model_is_not_moved_by_merging():
    source = source_of("spectral_norm").train()
    before = snapshot(source)
    parity.transfer(source, flax_linear(), merge="spectral_norm")
    assert snapshot(source) == before
    assert source.training


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda layer: setattr(layer, "merged", True), 0.0),
        (lambda layer: setattr(layer, "disable_adapters", True), 0.0),
        (lambda layer: layer.scaling.update(default=0.5), 0.5),
        (lambda layer: setattr(layer, "active_adapters", []), 0.0),
    ],
)
def test_an_adapter_counts_as_the_model_says(change, wanted):
    source, target = source_of("lora"), flax_linear()
    change(source.layer)
    parity.transfer(source, target, merge="lora")
    base, a, b = source.layer.base_layer.weight, source.layer.lora_A["default"].weight, source.layer.lora_B["default"].weight
    assert bits(target.layer.kernel[...].T) == bits((base + b @ a * wanted if wanted else base).detach())


def test_an_adapter_in_half_precision_is_multiplied_in_float32_as_peft_does():
    source = source_of("lora").to(torch.bfloat16)
    target = FlaxNet(nnx.Linear(3, 4, param_dtype=jnp.bfloat16, rngs=rngs()))
    parity.transfer(source, target, merge="lora")
    base, a, b = source.layer.base_layer.weight, source.layer.lora_A["default"].weight, source.layer.lora_B["default"].weight
    wanted = base + (b.float() @ a.float() * 3.0).to(torch.bfloat16)
    assert torch.equal(torch.from_numpy(np.asarray(target.layer.kernel[...].T, np.float32)), wanted.detach().float())


def two_adapters() -> Net:
    source = source_of("lora")
    source.layer.lora_A["other"], source.layer.lora_B["other"] = nn.Linear(3, 2, bias=False), nn.Linear(2, 4, bias=False)
    source.layer.scaling["other"] = 2.0
    return source


def dora() -> Net:
    source = source_of("lora")
    source.layer.use_dora = {"default": True}
    return source


def doubly() -> Net:
    source = source_of("weight_norm")
    parametrizations.orthogonal(source.layer, "weight")
    return source


@pytest.mark.parametrize(
    ("make", "merge", "sentence"),
    [
        (lambda: source_of("lora").state_dict(), "lora", "pass merge='lora=SCALING' with lora_alpha / r"),
        (lambda: two_adapters().state_dict(), "lora=1.0", "one adapter of two matrices can be merged"),
        (dora, "lora", r"the adapter of layer.weight is no plain LoRA \(DoRA, or a bias\); let peft merge it"),
        (lambda: Net(nn.Linear(3, 4)), "lora", "merge='lora': the source has no such arrays"),
        (flax_linear, "all", "merge is for a source with PyTorch's names"),
        (lambda: source_of("lora"), "laura", "merge takes 'weight_norm', 'spectral_norm', 'lora', 'recurrent biases', 'all'"),
        (lambda: source_of("lora"), "weight_norm=2", "and lora=SCALING for a file, got 'weight_norm=2'"),
        (doubly, "weight_norm", "layer.weight is parametrized by _WeightNorm, _Orthogonal, not by weight_norm alone"),
    ],
)
def test_what_cannot_be_merged_is_refused(make, merge, sentence):
    target = flax_linear()
    with pytest.raises(parity.InputError, match=sentence):
        parity.transfer(make(), target, merge=merge)


def test_both_adapters_of_a_model_are_added():
    source, target = two_adapters(), flax_linear()
    parity.transfer(source, target, merge="all")
    layer = source.layer
    wanted = layer.base_layer.weight + layer.lora_B["default"].weight @ layer.lora_A["default"].weight * 3.0
    wanted = wanted + layer.lora_B["other"].weight @ layer.lora_A["other"].weight * 2.0
    assert bits(target.layer.kernel[...].T) == bits(wanted.detach())


def test_names_of_the_users_own_are_left_alone():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.a_g, self.a_v = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, 2))

    class FlaxOwn(nnx.Module):
        def __init__(self):
            self.a_g, self.a_v = nnx.Param(jnp.zeros(3)), nnx.Param(jnp.zeros((3, 2)))

    target = FlaxOwn()
    assert parity.transfer(Own(), target).passed
    assert float(target.a_v[...].sum()) == 6


@pytest.mark.parametrize("ambiguous", [False, True])
def test_the_axis_of_an_iteration_is_found_in_the_numbers(ambiguous):
    layer = parametrizations.spectral_norm(nn.ConvTranspose1d(4, 4, 3)).eval()
    if ambiguous:
        with torch.no_grad():
            layer.parametrizations.weight[0]._v.fill_(0.1)
    leaves = parity.frameworks.load("torch").leaves(layer.state_dict())
    one = next(one for one in computed(leaves) if one.kind == "spectral_norm")
    if ambiguous:
        with pytest.raises(parity.InputError, match="do not tell along which axis spectral_norm was taken"):
            effective(one, None)
    else:
        np.testing.assert_allclose(effective(one, None), layer.weight.detach().numpy(), rtol=1e-6)


QUANTISED = {
    "bitsandbytes": {"l.weight": torch.uint8, "l.weight.absmax": torch.float32, "l.weight.quant_map": torch.float32},
    "GPTQ or AWQ": {"l.qweight": torch.int32, "l.qzeros": torch.int32, "l.scales": torch.float16},
    "compressed-tensors": {"l.weight_packed": torch.int32, "l.weight_scale": torch.float16},
}


@pytest.mark.parametrize("maker", QUANTISED)
def test_a_weight_in_a_few_bits_is_refused_with_the_reason(maker):
    state = {name: torch.zeros(4, 3).to(dtype) for name, dtype in QUANTISED[maker].items()}
    with pytest.raises(
        parity.TransferError, match=rf"l.\w+.*: the weight was quantised by {maker} and is not there as numbers"
    ):
        parity.transfer(state, FlaxNet(nnx.Linear(3, 4, rngs=rngs())), rename={"l": "layer"})


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_quantised_tensor_is_refused():
    weight = torch.quantize_per_tensor(torch.ones(4, 3), 0.1, 0, torch.qint8)
    with pytest.raises(parity.TransferError, match=r"weight is not dense, it has layout .* dtype qint8; use .* .dequantize"):
        parity.transfer({"weight": weight, "bias": torch.ones(4)}, nnx.Linear(3, 4, rngs=rngs()))


def test_a_parametrization_of_another_kind_is_named():
    source = nn.Linear(4, 4)
    parametrize.register_parametrization(source, "weight", nn.Softplus())
    with pytest.raises(
        parity.TransferError, match=r"parametrizations\.weight\.original is what a parametrization computes a param"
    ):
        parity.transfer(source, nnx.Linear(4, 4, rngs=rngs()))


# ---------------------------------------------------------------- two biases to one


def recurrent(name: str, **options: Any) -> nn.Module:
    source = getattr(nn, name)(3, 4, batch_first=True, **options)
    rng = random("recurrent biases", name)
    with torch.no_grad():
        for p in source.parameters():
            p.copy_(torch.from_numpy(rng.standard_normal(tuple(p.shape))))
        for path, p in source.named_parameters():
            if name == "GRU" and "bias_hh" in path:
                p[8:] = 0
    return source.eval()


FLAX_CELLS = {"GRU": nnx.GRUCell, "LSTM": nnx.OptimizedLSTMCell, "RNN": nnx.SimpleCell}


class Outputs(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


@pytest.mark.parametrize("name", FLAX_CELLS)
@pytest.mark.parametrize("both", [False, True])
def test_the_sum_of_two_biases_travels_if_it_is_asked_for(name, both):
    source = Outputs(recurrent(name, bidirectional=both))
    runs = [nnx.RNN(FLAX_CELLS[name](3, 4, rngs=rngs())) for _ in range(2)]
    target = FlaxNet(nnx.Bidirectional(*runs) if both else runs[0])
    with pytest.raises(parity.TransferError, match='pass merge="recurrent biases" to send the rounded sum'):
        parity.transfer(source, target)
    done = parity.transfer(source, target, merge="recurrent biases")
    assert sum("values are rounded" in note for note in done.notes) == 1 + both
    assert (
        "layer.bias_ih_l0 is merged from layer.bias_ih_l0 and layer.bias_hh_l0 (recurrent biases), a sum of which"
        in done.notes[0]
    )
    x = torch.from_numpy(random("recurrent x").standard_normal((2, 5, 3)).astype(np.float32))
    folded = Outputs(recurrent(name, bidirectional=both))
    with torch.no_grad():
        for path, first in folded.layer.named_parameters():
            if "bias_ih" in path:
                second = getattr(folded.layer, path.replace("ih", "hh"))
                first.add_(second)
                second.zero_()
    flax = Sequence(target.layer)
    agree(folded, flax, x)
    report = parity.compare(source, flax, x, levels=("native",))
    assert levels(report) == {"native": "passed"}, str(report)


class Sequence(FlaxNet):
    def __call__(self, x: Any) -> Any:
        return self.layer(x)


def test_a_bias_inside_the_reset_gate_is_never_folded():
    source = recurrent("GRU")
    with torch.no_grad():
        source.bias_hh_l0[9] = 0.5
    for given in (source, source.state_dict()):
        with pytest.raises(parity.TransferError, match=r"no bias inside the reset gate \(b_hn\).* \+ r \* \(W_hn h \+ b_hn"):
            parity.transfer(given, nnx.RNN(nnx.GRUCell(3, 4, rngs=rngs())), merge="recurrent biases")


def test_biases_that_are_zero_need_no_merging_and_come_back():
    source, target = randomised(nn.LSTMCell(3, 4), "zero"), nnx.LSTMCell(3, 4, rngs=rngs())
    done = parity.transfer(source, target, merge="recurrent biases")
    assert not done.notes
    assert not any(entry.merged for entry in done.plan)
    back = nn.LSTMCell(3, 4)
    parity.transfer(target, back)
    assert snapshot(back) == snapshot(source)


def test_a_merged_bias_is_cut_into_gates():
    source, target = nn.LSTMCell(3, 4), nnx.LSTMCell(3, 4, rngs=rngs())
    parity.transfer(source, target, merge="recurrent biases")
    merged = (source.bias_ih + source.bias_hh).detach()
    for number, part in enumerate((target.hi, target.hf, target.hg, target.ho)):
        assert bits(part.bias[...]) == bits(merged[4 * number : 4 * number + 4])
