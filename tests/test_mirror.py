"""The wings are one design in two frameworks: same files, names, signatures and docstrings; and neither knows the other."""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WINGS = ("torch_impl", "jax_impl")
FORBIDDEN = {
    "torch_impl": {"jax", "jaxlib", "flax", "optax", "orbax", "jax_impl", "parity"},
    "jax_impl": {"torch", "torchvision", "torch_impl", "parity"},
}
# What one wing alone needs: the dtype in which torch computes, spelled out.
JAX_ONLY = {("operations.py", "wide_dtype"), ("operations.py", "wide_matmul")}

Definition = ast.ClassDef | ast.FunctionDef


# ---------------------------------------------------------------- reading


def files(wing: Path) -> dict[str, ast.Module]:
    return {path.name: ast.parse(path.read_text()) for path in sorted(wing.glob("*.py"))}


def public(body: list[ast.stmt]) -> Iterator[Definition]:
    for node in body:
        if isinstance(node, Definition) and (not node.name.startswith("_") or node.name in ("__init__", "__call__")):
            yield node


def definitions(wing: Path, drop: frozenset = frozenset()) -> dict[str, Definition]:
    """Every public class, function and method under `file:name`, in order; `__call__` goes by torch's name."""
    found = {}
    for file, tree in files(wing).items():
        for node in public(tree.body):
            if (file, node.name) in drop:
                continue
            found[f"{file}:{node.name}"] = node
            if isinstance(node, ast.ClassDef):
                for method in public(node.body):
                    found[f"{file}:{node.name}.{method.name.replace('__call__', 'forward')}"] = method
    return found


def parameters(node: ast.FunctionDef) -> list[ast.arg]:
    a = node.args
    every = [*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg]
    return [arg for arg in every if arg is not None and arg.arg not in ("self", "rngs")]


def in_jax_words(annotation: ast.expr | None) -> str:
    # The Flax wing takes NumPy arrays as well, and its helpers say so.
    words = ast.unparse(annotation).replace("Array | np.ndarray", "Array") if annotation else ""
    return re.sub(r"\bTensor\b", "Array", words)


def signature(node: ast.FunctionDef) -> dict[str, object]:
    """A signature without `rngs`, in the words of the Flax wing."""
    a = node.args
    keyword = [(arg, default) for arg, default in zip(a.kwonlyargs, a.kw_defaults, strict=True) if arg.arg != "rngs"]
    return {
        "positional": [(arg.arg, in_jax_words(arg.annotation)) for arg in (*a.posonlyargs, *a.args)],
        "defaults": [ast.unparse(default) for default in a.defaults],
        "keyword": [(arg.arg, in_jax_words(arg.annotation), default and ast.unparse(default)) for arg, default in keyword],
        "rest": [arg and (arg.arg, in_jax_words(arg.annotation)) for arg in (a.vararg, a.kwarg)],
    }


# ---------------------------------------------------------------- the rules, each a list of what breaks it


def forbidden_imports(root: Path) -> list[str]:
    found = []
    for name in WINGS:
        for file, tree in files(root / name).items():
            for node in ast.walk(tree):
                modules = []
                if isinstance(node, ast.Import):
                    modules = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    modules = [node.module or ""]
                elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
                    modules = [ast.literal_eval(node.args[0])]
                found += [f"{name}/{file} imports {m}" for m in modules if m.split(".")[0] in FORBIDDEN[name]]
    return found


def floor_plan(root: Path) -> list[str]:
    torch_files, jax_files = ({path.name for path in (root / name).glob("*")} - {"__pycache__"} for name in WINGS)
    found = [f"{file} in one wing alone" for file in sorted(torch_files ^ jax_files)]
    left, right = list(definitions(root / WINGS[0])), list(definitions(root / WINGS[1], JAX_ONLY))
    if left != right:
        found.append(f"definitions differ: {left} against {right}")
    exported = [
        [ast.unparse(n).replace("jax_impl", "torch_impl") for n in files(root / w)["__init__.py"].body[1:]] for w in WINGS
    ]
    if exported[0] != exported[1]:
        found.append("__init__.py exports different names")
    return found


