"""Conversations with images, clips and sound, for web services."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmspec import _hf
from mmspec.modalities.common.conversation import ConversationModel
from mmspec.modalities.vlm import clips
from mmspec.targets.readers.visual import FRAMES


def chat_model(source: str, model: Any, **options: Any) -> ConversationModel:
    """The conversations of a text or vision-language model."""
    has_clips = FRAMES in _hf.forward_names(model)
    return ConversationModel(source, model, read_clips if has_clips else None, **options)


def read_clips(files: Sequence[bytes]) -> dict[str, Any]:
    """Arguments of a processor for clips, from the bytes of their files."""
    return clips.processor_arguments([_read_clip(one) for one in files])


def _read_clip(data: bytes) -> clips.VideoClip:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "clip"
        file.write_bytes(data)
        return clips.read(file)
