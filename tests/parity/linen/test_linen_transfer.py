"""Linen models and variables as source and target of a transfer."""

import re
import sys
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen as nn
from flax import nnx
from flax.core import freeze, meta
from linen_pairs import RENAMES, STYLES, CompactEncoder, LinenConv, SetupEncoder, TorchConv, TorchEncoder, images, x
from transfer_helpers import bits, scramble, snapshot, transposed

import parity
from parity import cli
from parity.weights.leaf import Layer
from parity.weights.rules import in_words_of


def flat(variables: Any) -> dict[str, Any]:
    return {"/".join(keys): array for keys, array in flax.traverse_util.flatten_dict(dict(variables)).items()}


def all_bits(variables: Any) -> dict[str, Any]:
    return {path: bits(array) for path, array in flat(flax.core.unfreeze(variables)).items()}


def empty(style: type) -> parity.Linen:
    return parity.Linen(style(), None, x())


def filled(style: type, name: str = "source") -> tuple[torch.nn.Module, parity.Linen]:
    source = scramble(TorchEncoder(), name)
    return source, parity.transfer(source, empty(style), rename=RENAMES[style]).value


# Torch's name, Linen's name, whether Linen stores it transposed; the same in both styles but for these.
AUTOMATIC = {"ffn/layers_0": "Dense_0", "ffn/layers_2": "Dense_1", "params/heads_left": "params/Dense_0"}
AUTOMATIC |= {"params/heads_right": "params/Dense_1"}


def names(style: type) -> list[tuple[str, str, bool]]:
    found = []
    for i in range(2):
        for norm in ("norm1", "norm2"):
            found += [
                (f"layers.{i}.{norm}.{t}", f"params/layers_{i}/{norm}/{f}", False)
                for t, f in (("weight", "scale"), ("bias",) * 2)
            ]
        for torch_name, linen_name in [
            *((n, n) for n in ("q", "k", "v", "out")),
            ("ffn.0", "ffn/layers_0"),
            ("ffn.2", "ffn/layers_2"),
        ]:
            found.append((f"layers.{i}.{torch_name}.weight", f"params/layers_{i}/{linen_name}/kernel", True))
            found.append((f"layers.{i}.{torch_name}.bias", f"params/layers_{i}/{linen_name}/bias", False))
    for head in ("left", "right"):
        found.append((f"heads.{head}.weight", f"params/heads_{head}/kernel", True))
        found.append((f"heads.{head}.bias", f"params/heads_{head}/bias", False))
    for mine, theirs in AUTOMATIC.items() if style is CompactEncoder else ():
        found = [(t, f.replace(mine, theirs), flips) for t, f, flips in found]
    return found


@pytest.mark.parametrize("style", STYLES)
def test_every_bit_arrives_under_its_name_and_comes_back(style):
    source, target = filled(style)
    before = snapshot(source)
    assert all_bits(target.variables) == {f: transposed(before[t]) if flips else before[t] for t, f, flips in names(style)}
    back = scramble(TorchEncoder(), "another")
    assert parity.transfer(target, back, rename=RENAMES[style]).passed
    assert snapshot(back) == before


@pytest.mark.parametrize("style", STYLES)
def test_a_target_stays_as_it_is(style):
    source, target = filled(style)
    before = all_bits(target.variables)
    other = parity.transfer(scramble(TorchEncoder(), "other"), target, rename=RENAMES[style]).value
    assert all_bits(target.variables) == before != all_bits(other.variables)
    assert other.module is target.module
    for tensor in source.parameters():
        tensor.data.zero_()
    assert all_bits(target.variables) == before


@pytest.mark.parametrize("wrap", [dict, freeze], ids=["dict", "FrozenDict"])
def test_variables_are_a_tree_of_their_own_type(wrap):
    source, target = filled(SetupEncoder)
    tree = wrap(target.variables)
    # No dict of modules is known in a tree: its key is joined to its name.
    rename = {"heads.left": "heads_left", "heads.right": "params.heads_right"}
    made = parity.transfer(scramble(TorchEncoder(), "other"), tree, rename=rename).value
    assert type(made) is type(tree)
    assert jax.tree.structure(made) == jax.tree.structure(tree)
    back = scramble(TorchEncoder(), "another")
    parity.transfer(tree, back, rename=rename)
    assert snapshot(back) == snapshot(source)


