"""CSM: a backbone predicts the first code of a frame, a small depth decoder the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from mmspec import _hf, _hf_cache
from mmspec.distributions.categorical import Categorical
from mmspec.distributions.sampling import Sampling
from mmspec.modalities.common.chat_template import apply_chat_template
from mmspec.modalities.speech.codecs import Codec
from mmspec.modalities.speech.frames.settings import sampling_arguments
from mmspec.targets.cache import SlotCache
from mmspec.targets.frames.frame_distributions import DepthDistribution
from mmspec.targets.frames.frames import NO_END, FrameMemory, FrameSettings, FrameStop, Outputs


@dataclass(frozen=True, eq=False)
class CsmReader:
    """Reader of CSM. One token is one frame; a frame of EOS in all books but the last ends it."""

    model: Any
    is_parallel = False
    has_codec = True  # is part of the model
    end = NO_END
    min_temperature = 0.0
    inputs = ("input_ids", "attention_mask", "input_values", "input_values_cutoffs")

    @property
    def books(self) -> int:
        return int(self.model.config.num_codebooks)

    @property
    def size(self) -> int:
        return int(self.model.config.vocab_size)

    @property
    def min_tokens(self) -> int:
        """New tokens of one frame."""
        return 1

    def like(self, model: Any) -> CsmReader:
        if model.config.model_type != "csm":
            raise ValueError(f"{type(model).__name__} cannot draft for CSM; give a smaller one")
        return CsmReader(model)

    def begin(
        self, inputs: Mapping[str, Any], settings: FrameSettings
    ) -> tuple[list[FrameMemory], list[Outputs]]:
        """Prefill the prompts, audio of earlier turns included, without their padding."""
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        mask = _hf.infer_mask(self.model, ids) if mask is None else mask
        mask = torch.ones_like(ids) if mask is None else mask
        memories, outputs = [], []
        for row in range(len(ids)):
            own = ids[row][mask[row].bool()][None]
            cache = SlotCache(self.model.config, own.shape[1] + 64)
            cache.plan_uniform(0, own.shape[1])
            audio = {
                name: inputs[name][row : row + 1]
                for name in ("input_values", "input_values_cutoffs")
                if inputs.get(name) is not None
            }
            outputs.append(self._read(cache, own, 1, **audio))
            memories.append(FrameMemory(cache, own.shape[1]))
        return memories, outputs

    def read(self, memory: FrameMemory, frames: Tensor) -> Outputs:
        """Logits (n, V) of first codes, and states (n, H) for the depth decoder."""
        return self._read(memory.cache, frames[None], len(frames))

    def _read(self, cache: SlotCache, ids: Tensor, count: int, **audio: Any) -> Outputs:
        out = self.model(
            input_ids=ids,
            use_cache=True,
            output_hidden_states=True,
            logits_to_keep=count,
            return_dict=True,
            **{_hf_cache.CACHE_NAME: cache, **audio},
        )
        return out.logits[0], out.hidden_states[-1][0, -count:]

    def distribution(
        self, outputs: Outputs, steps: Tensor, ends: Tensor, settings: FrameSettings
    ) -> DepthDistribution:
        decoder = CsmDepth(self.model.depth_decoder, settings.depth)
        return DepthDistribution(
            settings.sampling.distribution(outputs[0]), outputs[1], decoder, self.books
        )

    def stop(self, most: int) -> FrameStop:
        eos = int(self.model.config.codebook_eos_token_id)
        return FrameStop(most, eos, tuple(range(self.books - 1)))

    def framing(self, most: int) -> WholeFrames:
        return WholeFrames(self.books, self.stop(most))

    def steps(self, frames: int) -> int:
        """New tokens of so many frames."""
        return frames

    def remaining_tokens(self, length: int, inputs: Mapping[str, Any]) -> int:
        """New tokens if `length` includes the prompt."""
        return length - int(inputs["input_ids"].shape[1])

    def generate_audio(
        self, inputs: Mapping[str, Any], settings: FrameSettings, codec: Codec
    ) -> list[Tensor]:
        """Waveforms of the model's own `generate()`, per row (S,), up to the end frame."""
        own = copy(self.model)  # `generate()` changes the settings of its depth decoder
        own.depth_decoder = copy(own.depth_decoder)
        own.depth_decoder.generation_config = deepcopy(own.depth_decoder.generation_config)
        depth = sampling_arguments(settings.depth).items()
        options = {
            "max_new_tokens": settings.max_frames,
            **sampling_arguments(settings.sampling),
            **{f"depth_decoder_{name}": one for name, one in depth},
        }
        rows, framing = own.generate(**inputs, **options), self.framing(settings.max_frames)
        return [codec.decode(framing.cut_at_end(row)) for row in rows]

    def codec(self, processor: Any) -> Codec:
        return Codec.of(self.model.codec_model)

    def apply_processor(
        self, processor: Any, texts: Sequence[str], voice: str | None
    ) -> dict[str, Any]:
        """Texts as turns of a speaker, by default "0"."""
        role = "0" if voice is None else voice
        turns = [[{"role": role, "content": [{"type": "text", "text": text}]}] for text in texts]
        options = {"tokenize": True, "return_dict": True, "padding": True, "return_tensors": "pt"}
        made = apply_chat_template(processor, turns, **options)
        return {name: made[name] for name in ("input_ids", "attention_mask")}


