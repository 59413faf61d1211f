"""The built wheel, in environments of its own: each holds what one extra asks for and nothing else."""

import os
import re
import subprocess
import sys
import textwrap
import venv
import zipfile
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch_impl", "jax_impl", "parity")
FRAMEWORKS = {"torch": ("torch",), "flax": ("jax", "jaxlib", "flax", "optax", "orbax")}
EVERY_FRAMEWORK = sum(FRAMEWORKS.values(), ())

# One line for each public module of the wings; both wings run the same text.
MODULES = """
small = wing.TransformerConfig(d_model=8, n_heads=2, n_layers=2, max_len=16)
modules = [
    (wing.Linear(8, 6, **rngs), [x]),
    (wing.ReLU(), [x]),
    (wing.Dropout(0.1, **rngs), [x]),
    (wing.FeedForwardNetwork(8, 12, **rngs), [x]),
    (wing.SelfAttention(8, 2, **rngs), [x, x, x, None]),
    (wing.Multi_Head_Self_Attention(8, 2, **rngs), [x, x, x, None]),
    (wing.MultiHeadAttention(8, 2, 4, 4, 4, **rngs), [x, x, x, None]),
    (wing.ScaledDotProductAttention(), [heads, heads, heads, None]),
    (wing.GELU("tanh"), [x]),
    (wing.LayerNorm(8, **rngs), [x]),
    (wing.RMSNorm(8, **rngs), [x]),
    (wing.Embedding(7, 8, **rngs), [ids]),
    (wing.SinusoidalPositions(8, 16), [x]),
    (wing.RotaryPositions(8, 16), [heads]),
    (wing.EncoderLayer(small, **rngs), [x]),
    (wing.DecoderLayer(small, **rngs), [x, x]),
    (wing.Encoder(small, **rngs), [x]),
    (wing.Decoder(small, **rngs), [x, x]),
    (wing.Transformer(7, 7, small, **rngs), [ids, ids]),
]
public = {name for name, value in vars(wing).items() if isinstance(value, type) and issubclass(value, nn.Module)}
built = {type(module).__name__ for module, _ in modules}
assert public == built, f"add a line to MODULES in this test for {sorted(public - built)}"
for module, inputs in modules:
    output = module(*inputs)
    for array in output if isinstance(output, tuple) else (output,):
        assert np.isfinite(as_numpy(array)).all(), type(module).__name__
"""
PREPARE = {
    "torch": """
import numpy as np, torch, torch_impl as wing
from torch import nn
x = torch.linspace(-1, 1, 2 * 5 * 8).reshape(2, 5, 8)
heads, rngs, as_numpy = x[:, None], {}, lambda tensor: tensor.detach().numpy()
ids = torch.tensor([[1, 2, 3, 4, 5], [6, 1, 2, 0, 0]])
""",
    "flax": """
import jax.numpy as jnp, numpy as np, jax_impl as wing
from flax import nnx as nn
x = jnp.linspace(-1, 1, 2 * 5 * 8).reshape(2, 5, 8)
heads, rngs, as_numpy = x[:, None], {"rngs": nn.Rngs(0)}, np.asarray
ids = jnp.asarray([[1, 2, 3, 4, 5], [6, 1, 2, 0, 0]])
""",
}
OTHER_WING = {"torch": "jax_impl", "flax": "torch_impl"}


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Folder with the sdist, and the wheel that pip makes from that sdist alone."""
    pytest.importorskip("hatchling", reason="building the wheel needs hatchling, of the extra `dev`")
    folder = tmp_path_factory.mktemp("built")
    command([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder], cwd=ROOT)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation"]
    command([*pip, "-w", folder, *folder.glob("*.tar.gz")], cwd=folder)
    return folder


@pytest.fixture
def environment(built, tmp_path):
    """Return a function: name of an extra ("" for none) -> the interpreter of a fresh environment that has just that."""

    def make(extra):
        place = tmp_path / f"environment {extra}"
        venv.create(place, symlinks=True, with_pip=False)
        (site,) = place.glob("lib/python*/site-packages")
        (wheel,) = built.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
        (metadata,) = site.glob("torch_flax_parity-*.dist-info")
        for needed in needs(PathDistribution(metadata), extra):
            link(needed, site)
        return place / "bin" / "python"

    return make


def needs(project, extra):
    """Distributions that `project[extra]` needs, direct or not, as they are installed here."""
    seen, waiting = {}, [(project, extra)]
    while waiting:
        needing, wish = waiting.pop()
        for requirement in map(Requirement, needing.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": wish}):
                for inner in ("", *requirement.extras):
                    key = (re.sub(r"[-_.]+", "-", requirement.name).lower(), inner)
                    if key not in seen:
                        seen[key] = distribution(requirement.name)
                        waiting.append((seen[key], inner))
    return list(seen.values())


def link(installed: Distribution, site: Path):
    """Put what `installed` owns at the top of its site-packages into another one, by symbolic links."""
    assert installed.files, f"{installed.name} does not list its files, so it cannot be linked into a test environment"
    for top in {file.parts[0] for file in installed.files} - {"..", "__pycache__"}:
        if not (site / top).exists():
            (site / top).symlink_to(installed.locate_file(top))


def command(words, **options):
    """Run a command; on failure show all that it said."""
    result = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False, **options)
    assert result.returncode == 0, f"{words} ended with {result.returncode}\n{result.stdout}{result.stderr}"


def run(python, code):
    """Run code in an environment: isolated from this one, warnings as errors, on the CPU."""
    command([python, "-I", "-W", "error", "-c", textwrap.dedent(code)], env={**os.environ, "JAX_PLATFORMS": "cpu"})


def assert_absent(names):
    """Code that fails where one of the packages can be found."""
    return f"import importlib.util as u; found = [n for n in {names} if u.find_spec(n)]; assert not found, found\n"


def assert_not_loaded(names):
    """Code that fails where one of the packages has been imported."""
    return f"import sys; loaded = [n for n in {names} if n in sys.modules]; assert not loaded, loaded\n"


@pytest.mark.parametrize(("extra", "other"), [("torch", "flax"), ("flax", "torch")])
def test_each_wing_runs_where_the_other_framework_is_absent(environment, extra, other):
    run(environment(extra), assert_absent(FRAMEWORKS[other]) + PREPARE[extra] + MODULES)


@pytest.mark.parametrize(("extra", "other"), [("torch", "flax"), ("flax", "torch")])
def test_the_other_wing_names_the_framework_that_it_misses(environment, extra, other):
    code = f"""
    try:
        import {OTHER_WING[extra]}
    except ModuleNotFoundError as error:
        assert error.name in {FRAMEWORKS[other]}, error.name
    else:
        raise AssertionError("imported without its framework")
    """
    run(environment(extra), code)


@pytest.mark.parametrize("extra", ["", "torch", "flax"])
def test_parity_imports_with_no_framework_or_one_and_loads_none(environment, extra):
    absent = [name for key, names in FRAMEWORKS.items() if key != extra for name in names]
    run(environment(extra), assert_absent(absent) + "import parity\n" + assert_not_loaded(EVERY_FRAMEWORK))


def test_parity_loads_no_framework_where_both_are_installed():
    run(sys.executable, "import parity\n" + assert_not_loaded(EVERY_FRAMEWORK))


def test_the_wheel_holds_every_file_of_the_three_packages(built):
    (wheel,) = built.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    tree = {path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert tree | {f"{package}/py.typed" for package in PACKAGES} <= packed
    assert {name.split("/")[0] for name in packed} == set(PACKAGES)


# One model in both frameworks: {epsilon} can be planted in Flax's.
TORCH = """
import numpy as np, parity, torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = torch.nn.Linear(4, 6), torch.nn.LayerNorm(6)
    def forward(self, x):
        return self.norm(self.up(x))
