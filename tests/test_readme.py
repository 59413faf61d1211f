import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
# Language and content of each block, in order.
FENCED = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
BLOCKS = [content for language, content in FENCED if language == "python"]


def shape(text):
    """A printed result without its numbers: the last digits are the machine's."""
    return re.sub(r"[-+\d.,]+(e[-+]?\d+)?", "#", text)


def test_the_code_of_the_readme_runs_in_order_and_prints_what_stands_below_it(capsys, unchecked_shapes):
    names = {"__name__": "readme"}
    printed = []
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), names)
        printed.append(capsys.readouterr().out.strip())
    shown = [content.strip() for language, content in FENCED if not language and "the same function" in content.lower()]
    assert shape(printed[0]) == shape(shown[0])
    assert printed[1] == shown[1]
    assert "cause: activation" in shown[0] and "change: use jax.nn.gelu(x, approximate=False)" in shown[0]


def test_two_user_modules_take_at_most_ten_lines():
    lines = [line for line in BLOCKS[0].splitlines() if line.strip()]
    assert any("parity.transfer" in line for line in lines)
    assert any("parity.compare" in line for line in lines)
    assert len(lines) <= 10


def test_the_readme_names_the_two_commands():
    targets = set(
        re.findall(r"^([a-z-]+):", (Path(__file__).parents[1] / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert {"parity", "test"} <= targets
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", README, re.MULTILINE)) <= targets


def test_what_the_readme_names_exists():
    root = Path(__file__).parents[1]
    named = re.findall(r"\]\(([^)#:]+)\)", README) + re.findall(r'src="([^"]+)"', README)
    assert [target for target in named if not (root / target).exists()] == []
    assert "docs/report.png" in named, "the picture of a report"
