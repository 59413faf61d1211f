import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_code_of_the_readme_runs_in_order(capsys, unchecked_shapes):
    names = {"__name__": "readme"}
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert printed.startswith(
        "the same function: weights, structure, wiring, identical, native, gradients (160 values identical)"
    )
    assert printed.rstrip().endswith("attention")


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
