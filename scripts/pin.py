"""Print constraints.txt: every package that the project's extras need, at the version installed here.

Usage: .venv/bin/python scripts/pin.py > constraints.txt
"""

import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PROJECT = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text())["project"]
OWN_NAME = canonicalize_name(PROJECT["name"])


def requirements(name: str) -> list[Requirement]:
    """List what a package asks for; this project's own wishes come from pyproject.toml, which may be newer than the install."""
    if name != OWN_NAME:
        return [Requirement(text) for text in distribution(name).requires or ()]
    extras = PROJECT["optional-dependencies"]
    optional = [f'{text} ; extra == "{extra}"' for extra, texts in extras.items() for text in texts]
    return [Requirement(text) for text in (*PROJECT["dependencies"], *optional)]


def closure(name: str, extra: str) -> set[str]:
    """Follow requirements from `name[extra]` as far as they lead on this machine."""
    seen, waiting = set(), [(name, extra)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for needed in requirements(name):
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                waiting += [(canonicalize_name(needed.name), wish) for wish in ("", *needed.extras)]
    return {name for name, _ in seen} - {OWN_NAME}


if __name__ == "__main__":
    print("# Versions that `make` installs; written by scripts/pin.py from an environment in which the tests passed.")
    for name in sorted(closure(OWN_NAME, "dev")):
        # '+cpu' and the like name a build of a version, and builds differ from machine to machine.
        print(f"{re.sub(r'[-_.]+', '-', name)}=={Version(distribution(name).version).public}")
