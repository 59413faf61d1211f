"""Bundles that many tests read, each recorded once."""

import bundle_pairs as pairs
import pytest

import parity


@pytest.fixture(scope="session")
def models():
    torch_model = pairs.torch_model()
    return torch_model, pairs.flax_model(torch_model)


@pytest.fixture(scope="session")
def recorded(models, tmp_path_factory):
    """By the side, and by the size of Flax's."""
    folder = tmp_path_factory.mktemp("bundles")
    given = pairs.ids(), pairs.scale()
    found = {
        side: parity.record(model, *given, path=folder / f"{side}.safetensors")
        for side, model in zip(("torch", "flax"), models, strict=True)
    }
    for keep in ("summaries", "digests"):
        for side, model in zip(("torch", "flax"), models, strict=True):
            path = folder / f"{side}_{keep}.safetensors"
            found[f"{side} {keep}"] = parity.record(
                model, *given, path=path, keep=keep, gradients=(side, keep) == ("flax", "summaries")
            )
    return found
