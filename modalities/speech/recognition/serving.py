"""Conversations with sound, for web services."""

from __future__ import annotations

from typing import Any

from mmspec.modalities.common.conversation import ConversationModel


def chat_model(source: str, model: Any, **options: Any) -> ConversationModel | None:
    """The conversations of a speech language model; None for an encoder-decoder."""
    if model.config.is_encoder_decoder:
        return None
    return ConversationModel(source, model, **options)
