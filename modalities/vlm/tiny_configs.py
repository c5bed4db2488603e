"""Small configurations of any class of transformers, made from its default one.

Sizes are config fields with a limited set of names: widths, heads, layers, experts, vocabularies,
positions. Each known name gets a small value, also in sub-configurations, so that widths match.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from transformers import PreTrainedConfig

VOCAB, WIDTH, HEADS, HEAD, LAYERS = 160, 64, 4, 16, 2
PATCHES = 4  # along each side of an image
WINDOW = 16  # of sliding layers, shorter than any prompt of the survey
SPECIAL = range(100, VOCAB)  # ids of placeholders and their delimiters; smaller ids are text

# names (whole, by regular expression) -> value; the first that fits
_SIZES: tuple[tuple[str, Any], ...] = (
    (r"type_vocab_size|task_type_vocab_size|additional_vocab_size", None),
    (r"ngram_vocab_size_base|encoder_hash_byte_group_vocab", 64),
    (r"(\w+_)?vocab_size(_\w+)?", VOCAB),
    (r"codebook_size|num_embeddings", 32),
    (
        r"(out_|output_|text_|encoder_|projector_|audio_|vision_|speech_|downsample_|image_text_"
        r"|patch_embed_|vector_quantization_|qformer_|swin_)?hidden_(size|dim|dimension)(_global)?"
        r"|d_model|n_embd|embed_dim|emb_dim|dim|width|projection_dim|output_dim|embedding_size"
        r"|(input|output)_embedding_size|word_embed_proj_dim|attention_hidden_size|lru_width"
        r"|vision_output_dim|projector_(in|out)put_dim|ple_embed_dim|audio_dim"
        r"|\w+_proj_dims?|feature_projection_input_dim|output_proj_dims|latent_dim|text_dim"
        r"|unit_embed_dim|adapter_(in|out)_dim|adapter_input_size|hidden_size_per_layer_input|input_dim|\w+_hidden_size",
        WIDTH,
    ),
    (
        r"(\w+_)?(intermediate|ffn|dff)(_hidden)?(_size|_dim)?(_mlp)?|d_ff|dim_ff|d_inner|mlp_dim"
        r"|feed_forward_size|feedforward_size",
        48,
    ),
    (r"index_n_heads", 32),  # scores are clamped at zero: with few heads, positions would tie
    (r"index_kpool", 4),
    (r"index_topk", 8),  # less than a prompt of the survey, so that sparse attention drops tokens
    (r"swa_num_key_value_heads|num_kv_heads|kv_n_heads|num_global_key_value_heads", 2),
    (r"num_key_value_heads", 2),
    (
        r"(\w+_)?(num_)?(attention_heads|key_heads|heads)|n_heads?|num_attention_groups"
        r"|num_head|resampler_n_heads|linear_num_(key|value|query)_heads",
        HEADS,
    ),
    (
        r"(\w+_)?head_dim|d_kv|dim_head|kv_channels|attention_head_size|mamba_d_head"
        r"|qk_(rope|nope)_head_dim|v_head_dim|query_pre_attn_scalar|linear_head_dim",
        HEAD,
    ),
    (r"rotary_dim", 8),
    (r"num_nextn_predict_layers|num_mtp_layers|num_kv_shared_layers", 0),
    (
        r"(\w+_)?(num_)?(hidden_)?layers|n_layers?|depth|num_blocks|resampler_depth|num_decoder_layers"
        r"|num_adapter_layers|insert_layer_id|conf_num_hidden_layers",
        LAYERS,
    ),
    (r"(q|kv|laurel|o)_(lora_)?rank|gated_norm_rank|hc_lowrank|time_step_rank|mamba_dt_rank", 16),
    (r"num_(local_)?experts|n_routed_experts|moe_num_experts|zero_expert_num", 4),
    (r"num_experts_per_tok|moe_top_?k|moe_k|num_selected_experts|top_k_experts", 2),
    (r"n_group|topk_group|mamba_n_groups|n_groups|o_groups", 1),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"sliding_window(_size)?|attention_window_size|local_attention_window_len", WINDOW),
    (r"attention_chunk_size|keep_window_size", WINDOW),
    (r"mamba_d_state|state_size|ssm_state_size", 8),
    (r"mamba_chunk_size|chunk_size|block_multiple_of", 8),
    (r"mamba_d_ssm", 2 * WIDTH),
    (
        r"max_position_embeddings|n_positions|max_seq_len|n_ctx|max_target_positions|seq_length"
        r"|max_sequence_length|original_max_position_embeddings",
        512,
    ),
    (r"max_source_positions", 40),
    (r"num_mel_bins|input_feat_size|mel_dim|num_mels", 80),
    (r"num_query_tokens|resampler_n_latents|latent_query_num", 4),
    (r"mm_tokens_per_image", 4),
    (r"num_filters|base_channels|latent_channels|upsample_initial_channel|output_channels", 32),
    (r"mamba_expand|expand", 2),
)
_TABLE = tuple((re.compile(pattern), value) for pattern, value in _SIZES)
_IDS = re.compile(r"\w+_(token_)?(id|index)$")


# exceptions to the rules above, by model type
_KINDS = ["sliding_attention", "full_attention"]
_PINS = {"image_grid_pinpoints": [[PATCHES * 14, 2 * PATCHES * 14]]}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_AXES = {**_ROPE, "mrope_section": [4, 2, 2]}
_OWN: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16, "attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 16},
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "layer_types": ["mamba", "attention"],
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 16},
    "gemma3n_text": {
        "layer_types": 2 * _KINDS,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": None,
    },
    "gemma4_text": {
        "layer_types": 2 * _KINDS,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "global_head_dim": 32,
    },
    "aria": {"projector_patch_to_query_dict": {PATCHES**2: 4}},
    "aya_vision": {
        "vision_feature_select_strategy": "full",
        "vision_config": {
            "model_type": "siglip_vision_model",
            "image_size": PATCHES * 16,
            "hidden_size": WIDTH,
            "intermediate_size": 48,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
        },
    },
    "blt": {"num_hidden_layers": LAYERS},
    "chameleon": {"vocabulary_map": {"<image>": 101}},
    "cohere_compass_text": {"rope_parameters": {kind: _AXES for kind in _KINDS}},
    "DbrxAttentionConfig": {"rope_theta": 1e4, "clip_qkv": 8, "kv_n_heads": 2},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {
        "swa_num_attention_heads": HEADS,
        "swa_num_key_value_heads": HEADS,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 2 * HEAD,
        "swa_qk_nope_head_dim": HEAD,
        "swa_v_head_dim": HEAD,
    },
    "emu3": {
        "vocabulary_map": {
            "<image>": 101,
            **{f"<|visual token {code:06}|>": 120 + code for code in range(32)},
        }
    },
    "ernie4_5_vl_moe_text": {
        "rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]},
        "moe_intermediate_size": [48, 32],
    },
    "fast_vlm": {"vision_config": {"architecture": "test_convnext", "hidden_size": WIDTH}},
    "FunAsrNanoAdaptorConfig": {"intermediate_size": WIDTH // 4},
    "gemma3n_vision": {"architecture": "test_convnext"},
    "glm5_next_text": {"num_key_value_heads": HEADS},
    "florence_vision": {
        "depths": (1, 1),
        "patch_size": (7, 3),
        "patch_stride": (4, 2),
        "patch_padding": (3, 1),
        "patch_prenorm": (False, True),
        "embed_dim": (16, 32),
        "num_heads": (2, 4),
        "num_groups": (2, 4),
        "window_size": 4,
    },
    "granite4_vision": {
        "downsample_rate": "1/2",
        "spatial_target_layers": [0, 1],
        "deepstack_layer_map": [[1, 0]],
    },
    "inkling_vision": {"patch_size": 2, "num_hidden_layers": 8},
    "mimi": {"upsample_groups": WIDTH},
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "mllama_vision_model": {"intermediate_layers_indices": [0], "vision_output_dim": 2 * WIDTH},
    "hunyuan_vl_text": {"head_dim": HEAD},
    "molmo2_adapter": {"vision_feature_layer": [-1, 0]},
    "llama4_vision_model": {
        "intermediate_size": 4 * WIDTH,
        "projector_input_dim": WIDTH,
        "projector_output_dim": WIDTH,
    },
    "llava_next": _PINS,
    "llava_next_video": _PINS,
    "llava_onevision": _PINS,
    "longcat_flash": {"head_dim": HEAD, "qk_head_dim": 2 * HEAD},
    "moonshine_streaming": {"num_key_value_heads": HEADS},
    "moonshine_streaming_encoder": {"sliding_windows": [[16, 4]] * LAYERS},
    "muse_spark_audio": {
        "patch_sizes": (16, 6),
        "hidden_sizes": (32, WIDTH),
        "depths": (1, 1),
        "num_hidden_layers": 2,
    },
    "paddleocr_vl_text": {"rope_parameters": _AXES},
    "perception_lm": {
        "vision_use_cls_token": False,
        "vision_config": {"architecture": "test_vit", "model_args": {"embed_dim": WIDTH}},
    },
    "qwen2_5_omni_thinker": {"vision_start_token_id": 99},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 99},
    "qwen4_exp_text": {
        "indexer_n_heads": 32,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "radio": {"video_temporal_patch_size": 2},
    "reformer": {"axial_pos_embds": False},
    "sam_vision_model": {"global_attn_indexes": [0]},
    "step3p5": {"sliding_window": WINDOW, "num_sliding_attention_heads": HEADS},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "voxtral": {"audio_token_id": SPECIAL[-1]},
    "voxtral_encoder": {"intermediate_size": 4 * WIDTH},  # four frames become one feature
    "vibevoice_acoustic_tokenizer_encoder": {
        "depths": (1, 1),
        "downsampling_ratios": (8,),
        "num_filters": 8,
    },
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "attention_hidden_size": 2 * WIDTH,
        "attention_head_dim": 2 * HEAD,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
}
_CROSSED = ("is_decoder", "add_cross_attention")
_MISSING = {  # sizes that a default configuration omits, but its class needs
    "head_dim": HEAD,
    "num_key_value_heads": HEADS,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
}


def tiny_config(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """Make a small configuration of a class. Exceptions of the class are not caught."""
    config = config_class()
    return _shrink(config, {}, () if config.is_encoder_decoder else ("is_decoder",))


def _shrink(
    config: PreTrainedConfig, ids: dict[str, int], roles: Sequence[str] = ()
) -> PreTrainedConfig:
    """Return a configuration with small sizes; `ids` are the special ids assigned so far, by name.

    `roles` are boolean fields to set, such as `is_decoder`.
    """
    stored = vars(config)
    names = [one.name for one in fields(config) if one.init]
    given: dict[str, Any] = {n: stored.get(config.attribute_map.get(n, n)) for n in names}
    kinds: dict[str, Any] = {n: value for n, value in given.items() if _is_kinds(n, value)}
    own: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, PreTrainedConfig):
            is_half = name == "decoder" and config.is_encoder_decoder
            own[name] = _shrink(value, ids, _CROSSED if is_half else ())
        elif name in roles:
            own[name] = True
        elif isinstance(value, int) and not isinstance(value, bool):
            own.update(_small(name, value, ids))
        elif value is None and name in _MISSING:
            own[name] = _MISSING[name]
    layers: int = max([LAYERS, *(len(dict.fromkeys(value)) for value in kinds.values())])
    for name, value in kinds.items():
        own[name] = _few(value, layers)
    if "num_hidden_layers" in own:
        own["num_hidden_layers"] = layers
    if isinstance(given.get("image_size"), int) and isinstance(given.get("patch_size"), int):
        own["image_size"] = PATCHES * given["patch_size"]
    if "qk_rope_head_dim" in given:  # latent attention keeps one head per query
        own["num_key_value_heads"] = HEADS
    rope = given.get("rope_parameters") or {}
    if "mrope_section" in (*rope, *config.ignore_keys_at_rope_validation):
        own["rope_parameters"] = _sections(rope)
    special = _OWN.get(config.model_type or type(config).__name__, {})
    return type(config)(**{**own, **special})


def _sections(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary sections, one per axis, that fill the rotated part of half a head."""
    half = int(HEAD // 2 * rope.get("partial_rotary_factor", 1.0))
    count = len(rope.get("mrope_section") or range(3))
    rest = [half // count] * (count - 1)
    own = {"rope_type": "default", "rope_theta": 1e4, **rope}
    return {**own, "mrope_section": [half - sum(rest), *rest]}


def _small(name: str, value: int, ids: dict[str, int]) -> Mapping[str, int]:
    if _IDS.fullmatch(name):
        if value < VOCAB and not any(word in name for word in ("image", "video", "audio")):
            return {}
        return {name: ids.setdefault(name, SPECIAL[len(ids)])}
    for pattern, small in _TABLE:
        if pattern.fullmatch(name):
            return {} if small is None or value <= 0 else {name: small}
    return {}


def _is_kinds(name: str, value: Any) -> bool:
    is_list = isinstance(value, list | tuple) and len(value) > LAYERS
    return is_list and isinstance(value[0], str) and "type" in name


def _few(kinds: Any, layers: int) -> list[str]:
    """Shorten a list of layer types to `layers`, keeping all distinct types."""
    distinct = list(dict.fromkeys(kinds))
    return [distinct[min(at, len(distinct) - 1)] for at in range(layers)]
