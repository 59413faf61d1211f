"""What a process runs with, what is missing in it, and what of it is known to go wrong: one object for every face."""

import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from parity.errors import MissingFrameworkError, first_line
from parity.frameworks import load
from parity.trained import why_missing

OURS = "torch-flax-parity"
# Versions that are told, in this order, where they are installed.
PACKAGES = ("numpy", "ml-dtypes", "jaxlib", "optax", "orbax-checkpoint", "safetensors", "tokenizers", "jinja2", "plotly")
# What brings jax to a GPU; its version must be jaxlib's.
PLUGINS = tuple(f"jax-cuda{major}-{part}" for major in (12, 13) for part in ("plugin", "pjrt"))
# Variables that change what is computed, or where.
VARIABLES = (
    *("XLA_FLAGS", "JAX_PLATFORMS", "JAX_DEFAULT_MATMUL_PRECISION", "XLA_PYTHON_CLIENT_PREALLOCATE"),
    *("XLA_PYTHON_CLIENT_ALLOCATOR", "XLA_PYTHON_CLIENT_MEM_FRACTION", "NVIDIA_TF32_OVERRIDE"),
    *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "CUDA_VISIBLE_DEVICES"),
    *("OMP_NUM_THREADS", "KMP_DUPLICATE_LIB_OK"),
)
# Parts that some commands need: the module, the extra that brings it, what it is for.
PARTS = (
    ("torch", "torch", "every comparison"),
    ("jax", "flax", "every comparison"),
    ("flax", "flax", "every comparison"),
    ("optax", "flax", "optimizers and training"),
    ("orbax.checkpoint", "flax", "Orbax folders"),
    ("safetensors", "all", "the trained encoder of the built-in suite"),
    ("tokenizers", "all", "the trained encoder of the built-in suite"),
    ("jinja2", "report", "pages and notebooks"),
    ("plotly", "report", "the pictures on pages"),
)


@dataclass(frozen=True)
class Missing:
    """Something that is not installed.

    Attributes:
        name: of the package.
        install: the command that brings it.
        needed_for: what cannot be done without it.
    """

    name: str
    install: str
    needed_for: str


@dataclass(frozen=True)
class Warned:
    """A combination or setting that is known to go wrong.

    Attributes:
        code: one of `parity.KNOWN_BAD`.
        what: what was found, and what comes of it.
        do: the one thing to do.
        proof: whether comparisons set it right while they run, so that it concerns other runs alone.
    """

    code: str
    what: str
    do: str
    proof: bool = False


@dataclass(frozen=True)
class Environment(Mapping[str, str]):
    """Versions, devices and settings by name, as a mapping, with what is missing and what is known to go wrong.

    Attributes:
        facts: versions, devices, settings as they are in this process, and in a report what was pinned while comparing.
        missing: what is not installed.
        warnings: known-bad combinations, those that may change a comparison first.
    """

    facts: Mapping[str, str]
    missing: tuple[Missing, ...] = ()
    warnings: tuple[Warned, ...] = ()

    def __getitem__(self, name: str) -> str:
        return self.facts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.facts)

    def __len__(self) -> int:
        return len(self.facts)

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """The facts in words, no wider than so many columns; without a width one line for each."""
        from parity.report.environment import environment_text

        return environment_text(self, width)

    def to_dict(self) -> dict[str, Any]:
        """The facts for machines."""
        from parity.report.data import document

        parts: dict[str, Any] = {"facts": dict(self.facts), "missing": list(self.missing), "warnings": list(self.warnings)}
        return document("environment", self, **parts)


def environment() -> Environment:
    """Versions, devices and settings of this process, what is missing in it, and what of it is known to go wrong.

    A framework that cannot be imported is told as such; nothing is raised for it.

    Returns:
        The facts, as a mapping from names to words; `warnings` has a code and one thing to do for each.
    """
    rooms, broken = [], dict[str, str]()
    for room, name in (("torch", "torch"), ("nnx", "jax")):
        try:
            rooms.append(load(room))
        except MissingFrameworkError:
            continue
        except Exception as error:
            broken[name] = f"cannot be imported: {type(error).__name__}: {first_line(error)}"
    return surroundings(*rooms, broken=broken)


