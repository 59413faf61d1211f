"""Both wings learn from a real text: alike step by step, to a stated loss, and decode the same with each other's weights."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import parity

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_on_text.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_on_text", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_text_is_read_and_spelled(example):
    words = example.words()
    assert words[:8] == ["shall", "i", "compare", "thee", "to", "a", "summer's", "day"]
    assert len(words) == len(set(words)) > 300
    assert example.read(example.spelled(words)) == words
    assert example.spelled(["day"])[0, :6].tolist()[-2:] == [example.STOP, example.PAD]
    for source, target in example.batches(2):
        assert source.shape == target.shape == (example.BATCH, 13)
        assert [word[::-1] for word in example.read(source)] == example.read(target)


def test_from_the_same_weights_both_wings_learn_alike_and_decode_the_same(example):
    ours, theirs = example.torch_model(), example.flax_model()
    parity.transfer(ours, theirs)
    expected, found = example.train_torch(ours, 40), example.train_flax(theirs, 40)
    # Not the bit for bit claim, which needs float64: rounding grows as it is fed back.
    np.testing.assert_allclose(found[:10], expected[:10], rtol=1e-5)
    np.testing.assert_allclose(found, expected, rtol=1e-2)
    assert expected[0] > 3
    assert expected[-1] < 2.2
    again = example.flax_model(1)
    parity.transfer(ours, again)
    given = example.words()[:20]
    tokens = example.decoded(ours, given)
    np.testing.assert_array_equal(example.decoded(again, given), tokens)
    assert len(np.unique(tokens)) > 5


@pytest.mark.slow
def test_the_example_reaches_its_loss_in_both_wings():
    run = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=EXAMPLE.parents[1],
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("decodes the same tokens") == 2
