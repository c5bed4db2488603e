"""Tiny random models of several codebooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers import (
    CsmConfig,
    CsmForConditionalGeneration,
    DacConfig,
    DacModel,
    DiaConfig,
    DiaFeatureExtractor,
    DiaForConditionalGeneration,
    DiaProcessor,
    DiaTokenizer,
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
    model = random_model(lambda: MusicgenForConditionalGeneration(config), seed)
    return _set_start_tokens(_fill_codebooks(model))


def melody(seed: int = 0, layers: int = 2) -> Any:
    """A MusicGen Melody, with text and chroma as a prefix of the frames."""
    made: Any = MusicgenMelodyConfig
    config = made(**_parts(MusicgenMelodyDecoderConfig, layers), num_chroma=4, chroma_length=3)
    model = random_model(lambda: MusicgenMelodyForConditionalGeneration(config), seed)
    return _set_start_tokens(_fill_codebooks(model))


def _fill_codebooks(model: Any) -> Any:
    """Random codebooks in place of zeros, so that every code has a sound of its own."""
    noise = torch.Generator().manual_seed(0)
    for name, table in model.named_buffers():
        if name.endswith(("codebook.embed", "codebook.embed_sum")):
            table.normal_(0.0, 3.0, generator=noise)
    return model


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
    model: CsmForConditionalGeneration = _fill_codebooks(
        random_model(lambda: CsmForConditionalGeneration(config), seed)
    )
    return model


def dia(seed: int = 0, layers: int = 2) -> Any:
    """A Dia of three books; its codes are followed by those of the end, padding and the beginning.

    Seed 2 ends a text of its own accord or at the length limit, seed 0 after a few frames.
    """
    attention = {**_DECODER, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24}
    across = {f"cross_{name}": attention[name] for name in ("num_key_value_heads", "head_dim")}
    special = {"eos_token_id": CODES, "pad_token_id": CODES + 1, "bos_token_id": CODES + 2}
    made: Any = DiaConfig
    config = made(
        encoder_config={**attention, "num_hidden_layers": 1, "max_position_embeddings": 64},
        decoder_config={
            **{**attention, **across, **special, "num_hidden_layers": layers},
            "cross_num_attention_heads": 2,
            "cross_hidden_size": 16,
            "vocab_size": CODES + 3,
            "num_channels": BOOKS,
            "max_position_embeddings": 64,
        },
        delay_pattern=[0, 1, 2],
    )
    model = random_model(lambda: DiaForConditionalGeneration(config), seed)
    own = {"do_sample": True, "guidance_scale": GUIDANCE, "top_k": CODES + 1}
    model.generation_config.update(**special, **own)
    return model


@cache
def dia_processor() -> Any:
    """Bytes to ids, and a DAC of three books."""
    made: Any = DacConfig
    config = made(
        encoder_hidden_size=4,
        downsampling_ratios=[2, 2],
        decoder_hidden_size=16,
        upsampling_ratios=[2, 2],
        n_codebooks=BOOKS,
        codebook_size=CODES,
        codebook_dim=4,
        sampling_rate=1000,
        hidden_size=8,
    )
    codec = random_model(lambda: DacModel(config), 0)
    with torch.no_grad():
        codec.decoder.conv2.weight.mul_(100)  # codes differ by more than rounding
    return DiaProcessor(DiaFeatureExtractor(1, 1000, hop_length=4), DiaTokenizer(), codec)


MODELS: Mapping[str, Callable[..., Any]] = {"delay": musicgen, "depth": csm, "end": dia}
GUIDANCE, PROMPT = 2.0, (2, 3, 4, 5)
SAMPLING: dict[str, dict[str, Any]] = {
    "delay": {"temperature": 1.0, "top_k": 0},
    "depth": {"temperature": 1.0, "top_k": 0},
    "end": {"temperature": 1.0, "top_k": CODES + 1},  # guidance needs one
}


def bind_recipe(recipe: Recipe, name: str, seed: int) -> Accelerated:
    """Bind a recipe to a tiny model, with a second one as draft model."""
    maker = MODELS[name]
    small = maker(2 * seed + 1, layers=1) if recipe.takes_drafter else None
    processor = dia_processor() if name == "end" else None
    return accelerate(maker(2 * seed), recipe, drafter=small, processor=processor)


def tiny_request(name: str, batch: int = 1) -> dict[str, Any]:
    """A batch of the same prompt."""
    ids = torch.tensor([PROMPT]).expand(batch, -1).contiguous()
    start = {"decoder_input_ids": delayed_start(batch)} if name == "end" else {}
    mask = torch.ones_like(ids)
    return {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 12, **start}


def delayed_start(batch: int) -> Tensor:  # (B, BOOKS, BOOKS)
    """What the processor makes of a text for a Dia: the beginning, and padding where it is over."""
    begin = torch.arange(BOOKS)[:, None] <= torch.arange(BOOKS)
    return torch.where(begin, CODES + 2, CODES + 1).expand(batch, -1, -1)


def speech_subject(fast: Accelerated, name: str) -> Subject:
    """Sampled codes of a tiny model, of prefill and rounds, and their exact distribution."""

    def sample(batch: int, first: int, seed: int) -> Tensor:
        rows = list(range(first, first + batch))
        request = {**tiny_request(name, batch), **SAMPLING[name], "max_new_tokens": 5}
        out = fast.synthesize(**request, seed=seed, row_ids=rows)
        refuse_fallback(out.stats)
        return torch.stack([_select_codes(name, row) for row in out.codes])

    return Subject(_DISTRIBUTIONS[name](fast.model), sample)


def _select_codes(name: str, codes: Tensor) -> Tensor:  # (K, T) -> (LENGTH,)
    """Codes of two steps of a delay pattern; of a depth decoder those of the second frame.

    Codes after the end of speech count as zeros.
    """
    if name in ("delay", "end"):
        codes = torch.nn.functional.pad(codes, (0, 2))
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


@torch.no_grad()
def _end_distribution(model: Any) -> Tensor:
    """The distribution by plain guided forwards; frames after an end count as zeros."""
    mass = torch.zeros(CODES, CODES, CODES, dtype=torch.float64)
    steps = torch.full((1, BOOKS, 1), CODES + 2)
    first, is_end = _end_codes(model, steps)
    if is_end[0]:
        mass[0, 0, 0] = 1
        return mass
    steps = torch.full((CODES, BOOKS, 2), CODES + 2)
    steps[:, 0, 1] = torch.arange(CODES)
    second, is_end = _end_codes(model, steps)
    second[:, 0] = torch.where(is_end[:, None], torch.eye(CODES)[0], second[:, 0])
    return first[0, 0, :, None, None] * second[:, 0, :, None] * second[:, 1, None, :]


def _end_codes(model: Any, steps: Tensor) -> tuple[Tensor, Tensor]:
    """Distributions of codes (R, K, CODES) after the steps (R, K, s), and which rows end (R,)."""
    ids = torch.tensor([PROMPT]).expand(len(steps), -1)
    texts = (ids, torch.zeros_like(ids))
    both = [model(input_ids=one, decoder_input_ids=steps.mT.contiguous()).logits for one in texts]
    cond, uncond = (one[:, -1].view(len(steps), BOOKS, -1).double() for one in both)
    guided = cond + GUIDANCE * (cond - uncond)
    least = guided.topk(SAMPLING["end"]["top_k"]).values[..., -1:]
    kept = cond.masked_fill(guided < least, -torch.inf)
    is_end = kept[:, 0, : CODES + 1].argmax(-1) == CODES
    return kept[..., :CODES].softmax(-1), is_end


_DISTRIBUTIONS: Mapping[str, Callable[[Any], Tensor]] = {
    "delay": _delay_distribution,
    "depth": _depth_distribution,
    "end": _end_distribution,
}