@dataclass(frozen=True)
class CsmDepth:
    """The depth decoder; its position 0 holds the state of the backbone."""

    model: Any
    sampling: Sampling

    def distributions(
        self, states: Tensor, codes: Tensor
    ) -> Categorical:  # (R, H), (R, n) -> (R, n)
        ids = torch.nn.functional.pad(codes, (1, 0))
        return self.sampling.distribution(self.model(ids, backbone_last_hidden_state=states).logits)

    def begin(self, states: Tensor) -> dict[str, Any]:
        return {"cache": DynamicCache(config=self.model.config), "states": states}

    def step(self, memory: dict[str, Any], code: Tensor) -> Categorical:  # (R,) -> (R,)
        ids, states = code[:, None], memory.pop("states", None)
        if states is not None:
            ids = torch.nn.functional.pad(ids, (1, 0))
        out = self.model(
            ids,
            backbone_last_hidden_state=states,
            use_cache=True,
            logits_to_keep=1,
            **{_hf_cache.CACHE_NAME: memory["cache"]},
        )
        return self.sampling.distribution(out.logits)[:, 0]


@dataclass(frozen=True)
class WholeFrames:
    """Frames of one token each; the end frame is not decoded."""

    books: int
    stop: FrameStop
    latest = 0

    def codes(self, tokens: Sequence[Tensor]) -> Tensor:  # (K, T)
        count = self.count_frames(tokens)
        if not count:
            return torch.zeros(self.books, 0, dtype=torch.int64)
        return torch.stack(list(tokens[:count]), -1)

    def cut_at_end(self, frames: Tensor) -> Tensor:  # (T, K) -> (K, T')
        """The frames of a padded row before its end frame."""
        ended = frames[:, list(self.stop.books)].eq(self.stop.eos or 0).all(-1).int()
        return frames[: int(ended.argmax()) if bool(ended.any()) else len(frames)].T

    def count_frames(self, tokens: Sequence[Tensor]) -> int:
        return len(tokens) - self._has_ended(tokens)

    def is_over(self, tokens: Sequence[Tensor]) -> bool:
        return len(tokens) >= self.stop.max_frames or self._has_ended(tokens)

    def _has_ended(self, tokens: Sequence[Tensor]) -> bool:
        return bool(tokens) and bool(tokens[-1][list(self.stop.books)].eq(self.stop.eos or 0).all())