def surroundings(
    *rooms: ModuleType, pinned: Mapping[str, str] | None = None, broken: Mapping[str, str] | None = None
) -> Environment:
    """The environment of a process in which these rooms are open.

    Args:
        rooms: of the frameworks that could be imported.
        pinned: what is set while comparing, by name.
        broken: why a framework that is installed could not be imported.
    """
    facts = {
        OURS: installed()[OURS],
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }
    for name in ("torch", "jax", "flax"):
        if name in installed():
            facts[name] = installed()[name]
    facts |= {name: text for name, text in installed().items() if name not in facts}
    for room in rooms:
        facts |= room.environment()
        # A recorded side has run where it was recorded, and says so itself.
        if absent := getattr(room, "gpu_missing", None):
            facts[f"{'torch' if room.NAME == 'torch' else 'jax'} gpu"] = absent() or "available"
    facts |= {name: f"{facts.get(name, '')} {why}".strip() for name, why in (broken or {}).items()}
    facts |= {name: os.environ[name] for name in VARIABLES if name in os.environ}
    facts["trained encoder"] = why_missing() or "installed"
    facts |= pinned or {}
    return Environment(facts, missing(), tuple(sorted(known_bad(facts), key=lambda one: one.proof)))


@lru_cache(maxsize=1)
def installed() -> dict[str, str]:
    """Versions of what is installed, none of it loaded."""
    found = {}
    for name in (OURS, "torch", "jax", "flax", *PACKAGES, *PLUGINS):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    old = older_than_jax_wants()
    return found | ({"CUDA libraries": old} if old else {})


def versions() -> dict[str, str]:
    """Versions of the frameworks and NumPy, none of them loaded."""
    return {name: installed().get(name, "not installed") for name in ("torch", "jax", "flax", "numpy")}


@lru_cache(maxsize=1)
def missing() -> tuple[Missing, ...]:
    """What is not installed, and how to install it."""
    # The parent first: a search below a package that is missing is an error.
    absent = [part for part in PARTS if any(find_spec(name) is None for name in (part[0].partition(".")[0], part[0]))]
    return tuple(Missing(name, f"pip install '.[{extra}]' in a clone", what) for name, extra, what in absent)


# --------------------------------------------------------------------------- what is known to go wrong

KNOWN_BAD = {
    "import-fails": "a framework is installed and cannot be imported",
    "too-old": "a package is older than the oldest with which parity ran",
    "numpy-abi": "torch was built for another NumPy, and takes no arrays from this one",
    "jaxlib-mismatch": "jaxlib is newer than jax, which refuses it",
    "flax-jax": "a Flax that fails with this jax",
    "jax-plugin-mismatch": "the CUDA plugin of jax is of another version than jaxlib",
    "cuda-mismatch": "torch and jax are built for different CUDA, and load both into one process",
    "cudnn-too-old": "CUDA libraries, pinned by torch as a rule, are older than jax asks for",
    "xla-flags": "XLA_FLAGS changes what compiled programs compute",
    "jit-off": "jax compiles nothing, so that what is called compiled runs operation by operation",
    "denormals-off": "torch turns denormal numbers to zero",
    "openmp-twice": "more than one OpenMP runtime is allowed in the process",
    "tf32-forced": "a variable decides on TF32 over the frameworks' own settings",
    "gpu-memory": "jax takes most of the GPU's memory at once, beside torch",
    "one-side-gpu": "one framework sees a GPU, the other does not",
    "cublas-workspace": "products of torch on the GPU need not repeat",
    "torch-precision": "torch's float32 products keep fewer digits",
    "jax-precision": "jax's float32 products keep fewer digits",
    "x64-off": "jax makes float64 and int64 arrays 32 bits wide in silence",
    "default-dtype": "torch makes new arrays in another dtype than float32",
    "other-generator": "jax draws by another generator than threefry",
}
# Measured on a product, a GELU, a norm and a softmax on the CPU, jax 0.10.2: the share of values that stay the same.
XLA_FLAGS = {
    "xla_cpu_enable_fast_math": "94 % of float32 values stay the same",
    "xla_allow_excess_precision": "93 % of bfloat16 values stay the same",
    "xla_backend_optimization_level": "85 % of float32 values stay the same",
    "xla_cpu_max_isa": "75 % of float32 values stay the same",
    "xla_disable_hlo_passes": "passes that are left out leave other operations",
}
Facts = Mapping[str, str]


def known_bad(facts: Facts) -> Iterator[Warned]:
    """The known-bad combinations among facts, of which any may be absent."""
    for check in CHECKS:
        yield from check(facts)


