"""How likely the target finds a drawn picture: its own distributions, read off one forward."""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.api import Accelerated
from mmspec.distributions.sampling import Sampling
from mmspec.draft import Draft, Kind
from mmspec.modalities.image.drawing import Drawing, cells
from mmspec.targets.memory import block


@torch.no_grad()
def log_likelihood(fast: Accelerated, drawing: Drawing, sequences: Tensor) -> Tensor:
    """Mean log-probability (B,) of the codes of pictures (B, L), each given those before it.

    By the guided distributions at the request's temperature, before top-k and the like, so that a
    picture of a relaxed recipe is never impossible. The mean over the target's own pictures is
    minus its mean entropy per code. Pictures of one code have no distribution but the prompt's.
    """
    length = sequences.shape[1]
    memory, first, _ = fast.session.bound.backbone.prefill(drawing.inputs, room=length + 64)
    logits = first[:, None]
    if length > 1:
        behind = Draft.chain(sequences[:, 1:-1], Kind.DET)
        layout = block(sequences[:, :1].tolist(), behind, memory.like)
        logits = torch.cat((logits, fast.session.bound.backbone.read(memory, layout)[0]), 1)
    places = drawing.sampling.places
    start = drawing.inputs["attention_mask"].sum(-1, keepdim=True)
    position = start + torch.arange(length, device=start.device)
    asked = Sampling(True, drawing.sampling.temperature, places=places)
    distribution = asked.distribution(logits, None, position).log_prob(sequences)  # (B, L)
    return distribution[:, cells(drawing.grid, distribution.device).flatten()].mean(-1)
