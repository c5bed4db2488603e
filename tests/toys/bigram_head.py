"""A stranger's draft model: what usually follows a token. One file, known to nobody in mmspec."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Drafter
from mmspec.drafters.draft_model import DraftModel, DraftNodes, committed_prefix, draft_distribution
from mmspec.drafters.neural.small_model import build_head_drafter
from mmspec.recipe import DraftModelKind, Kit
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.context import Context

SEES = "last token"
WEIGHTS, CONFIG = "bigram.safetensors", "bigram.json"


class BigramHead(nn.Module):
    """Logits of the next token, one row per token."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, n) -> (B, n, V)
        logits: Tensor = self.table(tokens)
        return logits

    def save_pretrained(self, folder: str | Path) -> None:
        """Write weights and configuration."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        save_file(self.state_dict(), Path(folder) / WEIGHTS)
        content = {"vocabulary": self.table.num_embeddings}
        (Path(folder) / CONFIG).write_text(json.dumps(content))


@dataclass(frozen=True, eq=False)
class BigramDraft(DraftModel):
    """A head as a source of draft distributions. It says only what a `DraftModel` must."""

    head: BigramHead
    sees: ClassVar[str] = SEES

    def predict_first(self, context: Context, state: None) -> Categorical:
        last = torch.tensor([row[-1:] for row in context.history], device=context.device)
        return draft_distribution(context, self.head(last), committed_prefix(context))

    def predict(self, context: Context, state: None, nodes: DraftNodes) -> Categorical:
        ahead = nodes.layout.depths + 1
        return draft_distribution(context, self.head(nodes.tokens), nodes.prefix(context), ahead)


@dataclass(frozen=True)
class BigramKind(DraftModelKind):
    """Its draft model kind in mmspec."""

    description: str = "bigram head"

    def accepts(self, model: Any) -> bool:
        return isinstance(model, BigramHead)

    def owns(self, folder: Path) -> bool:
        return (folder / CONFIG).exists()

    def load(self, source: str | Path, target: Any, dtype: torch.dtype | None = None) -> BigramHead:
        if not self.owns(Path(source)):
            raise ValueError(f"{source} holds no bigram head; give a folder written by one")
        head = BigramHead(json.loads((Path(source) / CONFIG).read_text())["vocabulary"])
        head.load_state_dict(load_file(Path(source) / WEIGHTS))
        return head.to(dtype=dtype).eval()

    def default_sees(self, model: Any, target: Reader, requested: str) -> str:
        return SEES

    def read(self, model: BigramHead, target: Reader, sees: str) -> BigramDraft:
        if model.table.num_embeddings != target.vocabulary:
            raise ValueError(
                f"this bigram head knows {model.table.num_embeddings} tokens, but the target "
                f"{target.vocabulary}; give one for this target"
            )
        return BigramDraft(model.to(target.device))

    def random(self, target: Reader, seed: int) -> BigramHead:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return BigramHead(target.vocabulary).eval()


BIGRAM = BigramKind()


def bigram(kit: Kit) -> Drafter:
    """What usually follows."""
    return build_head_drafter(kit)
