"""A trace puts what it records aside: the same rows, and memory that does not grow with the model."""

import subprocess
import sys
import textwrap
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

import parity
from parity.evidence import shelf, trace
from parity.evidence.calls import Call, Captured
from parity.evidence.isolation import Isolator
from parity.evidence.subject import Subject
from parity.frameworks import load
from parity.frameworks.jax import pieces

WIDTH = 6


class TorchBlock(nn.Module):
    """Returns a tuple with a dict inside; calls one of its layers twice, and takes a keyword."""

    def __init__(self, shared: nn.Module):
        super().__init__()
        self.norm, self.shared, self.own = nn.LayerNorm(WIDTH), shared, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> Any:
        y = self.own(self.own(self.norm(x))) + shift
        return x + self.shared(y), {"inner": y, "size": 3}


class TorchNet(nn.Module):
    def __init__(self, layers: int):
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([TorchBlock(self.shared) for _ in range(layers)])

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> Any:
        for block in self.blocks:
            x, aside = block(x, shift=shift)
        return {"x": x, "aside": aside}


class FlaxBlock(nnx.Module):
    def __init__(self, shared: nnx.Module, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, epsilon=1e-5, use_fast_variance=False, rngs=rngs)
        self.shared, self.own = shared, nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, *, shift: jax.Array) -> Any:
        y = self.own(self.own(self.norm(x))) + shift
        return x + self.shared(y), {"inner": y, "size": 3}


class FlaxNet(nnx.Module):
    def __init__(self, layers: int, rngs: nnx.Rngs):
        self.shared = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([FlaxBlock(self.shared, rngs) for _ in range(layers)])

    def __call__(self, x: jax.Array, shift: jax.Array) -> Any:
        for block in self.blocks:
            x, aside = block(x, shift=shift)
        return {"x": x, "aside": aside}


