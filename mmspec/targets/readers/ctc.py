"""Recognisers whose encoder says labels of its own: what it hears, once for everybody."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class CtcHead:
    """Where the labels of a family are: data that a modality fills in."""

    media: str  # request key of the sound
    encoder: Callable[[Any], Any]  # model -> what makes states (B, T, D) of it
    head: Callable[[Any], Any]  # model -> what makes logits (B, T, V) of those
    seen: Callable[[Any, Mapping[str, Any], int], Tensor | None]  # model, request, T -> (B, T) bool
    blank: int = 0


@dataclass(frozen=True)
class Heard:
    """What an encoder made of the sounds of a request."""

    encoded: Any  # the encoder's own output
    log_probs: Tensor  # (B, T, V) float32
    seen: Tensor  # (B, T) bool, False = padding
    blank: int


def hear(model: Any, ctc: CtcHead, inputs: Mapping[str, Any]) -> Heard | None:
    """Run the encoder and its head; None for a request without a sound."""
    sound = inputs.get(ctc.media)
    if sound is None:
        return None
    encoded = ctc.encoder(model)(sound.to(model.dtype))
    states = encoded.last_hidden_state
    log_probs = ctc.head(model)(states).float().log_softmax(-1)
    seen = ctc.seen(model, inputs, states.shape[1])
    if seen is None:
        seen = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
    return Heard(encoded, log_probs, seen, ctc.blank)


@contextmanager
def remembered(model: Any, ctc: CtcHead | None, heard: Heard | None) -> Iterator[None]:
    """Within this block the model's encoder gives what it gave before, without a forward."""
    if ctc is None or heard is None:
        yield
        return
    encoder = ctc.encoder(model)
    encoder.forward = lambda *_, **__: heard.encoded
    try:
        yield
    finally:
        del encoder.forward
