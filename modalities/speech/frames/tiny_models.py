"""Tiny random models of several codebooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers import (
    CsmConfig,
    CsmForConditionalGeneration,
    EncodecConfig,
    MimiConfig,
    MusicgenConfig,
    MusicgenDecoderConfig,
    MusicgenForConditionalGeneration,
    MusicgenMelodyConfig,
    MusicgenMelodyDecoderConfig,
    MusicgenMelodyForConditionalGeneration,
    T5Config,
)

from mmspec.accelerated import Accelerated
from mmspec.api import accelerate
from mmspec.bench.frequency import LENGTH, Subject, refuse_fallback
from mmspec.distributions.sampling import guide
from mmspec.models.loading import random_model
from mmspec.recipe import Recipe

BOOKS, CODES = 3, 4  # few enough to enumerate frames
_DECODER: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def musicgen(seed: int = 0, layers: int = 2) -> Any:
    """A MusicGen with a text encoder and an Encodec of three books."""
    made: Any = MusicgenConfig
    config = made(**_parts(MusicgenDecoderConfig, layers))
    return _set_start_tokens(random_model(lambda: MusicgenForConditionalGeneration(config), seed))


def melody(seed: int = 0, layers: int = 2) -> Any:
    """A MusicGen Melody, with text and chroma as a prefix of the frames."""
    made: Any = MusicgenMelodyConfig
    config = made(**_parts(MusicgenMelodyDecoderConfig, layers), num_chroma=4, chroma_length=3)
    return _set_start_tokens(
        random_model(lambda: MusicgenMelodyForConditionalGeneration(config), seed)
    )


def _set_start_tokens(model: Any) -> Any:
    for name in ("pad_token_id", "bos_token_id", "decoder_start_token_id"):
        setattr(model.generation_config, name, CODES)
    model.generation_config.guidance_scale = 2.0
    return model


def _parts(kind: Any, layers: int) -> dict[str, Any]:
    """Configurations of the text encoder, codec and decoder."""
    text = T5Config(vocab_size=24, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2)
    sound = EncodecConfig(
        sampling_rate=1000,
        target_bandwidths=[0.25 * BOOKS],
        upsampling_ratios=[4, 2],
        num_filters=4,
        hidden_size=8,
        codebook_dim=8,
        codebook_size=CODES,
        num_lstm_layers=1,
        kernel_size=3,
    )
    decoder = kind(
        **{**_DECODER, "num_hidden_layers": layers},
        vocab_size=CODES,
        ffn_dim=24,
        num_codebooks=BOOKS,
        max_position_embeddings=64,
        pad_token_id=CODES,
        bos_token_id=CODES,
        decoder_start_token_id=CODES,
    )
    parts = {"text_encoder": text, "audio_encoder": sound, "decoder": decoder}
    return {name: one.to_dict() for name, one in parts.items()}


def csm(seed: int = 0, layers: int = 2) -> CsmForConditionalGeneration:
    """A backbone and a depth decoder, with a Mimi of three books."""
    attention = {**_DECODER, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24}
    depth = {**attention, "backbone_hidden_size": 16, "max_position_embeddings": BOOKS + 1}
    made: Any = MimiConfig
    sound = made(
        sampling_rate=1000,
        frame_rate=125,
        hidden_size=8,
        num_filters=4,
        upsampling_ratios=[2, 2],
        kernel_size=3,
        codebook_size=CODES,
        codebook_dim=4,
        num_quantizers=BOOKS,
        num_semantic_quantizers=1,
        vector_quantization_hidden_dimension=4,
        upsample_groups=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=4,
        intermediate_size=16,
    )
    config = CsmConfig(
        **{**attention, "num_hidden_layers": layers},
        vocab_size=CODES,
        text_vocab_size=24,
        num_codebooks=BOOKS,
        codebook_pad_token_id=CODES - 1,
        codebook_eos_token_id=0,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        audio_token_id=22,
        audio_eos_token_id=23,
        depth_decoder_config={**depth, "num_codebooks": BOOKS, "vocab_size": CODES},
        codec_config=sound.to_dict(),
    )
    model: CsmForConditionalGeneration = random_model(
        lambda: CsmForConditionalGeneration(config), seed
    )
    return model


MODELS: Mapping[str, Callable[..., Any]] = {"delay": musicgen, "depth": csm}
GUIDANCE, PROMPT = 2.0, (2, 3, 4, 5)
SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_k": 0}


def bind_recipe(recipe: Recipe, name: str, seed: int) -> Accelerated:
    """Bind a recipe to a tiny model, with a second one as draft model."""
    maker = MODELS[name]
    small = maker(2 * seed + 1, layers=1) if recipe.takes_drafter else None
    return accelerate(maker(2 * seed), recipe, drafter=small)


def tiny_request(batch: int = 1) -> dict[str, Any]:
    """A batch of the same prompt."""
    ids = torch.tensor([PROMPT]).expand(batch, -1).contiguous()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 12}


def speech_subject(fast: Accelerated, name: str) -> Subject:
    """Sampled codes of a tiny model, of prefill and rounds, and their exact distribution."""

    def sample(batch: int, first: int, seed: int) -> Tensor:
        rows = list(range(first, first + batch))
        request = {**tiny_request(batch), **SAMPLING, "max_new_tokens": 5}
        out = fast.synthesize(**request, seed=seed, row_ids=rows)
        refuse_fallback(out.stats)
        return torch.stack([_select_codes(name, row) for row in out.codes])

    return Subject(_DISTRIBUTIONS[name](fast.model), sample)


def _select_codes(name: str, codes: Tensor) -> Tensor:  # (K, T) -> (LENGTH,)
    """Codes of two steps of a delay pattern; of a depth decoder those of the second frame."""
    if name == "delay":
        return torch.stack([codes[0, 0], codes[0, 1], codes[1, 0]])
    if codes.shape[1] < 2:  # the first frame ended speech
        return torch.zeros(LENGTH, dtype=torch.int64)
    return codes[:, 1]


@torch.no_grad()
def _delay_distribution(model: Any) -> Tensor:
    """The distribution by plain guided forwards over whole sequences, without a cache."""
    mass = torch.ones((), dtype=torch.float64)
    first = _guided_logits(model, torch.full((1, BOOKS, 1), CODES))[0, 0].softmax(-1)
    steps = torch.full((CODES, BOOKS, 2), CODES)
    steps[:, 0, 1] = torch.arange(CODES)
    second = _guided_logits(model, steps).softmax(-1)
    mass = first[:, None, None] * second[:, 0, :, None] * second[:, 1, None, :]
    return mass


def _guided_logits(model: Any, steps: Tensor) -> Tensor:  # (R, K, s) -> (R, K, V) float64
    """Guided logits after the steps."""
    rows = len(steps)
    ids = torch.tensor([PROMPT])
    text = model.text_encoder(input_ids=ids).last_hidden_state.expand(rows, -1, -1)
    logits = []
    for states in (text, torch.zeros_like(text)):
        mask = torch.full(states.shape[:2], int(states is text))
        out = model(
            encoder_outputs=(states,),
            attention_mask=mask,
            decoder_input_ids=steps.flatten(0, 1),
        )
        logits.append(out.logits[:, -1].view(rows, BOOKS, -1).double())
    return guide(logits[0], logits[1], GUIDANCE)


@torch.no_grad()
def _depth_distribution(model: Any) -> Tensor:
    """The distribution of the second frame, summed over first frames; an end counts as zeros."""
    prompt = torch.tensor([PROMPT])
    frames = torch.tensor(list(product(range(CODES), repeat=BOOKS)))
    text = model.embed_text_tokens(prompt)
    first = _frame_distribution(model, text, frames)
    audio = model.backbone_model.embed_tokens(frames[:, None])
    embeds = torch.cat((text.expand(len(frames), -1, -1), audio), 1)
    over = (frames[:, : BOOKS - 1] == 0).all(-1)
    mass = torch.zeros(len(frames), dtype=torch.float64)
    for row in range(len(frames)):
        if over[row]:
            mass[0] += first[row]
        else:
            second = _frame_distribution(model, embeds[row : row + 1], frames)
            mass[0] += first[row] * second[over].sum()
            mass += first[row] * second.masked_fill(over, 0)
    return mass.view((CODES,) * BOOKS)


def _frame_distribution(
    model: Any, embeds: Tensor, frames: Tensor
) -> Tensor:  # (1, L, D), (F, K) -> (F,)
    """The probability of every frame after a sequence."""
    state = model.backbone_model(inputs_embeds=embeds).last_hidden_state[:, -1]
    distribution: Tensor = model.lm_head(state).double().softmax(-1)[0, frames[:, 0]]
    ids = torch.nn.functional.pad(frames[:, :-1], (1, 0))
    states = state.expand(len(frames), -1)
    rest = model.depth_decoder(ids, backbone_last_hidden_state=states).logits.double().softmax(-1)
    for book in range(1, BOOKS):
        distribution = distribution * rest[:, book - 1].gather(-1, frames[:, book : book + 1])[:, 0]
    return distribution


_DISTRIBUTIONS: Mapping[str, Callable[[Any], Tensor]] = {
    "delay": _delay_distribution,
    "depth": _depth_distribution,
}
