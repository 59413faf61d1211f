"""all-MiniLM-L6-v2 as PyTorch runs it: the canonical side of the port.

The encoder is that of the library `transformers`; pooling and length are those of the model's own `modules.json`.
"""

from pathlib import Path

import torch
from transformers import BertModel
from transformers.utils import logging

# The file has a pooler besides, which `transformers` reports at length.
logging.set_verbosity_error()
logging.disable_progress_bar()


class SentenceEncoder(BertModel):
    """Token ids to sentence embeddings of length one."""

    @classmethod
    def trained(cls, folder: Path) -> "SentenceEncoder":
        """The encoder with the weights of a folder that holds `config.json` and `model.safetensors`."""
        return cls.from_pretrained(folder, local_files_only=True, add_pooling_layer=False, attn_implementation="eager").eval()

    def forward(self, ids: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        """Embeddings `(n, 384)` of ids `(n, length)`; `padding` of the same shape is True where there is no token."""
        states = super().forward(ids, attention_mask=(~padding).long()).last_hidden_state
        kept = (~padding)[..., None].to(states.dtype)
        mean = (states * kept).sum(1) / kept.sum(1).clamp(min=1e-9)
        return torch.nn.functional.normalize(mean, dim=-1)
