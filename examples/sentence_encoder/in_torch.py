"""all-MiniLM-L6-v2 as PyTorch runs it: the canonical side of the port.

The encoder is `transformers.BertModel`; pooling and normalisation are those of the model's own `modules.json`.
"""

from pathlib import Path

import torch
from transformers import BertModel


class SentenceEncoder(torch.nn.Module):
    """Token ids to sentence embeddings of length one.

    Args:
        folder: where `config.json` and `model.safetensors` lie.
    """

    def __init__(self, folder: Path):
        super().__init__()
        self.bert = BertModel.from_pretrained(folder, add_pooling_layer=False, attn_implementation="eager").eval()

    def forward(self, ids: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        """Embeddings `(n, 384)` of ids `(n, length)`; `padding` of the same shape is True where there is no token."""
        states = self.bert(ids, attention_mask=(~padding).long()).last_hidden_state
        kept = (~padding)[..., None].to(states.dtype)
        mean = (states * kept).sum(1) / kept.sum(1).clamp(min=1e-9)
        return torch.nn.functional.normalize(mean, dim=-1)
