"""The Transformer trained in both wings on a real text with dropout on: a short form here, the whole one marked slow."""

import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
# Keys are compared by differences: a bias of theirs moves no attention.
NOISE = {"source_embedding.weight", "target_embedding.weight"}


@pytest.fixture(scope="module")
def example():
    sys.path.insert(0, str(EXAMPLES))
    try:
        spec = importlib.util.spec_from_file_location("train_both", EXAMPLES / "train_both.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(EXAMPLES))


def agree(found, steps, mode):
    """1e-10 at the end, and what is left out of it is named: biases of keys, and rows of letters that never come."""
    assert found.passed, str(found)
    assert len(found.drift) == steps and found.mode == mode
    assert max(drift.values for drift in found.drift) < 1e-10 and all(drift.rounding is None for drift in found.drift)
    assert all(name in NOISE or name.endswith("W_k.bias") for name, _ in found.noise)
    assert any(name.endswith("W_k.bias") for name, _ in found.noise)


def test_a_short_form_stays_together_and_learns(example):
    found = example.trained(1, 12, "compiled")
    agree(found, 12, "compiled")
    assert found.drift[-1].loss < found.drift[0].loss


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["compiled", "eager"])
def test_two_hundred_steps_of_six_layers(example, mode):
    found = example.trained(6, 200, mode)
    agree(found, 200, mode)
    # Guessing among the letters costs 3.3.
    assert sum(drift.loss for drift in found.drift[-20:]) / 20 < 1.9


def test_both_curves_are_drawn_on_one_picture(example, tmp_path):
    pytest.importorskip("matplotlib")
    found = example.trained(1, 2, "compiled")
    example.draw({"compiled": found}, tmp_path / "curves.png")
    assert 5_000 < (tmp_path / "curves.png").stat().st_size < 150_000
