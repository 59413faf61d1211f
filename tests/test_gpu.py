import pytest

import parity
from parity import suite
from parity.frameworks import load

WHY = suite.no_gpu(load("torch"), load("nnx"))

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(WHY), reason=f"no GPU that both frameworks see: {WHY}")]


@pytest.mark.parametrize("module", ["FeedForward", "Multi_Head", "ScaledDot"])
def test_the_suite_agrees_on_a_gpu(module):
    result = parity.check(device="gpu", module=module)
    assert result.passed, "\n\n".join(f"{case.name}\n{case.error or case.report}" for case in result.ran if not case.passed)
    assert result.figures()["unexplained"] == 0