def common(root: Path) -> Iterator[tuple[str, Definition, Definition]]:
    left, right = (definitions(root / name) for name in WINGS)
    return ((name, left[name], right[name]) for name in left if name in right)


# torch needs no tensor from the root; the Flax wing has made it a number by then.
RESULTS_THAT_DIFFER = {"operations.py:rounded_sqrt"}


def different_signatures(root: Path) -> list[str]:
    found = []
    for name, left, right in common(root):
        if isinstance(left, ast.ClassDef):
            continue
        if signature(left) != signature(right):
            found.append(f"{name}: {signature(left)} against {signature(right)}")
        if name not in RESULTS_THAT_DIFFER and in_jax_words(left.returns) != in_jax_words(right.returns):
            found.append(f"{name} returns {in_jax_words(left.returns)} against {in_jax_words(right.returns)}")
    return found


def different_docstrings(root: Path) -> list[str]:
    return [
        f"docstrings of {name} differ"
        for name, left, right in common(root)
        if ast.get_docstring(left) != ast.get_docstring(right)
    ]


def raises(node: ast.AST) -> bool:
    """Whether a body raises by itself or calls a check."""
    calls = (ast.unparse(n.func) for n in ast.walk(node) if isinstance(n, ast.Call))
    return any(isinstance(n, ast.Raise) for n in ast.walk(node)) or any(
        c == "raise_all" or c.startswith("check_") for c in calls
    )