def nets(layers: int, fault: int | None = None) -> tuple[nn.Module, nnx.Module, tuple[Any, ...], dict[str, Any]]:
    """Equal models, but for a fault in the norm of one block, and a call of them."""
    torch.manual_seed(0)
    mine, theirs = TorchNet(layers).eval(), FlaxNet(layers, nnx.Rngs(0))
    parity.transfer(mine, theirs)
    if fault is not None:
        theirs.blocks[fault].norm.epsilon = 1e-3
    generator = torch.Generator().manual_seed(1)
    return mine, theirs, (torch.randn(2, 5, WIDTH, generator=generator),), {"shift": torch.randn(WIDTH, generator=generator)}


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing stays in memory, and Flax is cut behind every result."""
    monkeypatch.setattr(shelf, "ROOM", 0)
    monkeypatch.setattr(pieces, "PIECE", 1)


@pytest.mark.parametrize("fault", [None, 1])
def test_streamed_rows_are_those_of_a_trace_in_memory(fault: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs, args, kwargs = nets(3, fault)
    plain = parity.trace(mine, theirs, *args, kwargs=kwargs)
    monkeypatch.setattr(shelf, "ROOM", 0)
    monkeypatch.setattr(pieces, "PIECE", 1)
    cut = parity.trace(mine, theirs, *args, kwargs=kwargs)
    assert cut.to_dict() == plain.to_dict()
    assert cut.steps == plain.steps
    first = cut.first_divergence()
    assert (first.path if first else None) == (None if fault is None else "blocks.1.norm")


@pytest.mark.parametrize("fault", [None, 1])
def test_calls_compared_while_they_come_in_are_those_compared_at_the_end(
    fault: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs, args, kwargs = nets(3, fault)
    streamed = parity.trace(mine, theirs, *args, kwargs=kwargs)
    monkeypatch.setattr(trace.Desk, "arrived", lambda desk, one: one)
    whole = parity.trace(mine, theirs, *args, kwargs=kwargs)
    assert whole.steps == streamed.steps
    assert whole.to_dict() == streamed.to_dict()


def test_nothing_is_kept_of_a_call_that_agrees_and_all_of_one_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs, args, kwargs = nets(2, fault=1)
    kept: dict[tuple[str, int], Any] = {}
    arrived = trace.Desk.arrived

    def seen(desk: trace.Desk, one: Any) -> Any:
        # In torch's words: the shared layer has a path of its own there.
        return kept.setdefault((desk.known(one.path), one.call), arrived(desk, one))

    monkeypatch.setattr(trace.Desk, "arrived", seen)
    found = parity.trace(mine, theirs, *args, kwargs=kwargs)
    assert {(step.path, step.call) for step in found.steps} == kept.keys()
    for step in found.steps:
        one = kept[step.path, step.call]
        assert bool(one.outputs) is bool(one.inputs) is not step.agrees, step


def test_of_two_modules_under_one_path_one_that_agrees_does_not_hide_the_other() -> None:
    mine, theirs, args, kwargs = nets(1)
    subject = Subject(mine, theirs, args, kwargs, gradients=False)
    runs = [subject.torch.capture(mine, subject.call, dtype=dtype)[1] for dtype in ("float64", None)]
    desk = trace.Desk(subject, *runs)
    equal = next(one for one in runs[0] if one.path == "blocks.0.norm")
    other = Captured(equal.path, equal.call, {"": equal.outputs[""] + 1}, equal.inputs)
    assert desk.arrived(equal).outputs == {}
    assert (equal.path, equal.call) in desk.agreed
    assert desk.arrived(other) is other
    assert (equal.path, equal.call) not in desk.agreed


def test_an_error_while_comparing_is_not_taken_for_one_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs, args, kwargs = nets(1)

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("of the comparison")

    monkeypatch.setattr(trace, "compare_step", broken)
    with pytest.raises(ZeroDivisionError, match="of the comparison"):
        parity.trace(mine, theirs, *args, kwargs=kwargs)


def test_room_is_free_again_once_nobody_has_an_array() -> None:
    made = shelf.Shelf()
    kept = [made.put(np.arange(number + 2.0)) for number in range(3)]
    assert made.held == (2 + 3 + 4) * 8
    del kept[1]
    assert made.held == (2 + 4) * 8


def test_only_what_somebody_may_write_into_is_copied() -> None:
    made, mine, theirs = shelf.Shelf(), np.arange(3.0), np.asarray(jnp.arange(3.0))
    assert made.put(mine).array is not mine
    assert made.put(theirs).array is theirs


@pytest.mark.usefixtures("streamed")
def test_recorded_arrays_are_bit_equal_and_repeated_calls_are_kept_apart() -> None:
    mine, theirs, args, kwargs = nets(2)
    subject = Subject(mine, theirs, args, kwargs, gradients=False)
    for room, model in ((subject.torch, mine), (subject.flax, theirs)):
        whole = room.capture(model, subject.call, dtype="float64")[1]
        aside = room.capture(model, subject.call, dtype="float64", keep=shelf.Shelf().put)[1]
        assert [(c.path, c.call) for c in aside] == [(c.path, c.call) for c in whole]
        assert {c.call for c in whole if c.path.endswith("own")} == {0, 1}
        for one, other in zip((c.taken() for c in aside), whole, strict=True):
            assert {**one.outputs, **one.inputs}.keys() == {**other.outputs, **other.inputs}.keys()
            for name, array in {**other.outputs, **other.inputs}.items():
                np.testing.assert_array_equal({**one.outputs, **one.inputs}[name], array, strict=isinstance(array, np.ndarray))


class Alive:
    """Counts the bytes of recorded arrays that are in memory, and how many there were at most."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = self.peak = 0
        put, read, run = shelf.Shelf.put, shelf.Shelved.read, pieces.run_piece
        monkeypatch.setattr(shelf.Shelf, "put", lambda shelf, array: put(shelf, self.seen(array)))
        monkeypatch.setattr(shelf.Shelved, "read", lambda shelved: self.seen(read(shelved)))
        monkeypatch.setattr(pieces, "run_piece", lambda *given: [self.seen(one) for one in run(*given)])

    def seen(self, array: Any) -> Any:
        self.now += array.nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(array, self.gone, array.nbytes)
        return array

    def gone(self, size: int) -> None:
        self.now -= size


def peak(monkeypatch: pytest.MonkeyPatch, layers: int, fault: int | None = None) -> int:
    mine, theirs, args, kwargs = nets(layers, fault)
    with monkeypatch.context() as patched:
        alive = Alive(patched)
        parity.trace(mine, theirs, *args, kwargs=kwargs)
    return alive.peak


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize(("fault", "blocks"), [(None, 2), (1, 3)])
def test_memory_held_by_a_trace_does_not_grow_with_layers(
    fault: int | None, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one block in float64: five modules' outputs and the second output.

    Where a fault is small, a second look lays torch's four shaken runs of one call beside it: 7,680 bytes, of 2,880 a block.
    """
    block = 6 * 2 * 5 * WIDTH * 8
    few, many = peak(monkeypatch, 2, fault), peak(monkeypatch, 8, fault)
    assert few == many
    assert many <= blocks * block


def test_memory_would_grow_if_nothing_were_put_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count sees what stays in memory."""
    assert peak(monkeypatch, 8) > 2 * peak(monkeypatch, 2)


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "bool"])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 5), (4, 3, 2)])
def test_arrays_come_back_bit_for_bit(dtype: str, shape: tuple[int, ...]) -> None:
    made = shelf.Shelf()
    arrays = [(np.random.default_rng(i).standard_normal(shape) * 9).astype(dtype).T for i in range(3)]
    back = [one.read() for one in [made.put(array) for array in arrays]]
    for one, other in zip(back, arrays, strict=True):
        np.testing.assert_array_equal(one, other, strict=True)