def imports(facts: Facts) -> Iterator[Warned]:
    """What is installed and cannot be used at all."""
    for name in ("torch", "jax"):
        if "cannot be imported" in facts.get(name, ""):
            yield Warned("import-fails", f"{name} {facts[name]}", f"install {name} anew in an environment of its own")
    bridge = facts.get("torch and NumPy", "")
    if bridge not in ("", "work together"):
        what = f"torch {facts.get('torch')} takes no arrays of NumPy {facts.get('numpy')}: {bridge}"
        # torch 2.3 is the first that was built for NumPy 2 (pytorch/pytorch#132179).
        yield Warned("numpy-abi", what, "pip install --upgrade torch")


def ages(facts: Facts) -> Iterator[Warned]:
    """What is older than the oldest that was tried."""
    for name, bound in bounds().items():
        if name in facts and release(facts[name]) < release(bound):
            what = f"{name} {facts[name]} is older than {bound}, the oldest that was tried"
            yield Warned("too-old", what, f"pip install '{name}>={bound}'")


def jax_parts(facts: Facts) -> Iterator[Warned]:
    """Parts of jax that are not of one release."""
    jax, jaxlib = facts.get("jax", ""), facts.get("jaxlib", "")
    if jax and jaxlib and release(jaxlib) > release(jax):
        what = f"jaxlib {jaxlib} is newer than jax {jax}, which refuses it"
        yield Warned("jaxlib-mismatch", what, f"pip install 'jax=={jaxlib}'")
    if facts.get("flax") and jax and release(facts["flax"]) < (0, 12, 2) and release(jax) >= (0, 8, 3):
        yield Warned("flax-jax", f"flax {facts['flax']} fails in nnx.jit with jax {jax}", "pip install 'flax>=0.12.2'")
    for plugin in PLUGINS:
        if plugin in facts and jaxlib and release(facts[plugin]) != release(jaxlib):
            # jax leaves it out with a warning, or crashes (jax-ml/jax#24901).
            what = f"{plugin} {facts[plugin]} does not belong to jaxlib {jaxlib}: jax runs on the CPU alone, or crashes"
            yield Warned("jax-plugin-mismatch", what, f"pip install '{plugin}=={jaxlib}'")


def cuda(facts: Facts) -> Iterator[Warned]:
    """Both frameworks on one GPU."""
    built = re.search(r"CUDA (\d+)", facts.get("torch build", ""))
    plugins = [int(found[1]) for name in facts if (found := re.match(r"jax-cuda(\d+)-plugin$", name))]
    if built and plugins and int(built[1]) not in plugins:
        what = f"torch is built for CUDA {built[1]}, jax for CUDA {plugins[0]}: libraries of both are loaded into one process"
        yield Warned("cuda-mismatch", what, f"pip install 'jax[cuda{built[1]}]'")
    if "CUDA libraries" in facts:
        what = f"{facts['CUDA libraries']}: jax fails as it starts on the GPU, or in its first convolution"
        yield Warned("cudnn-too-old", what, "take a torch that pins newer ones, or an older jax")
    sees = {name: facts.get(f"{name} gpu") == "available" for name in ("torch", "jax") if f"{name} gpu" in facts}
    if len(sees) == 2 and any(sees.values()) and not all(sees.values()):
        blind = "jax" if sees["torch"] else "torch"
        what = f"{'torch' if sees['torch'] else 'jax'} sees a GPU, {blind} does not: {facts[f'{blind} gpu']}"
        install = "pip install 'jax[cuda13]', and unset JAX_PLATFORMS" if blind == "jax" else "install a CUDA build of torch"
        yield Warned("one-side-gpu", what, install)
    if len(sees) == 2 and all(sees.values()):
        if facts.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower() not in ("false", "0"):
            what = "jax takes three quarters of the GPU's memory when it starts, which torch then lacks"
            yield Warned("gpu-memory", what, "set XLA_PYTHON_CLIENT_PREALLOCATE=false", True)
        if "CUBLAS_WORKSPACE_CONFIG" not in facts:
            what = "torch's products on the GPU need not repeat bit for bit without CUBLAS_WORKSPACE_CONFIG"
            yield Warned("cublas-workspace", what, "set CUBLAS_WORKSPACE_CONFIG=:4096:8")


