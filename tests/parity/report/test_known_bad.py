"""What is known to go wrong with versions and settings: each combination planted, told once, with one thing to do."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from report_helpers import Words, failing, passing, squeezed

import parity
from parity import surroundings as environments
from parity.errors import MissingFrameworkError
from parity.frameworks import load
from parity.report.html import report_page
from parity.surroundings import Environment, known_bad, release, surroundings

WELL = {
    **{
        "torch": "2.13.0",
        "jax": "0.10.2",
        "jaxlib": "0.10.2",
        "flax": "0.12.8",
        "numpy": "2.4.0",
        "jax 64-bit types, as set": "on",
    },
    **{"torch build": "CUDA 13.0", "jax-cuda13-plugin": "0.10.2", "torch gpu": "available", "jax gpu": "available"},
    **{"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "torch and NumPy": "work together"},
    **{
        "torch float32 products, as set": "highest",
        "jax matmul precision, as set": "highest",
        "torch default dtype": "float32",
    },
}
# What is planted, the code that it must have, a part of the sentence, and of what to do.
PLANTED = [
    (
        {"torch": "2.13.0 cannot be imported: OSError: libcudart.so.13"},
        "import-fails",
        "OSError: libcudart",
        "install torch anew",
    ),
    ({"jax": "0.10.2 cannot be imported: RuntimeError: jaxlib"}, "import-fails", "RuntimeError", "install jax anew"),
    ({"torch and NumPy": "RuntimeError: Numpy is not available"}, "numpy-abi", "NumPy 2.4.0: RuntimeError", "--upgrade torch"),
    ({"torch": "2.5.1+cu124"}, "too-old", "torch 2.5.1+cu124 is older than 2.9", "'torch>=2.9'"),
    ({"jaxlib": "0.10.3"}, "jaxlib-mismatch", "jaxlib 0.10.3 is newer than jax 0.10.2", "'jax==0.10.3'"),
    ({"flax": "0.12.1"}, "flax-jax", "flax 0.12.1 fails in nnx.jit with jax 0.10.2", "'flax>=0.12.2'"),
    ({"jax-cuda13-plugin": "0.10.1"}, "jax-plugin-mismatch", "does not belong to jaxlib 0.10.2", "'jax-cuda13-plugin==0.10.2'"),
    ({"torch build": "CUDA 12.8"}, "cuda-mismatch", "torch is built for CUDA 12, jax for CUDA 13", "'jax[cuda12]'"),
    ({"CUDA libraries": "nvidia-cudnn-cu12 9.1 is older than 9.8"}, "cudnn-too-old", "9.1 is older than 9.8", "an older jax"),
    ({"jax gpu": "jax 0.10.2 runs on cpu only"}, "one-side-gpu", "torch sees a GPU, jax does not", "jax[cuda13]"),
    ({"torch gpu": "torch sees no CUDA device"}, "one-side-gpu", "jax sees a GPU, torch does not", "a CUDA build of torch"),
    ({"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}, "gpu-memory", "three quarters", "XLA_PYTHON_CLIENT_PREALLOCATE=false"),
    ({"CUBLAS_WORKSPACE_CONFIG": None}, "cublas-workspace", "need not repeat", ":4096:8"),
    ({"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}, "xla-flags", "94 %", "leave xla_cpu_enable_fast_math out"),
    ({"jax compilation": "off"}, "jit-off", "compiles nothing", "unset JAX_DISABLE_JIT"),
    ({"torch denormals": "turned to zero"}, "denormals-off", "to zero", "set_flush_denormal(False)"),
    ({"KMP_DUPLICATE_LIB_OK": "TRUE"}, "openmp-twice", "two OpenMP runtimes", "unset it"),
    ({"NVIDIA_TF32_OVERRIDE": "0"}, "tf32-forced", "NVIDIA_TF32_OVERRIDE=0 decides", "unset NVIDIA_TF32_OVERRIDE"),
    ({"torch float32 products, as set": "high"}, "torch-precision", "'high'", "set_float32_matmul_precision('highest')"),
    ({"jax matmul precision, as set": "bfloat16"}, "jax-precision", "bfloat16", "'highest'"),
    ({"jax matmul precision, as set": "default"}, "jax-precision", "TF32 on a GPU", "'highest'"),
    ({"jax 64-bit types, as set": "off"}, "x64-off", "32 bits wide in silence", "jax_enable_x64"),
    ({"torch default dtype": "float64"}, "default-dtype", "new arrays in float64", "param_dtype=float64"),
    ({"jax random numbers": "rbg"}, "other-generator", "jax draws by rbg", "threefry2x32"),
]


@pytest.mark.parametrize(("facts", "code", "what", "do"), PLANTED, ids=[f"{row[1]}-{i}" for i, row in enumerate(PLANTED)])
def test_a_bad_combination_is_told_once_and_what_to_do(facts, code, what, do):
    assert not list(known_bad(WELL))
    [found] = [one for one in known_bad({k: v for k, v in (WELL | facts).items() if v is not None}) if one.code == code]
    assert what in found.what and do in found.do


def test_every_known_bad_combination_is_planted():
    assert {code for _, code, _, _ in PLANTED} == set(parity.KNOWN_BAD)


def test_versions_are_compared_by_their_numbers():
    assert release("2.13.0+cpu") == (2, 13, 0) > release("2.9.1") and release("0.10.2.dev1") == (0, 10, 2)
    assert release("unknown") == ()


def test_a_cuda_library_that_jax_wants_newer_is_found_in_what_packages_declare(monkeypatch):
    wishes = ['nvidia-cudnn-cu12<10.0,>=9.8; extra == "with-cuda"', "jax-cuda12-pjrt==0.10.2", "nvidia-nowhere>=1"]
    have = {"nvidia-cudnn-cu12": "9.1.0.70"}

    def version(name):
        if name not in have:
            raise environments.PackageNotFoundError
        return have[name]

    def requires(name):
        if name != "jax-cuda12-plugin":
            raise environments.PackageNotFoundError
        return wishes

    monkeypatch.setattr(environments, "version", version)
    monkeypatch.setattr(environments, "requires", requires)
    told = "nvidia-cudnn-cu12 9.1.0.70 is older than 9.8, which jax-cuda12-plugin asks for"
    assert environments.older_than_jax_wants() == told
    have["nvidia-cudnn-cu12"] = "9.10.2.21"
    assert environments.older_than_jax_wants() == ""


def test_settings_are_those_of_this_process():
    before = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    try:
        torch.set_float32_matmul_precision("high")
        torch.set_default_dtype(torch.float64)
        torch.set_flush_denormal(True)
        found = {one.code for one in parity.environment().warnings}
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.set_default_dtype(before[1])
        torch.set_flush_denormal(False)
    assert {"torch-precision", "default-dtype", "denormals-off"} <= found
    assert not {"torch-precision", "default-dtype", "denormals-off"} & {one.code for one in parity.environment().warnings}


def test_settings_are_told_as_they_are_and_as_they_are_pinned_while_comparing():
    facts = passing().environment
    assert facts["torch algorithms, as set"] == "any" and facts["torch algorithms"] == "deterministic"
    assert set(parity.environment()) <= set(facts)


def test_what_is_missing_or_broken_is_told_and_nothing_raises(monkeypatch):
    def loaded(room):
        if room == "torch":
            raise OSError("libtorch.so: undefined symbol")
        raise MissingFrameworkError("flax is not installed")

    monkeypatch.setattr(environments, "load", loaded)
    monkeypatch.setattr(environments, "find_spec", lambda name: None if name == "plotly" else object())
    environments.missing.cache_clear()
    try:
        found = parity.environment()
    finally:
        environments.missing.cache_clear()
    assert [(one.name, one.install) for one in found.missing] == [("plotly", "pip install '.[report]' in a clone")]
    assert "cannot be imported: OSError: libtorch.so" in found["torch"]
    assert found.warnings[0].code == "import-fails"
    text = str(found)
    assert "missing: plotly, for the pictures on pages: pip install '.[report]' in a clone" in text
    assert "import-fails (also while comparing): torch" in text


def test_a_torch_that_takes_no_arrays_of_numpy_is_told(monkeypatch):
    def refused(array):
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(torch, "from_numpy", refused)
    assert surroundings(load("torch"))["torch and NumPy"] == "RuntimeError: Numpy is not available"


def test_variables_change_what_is_told_in_a_process_of_its_own():
    bad = {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true", "JAX_DISABLE_JIT": "1", "JAX_DEFAULT_MATMUL_PRECISION": "bfloat16"}
    code = "import parity; print([one.code for one in parity.environment().warnings if not one.code.startswith('x64')])"
    env = {**os.environ, **bad, "PYTHONPATH": str(Path(__file__).parents[3]), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['xla-flags', 'jit-off', 'jax-precision']"


@pytest.mark.parametrize("make", [passing, failing])
def test_what_may_change_a_comparison_stands_in_every_face_of_its_report(make):
    known = make()
    facts = {**known.environment, "XLA_FLAGS": "--xla_backend_optimization_level=0", "jax 64-bit types, as set": "off"}
    report = replace(known, environment=Environment(facts, (), tuple(known_bad(facts))))
    told = "XLA_FLAGS changes results: xla_backend_optimization_level"
    page, data = squeezed(Words(report_page(report)).text), report.to_dict()
    assert told in str(report) and told in page and told in squeezed(Words(report._repr_html_()).text)
    assert {"xla-flags", "x64-off"} <= {hint["code"] for hint in data["hints"] if hint["kind"] == "environment"}
    # What comparisons set right is no news of this one, and is on the page for other runs.
    assert "in silence" not in str(report) and "x64-off" in page
    for name, value in facts.items():
        assert name in page and squeezed(value) in page and data["environment"][name] == value
        assert f"{value}" in report.text(environment=True)
    assert "jax devices" not in report.text()


def test_the_facts_fit_in_a_narrow_terminal():
    lines = parity.environment().text(40).splitlines()
    assert max(map(len, lines)) <= 40
    assert "jax" in "".join(lines) and "x64-off" in "".join(lines)
