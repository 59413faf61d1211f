"""The file of a bundle: what is in it comes back, and each way in which one can be broken is told."""

import json
import struct
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import parity
from parity.bundles import form
from parity.bundles.encoding import Encoder, decoded, function, setting
from parity.bundles.file import FACTS, FORM, SEAL, VERSION, read, sealed, write
from parity.evidence.calls import Call
from parity.weights.leaf import digest

Pair = namedtuple("Pair", "first second")


@dataclass
class Point:
    x: object
    y: object


def there_and_back(value):
    encoder = Encoder()
    text = json.dumps(encoder.encoded(value), allow_nan=False)
    return decoded(json.loads(text), encoder.arrays.__getitem__)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -3,
        2.5,
        float("inf"),
        "words",
        (1, [2, (3,)], {"a": None, 4: (5,)}),
        frozenset({"a", "b"}),
        {1, 2},
        {("path", 0): {"": 1.5}},
    ],
)
def test_plain_values_come_back(value):
    found = there_and_back(value)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool", "complex64", "complex128"]
)
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 4)])
def test_arrays_come_back_bit_for_bit(dtype, shape, tmp_path):
    array = np.arange(int(np.prod(shape)) or 1)[: int(np.prod(shape))].reshape(shape)
    array = array.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    encoder = Encoder()
    told = encoder.encoded(array)
    write(tmp_path / "one.safetensors", facts(answers={"x": {"returns": told}}), encoder.arrays)
    found = read(tmp_path / "one.safetensors")
    back = found.value(found.facts["answers"]["x"]["returns"])
    assert back.dtype == array.dtype and back.shape == shape and back.tobytes() == array.tobytes()


def test_nan_keeps_its_bits_and_equal_arrays_are_kept_once():
    encoder = Encoder()
    array = np.array([np.nan, -np.nan, -0.0], np.float32)
    encoder.encoded([array, array.copy(), array[:2]])
    assert len(encoder.arrays) == 2
    assert digest(np.array([0.0])) != digest(np.array([-0.0])) and digest(np.zeros((2, 1))) != digest(np.zeros((1, 2)))


def test_named_tuples_and_dataclasses_keep_their_fields():
    found = there_and_back([Pair(1, np.ones(2)), Point((1,), None)])
    assert found[0].first == 1 and (found[0].second == 1).all() and found[0]._fields == ("first", "second")
    assert (found[1].x, found[1].y) == ((1,), None)


def test_what_no_file_can_hold_keeps_its_kind():
    assert repr(there_and_back(object())) == "<builtins.object>" and there_and_back(object()) == there_and_back(object())


def test_a_function_that_a_layer_held_is_a_name_and_its_defaults():
    def gelu(x, approximate=True):
        return x

    gelu.__module__ = "jax.nn"
    found = function(setting(gelu, Encoder()))
    assert (found.__name__, found.__module__) == ("gelu", "jax.nn")
    with pytest.raises(parity.InputError, match="gelu was recorded by its name, and cannot be called"):
        found(1)


# ------------------------------------------------------------------------------ broken files


def facts(**changes):
    plain = {str: "", int: 0, bool: False}
    found = {name: plain.get(kind, {}) if not isinstance(kind, list) else [] for name, kind in form.FACTS.items()}
    one = {"name": "", "shows": "", "call": None, "padding mask": None, "masks": None}
    return found | {"side": "torch", "room": "torch", "keep": "all", "sets": [one]} | changes


