"""Dia: text bytes to a delay pattern of codebooks, with an end that passes through the books."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache
from transformers.generation.logits_process import (
    DiaClassifierFreeGuidanceLogitsProcessor,
    DiaEOSChannelFilterLogitsProcessor,
)
from transformers.modeling_outputs import BaseModelOutput

from mmspec import _hf_cache
from mmspec.modalities.speech.codecs import Codec
from mmspec.modalities.speech.frames.delayed_frames import DelayedFrames
from mmspec.modalities.speech.frames.settings import sampling_arguments
from mmspec.targets.cache import SlotCache
from mmspec.targets.frames.frame_distributions import FREE, ParallelDistribution
from mmspec.targets.frames.frames import FrameMemory, FrameSettings, FrameStop, Outputs


@dataclass(frozen=True, eq=False)
class DiaReader:
    """Reader of Dia: book k of frame t is predicted at step t + `delays[k]`.

    The end is that of `DiaEOSChannelFilterLogitsProcessor` and `DiaEOSDelayPatternLogitsProcessor`,
    computed for every position from the frames of its own path: book 0 ends where its most likely
    code is `end`, or in time for `max_frames`; book k ends `delays[k]` steps later, and padding
    follows.

        step     7   8   9   10  11         book 0 ends at step 8
        book 0   a8  E   -   -   -          certain from there on: E and -
        book 1   b7  b8  E   -   -          sampled until its own end: b8, c7, c8, c9
        book 3   c5  c6  c7  c8  E

    Guidance is that of `DiaClassifierFreeGuidanceLogitsProcessor`: the conditional logits of the
    codes that guided logits rank highest. The temperature, which `generate()` applies between the
    two, changes neither. Where those codes are all special ones, code 0 is certain, as in greedy
    `generate()`, whose sampling fails there. Raises ValueError for a configuration whose special
    codes or delays `generate()` would read otherwise.
    """

    model: Any
    is_parallel = True
    has_codec = False  # its processor has it
    min_temperature = 1.0  # `generate()` replaces lower ones by it
    inputs = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")

    def __post_init__(self) -> None:
        name, own = type(self.model).__name__, self.model.generation_config.eos_token_id
        if not isinstance(self.config.eos_token_id, int) or own != self.config.eos_token_id:
            raise ValueError(
                f"eos_token_id={own} of the generation configuration of {name} differs from "
                f"{self.config.eos_token_id} of its decoder, so generate() would not stop at the "
                "end of speech; set both to one number"
            )
        if self.delays[0] != 0 or min(self.delays) < 0:
            raise ValueError(
                f"delay_pattern={list(self.delays)} of {name}: the first book begins the end of "
                "speech, so its delay must be 0, and no other negative; give such a pattern"
            )

    @property
    def config(self) -> Any:
        return self.model.config.decoder_config

    @property
    def books(self) -> int:
        return int(self.config.num_channels)

    @property
    def size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def delays(self) -> tuple[int, ...]:
        return tuple(self.model.config.delay_pattern)

    @property
    def latest(self) -> int:
        return max(self.delays)

    @property
    def end(self) -> int:
        return int(self.config.eos_token_id)

    @property
    def padding(self) -> int:
        """The code of books that have ended."""
        own = self.model.generation_config.pad_token_id
        return self.end if own is None else int(own)

    @property
    def min_tokens(self) -> int:
        """New tokens of one frame and the end."""
        return self.steps(1)

    def like(self, model: Any) -> DiaReader:
        if model.config.model_type != "dia":
            raise ValueError(f"{type(model).__name__} cannot draft for Dia; give a smaller one")
        other = DiaReader(model)
        mine, theirs = self._codes(), other._codes()
        differing = [name for name in mine if mine[name] != theirs[name]]
        if differing:
            shown = [
                ", ".join(f"{name} {one[name]}" for name in differing) for one in (theirs, mine)
            ]
            raise ValueError(
                f"the draft model has {shown[0]}, the target {shown[1]}; give one with the same "
                "codes"
            )
        return other

    def _codes(self) -> dict[str, Any]:
        """What a draft model must have in common, by name."""
        return {
            "delays": self.delays,
            "end": self.end,
            "padding": (self.padding, self.config.pad_token_id),
            "beginning": self.config.bos_token_id,
            "text tokens": self.model.config.encoder_config.vocab_size,
        }

    def begin(
        self, inputs: Mapping[str, Any], settings: FrameSettings
    ) -> tuple[list[FrameMemory], list[Outputs]]:
        """Encode the texts once, and read the prompts of the decoder without their padding."""
        guidance = self._guidance(settings)
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        mask = torch.ones_like(ids) if mask is None else mask
        texts = [ids] if guidance is None else [ids, torch.zeros_like(ids)]
        encode = self.model.get_encoder()
        states = [encode(input_ids=one, attention_mask=mask).last_hidden_state for one in texts]
        memories, outputs = [], []
        for row, prompt in enumerate(_read_prompts(self, inputs)):
            cache = SlotCache(self.config)
            own = torch.cat([one[row, None] for one in states])
            step_inputs = {
                "encoder_outputs": BaseModelOutput(last_hidden_state=own),
                "attention_mask": mask[row].expand(len(texts), -1),
                "guidance": guidance,
                "prompt": prompt,
            }
            beside = EncoderDecoderCache(cache, DynamicCache(config=self.config))
            memory = FrameMemory(cache, 0, 0, step_inputs, beside)
            memory.plan(len(prompt.frames))
            read = self.read(memory, prompt.frames)
            outputs.append(tuple(one[-1:] for one in read))
            memory.prompt = len(prompt.frames)
            memories.append(memory)
        return memories, outputs

    def read(self, memory: FrameMemory, frames: Tensor) -> Outputs:
        """Logits (n, K, V) after each frame (n, K), guided, and codes that the prompt fixes (n, K).

        One forward; under guidance both branches in one batch.
        """
        carried = dict(memory.step_inputs)
        guidance, prompt = carried.pop("guidance"), carried.pop("prompt")
        first = memory.cache.get_seq_length() + 1 - len(prompt.frames)  # step of the first output
        logits = self.model(
            decoder_input_ids=frames.expand(len(carried["attention_mask"]), -1, -1),
            use_cache=True,
            return_dict=True,
            **{_hf_cache.CACHE_NAME: memory.model_cache, **carried},
        ).logits
        scores = logits.float().flatten(0, 1)  # (K n, V), of both branches (2 K n, V)
        if guidance is not None:
            scores = guidance(_no_ids(len(scores) // 2), scores)
        scores = scores.view(self.books, len(frames), -1).transpose(0, 1)
        return scores, prompt.fixed_codes(first, len(frames))

    def distribution(
        self, outputs: Outputs, steps: Tensor, ends: Tensor, settings: FrameSettings
    ) -> ParallelDistribution:
        logits, fixed = outputs  # (B, M, K, V), (B, M, K)
        filter_ends = DiaEOSChannelFilterLogitsProcessor(self.books, self.end)
        flat = logits.flatten(0, 2).clone()  # that it writes to
        scores = filter_ends(_no_ids(len(flat)), flat).view(logits.shape)
        is_end = scores[..., 0, :].argmax(-1) == self.end
        is_end |= steps == settings.max_frames - 1 - self.latest
        is_left = scores.isfinite().any(-1) | ~logits.isfinite().any(-1)
        scores[..., 0] = torch.where(is_left, scores[..., 0], 0.0)  # the argmax of no code
        since = steps - torch.where(is_end, torch.minimum(ends, steps), ends)
        codes = settings.sampling.distribution(scores.flatten(1, 2))
        split = type(codes)(codes.scores.view(logits.shape), codes.hard)
        ended = self.ended_codes(since)
        return ParallelDistribution(split, torch.where(fixed == FREE, ended, fixed))

    def ended_codes(self, since: Tensor) -> Tensor:  # (B, M) -> (B, M, K)
        """Codes that are certain so many steps after the end of book 0, else FREE.

        Negative where it has not ended.
        """
        late = since[..., None] - torch.tensor(self.delays, device=since.device)
        return torch.where(late > 0, self.padding, torch.where(late == 0, self.end, FREE))

    def stop(self, most: int) -> FrameStop:
        return FrameStop(most, self.end, (self.delays.index(self.latest),))

    def framing(self, most: int) -> DelayedFrames:
        return DelayedFrames(self.delays, most, self.end)

    def steps(self, frames: int) -> int:
        """New tokens of so many frames: the delay, and the end in every book."""
        return frames + self.latest + 1

    def remaining_tokens(self, length: int, inputs: Mapping[str, Any]) -> int:
        """New tokens if a configuration sets `length`, which excludes prompt and delay."""
        return length + self.latest

    def generate_audio(
        self, inputs: Mapping[str, Any], settings: FrameSettings, codec: Codec
    ) -> list[Tensor]:
        """Waveforms of the model's own `generate()`, per row (S,), without the prompt."""
        options = {**sampling_arguments(settings.sampling), "top_k": settings.guidance_top_k}
        made = self.model.generate(
            **inputs,
            **options,
            guidance_scale=settings.guidance,
            max_new_tokens=settings.max_frames,
        )
        start = _read_start(self, inputs)[2]
        framing = self.framing(settings.max_frames)
        return [codec.decode(framing.codes(framing.cut_at_end(row[start:]))) for row in made]

    def codec(self, processor: Any) -> Codec:
        """The DAC of its processor. Raises ValueError for a processor without one."""
        if getattr(processor, "audio_tokenizer", None) is None:
            raise ValueError(
                f"a {type(processor).__name__} has no codec (audio_tokenizer), which decodes the "
                "frames of Dia; give processor= a DiaProcessor, or its folder"
            )
        return Codec.of(processor.audio_tokenizer)

    def apply_processor(
        self, processor: Any, texts: Sequence[str], voice: str | None
    ) -> dict[str, Any]:
        """Bytes of the texts, and the delayed start of their frames. Raises ValueError for a voice.

        The processor's own special codes and delays are replaced by those of the model.
        """
        if voice is not None:
            raise ValueError(
                f"voice={voice!r}: Dia takes speakers from its text ([S1], [S2]) and from an audio "
                "prompt; drop voice=, or give the tensors that its processor makes of audio"
            )
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        codes = {name: getattr(self.config, name) for name in names}
        options = {"delay_pattern": list(self.delays), "padding": True, "return_tensors": "pt"}
        return dict(processor(text=list(texts), **codes, **options))

    def _guidance(self, settings: FrameSettings) -> Any:
        """The processor of guided logits, None without. Raises ValueError for an invalid top-k."""
        if settings.guidance == 1:
            return None
        top_k = settings.guidance_top_k
        if not 1 <= top_k <= self.size:
            raise ValueError(
                f"top_k={top_k} with guidance={settings.guidance:g}: Dia's guidance selects "
                f"the top_k most likely codes itself; give 1 to {self.size}, or guidance=1"
            )
        return DiaClassifierFreeGuidanceLogitsProcessor(settings.guidance, top_k)