def sections(docstring: str) -> dict[str, str]:
    parts = re.split(r"^(Args|Returns|Raises|Source):\n", docstring, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def documented(section: str) -> list[str]:
    return re.findall(r"^    (\w+): ", section, flags=re.MULTILINE)


def gaps_of(docstring: str | None, wanted: list[str], returns: bool, refuses: bool) -> list[str]:
    if not docstring:
        return ["no docstring"]
    if docstring.rstrip().endswith("arguments, results and errors are its own."):
        return []
    have = sections(docstring)
    found = []
    if documented(have.get("Args", "")) != wanted:
        found.append(f"Args names {documented(have.get('Args', ''))}, not {wanted}")
    found += [f"no {part}" for part, needed in (("Returns", returns), ("Raises", refuses)) if needed and part not in have]
    return found


def docstring_gaps(root: Path) -> list[str]:
    found = []
    for wing in WINGS:
        every = definitions(root / wing)
        for name, node in every.items():
            if name.endswith("__init__"):
                continue
            if isinstance(node, ast.ClassDef):
                init = every.get(f"{name}.__init__")
                wanted = [arg.arg for arg in parameters(init)] if init else []
                gaps = gaps_of(ast.get_docstring(node), wanted, False, bool(init) and raises(init))
            else:
                returns = node.returns is not None and ast.unparse(node.returns) != "None"
                gaps = gaps_of(ast.get_docstring(node), [arg.arg for arg in parameters(node)], returns, raises(node))
            found += [f"{wing}/{name}: {gap}" for gap in gaps]
    return found


RULES = (forbidden_imports, floor_plan, different_signatures, different_docstrings, docstring_gaps)


@pytest.mark.parametrize("rule", RULES)
def test_the_wings_keep(rule):
    assert rule(ROOT) == []


def test_there_is_something_to_compare():
    names = list(definitions(ROOT / "torch_impl"))
    for name in ("layers.py:Linear.forward", "checks.py:check_mask", "self_attention.py:SelfAttention.__init__"):
        assert name in names
    assert len(names) > 40
    assert set(JAX_ONLY) <= {tuple(name.split(":")) for name in definitions(ROOT / "jax_impl")}


@pytest.mark.parametrize("wing", WINGS)
def test_importing_a_wing_loads_no_other_framework(wing):
    probe = f"import sys, {wing}; print(*sorted({{m.split('.')[0] for m in sys.modules}} & {FORBIDDEN[wing]!r}))"
    run = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.split() == []


# ---------------------------------------------------------------- each rule sees a planted fault

FAULTS = [
    (
        forbidden_imports,
        "torch_impl/layers.py",
        "from torch import Tensor, nn",
        "from torch import Tensor, nn\nimport jax.numpy as jnp",
    ),
    (forbidden_imports, "jax_impl/layers.py", "import math\n", "import math\nfrom torch.nn import functional\n"),
    (forbidden_imports, "jax_impl/checks.py", "    problems = []\n", "    import torch_impl.checks\n    problems = []\n"),
    (
        forbidden_imports,
        "torch_impl/checks.py",
        "import torch\n",
        'import importlib\nimport torch\nimportlib.import_module("parity")\n',
    ),
    (floor_plan, "jax_impl/layers.py", "class ReLU(", "class Relu("),
    (floor_plan, "torch_impl/checks.py", "KIND =", "def check_nothing():\n    pass\n\n\nKIND ="),
    (floor_plan, "jax_impl/__init__.py", "from jax_impl.layers import ReLU as ReLU\n", ""),
    (floor_plan, "torch_impl/self_attention.py", "    def forward(", "    def reset(self):\n        pass\n\n    def forward("),
    (different_signatures, "jax_impl/layers.py", "bias: bool = True, rngs", "bias: bool = False, rngs"),
    (different_signatures, "jax_impl/self_attention.py", 'query: Float[Array, "n lq e"]', 'query: Float[Array, "n lk e"]'),
    (different_signatures, "torch_impl/operations.py", "value: float)", "value: int)"),
    (different_signatures, "torch_impl/multi_head_attention.py", "d_k: int = 64", "d_k: int = 32"),
    (different_signatures, "jax_impl/feed_forward_network.py", '-> Float[Array, "*n e"]', '-> Float[Array, "*n o"]'),
    (different_docstrings, "jax_impl/layers.py", "NaN stays NaN", "NaN becomes 0"),
    (different_docstrings, "torch_impl/self_attention.py", "0 hides; broadcasts", "1 hides; broadcasts"),
    (docstring_gaps, "torch_impl/operations.py", "        b: second operand.\n", ""),
    (docstring_gaps, "jax_impl/checks.py", "        problems: one sentence each.\n", "        problem: one sentence each.\n"),
    (docstring_gaps, "jax_impl/operations.py", "    Returns:\n        Booleans of that shape.\n", ""),
    (docstring_gaps, "torch_impl/layers.py", "    Raises:\n        InputError: p is not in [0, 1].\n", ""),
    (docstring_gaps, "torch_impl/layers.py", '        """Clip at zero.\n', '        f"""Clip at zero.\n'),
]


@pytest.fixture
def copy_of_the_wings(tmp_path):
    for wing in WINGS:
        shutil.copytree(ROOT / wing, tmp_path / wing, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.parametrize(("rule", "file", "before", "after"), FAULTS)
def test_a_rule_sees_a_planted_fault(rule, file, before, after, copy_of_the_wings):
    assert rule(copy_of_the_wings) == []
    path = copy_of_the_wings / file
    text = path.read_text()
    assert before in text, "the fault cannot be planted: the wing has changed"
    path.write_text(text.replace(before, after, 1))
    assert len(rule(copy_of_the_wings)) > 0


def test_a_missing_file_is_seen(copy_of_the_wings):
    (copy_of_the_wings / "jax_impl" / "self_attention.py").unlink()
    assert "self_attention.py in one wing alone" in floor_plan(copy_of_the_wings)


def test_every_rule_has_a_planted_fault():
    assert {fault[0] for fault in FAULTS} == set(RULES)
