"""Faults of ports of image models, recurrent nets and whole models: the module exactly, and the cause first."""

import pytest
from port_fault_pairs import NEIGHBOURS, PORTS

import parity


@pytest.mark.parametrize("planted", PORTS, ids=lambda planted: planted.name)
def test_the_planted_cause_is_named_first(planted):
    found = parity.diagnose(*planted.pair(), *planted.inputs, **dict(planted.options))
    assert [fault.path for fault in found.isolation.faults] == [planted.path], str(found)
    assert found.causes, str(found)
    first = found.causes[0]
    assert (first.hypothesis, first.path) == (planted.cause, planted.path), str(found)
    assert planted.says in f"{first.what}; {first.change}", str(found)
    assert not found.notes and not found.unexplained, str(found)
