"""What the modules of this wing ask of their arguments, and the words in which they refuse.

Every check gathers all that is wrong with one call before it raises, and says the same
in both wings.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


class InputError(ValueError, RuntimeError):
    """An argument does not fit the module.

    It is a `RuntimeError` as well because that is what torch itself raises for most of
    these mistakes: code written against the source documents goes on catching it.
    """


def raise_all(where: str, problems: Sequence[str]) -> None:
    """Raise one error that lists every problem of one call; do nothing if there is none.

    Args:
        where: what was called, as the user knows it.
        problems: one sentence each.

    Raises:
        InputError: `problems` is not empty.
    """
    if len(problems) == 1:
        raise InputError(f"{where}: {problems[0]}")
    if problems:
        raise InputError(f"{where}: {len(problems)} problems\n  - " + "\n  - ".join(problems))


def check_sizes(where: str, **sizes: Any) -> None:
    """Refuse constructor sizes that are not positive whole numbers.

    Args:
        where: the class.
        sizes: each size under its argument's name.

    Raises:
        InputError: a size is not an `int`, is a `bool`, or is below 1.
    """
    raise_all(where, size_problems(**sizes))


def size_problems(**sizes: Any) -> list[str]:
    """Say which sizes are no positive whole numbers.

    Args:
        sizes: each size under its argument's name.

    Returns:
        One sentence each.
    """
    problems = []
    for name, size in sizes.items():
        if isinstance(size, bool):
            problems.append(f"{name} must be a whole number, got {size}; pass options such as bias by keyword")
        elif not isinstance(size, int):
            problems.append(f"{name} must be a whole number, got {size!r} of type {type(size).__name__}")
        elif size < 1:
            problems.append(f"{name} must be at least 1, got {size}")
    return problems


def check_heads(where: str, embed_size: int, heads: int) -> None:
    """Refuse a width that the heads cannot share out.

    Args:
        where: the class.
        embed_size: width E.
        heads: number of heads h.

    Raises:
        InputError: a size is no positive whole number, or E is no multiple of h.
    """
    check_sizes(where, embed_size=embed_size, heads=heads)
    raise_all(where, sharing_problems(embed_size=embed_size, heads=heads))


def sharing_problems(**sizes: int) -> list[str]:
    """Say if the heads cannot share out a width.

    Args:
        sizes: the width and the number of heads under their arguments' names, both at least 1.

    Returns:
        One sentence, or none.
    """
    (width_name, width), (heads_name, heads) = sizes.items()
    if width % heads == 0:
        return []
    return [
        f"{width_name} must be a multiple of {heads_name}, got {width_name}={width}, {heads_name}={heads}; "
        f"the nearest {width_name} that fits is {heads * max(1, round(width / heads))}"
    ]


def check_probability(where: str, p: float) -> None:
    """Refuse a dropout rate outside [0, 1].

    Args:
        where: the class.
        p: probability that an element is zeroed.

    Raises:
        InputError: `p` is not in [0, 1].
    """
    raise_all(where, rate_problems("the dropout rate", p))


def rate_problems(name: str, p: float) -> list[str]:
    """Say if a rate is outside [0, 1].

    Args:
        name: the option.
        p: its value.

    Returns:
        One sentence, or none.
    """
    return [] if 0.0 <= p <= 1.0 else [f"{name} must be between 0 and 1, got {p}"]


def check_sequences(where: str, width: int, weight: Tensor | None, **sequences: Tensor) -> None:
    """Refuse inputs that are not `(n, l, width)` in the dtype and on the device of the weights.

    The last two sequences are keys and values and must be equally long; all share n.

    Args:
        where: what was called.
        width: last axis of each sequence.
        weight: a parameter whose dtype and device the sequences must share.
        sequences: query, key and value under the names of the call, key and value last.

    Raises:
        InputError: kind, rank, width, dtype, device, batch size or length does not fit.
    """
    problems = []
    for name, x in sequences.items():
        found = _array_problems(name, x, rank=3, axes="(batch, length, width)")
        if not found and x.shape[-1] != width:
            found = [f"{name} must have width {width} on its last axis, got shape {tuple(x.shape)}"]
        problems += found or _weight_problems(name, x, weight)
    if not problems:
        if _differ(x.shape[0] for x in sequences.values()):
            problems.append(f"all inputs must have the same batch size, got {_shapes(**sequences)}")
        memory = list(sequences)[-2:]
        if _differ(sequences[name].shape[1] for name in memory):
            problems.append(f"{memory[0]} and {memory[1]} must be equally long, got {_shapes(**sequences)}")
    raise_all(where, problems)


def check_attention_inputs(where: str, Q: Tensor, K: Tensor, V: Tensor) -> None:
    """Refuse heads that do not fit each other.

    Args:
        where: what was called.
        Q: `(n, h, lq, d_k)`.
        K: `(n, h, lk, d_k)`.
        V: `(n, h, lk, d_v)`.

    Raises:
        InputError: kind, rank, dtype, device, head width or length does not fit.
    """
    problems = []
    for name, x in {"Q": Q, "K": K, "V": V}.items():
        problems += _array_problems(name, x, rank=4, axes="(batch, heads, length, width)")
    if not problems:
        if Q.shape[-1] != K.shape[-1]:
            problems.append(f"Q and K must have the same head width on their last axis, got {_shapes(Q=Q, K=K, V=V)}")
        if K.shape[-2] != V.shape[-2]:
            problems.append(f"K and V must be equally long on axis 2, got {_shapes(Q=Q, K=K, V=V)}")
        for axis, meaning in enumerate(("batch sizes", "numbers of heads")):
            if _differ(x.shape[axis] for x in (Q, K, V) if x.shape[axis] != 1):
                problems.append(f"the {meaning} on axis {axis} must be equal, got {_shapes(Q=Q, K=K, V=V)}")
        problems += _weight_problems("K", K, Q, than="Q") + _weight_problems("V", V, Q, than="Q")
    raise_all(where, problems)


def check_mask(where: str, mask: Tensor | None, shape: tuple[int, ...], like: Tensor) -> None:
    """Refuse a mask that would be misread, or that would enlarge the scores.

    Args:
        where: what was called.
        mask: the caller's mask, or None.
        shape: of the scores, `(n, h, lq, lk)`.
        like: an array on the device of the scores.

    Raises:
        InputError: `mask` is no array, is complex, is on another device, or does not broadcast to the scores' shape.
    """
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise InputError(f"{where}: mask must be a {KIND} or None, got {type(mask).__name__}")
    problems = []
    if mask.is_complex():
        problems.append(f"mask must be boolean, integer or real, got {dtype_name(mask)}")
    wanted, got = tuple(shape), tuple(mask.shape)
    padded = (1,) * (len(wanted) - len(got)) + got
    if len(got) > len(wanted) or any(have not in (1, want) for have, want in zip(padded, wanted, strict=True)):
        hint = ""
        if len(got) == 2 and got == (wanted[0], wanted[3]):
            hint = "; a mask over (batch, keys) needs mask[:, None, None, :]"
        problems.append(f"mask must broadcast to the scores' shape (batch, heads, queries, keys) = {wanted}, got {got}{hint}")
    problems += _device_problems("mask", mask, like, than="the inputs")
    raise_all(where, problems)


def check_features(where: str, x: Tensor, width: int, weight: Tensor) -> None:
    """Refuse an input whose last axis, dtype or device is not the layer's.

    Args:
        where: the layer.
        x: `(..., width)`.
        width: the layer's input width.
        weight: a parameter whose dtype and device `x` must share.

    Raises:
        InputError: kind, width, dtype or device does not fit.
    """
    problems = _array_problems("the input", x)
    if not problems:
        if x.ndim == 0 or x.shape[-1] != width:
            problems.append(f"the input must have width {width} on its last axis, got shape {tuple(x.shape)}")
        problems += _weight_problems("the input", x, weight)
    raise_all(where, problems)


def check_choices(where: str, name: str, given: str, choices: tuple[str, ...]) -> None:
    """Refuse an option that is none of the known ones.

    Args:
        where: the class.
        name: the option.
        given: its value.
        choices: the values that it may have.

    Raises:
        InputError: `given` is none of them.
    """
    raise_all(where, choice_problems(name, given, choices))


def choice_problems(name: str, given: str, choices: tuple[str, ...]) -> list[str]:
    """Say if an option is none of the known ones.

    Args:
        name: the option.
        given: its value.
        choices: the values that it may have.

    Returns:
        One sentence, or none.
    """
    return [] if given in choices else [f"{name} must be one of {', '.join(map(repr, choices))}, got {given!r}"]


def check_ids(where: str, n_tokens: int, **ids: Any) -> None:
    """Refuse single tokens that the vocabulary does not have.

    Args:
        where: what was called.
        n_tokens: size of the vocabulary.
        ids: each token under its argument's name.

    Raises:
        InputError: an id is no whole number, or outside [0, n_tokens).
    """
    problems = []
    for name, token in ids.items():
        if isinstance(token, bool) or not isinstance(token, int):
            problems.append(f"{name} must be a whole number, got {token!r} of type {type(token).__name__}")
        elif not 0 <= token < n_tokens:
            problems.append(f"{name} must be from 0 to {n_tokens - 1}, got {token}")
    raise_all(where, problems)


def check_batches(where: str, max_len: int, **batches: Tensor) -> None:
    """Refuse ids that are not `(n, l)` with one n and at most max_len of them in a row.

    Args:
        where: what was called.
        max_len: the longest sequence.
        batches: ids under the names of the call.

    Raises:
        InputError: kind, rank, dtype, length or batch size does not fit.
    """
    problems = []
    for name, ids in batches.items():
        found = _ids_problems(name, ids)
        if not found and ids.ndim != 2:
            found = [f"{name} must have 2 axes (batch, length), got {ids.ndim} with shape {tuple(ids.shape)}"]
        if not found and ids.shape[1] > max_len:
            found = [f"{name} is {ids.shape[1]} tokens long and max_len is {max_len}; shorten it or give a larger max_len"]
        problems += found
    if not problems and _differ(ids.shape[0] for ids in batches.values()):
        problems.append(f"all ids must have the same batch size, got {_shapes(**batches)}")
    raise_all(where, problems)


def check_tokens(where: str, tokens: Tensor, n_tokens: int) -> None:
    """Refuse ids that name no row.

    Args:
        where: the layer.
        tokens: ids, any shape.
        n_tokens: number of rows.

    Raises:
        InputError: `tokens` is no array of integers, or an id is outside [0, n_tokens).
    """
    problems = _ids_problems("the ids", tokens)
    low, high = (0, 0) if problems else _lowest_and_highest(tokens)
    if low < 0 or high >= n_tokens:
        problems.append(f"the ids must be from 0 to {n_tokens - 1}, got {low} to {high}")
    raise_all(where, problems)


KIND = "torch.Tensor"


def dtype_name(x: Tensor) -> str:
    """Name a dtype as the errors of both wings do, without the framework's prefix.

    Args:
        x: the array.

    Returns:
        Such as "float32".
    """
    return str(x.dtype).removeprefix("torch.")


def _array_problems(name: str, x: Any, rank: int | None = None, axes: str = "") -> list[str]:
    if not isinstance(x, Tensor):
        return [f"{name} must be a {KIND}, got {type(x).__name__}"]
    if rank is not None and x.ndim != rank:
        return [f"{name} must have {rank} axes {axes}, got {x.ndim} with shape {tuple(x.shape)}"]
    if not x.is_floating_point():
        return [f"{name} must be floating point, got {dtype_name(x)}"]
    return []


def _weight_problems(name: str, x: Tensor, weight: Tensor | None, than: str = "the weights") -> list[str]:
    if weight is None:
        return []
    problems = _device_problems(name, x, weight, than)
    # Under autocast the framework itself brings both to one dtype.
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        want = dtype_name(weight)
        problems.append(f"{name} is {dtype_name(x)} and {than} {want}; cast {name} to {want}")
    return problems


def _device_problems(name: str, x: Tensor, other: Tensor, than: str) -> list[str]:
    if x.device == other.device:
        return []
    return [f"{name} is on {x.device} and {than} on {other.device}; move {name} to {other.device}"]


def _shapes(**arrays: Tensor) -> str:
    # Made for an error alone: a program with open lengths cannot write them down.
    return ", ".join(f"{name} {tuple(x.shape)}" for name, x in arrays.items())


def _differ(sizes: Iterable[int]) -> bool:
    # Not by a set: a size of a program being exported has no hash.
    every = list(sizes)
    return any(size != every[0] for size in every)


def _ids_problems(name: str, ids: Any) -> list[str]:
    if not isinstance(ids, Tensor):
        return [f"{name} must be a {KIND}, got {type(ids).__name__}"]
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        return [f"{name} must be integers, got {dtype_name(ids)}"]
    return []


def _lowest_and_highest(ids: Tensor) -> tuple[int, int]:
    # 0 where there is no value to read: in a program being compiled, under vmap. There torch's own lookup raises.
    if torch.compiler.is_compiling() or ids.is_meta or ids.numel() == 0:
        return 0, 0
    try:
        return int(ids.min()), int(ids.max())
    except RuntimeError:
        return 0, 0
