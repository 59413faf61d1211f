"""Bundles on the command line, in pytest and on a page."""

import importlib.metadata
import json
import sys

import bundle_pairs as pairs
import pytest
from typer.testing import CliRunner

import parity
from parity.cli import app

ARGS = (
    () if any(e.name == "parity" for e in importlib.metadata.entry_points(group="pytest11")) else ("-p", "parity.pytest_plugin")
)

MODELS = """
import numpy as np, torch
from flax import nnx

def ours(scale=1.0):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3).eval()
    with torch.no_grad():
        model.weight.mul_(scale)
    return model

def port():
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    model.kernel[...] = ours().weight.detach().numpy().T
    model.bias[...] = ours().bias.detach().numpy()
    return model

x = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)
args = (x,)
named = {"input": x}
"""

NAMED = """
class Named(nnx.Module):
    def __init__(self):
        self.up, self.down = nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.up.kernel[...], self.up.bias[...] = port().kernel[...], port().bias[...]

    def __call__(self, x):
        return self.up(x)
"""


@pytest.fixture
def there(tmp_path, monkeypatch):
    """A folder with models, as the current one."""
    (tmp_path / "bundle_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("bundle_models", None)


def test_record_replay_and_diff_on_the_command_line(there):
    run = CliRunner()
    found = run.invoke(app, ["record", "bundle_models:ours", "a.safetensors", "--args", "bundle_models:args", "--no-gradients"])
    assert found.exit_code == 0 and "a.safetensors: " in found.output, found.output
    levels = ["--levels", "weights,identical"]
    found = run.invoke(app, ["replay", "a.safetensors", "bundle_models:port", *levels, "--json", "--html", "page.html"])
    assert found.exit_code == 0 and (there / "page.html").is_file()
    told = json.loads(found.stdout)
    assert told["verdict"] == "same" and told["notes"][0]["code"] == "recorded"
    found = run.invoke(app, ["record", "bundle_models:port", "b.safetensors", "--args", "bundle_models:x", "--no-gradients"])
    assert found.exit_code == 0, found.output
    found = run.invoke(app, ["diff", "a.safetensors", "a.safetensors"])
    assert found.exit_code == 0 and found.stdout.startswith("no difference")
    assert run.invoke(app, ["diff", "a.safetensors", "b.safetensors"]).exit_code == 1  # gradients were not recorded


def test_names_that_differ_and_what_is_left_out_are_told_to_replay(there):
    run, asked = CliRunner(), ["replay", "a.safetensors", "bundle_models:Named", "--levels", "weights,identical"]
    (there / "bundle_models.py").write_text(MODELS + NAMED)
    run.invoke(app, ["record", "bundle_models:ours", "a.safetensors", "--args", "bundle_models:args", "--no-gradients"])
    (there / "names.json").write_text('{"": "up"}')
    told = [*asked, "--rename", "names.json", "--ignore", "down.*"]
    assert run.invoke(app, asked).exit_code == run.invoke(app, told[:-2]).exit_code == 1
    found = run.invoke(app, told)
    assert found.exit_code == 0, found.output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["replay", "none.safetensors", "bundle_models:port"], "cannot be read"),
        (["replay", "a.safetensors", "port"], "MODEL must be module:name, such as my_models:build, got 'port'"),
        (["record", "bundle_models:ours", "a.safetensors", "--args", "x"], "--args must be module:name"),
        (
            ["record", "bundle_models:none", "a.safetensors", "--args", "bundle_models:args"],
            "MODEL bundle_models:none gives no",
        ),
    ],
)
def test_misuse_is_told(there, words, told):
    found = CliRunner().invoke(app, words)
    assert isinstance(found.exception, parity.InputError) and told in str(found.exception)


