"""Draft heads of the target's own checkpoint: found there, or in a folder that was saved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from mmspec.drafters.draft_model import DraftModel
from mmspec.drafters.neural.feature_head import FeatureDraft
from mmspec.drafters.neural.target_heads import HeadKind
from mmspec.models.folder import read_json
from mmspec.models.heads.native_mtp import (
    MARK,
    NativeMtpHead,
    build_head,
    load_head,
    new_head,
)
from mmspec.models.loading import random_model
from mmspec.models.own_heads import find_weights
from mmspec.targets.readers.reader import Reader


@dataclass(frozen=True, eq=False)
class NativeMtpKind(HeadKind):
    """Heads of one layer of the target's class (multi-token prediction)."""

    def owns(self, folder: Path) -> bool:
        file = folder / "config.json"
        return file.is_file() and bool(read_json(file).get(MARK))

    def is_in_checkpoint(self, source: Any) -> bool:
        return bool(find_weights(source))

    def find(self, target: Reader) -> NativeMtpHead | None:
        names = find_weights(target.model)
        return load_head(target.model, names) if names else None

    def load(
        self, source: str | Path, target: Reader, dtype: torch.dtype | None = None
    ) -> NativeMtpHead:
        folder = Path(source)
        if not self.owns(folder):
            raise ValueError(
                f"{source} does not hold a {self.description}; give a folder written by "
                "save_pretrained, or leave drafter= out to use the head of the checkpoint"
            )
        head = build_head(target.model, load_file(folder / "model.safetensors"), folder)
        nn.Module.to(head, dtype or head.dtype)
        return head

    def read(self, model: Any, target: Reader, sees: str) -> DraftModel:
        """Bind a head; its positions are on the axes that the target is read with."""
        model.config.positions = "mrope" if target.family.rope_axes == 3 else "keep"
        return super().read(model, target, sees)

    def skeleton(self, source: str | Path, target: Reader) -> NativeMtpHead:
        with torch.device("meta"):
            return new_head(target.decoder, target.config)

    def random(self, target: Reader, seed: int) -> Any:
        return random_model(lambda: new_head(target.decoder, target.config), seed)


NATIVE_MTP = NativeMtpKind(NativeMtpHead, FeatureDraft, "native MTP head")
