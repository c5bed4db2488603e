"""The bundled Whisper pair: a deep narrow decoder, a shallow encoder, byte tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForCausalLM,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mmspec.modalities.speech.utterances import RATE_HZ

CHUNK_S = 4  # length of a window
MELS = 40
WIDTH, HEADS = 96, 4
ENCODER_LAYERS, DECODER_LAYERS = 3, 12
STEPS_PER_SECOND = 50  # of the encoder and of timestamps
EOS, START = "<|endoftext|>", "<|startoftranscript|>"
LANGUAGE, TASK = "<|en|>", "<|transcribe|>"
NO_TIMESTAMPS = "<|notimestamps|>"
_CONTROL = (START, LANGUAGE, "<|translate|>", TASK, "<|startoflm|>", "<|startofprev|>")
_MOST = 160  # positions of the decoder


def build_processor() -> WhisperProcessor:
    """Byte tokens, then control tokens and timestamps in the published order."""
    letters = list(bytes_to_unicode().values())
    control = [EOS, *_CONTROL, "<|nospeech|>", NO_TIMESTAMPS]
    stamps = [f"<|{i / STEPS_PER_SECOND:.2f}|>" for i in range(CHUNK_S * STEPS_PER_SECOND + 1)]
    tokenizer = WhisperTokenizer(
        vocab={token: i for i, token in enumerate([*letters, EOS])},
        merges=[],
        language="english",
        task="transcribe",
        additional_special_tokens=control[1:],
        pad_token=EOS,
    )
    tokenizer.add_tokens(stamps)
    extractor = WhisperFeatureExtractor(feature_size=MELS, chunk_length=CHUNK_S)
    return WhisperProcessor(extractor, tokenizer)


def build(tokenizer: WhisperTokenizer, layers: int = DECODER_LAYERS) -> Any:
    """The untrained target."""
    return WhisperForConditionalGeneration(_config(tokenizer, layers))


def build_drafter(tokenizer: WhisperTokenizer, target: Any) -> Any:
    """A one-layer decoder for the target's encoder, initialised with the target's embeddings."""
    drafter = WhisperForCausalLM(_config(tokenizer, 1))
    own, its = drafter.model.decoder, target.model.decoder
    for name in ("embed_tokens", "embed_positions", "layer_norm"):
        getattr(own, name).load_state_dict(getattr(its, name).state_dict())
    return drafter


@torch.no_grad()
def transcribe(model: Any, processor: WhisperProcessor, waveforms: Sequence[Tensor]) -> list[str]:
    """Transcribe waveforms (T,) with transformers' own greedy `generate`."""
    ids = model.generate(**prepare_inputs(processor, waveforms), do_sample=False)
    texts: list[str] = processor.batch_decode(ids, skip_special_tokens=True)
    return [text.strip() for text in texts]


def prepare_inputs(processor: WhisperProcessor, waveforms: Sequence[Tensor]) -> dict[str, Any]:
    """Arguments of `generate` to transcribe waveforms (T,) in English, without timestamps."""
    features = extract_features(processor, waveforms)
    return {"input_features": features, "language": "en", "task": "transcribe"}


def extract_features(processor: WhisperProcessor, waveforms: Sequence[Tensor]) -> Tensor:
    """(B, mels, frames) of waveforms (T,)."""
    extract: Any = processor.feature_extractor
    sounds = [waveform.numpy() for waveform in waveforms]
    features: Tensor = extract(sounds, sampling_rate=RATE_HZ, return_tensors="pt").input_features
    return features


def generation_config(tokenizer: WhisperTokenizer) -> Any:
    """The generation configuration with the ids of control tokens."""
    ids: Any = tokenizer.convert_tokens_to_ids
    configure: Any = GenerationConfig
    return configure(
        bos_token_id=ids(EOS),
        eos_token_id=ids(EOS),
        pad_token_id=ids(EOS),
        decoder_start_token_id=ids(START),
        no_timestamps_token_id=ids(NO_TIMESTAMPS),
        prev_sot_token_id=ids("<|startofprev|>"),
        lang_to_id={LANGUAGE: ids(LANGUAGE)},
        task_to_id={"translate": ids("<|translate|>"), "transcribe": ids(TASK)},
        language="en",
        task="transcribe",
        is_multilingual=True,
        max_initial_timestamp_index=CHUNK_S * STEPS_PER_SECOND // 2,
        max_length=_MOST,
        return_timestamps=False,
    )


def _config(tokenizer: WhisperTokenizer, layers: int) -> WhisperConfig:
    ids: Any = tokenizer.convert_tokens_to_ids
    return WhisperConfig(
        vocab_size=len(tokenizer),
        num_mel_bins=MELS,
        d_model=WIDTH,
        encoder_layers=ENCODER_LAYERS,
        encoder_attention_heads=HEADS,
        encoder_ffn_dim=2 * WIDTH,
        decoder_layers=layers,
        decoder_attention_heads=HEADS,
        decoder_ffn_dim=WIDTH,
        max_source_positions=CHUNK_S * STEPS_PER_SECOND,
        max_target_positions=_MOST,
        decoder_start_token_id=ids(START),
        bos_token_id=ids(EOS),
        eos_token_id=ids(EOS),
        pad_token_id=ids(EOS),
        init_std=0.05,
    )
