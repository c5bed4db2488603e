"""MusicGen: a decoder of K codebooks in a delay pattern, conditioned on text, often guided."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from mmspec import _hf, _hf_cache
from mmspec.distributions.sampling import guide
from mmspec.modalities.speech.codecs import Codec
from mmspec.modalities.speech.frames.delayed_frames import DelayedFrames
from mmspec.modalities.speech.frames.settings import sampling_arguments
from mmspec.targets.cache import SlotCache
from mmspec.targets.frames.frame_distributions import FREE, ParallelDistribution
from mmspec.targets.frames.frames import NO_END, FrameMemory, FrameSettings, FrameStop, Outputs

# (model, inputs, guidance) -> states, mask
Encode = Callable[[Any, Mapping[str, Any], float], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True, eq=False)
class MusicgenReader:
    """Reader of MusicGen: book k of frame t is predicted at step t + k.

    Codes without a frame are fixed, see `forced_codes`. `encode` returns states (B, L, D) of texts,
    doubled if guided, and a mask if the decoder attends to them; no mask if they are a prefix of
    the frames (MusicGen Melody, which takes a melody as `input_features`). Raises ValueError for
    stereo, whose books are interleaved, and for codes that would end sound.
    """

    model: Any
    encode: Encode = _hf.encode_guided_text
    inputs: tuple[str, ...] = ("input_ids", "attention_mask")
    is_parallel = True
    has_codec = True  # is part of the model
    end = NO_END
    min_temperature = 0.0

    def __post_init__(self) -> None:
        channels = self.model.decoder.config.audio_channels
        if channels != 1:
            raise ValueError(
                f"{type(self.model).__name__} generates {channels} channels, whose books are "
                "interleaved; only one channel is supported: use model.generate()"
            )
        ends = self.model.generation_config.eos_token_id
        listed = [] if ends is None else ends if isinstance(ends, list) else [ends]
        if any(end < self.size for end in listed):
            raise ValueError(
                f"eos_token_id={ends} of the generation configuration of "
                f"{type(self.model).__name__} is a code of the books (below {self.size}), which "
                "would end sound; set it to None"
            )

    @property
    def config(self) -> Any:
        return self.model.decoder.config

    @property
    def books(self) -> int:
        return int(self.config.num_codebooks)

    @property
    def size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def min_tokens(self) -> int:
        """New tokens of one frame."""
        return 2 * self.books - 2

    @property
    def start(self) -> int:
        """The id at positions without a code."""
        found = self.model.generation_config.decoder_start_token_id
        return int(self.config.vocab_size if found is None else found)

    def like(self, model: Any) -> MusicgenReader:
        """The reader of a draft model.

        Raises ValueError for another class, or another number of chroma bins.
        """
        kind = self.model.config.model_type
        if model.config.model_type != kind:
            raise ValueError(
                f"{type(model).__name__} cannot draft for MusicGen ({kind}); give a smaller one of "
                "its own class"
            )
        mine, theirs = (getattr(one.config, "num_chroma", None) for one in (self.model, model))
        if mine != theirs:
            raise ValueError(
                f"the draft model reads melodies of num_chroma={theirs} bins, the target of {mine}"
                "; give one with the same number"
            )
        return MusicgenReader(model, self.encode, self.inputs)

    def begin(
        self, inputs: Mapping[str, Any], settings: FrameSettings
    ) -> tuple[list[FrameMemory], list[Outputs]]:
        """Encode the texts once, and read the start step.

        Raises ValueError for a melody of another number of rows.
        """
        melody = inputs.get("input_features")
        if melody is not None and len(melody) != len(inputs["input_ids"]):
            raise ValueError(
                f"input_features hold {len(melody)} melodies for {len(inputs['input_ids'])} texts; "
                "give one per text, as the processor returns them"
            )
        is_guided = settings.guidance > 1
        states, mask = self.encode(self.model, inputs, settings.guidance)
        batch = len(states) // (1 + is_guided)
        memories, outputs = [], []
        first = torch.full((1, self.books), self.start, device=states.device)
        for row in range(batch):
            rows = [row, batch + row] if is_guided else [row]
            cache = SlotCache(self.config)
            prefix: dict[str, Any] = {"encoder_hidden_states": states[rows]}
            carried: dict[str, Any] = {"scale": settings.guidance, "branches": len(rows)}
            length, beside = states.shape[1], cast(Any, cache)
            if mask is not None:  # the decoder attends to the text at every step
                whole = BaseModelOutput(last_hidden_state=states[rows])
                carried |= {"encoder_outputs": whole, "attention_mask": mask[rows]}
                prefix, length = {}, 0
                beside = EncoderDecoderCache(cache, DynamicCache(config=self.config))
            memory = FrameMemory(cache, 0, 0, {**carried, **prefix}, beside)
            memory.plan(length + 1)
            outputs.append(self.read(memory, first))
            memory.prompt, memory.step_inputs = length + 1, carried
            memories.append(memory)
        return memories, outputs

    def read(self, memory: FrameMemory, frames: Tensor) -> Outputs:  # (n, K) -> logits (n, K, V)
        """One forward; under guidance both branches in one batch."""
        carried = dict(memory.step_inputs)
        scale, branches = carried.pop("scale"), carried.pop("branches")
        logits = self.model(
            decoder_input_ids=frames.T.repeat(branches, 1),
            use_cache=True,
            return_dict=True,
            **{_hf_cache.CACHE_NAME: memory.model_cache, **carried},
        ).logits[:, -len(frames) :]
        each = logits.reshape(branches, self.books, *logits.shape[1:]).transpose(1, 2)
        return (guide(each[0], each[1] if branches > 1 else None, scale),)

    def distribution(
        self, outputs: Outputs, steps: Tensor, ends: Tensor, settings: FrameSettings
    ) -> ParallelDistribution:
        logits = outputs[0]  # (B, M, K, V)
        codes = settings.sampling.distribution(logits.flatten(1, 2))
        split = type(codes)(codes.scores.view(logits.shape), codes.hard)
        return ParallelDistribution(split, self.forced_codes(steps, settings.max_frames))

    def forced_codes(self, steps: Tensor, most: int) -> Tensor:  # (B, M) -> (B, M, K)
        """Codes that the delay pattern fixes, else FREE.

        Book k is free at steps k to k + T - 1, of T = most + 1 - K frames.
        """
        book = torch.arange(self.books, device=steps.device)
        frame = steps[..., None] - book
        return torch.where((frame >= 0) & (frame < most + 1 - self.books), FREE, self.start)

    def stop(self, most: int) -> FrameStop:
        return FrameStop(most)

    def framing(self, most: int) -> DelayedFrames:
        return DelayedFrames(tuple(range(self.books)), most)

    def steps(self, frames: int) -> int:
        """New tokens of so many frames."""
        return frames + self.books - 1

    def remaining_tokens(self, length: int, inputs: Mapping[str, Any]) -> int:
        """New tokens if a configuration sets `length`, which excludes the start step."""
        return length

    def generate_audio(
        self, inputs: Mapping[str, Any], settings: FrameSettings, codec: Codec
    ) -> list[Tensor]:
        """Waveforms of the model's own `generate()`, per row (S,)."""
        options = {"guidance_scale": settings.guidance, "max_new_tokens": settings.max_frames}
        made = self.model.generate(**inputs, **options, **sampling_arguments(settings.sampling))
        return list(made[:, 0].float().cpu())

    def codec(self, processor: Any) -> Codec:
        return Codec.of(self.model.audio_encoder)

    def apply_processor(
        self, processor: Any, texts: Sequence[str], voice: str | None
    ) -> dict[str, Any]:
        """Inputs of the text encoder. Raises ValueError for a voice."""
        if voice is not None:
            raise ValueError(f"voice={voice!r}: MusicGen has no speakers; drop it")
        made = processor(text=list(texts), padding=True, return_tensors="pt")
        return {name: made[name] for name in ("input_ids", "attention_mask")}
