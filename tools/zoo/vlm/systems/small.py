"""Small draft models of the survey: their parts, and losses on tokens or on distributions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.targets.readers.reader import Reader
from mmspec.training.heads import TrainingExample, read_example
from mmspec.training.losses import soft_cross_entropy
from mmspec.training.small_model import MASSV, TEXT_ONLY, TrainableSmallModel
from mmspec.zoo.training import load_teacher
from tools.zoo.vlm.architecture import SIGHTED
from tools.zoo.vlm.families import FAMILIES
from tools.zoo.vlm.train import save
from tools.zoo.vlm.training import vision_parameters

SHAPE = {  # of text models: one layer
    "num_hidden_layers": 1,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
FAMILY_OF = {"llava": "llava", "qwen2_5_vl": "qwen2.5-vl"}  # by the target's class


class SightedModel(nn.Module):
    """A small model of the target's class in training."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model.requires_grad_(True)

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def language_model(self) -> Any:
        return self.model

    def logits(self, example: TrainingExample, placeholders: Sequence[int]) -> Tensor:  # (B, T, V)
        """Logits of the tokens of an example.

        A placeholder of a picture that the target sampled has no features: it is read as token 0.
        """
        sampled = torch.isin(example.tokens, torch.tensor(placeholders))
        tokens = example.tokens.masked_fill(sampled, 0).clamp_min(0)
        inputs = dict(example.inputs)
        ids = torch.cat((inputs.pop("input_ids"), tokens), 1)
        mask = torch.cat((inputs.pop("attention_mask"), torch.ones_like(tokens)), 1)
        if "mm_token_type_ids" in inputs:  # from which Qwen-VL computes its positions
            types = inputs["mm_token_type_ids"]
            inputs["mm_token_type_ids"] = functional.pad(types, (0, tokens.shape[1]))
        else:
            inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
        logits: Tensor = self.model(
            input_ids=ids,
            attention_mask=mask,
            use_cache=False,
            logits_to_keep=tokens.shape[1] + 1,
            **inputs,
        ).logits
        return logits[:, :-1]


def new_text_model(reader: Reader, counts: Tensor, **changes: Any) -> TrainableSmallModel:
    """An untrained language model that reads text only."""
    return TEXT_ONLY.begin(reader, counts, **{**SHAPE, **changes})


def new_projected_model(reader: Reader, counts: Tensor, **changes: Any) -> TrainableSmallModel:
    """An untrained language model and projector of the target's vision features (MASSV)."""
    return MASSV.begin(reader, counts, **{**SHAPE, **changes})


@torch.no_grad()
def new_sighted_model(reader: Reader, counts: Tensor, processor: Any) -> SightedModel:
    """A small model of the target's class: a trained vision tower, and an untrained text model."""
    family = FAMILY_OF[reader.model.config.model_type]
    model = FAMILIES[family].build(SIGHTED, processor.tokenizer)
    text: Any = model.config.get_text_config()
    text.max_position_embeddings = reader.config.max_position_embeddings
    other = load_teacher(f"{family}-drafter")
    for own, trained in zip(vision_parameters(model), vision_parameters(other), strict=True):
        own.copy_(trained)
    return SightedModel(model)


def token_loss(reader: Reader, head: SightedModel, example: TrainingExample) -> Tensor:  # ()
    """Cross entropy of the target's tokens."""
    real = example.tokens >= 0
    logits = head.logits(example, reader.placeholder_ids)
    return functional.cross_entropy(logits[real].float(), example.tokens[real])


def distillation_loss(reader: Reader, head: SightedModel, example: TrainingExample) -> Tensor:
    """Cross entropy against the target's distribution of every token (Spec-LLaVA)."""
    read = read_example(reader, example, "hidden")
    real = example.tokens >= 0
    count = real.shape[1]
    states = read.prompt.features[:, -count - 1 : -1]
    logits = head.logits(example, reader.placeholder_ids)
    return soft_cross_entropy(logits[real], reader.head(states[real]))


def decoder_layers(head: Any) -> nn.Module:
    """The decoder layers of a small model, whose matrices Muon trains."""
    layers: nn.Module = head.language_model.get_decoder().layers
    return layers


def projector_parameters(head: TrainableSmallModel) -> list[nn.Parameter]:
    """What the first stage of MASSV trains."""
    assert head.projector is not None
    return list(head.projector.parameters())


def save_small(head: Any, folder: Path, processor: Any) -> None:
    """Write a small model in float16, with its tokenizer or processor."""
    head.half()
    if isinstance(head, SightedModel):
        save(head.model, processor, folder, sees=True)
        return
    save(head.language_model, processor, folder, sees=False)
    head.save_pretrained(folder)
