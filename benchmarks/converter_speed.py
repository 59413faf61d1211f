"""One row of the transfer benchmark, by the converter of transformers 4, in an environment that has it.

Run by transfer_speed.py; prints JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

import measuring


def main(row: str, folder: Path, repeat: int) -> dict[str, Any]:
    """Measure the row."""
    import transformers
    from transformers import BertConfig, BertModel, FlaxBertModel
    from transformers.modeling_flax_pytorch_utils import (
        convert_pytorch_state_dict_to_flax,
        load_flax_weights_in_pytorch_model,
        load_pytorch_checkpoint_in_flax_state_dict,
    )

    transformers.logging.set_verbosity_error()
    import jax
    import torch
    from safetensors.torch import load_file

    torch.set_num_threads(1)
    config, file = BertConfig.from_pretrained(folder), folder / "model.safetensors"
    versions = {"transformers": transformers.__version__, "torch": torch.__version__, "jax": jax.__version__}
    versions["flax"] = __import__("flax").__version__
    if row == "whole":
        # As its users load a checkpoint: the random model that it makes first is part of it.
        found = measuring.measured(
            lambda: jax.block_until_ready(FlaxBertModel.from_pretrained(folder).params), max(1, repeat // 3)
        )
        return found | {"floor": measuring.read_floor(file, repeat), "versions": versions}
    model = FlaxBertModel(config)
    if row == "file":
        found = measuring.measured(
            lambda: jax.block_until_ready(load_pytorch_checkpoint_in_flax_state_dict(model, str(file), False)), repeat
        )
        return found | {"floor": measuring.read_floor(file, repeat), "versions": versions}
    state = load_file(file)

    def convert() -> Any:
        # It puts NumPy arrays in the place of the tensors that it is given.
        return jax.block_until_ready(convert_pytorch_state_dict_to_flax(dict(state), model))

    floor = measuring.copy_floor([t.view(torch.uint8).numpy() if t.ndim else t.numpy() for t in state.values()], repeat)
    if row == "back":
        params, torch_model = convert(), BertModel(config)
        found = measuring.measured(lambda: load_flax_weights_in_pytorch_model(torch_model, params), repeat)
        return found | {"floor": floor, "versions": versions}
    found = measuring.measured(convert, repeat)
    params = jax.tree.leaves(convert())
    before = [float(torch.from_dlpack(leaf).flatten()[0]) for leaf in params]
    for tensor in state.values():
        tensor.add_(77)
    changed = sum(float(torch.from_dlpack(leaf).flatten()[0]) != old for leaf, old in zip(params, before, strict=True))
    return found | {"floor": floor, "versions": versions, "shared": changed, "leaves": len(params)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))