def test_eleven_layers_pair_by_number_not_by_alphabet():
    class Stack(nn.Module):
        def setup(self):
            self.layers = [nn.Dense(3) for _ in range(11)]

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    source = torch.nn.Module()
    source.layers = scramble(torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(11)), "stack")
    done = parity.transfer(source, parity.Linen(Stack(), None, jnp.ones((2, 3))))
    assert [(e.source, e.target) for e in done.plan if e.source.endswith("bias")] == [
        (f"layers.{i}.bias", f"params.layers_{i}.bias") for i in range(11)
    ]
    back = parity.transfer(done.value, source)
    assert [e.source for e in back.plan if e.target.endswith("bias")] == [f"params.layers_{i}.bias" for i in range(11)]
    # The same from a tree, where nothing tells a list from a Sequential.
    assert {e.source: e.target for e in parity.transfer(source, done.value.variables).plan} == {
        e.source: e.target for e in done.plan
    }
    seq = torch.nn.ModuleDict({"layers": torch.nn.Sequential(*source.layers)})
    assert len(parity.transfer(done.value.variables, seq).plan) == 22


@pytest.mark.parametrize("head", ["Dense_0", "params.Dense_0"])
def test_a_rename_is_written_with_or_without_the_collection(head):
    rename = {"heads.left": head, "heads.right.weight": "Dense_1.kernel", "heads.right.bias": "params.Dense_1.bias"}
    source, target = filled(CompactEncoder)
    assert all_bits(parity.transfer(source, empty(CompactEncoder), rename=rename).value.variables) == all_bits(target.variables)
    assert parity.transfer(target, source, rename=rename).passed


def test_what_is_not_paired_gets_a_rename_in_the_order_of_the_calls():
    with pytest.raises(parity.TransferError, match=re.escape("{'heads.left': 'Dense_0', 'heads.right': 'Dense_1'}")):
        parity.transfer(TorchEncoder(), empty(CompactEncoder))


# ---------------------------------------------------------------- collections, boxes, roles


def test_running_statistics_travel_and_keep_their_collection():
    source = scramble(TorchConv(), "conv")
    model = parity.Linen(LinenConv(), None, images(), train=False)
    done = parity.transfer(source, model)
    assert {"bn_1.running_mean": "batch_stats.bn_1.mean", "bn_2.weight": "params.bn_2.scale"}.items() <= done.rename.items()
    assert "BatchNorm counts no batches" in " ".join(done.alone)
    back = scramble(TorchConv(), "another")
    parity.transfer(done.value, back)
    assert {k: v for k, v in snapshot(back).items() if "num_batches" not in k} == {
        k: v for k, v in snapshot(source).items() if "num_batches" not in k
    }
    # In torch's words also from a tree alone.
    assert parity.transfer(done.value.variables, source).rename == {v: k for k, v in done.rename.items()}


class Sharded(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel = nn.with_logical_partitioning(nn.initializers.ones, ("in", "out"))
        return nn.Dense(4, kernel_init=nn.with_partitioning(nn.initializers.ones, ("a", "b")), name="a")(
            nn.Dense(3, kernel_init=kernel, name="b")(x)
        )


def test_boxes_are_looked_into_and_kept():
    source = scramble(torch.nn.ModuleDict({"b": torch.nn.Linear(5, 3), "a": torch.nn.Linear(3, 4)}), "boxes")
    model = parity.Linen(Sharded(), None, jnp.ones((2, 5)))
    value = parity.transfer(source, model).value
    boxes = [value.variables["params"][name]["kernel"] for name in "ab"]
    assert [type(box) for box in boxes] == [nn.Partitioned, nn.LogicallyPartitioned]
    assert [box.names for box in boxes] == [("a", "b"), ("in", "out")]
    assert bits(boxes[0].value) == transposed(bits(source["a"].weight))
    assert jax.tree.structure(value.variables) == jax.tree.structure(model.variables)
    back = scramble(torch.nn.ModuleDict({"b": torch.nn.Linear(5, 3), "a": torch.nn.Linear(3, 4)}), "another")
    parity.transfer(value, back)
    assert snapshot(back) == snapshot(source)
    assert snapshot(scramble(back, "a third")) != snapshot(source)
    parity.transfer(meta.unbox(value.variables), back)
    assert snapshot(back) == snapshot(source)


def test_an_abstract_array_is_put_where_it_says():
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    wanted = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "a"))
    kernel = jax.ShapeDtypeStruct((5, 3), np.float32, sharding=wanted)
    done = parity.transfer(
        torch.nn.Linear(5, 3, bias=False), parity.Linen(nn.Dense(3, use_bias=False), {"params": {"kernel": kernel}})
    )
    assert done.value.variables["params"]["kernel"].sharding == wanted


