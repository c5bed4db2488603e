"""A tiny Qwen2.5-Omni thinker, which reads images and sound, with its processor."""

from __future__ import annotations

from typing import Any

from transformers import (
    Qwen2_5OmniProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    WhisperFeatureExtractor,
)

from mmspec.modalities.vlm.survey import build
from tests.toys import qwen2_audio

# the ids of the survey's configuration begin with 99
SPECIAL = ("vision_bos", "audio", "image", "video", "audio_bos", "audio_eos", "user", "vision_eos")
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% for one in message['content'] %}{% if one['type'] == 'text' %}{{ one['text'] }}\
{% elif one['type'] == 'image' %}<|vision_bos|><|image|><|vision_eos|>\
{% else %}<|audio_bos|><|audio|><|audio_eos|>{% endif %}{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""


def model() -> Any:
    made = build("Qwen2_5OmniThinkerForConditionalGeneration")
    ids = processor().tokenizer.convert_tokens_to_ids
    made.generation_config.eos_token_id = ids("<|im_end|>")
    made.generation_config.pad_token_id = ids("<pad>")
    return made


def processor() -> Any:
    special = [f"<|{one}|>" for one in SPECIAL]
    tokenizer = qwen2_audio.make_tokenizer(
        [*special, "<|im_start|>", "<|im_end|>", "<pad>"],
        fill=99,
        extra_special_tokens={f"{one}_token": f"<|{one}|>" for one in SPECIAL if one != "user"},
    )
    sizes: dict[str, Any] = {"patch_size": 14, "merge_size": 2}
    pixels = {"shortest_edge": 28 * 28, "longest_edge": 4 * 28 * 28}
    return Qwen2_5OmniProcessor(
        Qwen2VLImageProcessor(**sizes, size=pixels),
        Qwen2VLVideoProcessor(**sizes),
        WhisperFeatureExtractor(feature_size=80, chunk_length=2),
        tokenizer,
        chat_template=TEMPLATE,
    )
