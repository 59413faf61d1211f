"""Arrays that are sent by two threads: whose they are, and when that is asked."""

import threading

import pytest

from parity.weights.side_by_side import side_by_side


@pytest.mark.parametrize("allowed", [True, False])
def test_calls_are_made_elsewhere_only_where_that_is_allowed(allowed):
    asked: list[bool] = []
    results = side_by_side(lambda number: (number, threading.get_ident()), range(5), lambda: asked.append(allowed) or allowed)
    made = dict(results)
    assert sorted(made) == list(range(5))
    assert asked == [allowed]
    assert (threading.get_ident() in made.values()) is not allowed


def test_nothing_is_asked_where_nothing_is_given():
    def allowed() -> bool:
        raise AssertionError

    assert list(side_by_side(str, [], allowed)) == []


@pytest.mark.parametrize("allowed", [True, False])
def test_an_error_in_a_call_is_raised(allowed):
    with pytest.raises(ZeroDivisionError):
        list(side_by_side(lambda number: 1 // number, [1, 0, 2], lambda: allowed))
