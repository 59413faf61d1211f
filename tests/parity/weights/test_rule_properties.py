"""Every row of the ledger, on NNX and on Linen, in configurations drawn at random."""

import contextlib
import re
from typing import Any

import jax
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from rule_strategies import ALONE, ROWS, Configuration, Row
from transfer_helpers import bits, scramble, snapshot

import parity
from parity.evidence import ladder
from parity.evidence.calls import Evaluation
from parity.evidence.subject import Subject

CHECKS = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large)
# torch says once in a process that it copies what it pads on one side.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
EVERY_ROW = pytest.mark.parametrize("row", ROWS, ids=str)


def examples(count: int) -> Any:
    return settings(max_examples=count, suppress_health_check=CHECKS)


class Outputs(Subject):
    """Of outputs that are all floats the level `identical` needs the float64 run of Flax alone: one program for each pair."""

    @property
    def flax_native(self) -> Evaluation:  # type: ignore[override]
        return self.flax_wide


def statuses(source: Any, target: Any, x: Any) -> tuple[dict[str, str], str]:
    """The levels `weights` and `identical`, and what they say."""
    subject = Outputs(source, target, x, {}, gradients=False, pins_checked=True)
    results = [ladder.weights(subject), ladder.identical(subject)]
    return {result.level: result.status for result in results}, "\n".join(map(str, results))


def runs(source: torch.nn.Module, x: tuple[torch.Tensor, ...]) -> bool:
    """Whether torch takes the configuration, and something is left of it: a kernel may be wider than its input."""
    try:
        with torch.no_grad():
            outputs = source(*x)
    except (RuntimeError, ValueError):
        return False
    return all(one.numel() for one in (outputs if isinstance(outputs, list) else [outputs]))


def counters(state: dict[str, Any]) -> dict[str, Any]:
    """The numbers of batches, which Flax has no place for: they stay as they are."""
    return {path: value for path, value in state.items() if path.endswith("num_batches_tracked")}


def came_back(source: torch.nn.Module, back: torch.nn.Module, value: Any, **options: Any) -> None:
    """Send a Flax model or tree, or a file, to a module of other numbers, which then has the source's."""
    kept = counters(snapshot(back))
    done = parity.transfer(value, back, **options)
    assert done.passed, done.settings
    assert snapshot(back) == snapshot(source) | kept


def agrees(row: Row, one: Configuration) -> None:
    """There: same settings, weights and outputs. Back: the same bits."""
    x, source = row.inputs(one), row.torch_layer(one)
    assume(runs(source, x))
    target = row.flax_layer(one, x)
    if one.told:
        done = parity.transfer(source, target)
        assert len(done.settings) == 1
        assert f": {one.told}" in done.settings[0]
        assert not done.passed
        return
    before = snapshot(source)
    done = parity.transfer(source, target)
    assert done.passed, done.settings
    assert {entry.decided_by for entry in done.plan if entry.source != "mark"} <= {"rule"}
    found, text = statuses(source, done.value, x)
    assert found == {"weights": "passed", "identical": "passed"}, text
    came_back(source, row.torch_layer(one, "back"), done.value)
    assert snapshot(source) == before


@EVERY_ROW
@examples(4)
@given(data=st.data())
def test_every_row_is_the_same_function_and_travels_back_bit_for_bit(row: Row, data: st.DataObject):
    agrees(row, data.draw(row.configurations()))


@pytest.mark.slow
@EVERY_ROW
@examples(60)
@given(data=st.data())
def test_every_row_in_many_more_configurations(row: Row, data: st.DataObject):
    agrees(row, data.draw(row.configurations()))


@EVERY_ROW
@examples(3)
@given(data=st.data(), dtype=st.sampled_from(("bfloat16", "float64", "float16", "float32")))
def test_every_row_carries_any_bits_of_any_dtype(row: Row, data: st.DataObject, dtype: str):
    one = data.draw(row.configurations())
    assume(not one.told)
    if row.flax == "flax.nnx.Embed":
        # It computes in the dtype in which its table was made.
        one = one.but(param_dtype=dtype)
    x = row.inputs(one)
    with jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext():
        source, back = (row.fitting(scramble(row.torch_layer(one), str(row), seed, dtype=dtype)) for seed in ("a", "b"))
        done = parity.transfer(source, row.flax_layer(one, x), cast="source")
        assert {entry.dtype for entry in done.plan} == {dtype}
        came_back(source, back, done.value)