def test_half_precision_comes_back() -> None:
    array = np.asarray(jnp.arange(7, dtype=jnp.bfloat16))
    np.testing.assert_array_equal(shelf.Shelf().put(array).read(), array, strict=True)


def test_arrays_stay_in_memory_where_the_disk_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shelf, "ROOM", 0)
    monkeypatch.setattr(shelf.tempfile, "TemporaryFile", full)
    made, array = shelf.Shelf(), np.arange(6.0)
    kept = made.put(array)
    assert (made.held, made.written) == (array.nbytes, 0)
    # Whoever gave it may write into it afterwards.
    array[:] = 0
    np.testing.assert_array_equal(kept.read(), np.arange(6.0))


def test_what_is_written_into_between_two_modules_is_recorded_twice() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Identity(), nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x + 1)
            y.mul_(2)
            return self.second(y)

    room, x = load("torch"), np.arange(3, dtype=np.float32)
    _, records = room.capture(Writes(), Call((x,), {}, frozenset(["args[0]"])))
    first, second, _ = records
    np.testing.assert_array_equal(first.outputs[""], x + 1)
    np.testing.assert_array_equal(second.inputs[0], 2 * (x + 1))


@pytest.mark.usefixtures("streamed")
def test_pieces_return_what_the_whole_returns() -> None:
    def body(a: jax.Array, b: dict[str, jax.Array]) -> Any:
        c = jnp.sin(a) @ b["w"]
        d = jax.lax.scan(lambda carry, row: (carry + row, carry * 2), c[0], c)[1]
        return {"given": a, "twice": [c, c], "number": 2.5, "scan": d, "none": None, "after": c + b["w"].sum()}

    given = np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3), {"w": np.full((3, 4), 0.5, np.float32)}
    given = jax.tree.map(jnp.asarray, given)
    calls: list[np.ndarray] = []
    got = pieces.in_pieces(body, given, lambda array: calls.append(array) or array)
    jax.tree.map(np.testing.assert_array_equal, got, jax.jit(body)(*given))
    assert got["none"] is None
    # One that is returned twice is handed on once.
    assert len(calls) == len(jax.tree.leaves(got)) - 1
    leaves, taken = jax.tree.leaves(got), dict[int, Any]()
    rest = pieces.in_pieces(body, given, np.array, lambda place, one: place != 2 and taken.setdefault(place, one) is one)
    np.testing.assert_array_equal(jax.tree.leaves(rest)[0], leaves[2])
    assert len(jax.tree.leaves(rest)) == 1
    assert taken.keys() == set(range(len(leaves))) - {2}
    for place, one in taken.items():
        np.testing.assert_array_equal(one, leaves[place])


@pytest.mark.usefixtures("streamed")
def test_memory_held_by_an_isolation_does_not_grow_with_recorded_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = []
    for layers in (2, 8):
        mine, theirs, args, kwargs = nets(layers)
        with monkeypatch.context() as patched:
            alive = Alive(patched)
            Isolator(Subject(mine, theirs, args, kwargs, gradients=False))
        peaks.append(alive.peak)
    assert peaks[0] == peaks[1]


def test_streamed_isolation_is_that_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs, args, kwargs = nets(3, fault=1)
    plain = parity.trace(mine, theirs, *args, kwargs=kwargs).isolated()
    monkeypatch.setattr(shelf, "ROOM", 0)
    monkeypatch.setattr(pieces, "PIECE", 1)
    cut = parity.trace(mine, theirs, *args, kwargs=kwargs).isolated()
    assert cut.to_dict() == plain.to_dict()
    assert [one.path for one in cut.faults] == ["blocks.1.norm"]


def test_a_trace_does_not_read_torchs_compiler() -> None:
    code = """
    import sys, numpy, torch
    from flax import nnx
    import parity
    mine, theirs = torch.nn.Linear(4, 3), nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    parity.transfer(mine, theirs)
    assert parity.trace(mine, theirs, numpy.ones((2, 4), "float32")).first_divergence() is None
    assert "torch._dynamo" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
