import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FRAMEWORKS = {"torch", "jax", "flax", "optax", "orbax"}
WINGS = {"torch_impl", "jax_impl"}


def imported(path):
    """Every module that a file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return found


def roots(path):
    return {name.split(".")[0] for name in imported(path)}


def forbidden(path):
    """What the table of rooms forbids a file of parity to import."""
    name = path.relative_to(ROOT / "parity").as_posix()
    if name == "suite.py":
        return set()
    if name.startswith("frameworks/torch/"):
        return {"jax", "flax"} | WINGS
    if name.startswith(("frameworks/nnx/", "frameworks/linen/", "frameworks/optax/", "frameworks/jax/")):
        return {"torch"} | WINGS
    return FRAMEWORKS | WINGS


FILES = sorted((ROOT / "parity").rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_a_room_imports_only_what_the_table_allows(path):
    assert not roots(path) & forbidden(path)


@pytest.mark.parametrize("name", ["cli.py"])
def test_the_faces_use_the_front_door(name):
    inner = {module for module in imported(ROOT / "parity" / name) if module.startswith("parity.")}
    assert not inner


def test_the_front_door_only_reexports():
    tree = ast.parse((ROOT / "parity" / "__init__.py").read_text(encoding="utf-8"))
    docstring, *rest = tree.body
    assert isinstance(docstring, ast.Expr)
    assert all(isinstance(node, ast.ImportFrom) and all(a.asname == a.name for a in node.names) for node in rest)


def test_the_check_of_the_rooms_sees_a_planted_import(tmp_path, monkeypatch):
    planted = tmp_path / "parity" / "evidence" / "planted.py"
    planted.parent.mkdir(parents=True)
    planted.write_text("def f():\n    from jax.numpy import sum\n", encoding="utf-8")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert roots(planted) & forbidden(planted) == {"jax"}


def test_a_report_room_holds_no_numerics():
    for path in (ROOT / "parity" / "report").glob("*.py"):
        assert "numpy" not in roots(path) or path.name == "data.py"


def test_there_is_no_python_older_than_the_one_promised():
    assert sys.version_info >= (3, 11)
