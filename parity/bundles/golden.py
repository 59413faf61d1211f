"""A model against the bundle that says what it is to do."""

import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from parity.bundles.difference import bundle_diff
from parity.bundles.file import Bundle, read
from parity.bundles.record import record
from parity.bundles.replay import replay
from parity.errors import InputError
from parity.evidence.result import Diff, Report
from parity.frameworks import describe, owner


def golden(
    model: Any,
    *args: Any,
    path: str | os.PathLike[str],
    update: bool = False,
    kwargs: Mapping[str, Any] | None = None,
    keep: str = "all",
    seed: int | None = None,
    gradients: bool = True,
    levels: Iterable[str] | None = None,
    rename: Mapping[str, str] | None = None,
    ignore: Iterable[str] = (),
) -> Diff | Report:
    """Compare a model with its golden bundle, or write that bundle anew.

    A model of the framework that was recorded is recorded again and compared as `parity.bundle_diff` does; one of the
    other framework is replayed, as `parity.replay` does.

    Args:
        model: of either framework.
        args: as in `parity.record`; a model of the other framework gets the recorded ones and needs none.
        path: of the golden bundle.
        update: whether the bundle is written anew if the model does something else now, if there is none, or if it is
            damaged or older. One that still holds is left as it is, and so is a newer one, and a file of weights. A model
            of the other framework never writes.
        kwargs: as in `parity.record`.
        keep: as in `parity.record`.
        seed: as in `parity.record`; None takes that of the bundle, or 0 if there is none.
        gradients: as in `parity.record`.
        levels: as in `parity.replay`.
        rename: as in `parity.replay`.
        ignore: as in `parity.replay`.

    Returns:
        The difference, or the report of the replay.

    Raises:
        InputError: there is no golden bundle, or it cannot be used; all that `parity.record` and `parity.replay` raise.
    """
    place = Path(path)
    room = owner(model)
    if room is None or not room.is_model(model):
        said = f"model must be a torch.nn.Module, a flax.nnx.Module or a parity.Linen, got {describe(model)}"
        raise InputError(said, "no-model")
    known = known_bundle(place, update)
    if known is not None and known.side != room.NAME:
        return replay(place, model, levels=levels, rename=rename, ignore=ignore)
    number = seed if seed is not None else known.facts["seed"] if known else 0
    options: dict[str, Any] = {"kwargs": kwargs, "keep": keep, "seed": number, "gradients": gradients}
    with tempfile.TemporaryDirectory() as folder:
        made = record(model, *args, path=Path(folder) / "now.safetensors", **options)
        if known is not None:
            found = bundle_diff(place, made)
            if found.passed or not update:
                return found
        record(model, *args, path=place, **options)
    return bundle_diff(place, place)


def known_bundle(place: Path, update: bool) -> Bundle | None:
    """The golden bundle; None if it is to be written anew.

    Raises:
        InputError: there is none, or it cannot be used, and none is to be written.
    """
    if not place.exists() and not update:
        said = f"there is no golden bundle {place}; write it with update=True, in pytest with --parity-update-golden"
        raise InputError(said, "file-missing")
    if not place.exists():
        return None
    try:
        return read(place)
    except InputError as error:
        # What stands there may be somebody's weights.
        if update and error.code not in ("no-bundle", "bundle-newer") and not place.is_dir():
            return None
        raise
