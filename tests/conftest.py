"""Shape annotations are enforced in the whole test run, and every random test hangs on one printed seed."""

import sys

from jaxtyping import config as jaxtyping_config
from jaxtyping import install_import_hook

WINGS = ("torch_impl", "jax_impl")

# The hook rewrites modules while they are imported; one that is loaded already would go unchecked.
early = [name for name in sys.modules if name.split(".")[0] in WINGS]
if early:
    raise RuntimeError(f"{', '.join(early)} imported before tests/conftest.py could turn shape checking on")
install_import_hook(list(WINGS), "beartype.beartype")

import hypothesis  # noqa: E402
import pytest  # noqa: E402
from helpers import SEED  # noqa: E402

# No test is timed: a busy machine is no fault. With the default seed the examples are the same on every machine.
hypothesis.settings.register_profile("parity", deadline=None, derandomize=SEED == 0, print_blob=True)
hypothesis.settings.load_profile("parity")


pytest_plugins = ("pytester",)


def pytest_report_header() -> str:
    return f"random tests: PARITY_TEST_SEED={SEED}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        report.sections.append(("seed", f"PARITY_TEST_SEED={SEED}"))
    return report


@pytest.fixture
def seed() -> int:
    return SEED


@pytest.fixture
def unchecked_shapes():
    """Switch the enforcement off, so that the wings' own errors are reached and NumPy masks pass."""
    jaxtyping_config.update("jaxtyping_disable", True)
    yield
    jaxtyping_config.update("jaxtyping_disable", False)
