"""Conversations with media, for web services: messages to inputs, tokens to text."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from mmspec.modalities.common import formatting
from mmspec.modalities.common.audio_inputs import (
    check_windows,
    find_feature_extractor,
    read_sounds,
)
from mmspec.modalities.common.chat_template import apply_chat_template
from mmspec.modalities.common.families import find_family
from mmspec.serving.chat import Part, Turn

AUDIO = ("input_features", "input_values", "audio_values")  # prefixes of forward arguments

ClipReader = Callable[[Sequence[bytes]], dict[str, Any]]  # files -> arguments of the processor


class ConversationModel:
    """The `mmspec.serving.chat.ChatModel` of a model that reads text, images, clips or sound.

    `read_clips` prepares the clips of models that read any.
    """

    def __init__(
        self, source: str, model: Any, read_clips: ClipReader | None = None, **options: Any
    ) -> None:
        self.source, self.model, self.read_clips = source, model, read_clips
        media = find_family(model).media
        sees = "pixel_values" in media
        hears = any(name.startswith(AUDIO) for name in media)
        self.processor = formatting.load_processor(source, model, sees or hears, **options)
        # a copy: decoding in one thread fails while another one sets the padding of the tokenizer
        self.tokenizer = copy.deepcopy(formatting.get_tokenizer(self.processor))
        self.is_text = formatting.get_tokenizer(self.processor) is self.processor
        hears = hears and not self.is_text and find_feature_extractor(self.processor) is not None
        kinds = {"image": sees, "video": sees and read_clips is not None, "audio": hears}
        self.reads = ("text", *(kind for kind, is_read in kinds.items() if is_read))
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
        if self.is_text:
            made = self.processor(text, return_tensors="pt")
            made.pop("token_type_ids", None)
        else:
            made = self._process(text, parts)
        device, dtype = self.model.get_input_embeddings().weight.device, self.model.dtype
        return {
            name: value.to(device, dtype if value.is_floating_point() else None)
            for name, value in made.items()
            if isinstance(value, Tensor)
        }

    def _process(self, text: str, parts: Sequence[Part]) -> Any:
        """The tensors of a processor."""
        given = {kind: [one.data for one in parts if one.kind == kind] for kind in self.reads}
        media: dict[str, Any] = {}
        if given.get("image"):
            media["images"] = [_open(data) for data in given["image"]]
        if given.get("video") and self.read_clips is not None:
            media |= self.read_clips(given["video"])
        sounds = read_sounds(self.processor, given["audio"]) if given.get("audio") else ()
        if sounds:
            media["audio"] = [one.samples.numpy() for one in sounds]
        made = self.processor(text=[text], **media, return_tensors="pt")
        if sounds:
            check_windows(self.processor, sounds, made)
        return made

    def _check(self, part: Part) -> None:
        if part.kind not in self.reads:
            raise ValueError(
                f"{self.source} reads {' and '.join(self.reads)}, no {part.kind}; drop it"
            )

    def _format(self, turns: Sequence[Turn]) -> str:
        """The conversation in the model's chat template, or one turn as it is."""
        if self.processor.chat_template:
            return self._apply_template([self._make_message(turn) for turn in turns])
        if len(turns) > 1:
            raise ValueError(
                f"{self.source} has no chat template, so it takes one message of the user; send "
                "the last one alone"
            )
        return self._mark(turns[0], "\n")

    def _apply_template(self, messages: Sequence[dict[str, Any]]) -> str:
        options = {"add_generation_prompt": True, "tokenize": False}
        return str(apply_chat_template(self.processor, messages, **options))

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template reads the parts of a message, or its text alone."""
        if self.is_text or "audio" not in self.reads:
            return not self.is_text
        content = [{"type": "audio"}, {"type": "text", "text": "?"}]
        try:
            text = self._apply_template([{"role": "user", "content": content}])
        except ValueError:
            return False
        return self.processor.audio_token in text and str(content) not in text

    def _make_message(self, turn: Turn) -> dict[str, Any]:
        if not self._takes_parts:
            return {"role": turn.role, "content": self._mark(turn, "\n" if self.is_text else "")}
        content = [
            {"type": "text", "text": part.text} if part.kind == "text" else {"type": part.kind}
            for part in turn.parts
        ]
        return {"role": turn.role, "content": content}

    def _mark(self, turn: Turn, separator: str) -> str:
        """The tokens of the media, then the texts."""
        named = vars(self.processor)
        marks = [
            named.get(f"{part.kind}_token", f"<{part.kind}>")
            for part in turn.parts
            if part.kind != "text"
        ]
        return separator.join([*marks, *(part.text for part in turn.parts if part.kind == "text")])


def _open(data: bytes) -> Any:
    return formatting.open_image(io.BytesIO(data), "the image")
