"""The configuration and class of every toy family: narrow layers, two vision blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as hf
from transformers import PreTrainedModel

VOCAB = 160
WORDS = range(4, 140)  # ordinary text; all other ids are special and never generated
PAD, BOS = 0, 1
IMAGE, VIDEO, START, END, BREAK = 150, 151, 152, 153, 154
HIDDEN, VISION, WINDOW = 64, 32, 16
MELS, AUDIO = 16, 20  # Whisper encoder: mel bands, positions (half the number of mel frames)
Built = tuple[hf.PreTrainedConfig, type[PreTrainedModel]]
Changes = dict[str, Any]


def _text(layers: int, changes: Changes, **own: Any) -> dict[str, Any]:
    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }
    return {**common, **own, **changes}


def _layer_types(layers: int, other: str, period: int) -> list[str]:
    """Every `period`-th layer and the last attend fully, the rest are `other`."""
    full = [(i + 1) % period == 0 or i == layers - 1 for i in range(layers)]
    return ["full_attention" if attends else other for attends in full]


def _vision(**own: Any) -> dict[str, Any]:
    common: dict[str, Any] = {
        "hidden_size": VISION,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": 4,
        "image_size": 16,
    }
    return {**common, **own}


def _composite(
    config: Callable[..., hf.PreTrainedConfig],
    cls: type[PreTrainedModel],
    text: Any,
    vision: Any,
    **own: Any,
) -> Built:
    image = {"image_token_id": IMAGE, "tie_word_embeddings": False}
    return config(text_config=text, vision_config=vision, **image, **own), cls


def _qwen_vl(
    config: Callable[..., hf.PreTrainedConfig],
    cls: type[PreTrainedModel],
    text: Changes,
    **vision: Any,
) -> Built:
    tower = {"hidden_size": VISION, "num_heads": 2, "patch_size": 4, "depth": 2, **vision}
    marks = {"vision_start_token_id": START, "vision_end_token_id": END, "video_token_id": VIDEO}
    return _composite(config, cls, text, tower, **marks)


def _mrope(*section: int, **own: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": list(section)}
    return {"rope_parameters": {**rope, **own}}


def _thirds(text: Changes) -> dict[str, Any]:
    half = text["hidden_size"] // text["num_attention_heads"] // 2
    return _mrope(half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8)


def _llama(layers: int, changes: Changes) -> Built:
    return hf.LlamaConfig(**_text(layers, changes)), hf.LlamaForCausalLM


def _mistral(layers: int, changes: Changes) -> Built:
    text = _text(layers, changes, sliding_window=WINDOW)
    return hf.MistralConfig(**text), hf.MistralForCausalLM


def _gemma3_text(layers: int, changes: Changes) -> Built:
    kinds = _layer_types(layers, "sliding_attention", 2)
    own = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW}
    text = _text(layers, changes, layer_types=kinds, **own)
    return hf.Gemma3TextConfig(**text), hf.Gemma3ForCausalLM


def _qwen3(layers: int, changes: Changes) -> Built:
    return hf.Qwen3Config(**_text(layers, changes, head_dim=16)), hf.Qwen3ForCausalLM


def _lfm2(layers: int, changes: Changes) -> Built:
    text = _text(layers, changes, layer_types=_layer_types(layers, "conv", 2), block_multiple_of=16)
    return hf.Lfm2Config(**text), hf.Lfm2ForCausalLM


def _llava(layers: int, changes: Changes) -> Built:
    text = hf.LlamaConfig(**_text(layers, changes))
    vision = hf.CLIPVisionConfig(**_vision(num_hidden_layers=3))
    return _composite(hf.LlavaConfig, hf.LlavaForConditionalGeneration, text, vision)


def _llava_next(layers: int, changes: Changes) -> Built:
    text = hf.MistralConfig(**_text(layers, changes, sliding_window=None))
    vision = hf.CLIPVisionConfig(**_vision(num_hidden_layers=3, patch_size=8))
    cls = hf.LlavaNextForConditionalGeneration
    return _composite(hf.LlavaNextConfig, cls, text, vision, image_grid_pinpoints=PINPOINTS)


def _llava_onevision(layers: int, changes: Changes) -> Built:
    text = hf.Qwen2Config(**_text(layers, changes))
    vision = hf.SiglipVisionConfig(**_vision(patch_size=8, vision_use_head=False))
    own = {"image_grid_pinpoints": PINPOINTS, "video_token_id": VIDEO}
    cls = hf.LlavaOnevisionForConditionalGeneration
    return _composite(hf.LlavaOnevisionConfig, cls, text, vision, **own)


def _llava_next_video(layers: int, changes: Changes) -> Built:
    text = hf.LlamaConfig(**_text(layers, changes))
    vision = hf.CLIPVisionConfig(**_vision(num_hidden_layers=3))
    own = {"image_grid_pinpoints": PINPOINTS, "video_token_id": VIDEO}
    cls = hf.LlavaNextVideoForConditionalGeneration
    return _composite(hf.LlavaNextVideoConfig, cls, text, vision, **own)


def _video_llava(layers: int, changes: Changes) -> Built:
    text = hf.LlamaConfig(**_text(layers, changes))
    vision = hf.CLIPVisionConfig(**_vision(num_hidden_layers=3))
    cls, own = hf.VideoLlavaForConditionalGeneration, {"video_token_id": VIDEO}
    return _composite(hf.VideoLlavaConfig, cls, text, vision, **own)


def _qwen2_vl(layers: int, changes: Changes) -> Built:
    text = _text(layers, changes)
    text = {**_thirds(text), **text}
    vision = {"embed_dim": VISION, "hidden_size": text["hidden_size"], "mlp_ratio": 2}
    return _qwen_vl(hf.Qwen2VLConfig, hf.Qwen2VLForConditionalGeneration, text, **vision)


def _qwen2_5_vl(layers: int, changes: Changes) -> Built:
    text = _text(layers, changes)
    text = {**_thirds(text), **text}
    blocks = {"window_size": 16, "fullatt_block_indexes": [1], "intermediate_size": 48}
    cls = hf.Qwen2_5_VLForConditionalGeneration
    return _qwen_vl(hf.Qwen2_5_VLConfig, cls, text, out_hidden_size=text["hidden_size"], **blocks)


def _qwen3_vl(layers: int, changes: Changes) -> Built:
    text = _text(layers, changes, head_dim=16, **_mrope(4, 2, 2, mrope_interleaved=True))
    vision = {"depth": 3, "deepstack_visual_indexes": [0, 1], **QWEN3_VISION}
    vision["out_hidden_size"] = text["hidden_size"]
    return _qwen_vl(hf.Qwen3VLConfig, hf.Qwen3VLForConditionalGeneration, text, **vision)


def _qwen3_5(layers: int, changes: Changes) -> Built:
    rope = _mrope(2, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.5)
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 16}
    sizes = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    kinds = _layer_types(layers, "linear_attention", 3)
    text = _text(layers, changes, layer_types=kinds, **rope, **heads, **sizes)
    cls = hf.Qwen3_5ForConditionalGeneration
    width = text["hidden_size"]
    return _qwen_vl(hf.Qwen3_5Config, cls, text, out_hidden_size=width, **QWEN3_VISION)


def _gemma3(layers: int, changes: Changes) -> Built:
    text, _ = _gemma3_text(layers, changes)
    vision = hf.SiglipVisionConfig(**_vision(image_size=32, vision_use_head=False))
    own = {"mm_tokens_per_image": 16, "boi_token_index": START, "eoi_token_index": END}
    return _composite(hf.Gemma3Config, hf.Gemma3ForConditionalGeneration, text, vision, **own)


def _idefics3(layers: int, changes: Changes) -> Built:
    text = hf.LlamaConfig(**_text(layers, changes))
    cls = hf.Idefics3ForConditionalGeneration
    return _composite(hf.Idefics3Config, cls, text, _vision(image_size=24), pad_token_id=PAD)


def _smolvlm(layers: int, changes: Changes) -> Built:
    text = hf.LlamaConfig(**_text(layers, changes))
    cls = hf.SmolVLMForConditionalGeneration
    return _composite(hf.SmolVLMConfig, cls, text, _vision(image_size=24), pad_token_id=PAD)


def _internvl(layers: int, changes: Changes) -> Built:
    text = hf.Qwen2Config(**_text(layers, changes))
    vision = hf.InternVLVisionConfig(**_vision(image_size=[24, 24], patch_size=[4, 4]))
    cls = hf.InternVLForConditionalGeneration
    return _composite(hf.InternVLConfig, cls, text, vision, image_seq_length=9)


def _paligemma(layers: int, changes: Changes) -> Built:
    text = hf.GemmaConfig(**_text(layers, changes, num_key_value_heads=1, head_dim=16))
    vision = hf.SiglipVisionConfig(**_vision(vision_use_head=False))
    width = text.hidden_size
    own = {"projection_dim": width, "hidden_size": width, "vocab_size": text.vocab_size}
    return _composite(hf.PaliGemmaConfig, hf.PaliGemmaForConditionalGeneration, text, vision, **own)


def _mistral3(layers: int, changes: Changes) -> Built:
    text = hf.MistralConfig(**_text(layers, changes, sliding_window=None))
    vision = hf.PixtralVisionConfig(**_vision(image_size=32))
    return _composite(hf.Mistral3Config, hf.Mistral3ForConditionalGeneration, text, vision)


def _lfm2_vl(layers: int, changes: Changes) -> Built:
    text, _ = _lfm2(layers, changes)
    tower = {k: v for k, v in _vision(vision_use_head=False).items() if k != "image_size"}
    vision = hf.Siglip2VisionConfig(**tower, num_patches=36)
    own = {"projector_hidden_size": 48}
    return _composite(hf.Lfm2VlConfig, hf.Lfm2VlForConditionalGeneration, text, vision, **own)


def _whisper(layers: int, changes: Changes) -> Built:
    own: dict[str, Any] = {
        "vocab_size": VOCAB,
        "d_model": HIDDEN,
        "encoder_layers": 2,
        "decoder_layers": layers,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
        "num_mel_bins": MELS,
        "max_source_positions": AUDIO,
        "max_target_positions": 256,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": None,
        "decoder_start_token_id": BOS,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
        "tie_word_embeddings": False,
    }
    return hf.WhisperConfig(**{**own, **changes}), hf.WhisperForConditionalGeneration


PINPOINTS = [[16, 16], [16, 32], [32, 16], [32, 32]]
QWEN3_VISION = {"intermediate_size": 48, "num_position_embeddings": 64}
BUILDERS: dict[str, Callable[[int, Changes], Built]] = {
    "llama": _llama,
    "mistral-sliding": _mistral,
    "gemma3-text": _gemma3_text,
    "qwen3": _qwen3,
    "lfm2": _lfm2,
    "llava": _llava,
    "llava_next": _llava_next,
    "llava_onevision": _llava_onevision,
    "llava_next_video": _llava_next_video,
    "video_llava": _video_llava,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "gemma3": _gemma3,
    "idefics3": _idefics3,
    "smolvlm": _smolvlm,
    "internvl": _internvl,
    "paligemma": _paligemma,
    "mistral3": _mistral3,
    "qwen3_5": _qwen3_5,
    "lfm2_vl": _lfm2_vl,
    "whisper": _whisper,
}