@dataclass(frozen=True)
class _Prompt:
    """The delayed start of the frames of a row."""

    frames: Tensor  # (L, K): read at once
    later: Tensor  # (D + 1, K): codes of the steps after it, FREE where none

    def fixed_codes(self, first: int, count: int) -> Tensor:  # (count, K)
        """Codes of the steps from `first` on; those of a negative step are not meant to be used."""
        steps = torch.arange(first, first + count, device=self.later.device)
        return self.later[steps.clamp(0, len(self.later) - 1)]


def _read_prompts(reader: DiaReader, inputs: Mapping[str, Any]) -> list[_Prompt]:
    """The start of every row, without its padding. Raises ValueError for what is no such start."""
    ids, mask, length = _read_start(reader, inputs)
    pad = reader.config.pad_token_id
    later = torch.nn.functional.pad(ids[:, length:], (0, 0, 0, 1), value=pad)
    steps = torch.arange(later.shape[1], device=later.device)[:, None]
    is_free = steps >= torch.tensor(reader.delays, device=later.device)
    _check_start(not bool((is_free & (later != pad)).any()), ids, "its codes follow the delays")
    later = torch.where(later == pad, FREE, later)
    padding = (mask[:, :length] == 0).sum(-1).tolist()
    return [
        _Prompt(row[first:length], own) for row, own, first in zip(ids, later, padding, strict=True)
    ]


