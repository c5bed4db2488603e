"""MusicGen: a decoder of K codebooks in a delay pattern, behind a text encoder, often guided."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from mmspec import _hf
from mmspec.distributions.sampling import guide
from mmspec.modalities.speech.codecs import Codec
from mmspec.modalities.speech.frames.asked import drawn
from mmspec.targets.cache import SlotCache
from mmspec.targets.frames.frame_distributions import FREE, ParallelDistribution
from mmspec.targets.frames.frames import FrameMemory, FrameSettings, FrameStop, Outputs

# (model, inputs, guidance) -> states, mask
Encode = Callable[[Any, Mapping[str, Any], float], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True, eq=False)
class MusicgenReader:
    """Book k of frame t is said at step t + k; what has no frame is forced, see `forced`.

    `encode` gives states (B, L, D) of texts, doubled if guided, and a mask where the decoder
    attends to them; none where they stand before the frames (MusicGen Melody). Raises ValueError
    for stereo, whose books are interleaved.
    """

    model: Any
    encode: Encode = _hf.encode_guided_text
    is_parallel = True
    inputs = ("input_ids", "attention_mask")

    def __post_init__(self) -> None:
        channels = self.model.decoder.config.audio_channels
        if channels != 1:
            raise ValueError(
                f"{type(self.model).__name__} speaks {channels} channels, whose books are "
                "interleaved; only one channel is read here: use model.generate()"
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
    def least(self) -> int:
        """New tokens of one frame."""
        return 2 * self.books - 2

    @property
    def start(self) -> int:
        """What stands where no code is."""
        found = self.model.generation_config.decoder_start_token_id
        return int(self.config.vocab_size if found is None else found)

    def like(self, model: Any) -> MusicgenReader:
        kind = self.model.config.model_type
        if model.config.model_type != kind:
            raise ValueError(
                f"{type(model).__name__} cannot draft for MusicGen ({kind}); give a smaller one of "
                "its own class"
            )
        return MusicgenReader(model, self.encode)

    def begin(
        self, inputs: Mapping[str, Any], settings: FrameSettings
    ) -> tuple[list[FrameMemory], list[Outputs]]:
        """Encode the texts, once, and read the step that stands before all frames."""
        guided = settings.guidance > 1
        states, mask = self.encode(self.model, inputs, settings.guidance)
        batch = len(states) // (1 + guided)
        memories, outputs = [], []
        first = torch.full((1, self.books), self.start, device=states.device)
        for row in range(batch):
            rows = [row, batch + row] if guided else [row]
            cache = SlotCache(self.config)
            told: dict[str, Any] = {"encoder_hidden_states": states[rows]}
            carried: dict[str, Any] = {"scale": settings.guidance, "branches": len(rows)}
            length, beside = states.shape[1], cast(Any, cache)
            if mask is not None:  # the decoder attends to the text at every step
                whole = BaseModelOutput(last_hidden_state=states[rows])
                carried |= {"encoder_outputs": whole, "attention_mask": mask[rows]}
                told, length = {}, 0
                beside = EncoderDecoderCache(cache, DynamicCache(config=self.config))
            memory = FrameMemory(cache, 0, 0, {**carried, **told}, beside)
            memory.plan(length + 1)
            outputs.append(self.read(memory, first))
            memory.prompt, memory.carried = length + 1, carried
            memories.append(memory)
        return memories, outputs

    def read(self, memory: FrameMemory, frames: Tensor) -> Outputs:  # (n, K) -> logits (n, K, V)
        """One pass; under guidance of both branches, side by side."""
        carried = dict(memory.carried)
        scale, branches = carried.pop("scale"), carried.pop("branches")
        logits = self.model(
            decoder_input_ids=frames.T.repeat(branches, 1),
            past_key_values=memory.beside,
            use_cache=True,
            return_dict=True,
            **carried,
        ).logits[:, -len(frames) :]
        each = logits.reshape(branches, self.books, *logits.shape[1:]).transpose(1, 2)
        return (guide(each[0], each[1] if branches > 1 else None, scale),)

    def distribution(
        self, outputs: Outputs, steps: Tensor, settings: FrameSettings
    ) -> ParallelDistribution:
        logits = outputs[0]  # (B, M, K, V)
        codes = settings.sampling.distribution(logits.flatten(1, 2))
        split = type(codes)(codes.scores.view(logits.shape), codes.hard)
        return ParallelDistribution(split, self.forced(steps, settings.most))

    def forced(self, steps: Tensor, most: int) -> Tensor:  # (B, M) -> (B, M, K)
        """Book k has codes at steps k to k + T - 1, of T = most + 1 - K frames."""
        book = torch.arange(self.books, device=steps.device)
        frame = steps[..., None] - book
        return torch.where((frame >= 0) & (frame < most + 1 - self.books), FREE, self.start)

    def stop(self, most: int) -> FrameStop:
        return FrameStop(most)

    def framing(self, most: int) -> DelayedFrames:
        return DelayedFrames(self.books, most)

    def steps(self, frames: int) -> int:
        """New tokens that so many frames take."""
        return frames + self.books - 1

    def left(self, length: int, ids: Tensor) -> int:
        """New tokens where a configuration limits them: its `generate()` counts no start."""
        return length

    def own_sound(self, inputs: Mapping[str, Any], settings: FrameSettings) -> list[Tensor]:
        """What the model's own `generate()` gives, per row (S,)."""
        how = {"guidance_scale": settings.guidance, "max_new_tokens": settings.most}
        made = self.model.generate(**inputs, **how, **drawn(settings.sampling))
        return list(made[:, 0].float().cpu())

    def codec(self) -> Codec:
        return Codec.of(self.model.audio_encoder)

    def prepared(self, processor: Any, texts: Sequence[str], voice: str | None) -> dict[str, Any]:
        """Texts as the text encoder reads them. Raises ValueError for a voice."""
        if voice is not None:
            raise ValueError(f"voice={voice!r}: MusicGen has no speakers; leave it out")
        made = processor(text=list(texts), padding=True, return_tensors="pt")
        return {name: made[name] for name in ("input_ids", "attention_mask")}


@dataclass(frozen=True)
class DelayedFrames:
    """Frames out of steps in which book k comes k steps late."""

    books: int
    most: int

    @property
    def latest(self) -> int:
        return self.books - 1

    def codes(self, tokens: Sequence[Tensor]) -> Tensor:  # (K, T)
        count = self.whole(tokens)
        if not count:
            return torch.zeros(self.books, 0, dtype=torch.int64)
        steps = torch.stack(list(tokens))
        return torch.stack([steps[book : book + count, book] for book in range(self.books)])

    def whole(self, tokens: Sequence[Tensor]) -> int:
        return max(min(len(tokens), self.most) - self.latest, 0)

    def is_over(self, tokens: Sequence[Tensor]) -> bool:
        return len(tokens) >= self.most