def test_random_keys_never_travel():
    class Keyed(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.variable("streams", "noise", lambda: jax.random.key(0))
            return nn.Dense(3, name="a")(x)

    source = scramble(torch.nn.ModuleDict({"a": torch.nn.Linear(5, 3)}), "keys")
    done = parity.transfer(source, parity.Linen(Keyed(), Keyed().init(jax.random.key(1), jnp.ones((2, 5)))))
    assert done.random == ("streams.noise",)
    assert done.value.variables["streams"]["noise"] == jax.random.key(0)


def test_an_embedding_is_no_kernel():
    class Table(nn.Module):
        @nn.compact
        def __call__(self, i):
            return nn.Embed(5, 5, name="table")(i)

    source = scramble(torch.nn.ModuleDict({"table": torch.nn.Embedding(5, 5)}), "embedding")
    for target in (parity.Linen(Table(), None, np.zeros((2, 3), np.int32)),):
        done = parity.transfer(source, target)
        assert [(e.target, e.layout, e.decided_by) for e in done.plan] == [("params.table.embedding", "as is", "rule")]
        assert bits(done.value.variables["params"]["table"]["embedding"]) == bits(source["table"].weight)


# ---------------------------------------------------------------- what is known without a call


class Named(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.remat(nn.Dense)(3)(nn.Dense(3)(nn.Dense(3, name="first")(x)))


def test_without_arguments_automatic_names_tell_the_class_and_the_plan_says_so():
    variables = Named().init(jax.random.key(0), jnp.ones((2, 3)))
    source = scramble(torch.nn.ModuleDict({n: torch.nn.Linear(3, 3) for n in ("first", "second", "third")}), "named")
    rename = {"second": "Dense_0", "third": "CheckpointDense_0"}
    for arguments, ways in (((), ["rule", "name", "name"]), ((jnp.ones((2, 3)),), ["rule"] * 3)):
        done = parity.transfer(source, parity.Linen(Named(), variables, *arguments), rename=rename)
        assert [e.decided_by for e in done.plan if e.source.endswith("weight")] == ways
        assert bits(done.value.variables["params"]["Dense_0"]["kernel"]) == transposed(bits(source["second"].weight))


def test_a_layer_that_is_told_by_its_name_claims_what_lies_in_it():
    class Attention(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.MultiHeadDotProductAttention(2)(x)

    source = scramble(torch.nn.ModuleDict({"att": torch.nn.MultiheadAttention(8, 2, batch_first=True)}), "attention")
    variables = Attention().init(jax.random.key(0), jnp.ones((2, 3, 8)))
    rename = {"att": "MultiHeadDotProductAttention_0"}
    done = parity.transfer(source, parity.Linen(Attention(), variables), rename=rename, verify=True)
    assert {(e.decided_by, e.layout) for e in done.plan if e.source.startswith("att.in_proj_w")} == {("name", "heads")}
    assert done.passed
    known = parity.transfer(source, parity.Linen(Attention(), variables, jnp.ones((2, 3, 8))), rename=rename).value
    assert all_bits(done.value.variables) == all_bits(known.variables)


def test_setup_tells_its_layers_without_a_call():
    source, target = filled(SetupEncoder)
    again = parity.transfer(source, parity.Linen(SetupEncoder(), target.variables))
    assert {e.decided_by for e in again.plan} == {"rule"}
    assert all_bits(again.value.variables) == all_bits(target.variables)


class Low(nn.Module):
    """Adds to a layer and keeps its own arrays among that layer's."""

    inner: nn.Module

    def setup(self):
        nn.share_scope(self, self.inner)

    def __call__(self, x):
        return self.inner(x)


class Wrapped(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = Low(nn.Dense(3), name="low")(x)
        x = nn.jit(nn.Dense)(3, name="jitted")(nn.remat(nn.Dense)(3, name="remat")(x))
        x = nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=1, out_axes=1)(3, name="each")(
            x
        )
        cell = nn.scan(nn.GRUCell, variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1)
        return cell(3, name="scanned")(jnp.zeros((x.shape[0], 3)), x)[1]


def test_a_class_that_flax_wraps_is_the_class_inside():
    # Twice: what jax has traced already is read all the same.
    for _ in range(2):
        room = parity.frameworks.load("linen")
        model = parity.Linen(Wrapped(), None, jnp.ones((2, 4, 3)))
        found = {leaf.path: leaf for leaf in room.leaves(model)}
        kinds = {path: leaf.kinds[0] for path, leaf in found.items() if path.count(".") == 2}
        assert (
            kinds["params.remat.kernel"] == kinds["params.jitted.kernel"] == kinds["params.each.kernel"] == "flax.linen.Dense"
        )
        assert "flax.linen.Dense" in found["params.Dense_0.kernel"].kinds
        assert found["params.each.kernel"].shape == (4, 3, 3)
        layers = {layer.own_path: layer for layer in room.layers(model)}
        assert layers["params.scanned"].kinds[0] == "flax.linen.GRUCell"
        assert layers["params.Dense_0"].settings("features") == 3


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("end", [".msgpack", ".safetensors", ".orbax"])
@pytest.mark.parametrize("style", STYLES)
def test_variables_travel_through_a_file(style, end, tmp_path: Path):
    source, target = filled(style)
    file = tmp_path / f"variables{end}"
    parity.transfer(target, file)
    assert all_bits(parity.transfer(file, empty(style)).value.variables) == all_bits(target.variables)
    parity.transfer(source, tmp_path / f"torch{end}", like=empty(style), rename=RENAMES[style])
    again = parity.transfer(tmp_path / f"torch{end}", empty(style)).value
    assert all_bits(again.variables) == all_bits(target.variables)
    if style is SetupEncoder:
        back = scramble(TorchEncoder(), "another")
        parity.transfer(file, back, rename={f"heads.{side}": f"heads_{side}" for side in ("left", "right")})
        assert snapshot(back) == snapshot(source)


def test_flax_reads_what_is_written_and_the_other_way_round(tmp_path: Path):
    _, target = filled(SetupEncoder)
    parity.transfer(target, tmp_path / "ours.msgpack")
    theirs = flax.serialization.from_bytes(target.variables, (tmp_path / "ours.msgpack").read_bytes())
    assert all_bits(theirs) == all_bits(target.variables)
    (tmp_path / "theirs.msgpack").write_bytes(flax.serialization.to_bytes(target.variables))
    read = parity.transfer(tmp_path / "theirs.msgpack", empty(SetupEncoder)).value
    assert all_bits(read.variables) == all_bits(target.variables)
    # Many files hold the parameters alone.
    (tmp_path / "params.msgpack").write_bytes(flax.serialization.to_bytes(target.variables["params"]))
    read = parity.transfer(tmp_path / "params.msgpack", empty(SetupEncoder)).value
    assert all_bits(read.variables) == all_bits(target.variables)


def test_a_torch_file_of_a_linen_model_needs_no_names(tmp_path: Path):
    source, target = filled(SetupEncoder)
    parity.transfer(target, tmp_path / "model.safetensors", like=source)
    back = scramble(TorchEncoder(), "another")
    parity.transfer(tmp_path / "model.safetensors", back)
    assert snapshot(back) == snapshot(source)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["parity", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return int(str(stopped.value.code))


def test_the_command_takes_names_from_a_linen_model(tmp_path: Path, monkeypatch, capsys):
    source, target = filled(SetupEncoder)
    torch.save(source.state_dict(), tmp_path / "model.pt")
    files = str(tmp_path / "model.pt"), str(tmp_path / "flax.msgpack")
    assert run(monkeypatch, "transfer", *files, "--like", "linen_pairs:empty_encoder", "--verify") == 0
    assert "params.layers_1.ffn.layers_2.kernel" in capsys.readouterr().out
    read = parity.transfer(files[1], empty(SetupEncoder)).value
    assert all_bits(read.variables) == all_bits(target.variables)
    assert run(monkeypatch, "rules") == 0
    assert "torch.nn.Linear <-> flax.nnx.Linear, flax.linen.Dense" in capsys.readouterr().out


def test_nnx_and_linen_speak_the_same_names():
    class Net(nnx.Module):
        def __init__(self):
            self.first, self.norm = nnx.Linear(3, 3, rngs=nnx.Rngs(0)), nnx.LayerNorm(3, rngs=nnx.Rngs(0))

    class Other(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.LayerNorm(name="norm")(nn.Dense(3, name="first")(x))

    source = scramble(Net(), "nnx")
    made = parity.transfer(source, parity.Linen(Other(), None, jnp.ones((2, 3)))).value
    assert bits(made.variables["params"]["first"]["kernel"]) == bits(source.first.kernel.get_value())
    parity.transfer(made, scramble(Net(), "another"))


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (jax.ShapeDtypeStruct((), np.float32), "params.negative_slope is abstract and holds no values"),
        ("text", "params.negative_slope holds a str, not an array"),
    ],
)
def test_a_source_without_values_is_refused(value, sentence):
    with pytest.raises(parity.TransferError, match=sentence):
        parity.transfer(parity.Linen(nn.PReLU(), {"params": {"negative_slope": value}}, x()), torch.nn.PReLU())


def test_a_traced_source_is_refused():
    variables = filled(SetupEncoder)[1].variables
    problems = []

    @jax.jit
    def run(variables):
        try:
            parity.transfer(parity.Linen(SetupEncoder(), variables), TorchEncoder())
        except parity.TransferError as error:
            problems.append(str(error))
        return 0

    run(variables)
    assert "params.layers_0.norm1.scale is being traced and holds no values" in problems[0]


def test_64_bits_are_not_cut_in_silence():
    with pytest.raises(parity.TransferError, match="would be cut from float64 to 32 bits"):
        parity.transfer(scramble(TorchEncoder(), "wide", dtype="float64"), empty(SetupEncoder), cast="source")


def test_a_wrong_shape_names_both_sides():
    source = TorchEncoder()
    source.heads["left"] = torch.nn.Linear(8, 4)
    with pytest.raises(
        parity.TransferError, match=r"heads.left.weight has shape \(4, 8\), so params.heads_left.kernel must have"
    ):
        parity.transfer(source, empty(SetupEncoder))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: parity.Linen(nn.Dense, {}), "got the class Dense itself; make an instance"),
        (lambda: parity.Linen(torch.nn.Linear(1, 1), {}), "takes a flax.linen.Module, got torch.nn.modules.linear.Linear"),
        (lambda: parity.Linen(nn.Dense(1).bind({}), {}), r"is bound to variables; give the parts of module.unbind\(\)"),
        (lambda: parity.Linen(nn.Dense(1), [1]), "variables must be what module.init returns, .* got list"),
        (lambda: parity.Linen(nn.Dense(1), {"Dense_0": {}}), "variables must be collections, .* got 'Dense_0'"),
        (lambda: parity.Linen(nn.Dense(1), {"params": {"params": {}}}), "hold params inside params"),
        (lambda: parity.Linen(nn.Dense(1)), "the Linen module Dense cannot be initialised on shapes: TypeError"),
        (
            lambda: parity.transfer(nn.Dense(1), TorchEncoder()),
            r"without its variables; give parity.Linen\(module, variables\)",
        ),
    ],
)
def test_what_is_no_linen_model_is_refused(make, sentence):
    with pytest.raises(parity.InputError, match=sentence):
        make()