def _read_start(reader: DiaReader, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor, int]:
    """Delayed codes (B, S, K), their mask (B, S), and how many steps of them are read at once.

    Without codes `generate()` would sample without the delay that the model was trained with.
    """
    ids, mask = (inputs.get(f"decoder_{name}") for name in ("input_ids", "attention_mask"))
    _check_start(ids is not None, ids, "decoder_input_ids are given")
    assert ids is not None
    mask = torch.ones_like(ids[..., 0]) if mask is None else mask
    shape = (len(inputs["input_ids"]), *ids.shape[1:2], reader.books)
    is_integer = not ids.is_floating_point()
    _check_start(ids.shape == shape and is_integer, ids, f"integers (B, S, K), here {shape}")
    ids = ids.long()
    is_code = bool(((ids >= 0) & (ids < reader.size)).all())
    _check_start(is_code, ids, f"codes are within 0 to {reader.size - 1}")
    is_read = ids[..., 0] != reader.config.pad_token_id
    length = int(is_read.sum(-1).max())
    is_start = torch.arange(shape[1], device=ids.device) < length
    is_even = length > 0 and bool((is_read == is_start).all())
    is_even = is_even and bool((ids[:, :length] != reader.config.pad_token_id).all())
    _check_start(is_even, ids, "all books have as many codes in every row before padding follows")
    is_padded = mask.shape == shape[:2] and bool((mask[:, :-1] <= mask[:, 1:]).all())
    is_padded = is_padded and bool((mask[:, length - 1] == 1).all() & (mask >= 0).all())
    _check_start(is_padded, mask, "decoder_attention_mask (B, S) is 0 for padding on the left")
    return ids, mask, length


def _check_start(is_valid: bool, given: Tensor | None, rule: str) -> None:
    if not is_valid:
        shape = None if given is None else tuple(given.shape)
        raise ValueError(
            f"the start of the frames (shape {shape}) is not what the processor of Dia makes, "
            f"where {rule}; pass all that the processor returns"
        )


def _no_ids(rows: int) -> Tensor:
    """Ids for processors that count their rows and do not read them."""
    return torch.empty(rows, 0, dtype=torch.int64)
