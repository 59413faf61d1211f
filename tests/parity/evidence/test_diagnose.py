"""For every hypothesis a planted fault: the cause that is named first, and the module, exactly."""

import pytest
from fault_pairs import PLANTED

import parity


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_the_planted_cause_is_named_first(planted):
    found = parity.diagnose(*planted.pair(), *planted.inputs, **dict(planted.options))
    assert [fault.path for fault in found.isolation.faults] == [planted.path], str(found)
    assert found.causes, str(found)
    first = found.causes[0]
    assert (first.hypothesis, first.path, first.complete) == (planted.cause, planted.path, True), str(found)
    assert planted.says in f"{first.what}; {first.change}", str(found)
    assert first.before > 1e3 and first.after <= 10
    assert not found.notes and not found.unexplained, str(found)