def edited(path, change, reseal=True):
    """Change the facts of a file, as somebody does who knows how it is made."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header["__metadata__"])
    if reseal:
        header["__metadata__"][SEAL] = sealed(header["__metadata__"].get(FACTS, ""))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def with_facts(change):
    def apply(metadata):
        found = json.loads(metadata[FACTS])
        change(found)
        metadata[FACTS] = json.dumps(found)

    return apply


@pytest.fixture
def bundle(tmp_path):
    encoder = Encoder()
    told = [encoder.encoded(np.arange(4.0)), encoder.encoded(np.arange(3))]
    write(tmp_path / "b.safetensors", facts(answers={"x": {"returns": told}}), encoder.arrays)
    return tmp_path / "b.safetensors"


def refused(path):
    with pytest.raises(parity.InputError) as caught:
        read(path)
    return str(caught.value)


def test_a_newer_version_says_to_update(bundle):
    edited(bundle, lambda m: m.update({FORM: str(VERSION + 1)}))
    told = refused(bundle)
    assert f"is a bundle of version {VERSION + 1}, and this parity knows versions up to {VERSION}" in told
    assert "update torch-flax-parity" in told


def test_an_older_version_says_to_record_again(bundle):
    edited(bundle, lambda m: m.update({FORM: "0"}))
    assert "is a bundle of version 0, which this parity no longer reads" in refused(bundle)


def test_a_version_that_is_none_is_told(bundle):
    edited(bundle, lambda m: m.update({FORM: "new"}))
    assert "is a bundle of version 'new', which is none" in refused(bundle)


def test_a_file_that_is_cut_short_is_told(bundle):
    bundle.write_bytes(bundle.read_bytes()[:-5])
    assert "it is cut short" in refused(bundle)


def test_facts_that_were_edited_are_told(bundle):
    edited(bundle, with_facts(lambda f: f.update({"seed": 7})), reseal=False)
    assert "its facts are not those that were written: somebody has edited them" in refused(bundle)


def test_numbers_that_were_edited_are_told(bundle):
    data = bytearray(bundle.read_bytes())
    data[-3] ^= 1
    bundle.write_bytes(bytes(data))
    assert "is not what was recorded: it was edited, or damaged on its way" in refused(bundle)


def test_everything_that_is_wrong_is_told_at_once(bundle):
    def change(found):
        del found["seed"], found["leaves"]
        found["keep"] = 3

    edited(bundle, with_facts(change), reseal=False)
    told = refused(bundle)
    assert "4 problems" in told and "somebody has edited them" in told
    assert "no entry 'seed'" in told and "no entry 'leaves'" in told and "entry 'keep' is int, not str" in told


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"side": "keras"}, "its entry 'side' is 'keras', not torch, flax"),
        ({"keep": "most"}, "its entry 'keep' is 'most', not all, summaries, digests"),
        ({"answers": {}}, "belongs to nothing that was recorded"),
        ({"answers": {"x": {"returns": {"~": "array", "of": "0" * 32}}}}, "array 00000000000000000000000000000000 is missing"),
    ],
)
def test_facts_that_contradict_the_file_are_told(bundle, change, words):
    edited(bundle, with_facts(lambda f: f.update(change)))
    assert words in refused(bundle)


def test_facts_that_are_no_json_are_told(bundle):
    edited(bundle, lambda m: m.update({FACTS: "{"}))
    assert "its facts are no valid JSON" in refused(bundle)
    edited(bundle, lambda m: m.update({FACTS: "[]"}))
    assert "its facts are a list, not an object" in refused(bundle)


ONE_LEAF = {
    **{"path": "w", "owner": "", "name": "w", "dtype": "float64", "role": "parameter", "unreadable": "", "digest": ""},
    **{"kinds": [], "also": [], "merged": [], "shape": [4], "identity": 0, "claims": [], "by_name": False, "loose": False},
    "values": None,
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"environment": {"torch": 10**30}}, "its entry 'environment.torch' is int, not str"),
        ({"environment": {"torch": float("nan")}}, "its entry 'environment.torch' is float, not str"),
        ({"seed": True}, "its entry 'seed' is bool, not int"),
        ({"room": "os"}, "its entry 'room' is 'os', not torch, nnx, linen"),
        ({"sets": []}, "its entry 'sets' is empty: it holds no run"),
        ({"sets": [3]}, "its entry 'sets[0]' is int, not dict"),
        ({"sets": [{"name": "<script>"}]}, "its facts have no entry 'sets[0].call'"),
        ({"leaves": [ONE_LEAF | {"kinds": [1]}]}, "its entry 'leaves[0].kinds[0]' is int, not str"),
        ({"leaves": [ONE_LEAF | {"claims": [["a", "b"]]}]}, "its entry 'leaves[0].claims[0]' has 2 parts, not 3"),
        ({"leaves": [ONE_LEAF | {"values": 3}]}, "the values of w are no array"),
        ({"layers": [{}]}, "its facts have no entry 'layers[0].settings'"),
        ({"answers": {"x": 3}}, "its entry 'answers.x' is int, not dict"),
        ({"answers": {"x": {"raises": ["a"]}}}, "its entry 'answers.x.raises' has 1 parts, not 3"),
        ({"answers": {"x": {"returns": {"~": "array"}}}}, "array None is missing"),
    ],
)
def test_entries_of_another_form_are_told_with_their_place(bundle, change, words):
    edited(bundle, with_facts(lambda f: f.update(change)))
    assert words in refused(bundle)


def test_an_array_of_the_model_that_is_another_by_its_facts_is_told(bundle):
    def change(found):
        found["leaves"] = [ONE_LEAF | {"shape": [2, 2], "dtype": "float32", "values": found["answers"]["x"]["returns"][0]}]

    edited(bundle, with_facts(change))
    assert "w is float32 (2, 2) by its facts, and float64 (4,) in the file" in refused(bundle)


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        ({"~": "data", "kind": "Call", "of": {"args": 3}}, Any),
        ({"~": "data", "kind": "Evaluation", "of": {"outputs": {"~": "dict", "of": []}, "gradients": None}}, Any),
        ({"~": "tuple", "of": []}, Call),
        ({"~": "tuple", "of": ["a", "b"]}, tuple[int, ...]),
        ({"~": "dict", "of": 3}, Any),
        ({"~": "dict", "of": [[[], 1]]}, Any),
        ({"~": "data", "kind": "Call", "of": "x"}, Any),
    ],
)
def test_a_recorded_value_of_another_kind_is_told_where_it_is_used(bundle, told, wanted):
    with pytest.raises(parity.InputError, match="a part of it has another form than a bundle has"):
        read(bundle).value(told, wanted)


def test_a_part_of_another_form_is_told(bundle):
    edited(bundle, with_facts(lambda f: f["answers"].update(y={"returns": {"~": "pickle", "of": [1]}})))
    found = read(bundle)
    with pytest.raises(parity.InputError, match="a part of it has another form than a bundle has"):
        found.value(found.facts["answers"]["y"]["returns"])


def test_other_files_are_told_by_what_they_are(tmp_path):
    from safetensors.numpy import save_file

    save_file({"weight": np.ones(2)}, tmp_path / "weights.safetensors")
    assert "is a safetensors file, but no bundle of parity's: it holds 1 arrays" in refused(tmp_path / "weights.safetensors")
    (tmp_path / "page.safetensors").write_text("<html>" + "x" * 100)
    assert "no safetensors file" in refused(tmp_path / "page.safetensors")
    assert "cannot be read" in refused(tmp_path / "none.safetensors")
    (tmp_path / "empty.safetensors").write_bytes(b"")
    assert "is empty (0 bytes)" in refused(tmp_path / "empty.safetensors")


def test_a_full_disk_leaves_the_old_file(bundle, monkeypatch):
    before = bundle.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("parity.bundles.file.write_tensors", full)
    with pytest.raises(parity.InputError, match="No space left on device; it is as it was before"):
        write(bundle, facts(), {})
    assert bundle.read_bytes() == before and [p.name for p in bundle.parent.iterdir()] == [bundle.name]


def test_a_place_where_no_bundle_can_stand_is_refused(tmp_path):
    with pytest.raises(parity.InputError, match=r"2 problems\n.*name it b.safetensors\n.*there is no folder"):
        write(tmp_path / "no" / "such" / "b.pt", facts(), {})
    (tmp_path / "d.safetensors").mkdir()
    with pytest.raises(parity.InputError, match="there is a folder of that name"):
        write(tmp_path / "d.safetensors", facts(), {})