def numbers(facts: Facts) -> Iterator[Warned]:
    """What changes numbers, also while comparing."""
    flags = {name: what for name, what in XLA_FLAGS.items() if name in facts.get("XLA_FLAGS", "")}
    if flags:
        told = "; ".join(f"{name} ({what})" for name, what in flags.items())
        yield Warned("xla-flags", f"XLA_FLAGS changes results: {told}", f"leave {' and '.join(flags)} out of XLA_FLAGS")
    if facts.get("jax compilation") == "off":
        what = "jax compiles nothing (jax_disable_jit): compiled runs are not what users run"
        yield Warned("jit-off", what, "unset JAX_DISABLE_JIT")
    if facts.get("torch denormals") == "turned to zero":
        yield Warned("denormals-off", "torch turns denormal numbers to zero here", "torch.set_flush_denormal(False)")
    if facts.get("KMP_DUPLICATE_LIB_OK", "").lower() in ("true", "1", "yes"):
        what = "KMP_DUPLICATE_LIB_OK lets two OpenMP runtimes into one process, which may give wrong numbers in silence"
        yield Warned("openmp-twice", what, "unset it, and install torch and NumPy from one source")
    for name in ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"):
        if name in facts:
            what = f"{name}={facts[name]} decides on TF32, whatever torch and jax are told"
            yield Warned("tf32-forced", what, f"unset {name}")


def settings(facts: Facts) -> Iterator[Warned]:
    """What comparisons set right while they run, and other runs do not."""
    products = facts.get("torch float32 products, as set", "highest")
    if products != "highest":
        what = f"torch's float32 products are set to {products!r}: TF32 on a GPU"
        yield Warned("torch-precision", what, "torch.set_float32_matmul_precision('highest')", True)
    precision = facts.get("jax matmul precision, as set", "")
    if precision not in ("", "highest", "float32") and (precision != "default" or facts.get("jax gpu") == "available"):
        what = f"jax_default_matmul_precision is {precision}: float32 products keep fewer digits (TF32 on a GPU)"
        yield Warned("jax-precision", what, "jax.config.update('jax_default_matmul_precision', 'highest')", True)
    if facts.get("jax 64-bit types, as set") == "off":
        what = "jax makes float64 and int64 arrays 32 bits wide in silence; float64 runs of comparisons switch it on"
        yield Warned("x64-off", what, "jax.config.update('jax_enable_x64', True) for models in float64", True)
    dtype = facts.get("torch default dtype", "float32")
    if dtype != "float32":
        what = f"torch makes new arrays in {dtype}, Flax's layers in float32"
        yield Warned("default-dtype", what, f"give the Flax model param_dtype={dtype}, or torch.set_default_dtype", True)
    generator = facts.get("jax random numbers", "threefry2x32")
    if not generator.startswith("threefry2x32"):
        what = f"jax draws by {generator}: parity.threefry and threefry_dropout reproduce threefry2x32 alone"
        yield Warned("other-generator", what, "jax.config.update('jax_default_prng_impl', 'threefry2x32')", True)


CHECKS: tuple[Callable[[Facts], Iterable[Warned]], ...] = (imports, ages, jax_parts, cuda, numbers, settings)


def release(text: str) -> tuple[int, ...]:
    """The numbers of a version, without what follows them: (2, 13, 0) of '2.13.0+cpu'."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


@lru_cache(maxsize=1)
def bounds() -> dict[str, str]:
    """The oldest version of each package, as the installed wheel declares it."""
    found = (re.match(r"([\w.-]+?)\s*>=\s*([\d.]+)", text) for text in requires(OURS) or ())
    chosen = ("numpy", "ml-dtypes", "torch", "jax", "flax", "optax")
    return {one[1]: one[2] for one in found if one and one[1] in chosen}


def older_than_jax_wants() -> str:
    """CUDA libraries that are older than the CUDA plugin of jax asks for; '' if there are none."""
    told = []
    for plugin in PLUGINS:
        try:
            wishes = requires(plugin) or ()
        except PackageNotFoundError:
            continue
        for wish in wishes:
            found = re.match(r"(nvidia-[\w-]+).*?>=\s*([\d.]+)", wish)
            try:
                have = version(found[1]) if found else ""
            except PackageNotFoundError:
                continue
            if found and have and release(have) < release(found[2]):
                told.append(f"{found[1]} {have} is older than {found[2]}, which {plugin} asks for")
    return "; ".join(told)
