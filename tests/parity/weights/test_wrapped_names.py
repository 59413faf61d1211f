"""What wrappers put before every name is left out of the names and told; where that is not certain, nothing is."""

import re
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from checkpoint_helpers import FlaxPair, TorchPair
from flax import nnx
from torch import nn
from transfer_helpers import FlaxHolder, Holder, rngs, scramble, snapshot, transposed

import parity
from parity import InputError, TransferError


def named(prefix: str) -> dict[str, torch.Tensor]:
    """The state_dict of a model inside a wrapper."""
    return {f"{prefix}{name}": tensor for name, tensor in scramble(TorchPair(), "wrapped").state_dict().items()}


def parallel(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        # On a machine with cards it would warn of an unbalanced pair.
        warnings.simplefilter("ignore")
        return nn.DataParallel(model)


def compiled(model: nn.Module) -> nn.Module:
    # What compiles makes no difference to the names, and this one needs no compiler to be loaded.
    return torch.compile(model, backend="eager")


def regional(model: nn.Module) -> nn.Module:
    """As is usual: each layer compiled by itself."""
    model.dense = compiled(model.dense)
    return model


class Trainer(nn.Module):
    """As a Lightning module holds its model."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.net = model

    def forward(self, x):
        return self.net(x)


WRAPPED = {
    "compiled": (compiled, "'_orig_mod': torch.compile puts that there"),
    "parallel": (parallel, "'module': torch.nn.DataParallel, DistributedDataParallel and AveragedModel put that there"),
    "trainer": (Trainer, "'net': Lightning modules and other trainers put that there"),
    "averaged": (torch.optim.swa_utils.AveragedModel, "'module': torch.nn.DataParallel"),
    "nested": (lambda m: parallel(compiled(m)), "'module._orig_mod': torch.nn.DataParallel"),
    "in-a-trainer": (lambda m: Trainer(compiled(m)), "'net._orig_mod': Lightning modules"),
    "regional": (regional, "_orig_mod in names of the source: torch.compile puts that there; left out of its names"),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_a_wrapped_model_is_a_source_and_a_target_like_the_model_inside(name):
    wrap, words = WRAPPED[name]
    plain = scramble(TorchPair(), "wrapped")
    expected = snapshot(plain)
    wrapped = wrap(plain)
    before = list(wrapped.state_dict())
    target = FlaxPair(rngs())
    done = parity.transfer(wrapped, target)
    assert snapshot(target)["dense.kernel"] == transposed(expected["dense.weight"])
    assert snapshot(target)["norm.scale"] == expected["norm.weight"]
    [note] = done.notes
    assert words in note and note.endswith("left out of its names")
    assert f"  note: {note}" in str(done).splitlines()
    assert done.to_dict()["notes"] == [note]
    # Its own names are what the plan shows, and what can be passed again.
    assert {entry.source for entry in done.plan} <= set(before)
    assert parity.transfer(wrapped, FlaxPair(rngs()), rename=done.rename).rename == done.rename
    # A setting that does not agree is told under the name of the model inside.
    loose = FlaxPair(rngs())
    loose.norm = nnx.LayerNorm(4, rngs=rngs())
    assert any(sentence.startswith("norm: eps=1e-05") for sentence in parity.transfer(wrapped, loose).settings)
    for flax in (target, nnx.state(target)):
        back = wrap(scramble(TorchPair(), "other"))
        told = parity.transfer(flax, back)
        assert list(back.state_dict()) == before
        ours = {k: v for k, v in snapshot(back).items() if k != "n_averaged"}
        assert list(ours.values()) == list(expected.values())
        assert "of the target" in told.notes[0]


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "_fsdp_wrapped_module.", "model.", "net.", "ema_model.", "shadow."]
)
def test_the_prefix_may_be_in_a_tree_or_file_on_either_side(prefix, tmp_path):
    expected, target = snapshot(named("")), FlaxPair(rngs())
    done = parity.transfer(named(prefix), target)
    assert f"every name of the source begins with {prefix[:-1]!r}" in done.notes[0]
    filled = snapshot(target)
    for end in (".pt", ".safetensors"):
        parity.transfer(named(prefix), tmp_path / f"a{end}")
        other = FlaxPair(rngs())
        assert f"every name of the source begins with {prefix[:-1]!r}" in parity.transfer(tmp_path / f"a{end}", other).notes[0]
        assert snapshot(other) == filled
        # The file keeps the names of what it is to be like.
        parity.transfer(target, tmp_path / f"b{end}", like=named(prefix))
        assert snapshot(parity.transfer(tmp_path / f"b{end}", named(prefix)).value) == snapshot(named(prefix))
    # Between two of torch too.
    back = parity.transfer(named(prefix), TorchPair())
    assert snapshot(back.value) == expected
    assert snapshot(parity.transfer(TorchPair(), named(prefix)).value).keys() == named(prefix).keys()


def test_a_prefix_of_flax_is_left_out_too():
    source = scramble(TorchPair(), "wrapped")
    done = parity.transfer(source, nnx.Dict(model=FlaxPair(rngs())))
    assert "every name of the target begins with 'model'" in done.notes[0]
    assert {entry.source: entry.target for entry in done.plan}["norm.bias"] == "model.norm.bias"
    both = parity.transfer(named("module."), nnx.Dict(net=FlaxPair(rngs())))
    assert [note.split(":")[0] for note in both.notes] == [
        "every name of the source begins with 'module'",
        "every name of the target begins with 'net'",
    ]


def test_a_name_that_both_sides_have_is_nobodys_wrapper():
    source, target = (
        {"model.x": torch.ones(2), "model.y": torch.ones(2)},
        nnx.Dict(model=FlaxHolder(x=jnp.ones(2), y=jnp.ones(2))),
    )
    assert parity.transfer(source, target).notes == ()
    # Layers of one's own that are called so, and are wrapped on neither side.
    assert parity.transfer(source, dict(source)).notes == ()


def test_what_is_not_in_front_of_all_names_stays():
    source = named("model.") | {"head.weight": torch.ones(2)}
    with pytest.raises(TransferError, match=r"model\.dense\.weight"):
        parity.transfer(source, FlaxPair(rngs()))


def test_a_name_that_might_be_the_models_own_gets_a_hint_that_works():
    source = {"model.x": torch.ones(2), "model.model.y": torch.ones(3)}
    target = nnx.Dict(x=nnx.Param(jnp.zeros(2)), model=FlaxHolder(y=jnp.zeros(3)))
    with pytest.raises(TransferError) as error:
        parity.transfer(source, target)
    assert (
        "every name of the source begins with 'model', and some of the target's do: Lightning modules and other trainers "
        "put that there; if that is so here, give the model inside it, .model, or pass rename={'model': ''}"
    ) in error.value.problems
    assert len(parity.transfer(source, target, rename={"model": ""}).plan) == 2
    with pytest.raises(TransferError, match=re.escape("pass rename={'model': ''}")):
        parity.transfer(target, source)
    assert len(parity.transfer(target, source, rename={"model": ""}).plan) == 2
    plain = {"x": torch.ones(2), "model.y": torch.ones(3)}
    with pytest.raises(TransferError, match=re.escape("every name of the target begins with 'model'")) as error:
        parity.transfer(plain, source)
    assert "pass rename={'': 'model'}" in str(error.value)
    assert len(parity.transfer(plain, source, rename={"": "model"}).plan) == 2


@pytest.mark.parametrize("rename", [{"model": ""}, {"model.{part}": "{part}"}, {"model.norm": "norm", "model.dense": "dense"}])
def test_a_prefix_that_rename_speaks_of_is_left_to_it(rename):
    done = parity.transfer(named("model."), FlaxPair(rngs()), rename=rename)
    assert done.notes == ()
    assert len(done.plan) == 4


def test_a_rename_may_leave_the_prefix_out():
    target = nnx.Dict(fc=nnx.Linear(4, 4, rngs=rngs()), norm=nnx.LayerNorm(4, epsilon=1e-5, rngs=rngs()))
    done = parity.transfer(named("module._orig_mod."), target, rename={"dense": "fc"})
    assert done.rename["module._orig_mod.dense.weight"] == "fc.kernel"
    assert "'module._orig_mod'" in done.notes[0]


def test_the_count_of_averaged_models_is_left_out_and_told(tmp_path):
    averaged = torch.optim.swa_utils.AveragedModel(scramble(TorchPair(), "wrapped"))
    averaged.update_parameters(TorchPair())
    count = "n_averaged is left out: AveragedModel counts there how many models it has averaged; no other model has it"
    torch.save(averaged.state_dict(), tmp_path / "a.pt")
    for source in (averaged, averaged.state_dict(), tmp_path / "a.pt"):
        assert parity.transfer(source, FlaxPair(rngs())).alone[0] == count
    done = parity.transfer(FlaxPair(rngs()), averaged)
    assert done.alone[0].startswith("n_averaged stays as it is")
    assert int(averaged.n_averaged) == 1
    # Between two of them it travels.
    other = torch.optim.swa_utils.AveragedModel(TorchPair())
    assert "n_averaged" in {entry.source for entry in parity.transfer(averaged, other).plan}
    assert int(other.n_averaged) == 1


def test_a_buffer_of_that_name_in_another_model_is_no_such_count():
    with pytest.raises(TransferError, match="n_averaged"):
        parity.transfer(Holder(w=torch.ones(2), n_averaged=torch.ones(1)), FlaxHolder(w=jnp.ones(2)))


@pytest.mark.parametrize("raw", ["model.", "online_model.", "module.", ""])
@pytest.mark.parametrize("mean", ["ema_model.", "model_ema.", "shadow."])
def test_raw_and_averaged_weights_in_one_checkpoint_are_refused_with_a_choice(raw, mean, tmp_path):
    kept = {name: tensor + 1 for name, tensor in named("").items()}
    source = named(raw) | {f"{mean}{name}": tensor for name, tensor in kept.items()}
    parity.transfer(source, tmp_path / "a.safetensors")
    for given in (source, tmp_path / "a.safetensors"):
        with pytest.raises(TransferError) as error:
            parity.transfer(given, FlaxPair(rngs()))
        assert len(error.value.problems) == 1
        assert "the source holds raw weights" in str(error.value) and f"({mean}*)" in str(error.value)
        assert f"ignore=('{mean}*',) for the raw ones" in str(error.value)
    # Both ways out that the sentence names work.
    target = FlaxPair(rngs())
    if raw:
        assert f"pass ignore=('{raw}*',) for the averaged" in str(error.value)
        parity.transfer(source, target, ignore=(f"{raw}*",))
    else:
        assert f"give a tree of the names below {mean[:-1]} alone for the averaged" in str(error.value)
        parity.transfer({name: tensor for name, tensor in source.items() if name.startswith(mean)}, target)
    assert snapshot(target)["norm.bias"] == snapshot(kept)["norm.bias"]
    parity.transfer(source, target, ignore=(f"{mean}*",))
    assert snapshot(target)["norm.bias"] == snapshot(named(""))["norm.bias"]
    # A copy of all is no choice between them.
    assert len(parity.transfer(source, dict(source)).plan) == 8


@pytest.mark.parametrize("mean", ["ema", "state_dict_ema", "model_ema"])
def test_a_file_with_raw_and_averaged_weights_under_two_keys_is_refused(mean, tmp_path):
    torch.save({"state_dict": named(""), mean: named(""), "epoch": 3}, tmp_path / "a.pt")
    with pytest.raises(InputError, match=re.escape(f"holds tensors under state_dict, {mean};")):
        parity.transfer(tmp_path / "a.pt", FlaxPair(rngs()))
    torch.save({mean: named("module."), "epoch": 3}, tmp_path / "b.pt")
    notes = parity.transfer(tmp_path / "b.pt", FlaxPair(rngs())).notes
    assert f"b.pt: the weights are under {mean!r}; left out: epoch" in notes
    assert any("begins with 'module'" in note for note in notes)


def test_the_modules_of_a_wrapped_model_are_compared_one_by_one_too():
    ours = Trainer(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))).eval()
    theirs = nnx.Sequential(nnx.Linear(4, 6, rngs=rngs()), jnp.tanh, nnx.Linear(6, 4, rngs=rngs()))
    parity.transfer(ours, theirs)
    bias = theirs.layers[2].bias
    bias.set_value(bias[...] + 1)
    trace = parity.trace(ours, theirs, torch.ones(3, 4))
    assert trace.first_divergence().path == "net.2"
    assert trace.first_divergence().last_agreement == "net.0"


class Held(nnx.Module):
    def __init__(self):
        self.body = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Linear(3, 2, rngs=nnx.Rngs(1)))


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("prefixed", ["torch", "flax"])
def test_a_prefix_that_no_wrapper_puts_there_is_proposed_in_either_direction(prefixed, back):
    bare = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)).state_dict()
    pair = ({f"ours.core.{name}": a for name, a in bare.items()}, Held().body) if prefixed == "torch" else (bare, Held())
    rename = {"ours.core": ""} if prefixed == "torch" else {"": "body"}
    source, target = reversed(pair) if back else pair
    with pytest.raises(parity.TransferError, match=re.escape(f"in front of them; pass rename={rename}")):
        parity.transfer(source, target)
    assert len(parity.transfer(source, target, rename=rename).plan) == 4


def test_a_rename_of_some_wrapped_names_is_told_to_leave_the_prefix_out():
    state = {f"module.{name}.weight": torch.ones(2, 2) for name in ("a", "b")}
    target = {"params": {name: {"kernel": jnp.zeros((2, 2))} for name in ("c", "b")}}
    with pytest.raises(TransferError, match=r"begins with 'module'.*because rename names it: write the names in"):
        parity.transfer(state, target, rename={"module.a": "c"})
    assert len(parity.transfer(state, target, rename={"a": "c"}).plan) == 2
    assert len(parity.transfer(state, target, rename={"module.a": "c", "module.b": "b"}).plan) == 2


class FlaxTrainer(nnx.Module):
    def __init__(self, net):
        self.net = net

    def __call__(self, x):
        return self.net(x)


@pytest.mark.parametrize("rename", [None, {"": "net"}])
def test_modules_inside_a_flax_model_that_is_held_are_paired_as_its_leaves_are(rename):
    """The part in front of Flax's names is left out for leaves; modules must be found behind it too."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)).eval()
    layers = (nnx.Linear(4, 6, rngs=rngs()), nnx.LayerNorm(6, epsilon=1e-3, use_fast_variance=False, rngs=rngs()))
    theirs = FlaxTrainer(nnx.Sequential(*layers, nnx.Linear(6, 3, rngs=rngs())))
    parity.transfer(ours, theirs, rename=rename)
    x = np.random.default_rng(0).standard_normal((2, 4), dtype=np.float32)
    assert parity.trace(ours, theirs, x, rename=rename).first_divergence().path == "1"
    found = parity.diagnose(ours, theirs, x, rename=rename)
    assert [(one.path, found.causes_of(one.path)[0].hypothesis) for one in found.isolation.faults] == [("1", "epsilon")]