def test_a_model_prints_what_it_is():
    assert repr(parity.Linen(LinenConv(), None, images())) == "parity.Linen(LinenConv, batch_stats, params)"


def test_sentences_to_linen_users_name_layers_of_linen():
    norm = nn.BatchNorm(use_running_average=True)
    own = parity.Linen(norm, norm.init(jax.random.key(0), jnp.ones((2, 4))))
    [setting] = parity.transfer(torch.nn.BatchNorm1d(4, momentum=None).eval(), own).settings[:1]
    assert "linen.BatchNorm cannot; give torch a momentum" in setting and "nnx" not in setting
    [setting] = parity.transfer(torch.nn.BatchNorm1d(4, momentum=None).eval(), nnx.BatchNorm(4, rngs=nnx.Rngs(0))).settings[:1]
    assert "nnx.BatchNorm cannot" in setting


def test_names_that_linen_has_otherwise_are_linens():
    said = "write one with four nnx.LinearGeneral, an nnx.Linear or nnx.MultiHeadAttention; or use nnx.max_pool"
    linen, other = (Layer("a", (kind,), {}.get) for kind in ("flax.linen.linear.Dense", "flax.nnx.Linear"))
    assert in_words_of(linen, said) == (
        "write one with four linen.DenseGeneral, a linen.Dense or linen.MultiHeadDotProductAttention; or use linen.max_pool"
    )
    assert in_words_of(other, said) == said and in_words_of(None, said) == said
