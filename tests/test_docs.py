"""What the documentation claims: every row of its tables is computed."""

import ast
import inspect
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import torch
import typer
from flax import linen, nnx
from torch import nn
from torch.nn import functional as F

import parity
import parity.cli

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(DOCS.glob("*.md"))
# `expression` → `value`, in a cell.
CLAIM = re.compile(r"`([^`]+)` → `([^`]+)`")


def default(function: Any, name: str) -> Any:
    found = inspect.signature(function).parameters[name].default
    return None if found is inspect.Parameter.empty else found


def raises(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "nothing"


NAMES = dict(torch=torch, nn=nn, F=F, nnx=nnx, linen=linen, jax=jax, jnp=jnp, optax=optax, default=default, raises=raises)
NAMES |= dict(J=torch.autograd.functional.jacobian, at=torch.tensor)
NAMES |= dict(q=torch.ones(1, 3), k=torch.ones(2, 3), v=torch.tensor([[1.0], [2.0]]))
NAMES |= dict(
    qj=jnp.ones((1, 1, 1, 3)), kj=jnp.ones((1, 2, 1, 3)), vj=jnp.ones((1, 2, 1, 3)) * jnp.array([1.0, 2.0]).reshape(1, 2, 1, 1)
)


def rows() -> list[tuple[str, list[tuple[str, str]]]]:
    text = (DOCS / "defaults.md").read_text(encoding="utf-8")
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [(row[0], CLAIM.findall(" | ".join(row))) for row in cells if row[0] != "What"]


@pytest.mark.parametrize(("what", "claims"), rows(), ids=[what for what, _ in rows()])
def test_a_default_is_what_the_table_says(what, claims):
    assert len(claims) == 2, "each row has one claim for each side"
    for expression, value in claims:
        assert eval(expression, {**NAMES, "r": nnx.Rngs(0)}) == ast.literal_eval(value), expression


# ----------------------------------------------------------------------------- code


def blocks(page: str) -> list[tuple[str, str]]:
    """Code, and what it prints where a plain block follows at once, of one page in order."""
    text = (DOCS / page).read_text(encoding="utf-8")
    fenced = re.compile(r"^```python\n(.*?)^```$(?:\n+^```\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)
    return [(code, shown or "") for code, shown in fenced.findall(text)]


@pytest.fixture
def as_before():
    """What pages add to the ledger and to the hypotheses is taken out again."""
    from parity.evidence.hypotheses import table
    from parity.weights import rules

    kept = [(known, list(known)) for known in (table.HYPOTHESES, rules.RULES)]
    yield
    for known, before in kept:
        known[:] = before


@pytest.mark.parametrize("page", [path.name for path in PAGES if "```python" in path.read_text(encoding="utf-8")])
def test_the_code_of_a_page_runs_and_prints_what_stands_below_it(page, capsys, as_before, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "docs"}
    for code, shown in blocks(page):
        exec(compile(code, page, "exec"), names)
        printed = capsys.readouterr().out
        assert not shown or printed.strip() == shown.strip()


def commands(page: Path) -> list[str]:
    """Lines of shells, and of files that run something, that begin with a program of ours."""
    found = re.findall(r"^```(?:bash|yaml)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [line for block in found for line in re.findall(r"\b(?:parity|make|pip) .*", block)]


@pytest.mark.parametrize("page", [path.name for path in PAGES if commands(path)])
def test_the_commands_of_a_page_have_the_options_that_it_gives(page):
    ours = typer.main.get_command(parity.cli.app)
    targets = (DOCS.parent / "Makefile").read_text(encoding="utf-8")
    extras = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for line in commands(DOCS / page):
        program, *words = shlex.split(line, comments=True)
        if program == "make":
            assert f"\n{words[0]}:" in targets, line
        elif program == "pip":
            named = [name for word in words for name in re.findall(r"\[(.*)\]", word)]
            assert {extra for name in named for extra in name.split(",")} <= set(extras), line
        else:
            command = ours.commands[words[0]]
            # Refuses what is no option, and arguments that are missing.
            command.make_context(words[0], words[1:])


def test_every_public_name_stands_in_the_documentation():
    text = "\n".join(path.read_text(encoding="utf-8") for path in PAGES)
    public = [
        name
        for name, value in vars(parity).items()
        if not name.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value) or name.isupper())
    ]
    assert [name for name in public if f"parity.{name}" not in text] == []


def test_a_table_of_faults_and_pictures_that_pages_name_exist():
    for page in DOCS.glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (DOCS / target).exists(), f"{page.name} names {target}"