def test_every_face_says_the_same_of_a_replay(models, recorded, tmp_path):
    report = parity.replay(recorded["torch"], pairs.flax_model(models[0], epsilon=1e-6), levels=["weights", "identical"])
    page = report.save_html(tmp_path / "page.html").read_text(encoding="utf-8")
    for face in (str(report), report._repr_html_(), page, json.dumps(report.to_dict())):
        assert "Flax has epsilon=1e-06 where torch has 1e-05" in face
    for face in (str(report), page, json.dumps(report.to_dict())):
        assert "expected (torch) is read from torch.safetensors" in face
    assert "if Flax does as torch, the difference falls from" in str(report)


GOLDEN = """
import bundle_models

def test_ours(parity_golden):
    found = parity_golden(bundle_models.ours(SCALE), bundle_models.x, path="ours.safetensors", gradients=False)
    assert found.passed

def test_port(parity_golden):
    assert parity_golden(bundle_models.port(), path="ours.safetensors", levels=["weights", "identical"]).passed
"""


def test_golden_bundles_are_compared_and_updated(pytester, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    pytester.makepyfile(bundle_models=MODELS, test_golden=GOLDEN.replace("SCALE", "1.0"))
    options = (*ARGS, "-p", "no:cacheprovider", "-p", "no:randomly")
    result = pytester.runpytest_inprocess(*options, "-k", "ours")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*there is no golden bundle *ours.safetensors; write it with*--parity-update-golden*"])
    pytester.runpytest_inprocess(*options, "--parity-update-golden").assert_outcomes(passed=2)
    bundle = pytester.path / "ours.safetensors"
    before = bundle.stat().st_mtime_ns
    # What still holds is left as it is.
    pytester.runpytest_inprocess(*options, "--parity-update-golden").assert_outcomes(passed=2)
    assert bundle.stat().st_mtime_ns == before and [p.name for p in pytester.path.glob("*.partial")] == []
    pytester.makepyfile(test_golden=GOLDEN.replace("SCALE", "1.5"))
    sys.modules.pop("test_golden", None)
    result = pytester.runpytest_inprocess(*options, "-k", "ours")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*golden bundle *ours.safetensors*",
            "*output: values differ, 6 of 6*",
            "*accept it: pytest --parity-update-golden*",
        ]
    )
    assert "Traceback" not in result.stdout.str() and bundle.stat().st_mtime_ns == before
    result = pytester.runpytest_inprocess(*options, "--parity-update-golden", "-k", "ours")
    result.assert_outcomes(passed=1)
    assert bundle.stat().st_mtime_ns != before
    result = pytester.runpytest_inprocess(*options, "-k", "port")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*NOT the same function*", "*expected (torch) is read from ours.safetensors*"])


def test_golden_bundles_are_written_by_workers(pytester, monkeypatch):
    pytest.importorskip("xdist")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    code = """
import pytest, bundle_models

@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_ours(parity_golden, scale):
    parity_golden(bundle_models.ours(scale), bundle_models.x, gradients=False, keep="digests")
"""
    pytester.makepyfile(bundle_models=MODELS.replace("from flax import nnx", ""), test_many=code)
    options = (*ARGS, "-p", "no:cacheprovider", "-n", "2")
    pytester.runpytest_subprocess(*options, "--parity-update-golden").assert_outcomes(passed=2)
    names = {path.name for path in (pytester.path / "golden").iterdir()}
    assert names == {"test_many-test_ours-1.0.safetensors", "test_many-test_ours-2.0.safetensors"}


def test_a_golden_bundle_that_is_broken_is_told_and_written_anew_if_asked(models, tmp_path):
    place = tmp_path / "g.safetensors"
    place.write_bytes(b"{}")
    given, options = (pairs.ids(), pairs.scale()), {"path": place, "gradients": False}
    with pytest.raises(parity.InputError, match="no safetensors file"):
        parity.golden(models[0], *given, **options)
    assert parity.golden(models[0], *given, update=True, **options).passed
    with pytest.raises(parity.InputError, match="model must be a torch"):
        parity.golden(3, *given, **options)
