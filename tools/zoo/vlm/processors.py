"""Processors of the bundled language models."""

from __future__ import annotations

from typing import Any

from transformers import (
    CLIPImageProcessor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from mmspec.zoo.clip_questions import clip_words
from mmspec.zoo.requests import request_words
from mmspec.zoo.scene_tensors import PIXELS
from mmspec.zoo.tokenizer import vocabulary, word_tokenizer

LLAVA_PATCH = 8
QWEN_PATCH, QWEN_MERGE = 4, 2

_LLAVA_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", "<image>")
_TEXT_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
_QWEN_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|unk|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_TEXT_CHAT = (
    "<bos>{% for message in messages %}{{ message['role'] }} : "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}assistant :{% endif %}"
)
_LLAVA_CHAT = (
    "<bos>{% for message in messages %}{{ message['role'] }} : "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image> {% else %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}assistant :{% endif %}"
)
_QWEN_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif part['type'] == 'video' %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def llava_processor(**more: Any) -> ProcessorMixin:
    """Build the processor of the LLaVA pair: 36 image tokens per image.

    `more` are arguments of `word_tokenizer`.
    """
    side = {"height": PIXELS, "width": PIXELS}
    image_processor = CLIPImageProcessor(
        size=side,
        crop_size=side,
        do_center_crop=False,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    tokenizer = word_tokenizer(
        _LLAVA_SPECIAL,
        **more,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
    )
    build: Any = LlavaProcessor
    processor: ProcessorMixin = build(
        image_processor=image_processor,
        tokenizer=tokenizer,
        patch_size=LLAVA_PATCH,
        vision_feature_select_strategy="default",
        chat_template=_LLAVA_CHAT,
        image_token="<image>",
        num_additional_image_tokens=1,
    )
    return processor


def qwen_processor(**more: Any) -> ProcessorMixin:
    """Build the processor of the Qwen2.5-VL pair: 36 image tokens per square image.

    `more` are arguments of `word_tokenizer`. The bounds on the area (called edges by the library)
    have a margin: without it a side of 47.999 or 48.001 would give 5 or 7 rows.
    """
    settings: dict[str, Any] = {
        "size": {"shortest_edge": (PIXELS - 1) ** 2, "longest_edge": (PIXELS + 1) ** 2},
        "patch_size": QWEN_PATCH,
        "merge_size": QWEN_MERGE,
        "temporal_patch_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    tokenizer = word_tokenizer(
        _QWEN_SPECIAL,
        **more,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|unk|>",
    )
    build: Any = Qwen2_5_VLProcessor
    processor: ProcessorMixin = build(
        image_processor=Qwen2VLImageProcessor(**settings),
        video_processor=Qwen2VLVideoProcessor(**settings, cap_pixels_per_frame=False),
        tokenizer=tokenizer,
        chat_template=_QWEN_CHAT,
    )
    return processor


def clip_processor() -> ProcessorMixin:
    """Build the processor of the clip models: 36 tokens per two frames."""
    words = tuple(word for word in clip_words() if word not in vocabulary())
    return qwen_processor(more=words, model_max_length=4096)


def request_processor(family: str) -> ProcessorMixin:
    """Build the processor of a model that answers requests of six kinds."""
    build = {"llava": llava_processor, "qwen2.5-vl": qwen_processor}[family]
    return build(more=_request_words(), model_max_length=1024)


def text_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer of a text model that answers requests of six kinds."""
    tokenizer = word_tokenizer(
        _TEXT_SPECIAL,
        more=_request_words(),
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=1024,
    )
    tokenizer.chat_template = _TEXT_CHAT
    return tokenizer


def _request_words() -> tuple[str, ...]:
    return tuple(word for word in request_words() if word not in vocabulary())