model = Model().eval()
with torch.no_grad():
    for name, p in model.named_parameters():
        p.copy_(torch.from_numpy(np.linspace(-1, 2, p.numel(), dtype=np.float32).reshape(p.shape)))
"""
FLAX = """
import numpy as np, parity
from flax import nnx
class Model(nnx.Module):
    def __init__(self, rngs, epsilon):
        self.up = nnx.Linear(4, 6, rngs=rngs)
        self.norm = nnx.LayerNorm(6, epsilon=epsilon, use_fast_variance=False, rngs=rngs)
    def __call__(self, x):
        return self.norm(self.up(x))
def made(epsilon=1e-5):
    model = Model(nnx.Rngs(0), epsilon)
    model.up.kernel[...] = np.linspace(-1, 2, 24, dtype=np.float32).reshape(6, 4).T
    model.up.bias[...] = model.norm.scale[...] = model.norm.bias[...] = np.linspace(-1, 2, 6, dtype=np.float32)
    return model
"""
INPUT = "x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)\n"


def test_recorded_without_jax_and_replayed_without_torch_and_the_other_way_round(environment, tmp_path):
    torch, flax, neither = environment("torch"), environment("flax"), environment("")
    one, other, wrong = (tmp_path / f"{name}.safetensors" for name in ("torch", "flax", "wrong"))
    here = assert_absent(FRAMEWORKS["flax"]) + TORCH + INPUT
    there = assert_absent(FRAMEWORKS["torch"]) + FLAX + INPUT
    run(torch, here + f"parity.record(model, x, path={str(one)!r})")
    run(
        flax,
        there
        + f"""
report = parity.replay({str(one)!r}, made())
assert report.passed, report
report = parity.replay({str(one)!r}, made(1e-6), levels=["identical"])
[cause] = report.diagnosis.causes
assert (cause.path, cause.hypothesis) == ("norm", "epsilon"), report
parity.record(made(), x, path={str(other)!r})
parity.record(made(1e-6), x, path={str(wrong)!r}, gradients=False)
""",
    )
    run(
        torch,
        here
        + f"""
report = parity.replay({str(other)!r}, model)
assert report.passed, report
report = parity.replay({str(wrong)!r}, model, levels=["identical"])
[cause] = report.diagnosis.causes
assert (cause.path, cause.hypothesis) == ("norm", "epsilon"), report
""",
    )
    run(
        neither,
        assert_absent(EVERY_FRAMEWORK) + f"import parity\nassert parity.bundle_diff({str(one)!r}, {str(other)!r}).passed",
    )