@EVERY_ROW
@examples(1)
@given(data=st.data())
def test_every_row_travels_through_a_tree_and_through_files(row: Row, data: st.DataObject, tmp_path_factory):
    one = data.draw(row.configurations().filter(lambda one: not one.told))
    x, source, folder = row.inputs(one), row.torch_layer(one), tmp_path_factory.mktemp("rows")
    target = row.flax_layer(one, x)
    expected = snapshot_of(parity.transfer(source, row.flax_layer(one, x)).value)
    parity.transfer(source, folder / "torch.safetensors")
    for given_ in (source.state_dict(), folder / "torch.safetensors"):
        done = parity.transfer(given_, target)
        assert snapshot_of(done.value) == expected
    parity.transfer(done.value, folder / "flax.msgpack")
    came_back(source, row.torch_layer(one, "back"), folder / "flax.msgpack")
    parity.transfer(done.value, folder / "back.safetensors", like=source)
    ignored = ("*num_batches_tracked",) if counters(snapshot(source)) else ()
    # A new file has counters, all 0.
    came_back(source, row.torch_layer(one, "back"), folder / "back.safetensors", ignore=ignored)


def snapshot_of(value: Any) -> Any:
    """Every array of a Flax model of either kind."""
    if isinstance(value, parity.Linen):
        return [(jax.tree_util.keystr(path), bits(leaf)) for path, leaf in jax.tree.leaves_with_path(value.variables)]
    return {path: leaf for path, leaf in snapshot(value).items() if "rngs" not in path}


# ---------------------------------------------------------------- faults


@EVERY_ROW
@examples(1)
@given(data=st.data())
def test_a_weight_that_is_changed_is_found_in_the_weights_and_in_the_outputs(row: Row, data: st.DataObject):
    one = data.draw(row.configurations().filter(lambda one: not one.told))
    x, source = row.inputs(one), row.torch_layer(one)
    done = parity.transfer(source, row.flax_layer(one, x))
    changed = {entry.source.partition("[")[0] for entry in done.plan} - {"mark"}
    for path in sorted(changed):
        tensor = source.state_dict()[path]
        kept = tensor.clone()
        tensor += 0.5
        found, text = statuses(source, done.value, x)
        assert found == {"weights": "failed", "identical": "failed"}, f"{path}: {text}"
        assert path in text
        tensor.copy_(kept)


FAULTS = [
    pytest.param(row, name, id=f"{row}-{name}")
    for row in ROWS
    if row.known
    for name in row.family.faults
    if name in map(str, row.rule.settings)
]


@pytest.mark.parametrize(("row", "name"), FAULTS)
@examples(1)
@given(data=st.data())
def test_a_setting_that_does_not_agree_is_told_or_refused(row: Row, name: str, data: st.DataObject):
    one = data.draw(row.configurations().filter(lambda one: not one.told))
    put_wrong, sentence = row.family.faults[name]
    wrong = put_wrong(one)
    x, source = row.inputs(wrong), row.torch_layer(wrong)
    target = row.flax_layer(wrong, x)
    try:
        told = parity.transfer(source, target).settings
    except parity.TransferError as error:
        told = error.problems
    assert any(sentence in problem for problem in told), told


WITHOUT = [
    pytest.param(row, one.torch, id=f"{row}-{one.torch}") for row in ROWS for one in row.rule.alone if one.fate != "kept"
]


@pytest.mark.parametrize(("row", "name"), WITHOUT)
@examples(1)
@given(data=st.data())
def test_what_flax_has_no_place_for_is_refused_and_nothing_is_written(row: Row, name: str, data: st.DataObject):
    options = next(options for start, options in ALONE.items() if name.startswith(start))
    one = data.draw(row.configurations()).but(options)
    source, target = row.torch_layer(one), row.flax_layer(one, row.inputs(one))
    if "hh" in name:
        for tensor in (value for path, value in source.state_dict().items() if "bias_hh" in path):
            tensor.fill_(0.5)
    before = snapshot_of(target)
    with pytest.raises(parity.TransferError, match=rf"layer\.{re.escape(name)}\S* (has no counterpart|is not all 0)"):
        parity.transfer(source, target)
    assert snapshot_of(target) == before


def test_no_row_and_no_setting_is_left_out():
    assert [str(row) for row in ROWS if not row.known] == [], "give the row a strategy in rule_strategies.py"
    lacking = {str(row): {str(s) for s in row.rule.settings if s.fate != "remark"} - {*row.family.faults} for row in ROWS}
    assert {row: names for row, names in lacking.items() if names} == {}, "give the setting a fault in rule_strategies.py"
