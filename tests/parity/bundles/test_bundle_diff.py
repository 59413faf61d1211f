"""Two recordings, compared with NumPy alone."""

import subprocess
import sys

import bundle_pairs as pairs
import pytest
from evidence_pairs import altered, one_ulp

import parity


@pytest.mark.parametrize("keep", ["", " summaries", " digests"])
@pytest.mark.parametrize("side", ["torch", "flax"])
def test_a_recording_is_equal_to_itself(side, keep, recorded):
    found = parity.bundle_diff(recorded[f"{side}{keep}"], recorded[f"{side}{keep}"])
    assert found.passed and len(found.leaves) > 10


def test_two_recordings_of_one_framework_differ_where_the_models_do(models, recorded, tmp_path):
    given = pairs.ids(), pairs.scale()
    wrong = pairs.flax_model(models[0], epsilon=1e-6)
    path = parity.record(wrong, *given, path=tmp_path / "w.safetensors")
    found = parity.bundle_diff(recorded["flax"], path)
    paths = {leaf.path for leaf in found.leaves if not leaf.agrees}
    assert {"setting norm: epsilon", "output in float64 ['scores']", "module norm: output", "gradient of out.kernel"} <= paths
    assert not any(path.startswith(("array", "argument", "module embed")) for path in paths)
    assert "1e-06, expected 1e-05" in str([leaf for leaf in found.leaves if leaf.path == "setting norm: epsilon"])


def test_one_ulp_in_a_parameter_is_told_bit_by_bit_and_by_digest(models, recorded, tmp_path):
    given, options = (pairs.ids(), pairs.scale()), {"gradients": False}
    wrong = pairs.flax_model(models[0])
    altered(wrong, "out.kernel", one_ulp)
    path = parity.record(wrong, *given, path=tmp_path / "w.safetensors", keep="digests", **options)
    [leaf] = [leaf for leaf in parity.bundle_diff(recorded["flax"], path).leaves if leaf.path == "array out.kernel"]
    assert leaf.reason == "some bits differ: a bundle knows it by its digest alone"


def test_recordings_of_both_frameworks_are_a_pair_in_either_order(recorded):
    for order in (("torch", "flax"), ("flax", "torch")):
        report = parity.bundle_diff(*(recorded[side] for side in order))
        assert report.passed, str(report)
    assert "expected (torch) is read from torch.safetensors" in str(report)


def test_recordings_on_other_arguments_or_seeds_are_refused(models, recorded, tmp_path):
    path = parity.record(
        models[1], pairs.ids(), 2 * pairs.scale(), seed=5, path=tmp_path / "other.safetensors", gradients=False
    )
    with pytest.raises(parity.InputError, match="cannot be compared: 2 problems") as caught:
        parity.bundle_diff(recorded["torch"], path)
    assert "they have seeds 0 and 5" in str(caught.value) and "the arguments are not the same" in str(caught.value)
    found = parity.bundle_diff(recorded["flax"], path)
    assert {"seed", "argument args[1]"} <= {leaf.path for leaf in found.leaves if not leaf.agrees}


def test_neither_framework_is_needed(recorded):
    code = f"""
    import sys
    for name in ("torch", "jax", "flax", "jaxlib"):
        sys.modules[name] = None
    import parity
    assert parity.bundle_diff({str(recorded["torch"])!r}, {str(recorded["flax"])!r}).passed
    assert parity.bundle_diff({str(recorded["torch"])!r}, {str(recorded["torch"])!r}).passed
    """
    import textwrap

    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
