"""Slow references for image generation: whole sequences, no cache, one row at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmspec.codes.grid import Grid
from mmspec.codes.image_family import ImageFamily
from mmspec.modalities.image import families as image
from tests.toys import image_models

GRIDS: dict[str, tuple[int, int]] = {"emu3": (2, 3), "chameleon": (2, 3)}
SIZE = image_models.SIDE


def grid_of(family: str, image_family: ImageFamily) -> Grid:
    return image_family.layout(*GRIDS.get(family, (SIZE, SIZE)))


def sized(family: str) -> dict[str, Any]:
    """The `grid=` of a family's requests."""
    return {"grid": GRIDS[family]} if family in GRIDS else {}


@torch.no_grad()
def logits_of(model: Any, family: str, given: Mapping[str, Any], row: int, new: Tensor) -> Tensor:
    """Logits (V,) behind one row of an engine's request and `new` tokens, from scratch."""
    states: Any
    keep = given["attention_mask"][row].bool()
    if family in ("emu3", "chameleon"):
        ids = torch.cat((given["input_ids"][row][keep], new))[None]
        inner = model.model.text_model if family == "emu3" else model.model
        states = inner(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        logits: Tensor = model.lm_head(states)[0]
        return logits[-1]
    if family == "janus":
        words = model.get_input_embeddings()(given["prompt_ids"][row][keep])
        codes = model.model.generation_aligner(model.model.generation_embeddings(new))
        embeds = torch.cat((words, codes))[None]
        mask = torch.ones(embeds.shape[:2], dtype=torch.int64)
        out = model.model.language_model(inputs_embeds=embeds, attention_mask=mask)
        logits = model.model.generation_head(out.last_hidden_state)[0]
        return logits[-1]
    slots = model.model.condition(given["condition"][row : row + 1])
    embeds = torch.cat((slots, model.model.embed_tokens(new)[None]), 1)
    mask = torch.cat((keep, torch.ones(len(new), dtype=torch.bool)))
    seen = torch.ones(len(mask), len(mask), dtype=torch.bool).tril() & mask
    seen = seen | torch.eye(len(mask), dtype=torch.bool)  # as published: a padded slot sees itself
    logits = model(inputs_embeds=embeds, attention_mask=seen[None, None]).logits[0]
    return logits[-1]


def two_passes(
    model: Any, family: str, arguments: dict[str, Any], scale: float, grid: Grid
) -> Tensor:
    """Greedy pictures (B, L) by plain two-pass guidance."""
    image_family = image.image_family(model)
    negative = arguments.get("negative")
    given = image_family.request({k: v for k, v in arguments.items() if k in image_family.inputs})
    if negative is None and image_family.unconditional is not None:
        other: Any = image_family.unconditional(given)
    else:
        other = negative
    allowed = grid.ids()
    rows = []
    for row in range(len(given["attention_mask"])):
        new = torch.zeros(0, dtype=torch.int64)
        for offset in range(grid.length):
            token = grid.forced_token(offset)
            if token is None:
                cond = logits_of(model, family, given, row, new)
                uncond = cond if scale == 1 else logits_of(model, family, other, row, new)
                guided = uncond + scale * (cond - uncond)
                token = int(allowed[guided[allowed].argmax()])
            new = torch.cat((new, torch.tensor([token])))
        rows.append(new)
    return torch.stack(rows)


@torch.no_grad()
def noisy(family: str, scale: float = 0.03) -> Any:
    """A copy of a toy with noise on its weights: right in part."""
    copy = image_models.PAINTERS[family]()
    noise = torch.Generator().manual_seed(5)
    for weight in copy.parameters():
        if weight.dim() == 2:
            weight.add_(torch.randn(weight.shape, generator=noise) * weight.std() * scale)
    return copy
