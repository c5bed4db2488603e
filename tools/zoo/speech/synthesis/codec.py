"""The bundled speech codec: an X-codec 2 (Ye et al. 2025), 50 codes of 1024 a second, at 16 kHz.

One codebook by finite scalar quantisation, without dead codes; a decoder that predicts a spectrum
per frame, which is cheap on one core; and an encoder of log-mel frames.
"""

from __future__ import annotations

from typing import Any

from transformers import Wav2Vec2BertConfig, Xcodec2Config, Xcodec2Model

RATE_HZ = 16_000
HOP = 320  # samples a code
LEVELS = (4, 4, 4, 4, 4)
_WIDTH, _SEMANTIC_WIDTH = 128, 64
_MELS = 160  # two frames of 80 a code


def build_codec() -> Xcodec2Model:
    """An untrained codec."""
    build_semantic: Any = Wav2Vec2BertConfig
    build: Any = Xcodec2Config
    semantic = build_semantic(
        hidden_size=_SEMANTIC_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * _SEMANTIC_WIDTH,
        feature_projection_input_dim=_MELS,
        left_max_position_embeddings=16,
        right_max_position_embeddings=8,
        conv_depthwise_kernel_size=7,
        final_dropout=0.0,
        layerdrop=0.0,
        apply_spec_augment=False,
        conformer_conv_dropout=0.0,
    )
    config = build(
        hidden_size=_WIDTH,
        intermediate_size=_WIDTH,
        num_hidden_layers=0,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=_WIDTH // 4,
        encoder_hidden_size=1,
        downsampling_ratios=(HOP,),
        semantic_model_config=semantic,
        quantization_dim=_WIDTH + _SEMANTIC_WIDTH,
        quantization_levels=LEVELS,
        activation_dropout=0.0,
    )
    return Xcodec2Model(config)
