"""Conversations with images and clips, for web services: messages to inputs, tokens to text."""

from __future__ import annotations

import copy
import io
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from mmspec import _hf
from mmspec.modalities.common import formatting
from mmspec.modalities.common.chat_template import apply_chat_template
from mmspec.modalities.common.families import find_family
from mmspec.modalities.vlm import clips
from mmspec.serving.chat import Part, Turn
from mmspec.targets.readers.visual import FRAMES


class ConversationModel:
    """The `mmspec.serving.chat.ChatModel` of a text or vision-language model."""

    def __init__(self, source: str, model: Any, **options: Any) -> None:
        self.source, self.model = source, model
        self.sees = "pixel_values" in find_family(model).media
        self.sees_clips = FRAMES in _hf.forward_names(model)
        self.processor = formatting.load_processor(source, model, self.sees, **options)
        # a copy: decoding in one thread fails while another one sets the padding of the tokenizer
        self.tokenizer = copy.deepcopy(formatting.get_tokenizer(self.processor))
        self.is_text = formatting.get_tokenizer(self.processor) is self.processor
        self.lock = threading.Lock()

    def make_inputs(self, turns: Sequence[Turn]) -> dict[str, Tensor]:
        """Input tensors (1, L). Raises ValueError for media that the model does not read."""
        with self.lock:
            return self._make_inputs(turns)

    def _make_inputs(self, turns: Sequence[Turn]) -> dict[str, Tensor]:
        parts = [part for turn in turns for part in turn.parts]
        for part in parts:
            self._check(part)
        text = self._format(turns)
        if not self.sees:
            made = self.processor(text, return_tensors="pt")
            made.pop("token_type_ids", None)
        else:
            images = [_open(part) for part in parts if part.kind == "image"]
            videos = [_read_clip(part) for part in parts if part.kind == "video"]
            media = {"images": images} if images else {}
            more = clips.processor_arguments(videos) if videos else {}
            made = self.processor(text=[text], **media, **more, return_tensors="pt")
        device = self.model.get_input_embeddings().weight.device
        return {name: value.to(device) for name, value in made.items()}

    def _check(self, part: Part) -> None:
        reads = ["text", *["image"] * self.sees, *["video"] * (self.sees and self.sees_clips)]
        if part.kind not in reads:
            raise ValueError(f"{self.source} reads {' and '.join(reads)}, no {part.kind}; drop it")

    def _format(self, turns: Sequence[Turn]) -> str:
        """The conversation in the model's chat template, or one turn as it is."""
        if self.processor.chat_template:
            messages = [_to_message(turn, self.is_text) for turn in turns]
            options = {"add_generation_prompt": True, "tokenize": False}
            return str(apply_chat_template(self.processor, messages, **options))
        if len(turns) > 1:
            raise ValueError(
                f"{self.source} has no chat template, so it takes one message of the user; send "
                "the last one alone"
            )
        named = vars(self.processor)
        marks = [
            named.get(f"{part.kind}_token", f"<{part.kind}>")
            for part in turns[0].parts
            if part.kind != "text"
        ]
        texts = [part.text for part in turns[0].parts if part.kind == "text"]
        return "\n".join([*marks, *texts])


def _to_message(turn: Turn, is_tokenizer: bool) -> dict[str, Any]:
    if is_tokenizer:
        return {"role": turn.role, "content": "\n".join(part.text for part in turn.parts)}
    content = [
        {"type": "text", "text": part.text} if part.kind == "text" else {"type": part.kind}
        for part in turn.parts
    ]
    return {"role": turn.role, "content": content}


def _open(part: Part) -> Image.Image:
    return formatting.open_image(io.BytesIO(part.data), "the image")


def _read_clip(part: Part) -> clips.VideoClip:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "clip"
        file.write_bytes(part.data)
        return clips.read(file)


chat_model = ConversationModel
