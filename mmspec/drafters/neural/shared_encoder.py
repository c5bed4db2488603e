"""A small decoder on the output of the target's encoder, which runs once.

Distil-Whisper (Gandhi et al. 2023) keeps its teacher's encoder, so that a draft model of two
decoder layers needs no encoder of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from mmspec import _hf
from mmspec.draft import Drafter
from mmspec.drafters.neural.draft_inputs import DraftInputs
from mmspec.drafters.neural.small_model import (
    SMALL_MODEL,
    SmallModel,
    build_autoregressive,
    small_model,
)
from mmspec.models.folder import read_json
from mmspec.models.loading import load_causal
from mmspec.recipe import DraftModelKind, Kit
from mmspec.targets.readers.encoder_decoder import EncoderDecoder
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.context import Context

SOURCE = "source"  # feature of the target
ENCODER = "encoder"  # value of `sees`


@dataclass(frozen=True)
class SharedEncoder(DraftInputs):
    """The decoder's prompt, and the encoder states of the target."""

    name: str = ENCODER
    required_features: ClassVar[frozenset[str]] = frozenset({SOURCE})

    def build(self, context: Context, backbone: Reader) -> Mapping[str, Any]:
        given = context.request.inputs
        kept_inputs = {name: given.get(name) for name in ("input_ids", "source_mask")}
        return {**kept_inputs, "encoder_outputs": context.shared[SOURCE]}


@dataclass(frozen=True)
class SharedEncoderKind(DraftModelKind):
    """Decoders without an encoder, models with the target's own, and any other draft model.

    One that does not share the encoder is handled by `SMALL_MODEL`.
    """

    @property
    def description(self) -> str:
        return SMALL_MODEL.description

    def accepts(self, model: Any) -> bool:
        return SMALL_MODEL.accepts(model)

    def owns(self, folder: Path) -> bool:
        return SMALL_MODEL.owns(folder)

    def load(self, source: str | Path, target: Reader, dtype: torch.dtype | None = None) -> Any:
        """Load a decoder saved alone as one, other models as `SMALL_MODEL` does."""
        if (Path(source) / "config.json").is_file():
            named = read_json(Path(source) / "config.json").get("architectures") or ("",)
            if isinstance(target, EncoderDecoder) and named[0].endswith("ForCausalLM"):
                return load_causal(source, dtype or "auto")
        return SMALL_MODEL.load(source, target, dtype)

    def default_sees(self, model: Any, target: Reader, requested: str) -> str:
        if requested in ("auto", ENCODER) and shares_encoder(model, target):
            return ENCODER
        return SMALL_MODEL.default_sees(
            model, target, "auto" if requested == ENCODER else requested
        )

    def read(self, model: Any, target: Reader, sees: str) -> Reader:
        """Raises ValueError for a decoder of states of another width or type."""
        if sees != ENCODER:
            return SMALL_MODEL.read(model, target, sees)
        own_size, draft_size = (
            _hf.unwrap_compiled(one).config.hidden_size for one in (target.model, model)
        )
        if own_size != draft_size:
            raise ValueError(
                f"the target's encoder gives states {own_size} wide, but the draft model's decoder "
                f"reads {draft_size}; give a draft model with an encoder of its own"
            )
        kinds = [_hf.unwrap_compiled(one).dtype for one in (target.model, model)]
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"the target's encoder gives states in {kinds[0]}, but the draft model is in "
                f"{kinds[1]}; load both alike, or call .to({kinds[0]}) on it"
            )
        return SMALL_MODEL.read(attach_encoder(model, target), target, "auto")

    def random(self, target: Reader, seed: int) -> Any:
        """With the target's encoder, if it has one."""
        model = SMALL_MODEL.random(target, seed)
        if isinstance(target, EncoderDecoder):
            own = _hf.unwrap_compiled(target.model).get_encoder()
            model.get_encoder().load_state_dict(own.state_dict())
        return model

    def save(self, model: Any, folder: Path, target: Any, drafter: Any) -> None:
        SMALL_MODEL.save(model, folder, target, drafter)


SHARED_ENCODER = SharedEncoderKind()


def shares_encoder(model: Any, target: Reader) -> bool:
    """Whether a draft model has no encoder, or one with the same weights as the target's."""
    if not isinstance(target, EncoderDecoder):
        return False
    inner, own = _hf.unwrap_compiled(model), _hf.unwrap_compiled(target.model)
    if not isinstance(inner, PreTrainedModel) or type(inner.config) is not type(own.config):
        return False
    if not inner.config.is_encoder_decoder:
        return True
    own_size, draft_size = (one.get_encoder().state_dict() for one in (own, inner))
    return own_size.keys() == draft_size.keys() and all(
        value.shape == draft_size[name].shape and torch.equal(value, draft_size[name].to(value))
        for name, value in own_size.items()
    )


def attach_encoder(model: Any, target: Reader) -> Any:
    """The draft model's decoder with the target's encoder, sharing their weights."""
    inner, own = _hf.unwrap_compiled(model), _hf.unwrap_compiled(target.model)
    config = copy.deepcopy(inner.config)
    config.is_encoder_decoder = True
    with torch.device("meta"):
        model = type(own)(config)
    model.set_encoder(own.get_encoder())
    model.set_decoder(inner.get_decoder())
    model.set_output_embeddings(inner.get_output_embeddings())
    return model.eval()


def shared_encoder(kit: Kit) -> Drafter:
    """A small decoder on the target's encoder; an independent draft model where it has its own.

    One that reads audio drafts the first token too, so that prompt and draft are one forward.
    """
    if kit.sees != ENCODER:
        return small_model(kit)
    assert isinstance(kit.drafter, Reader)
    model = build_autoregressive(kit, SmallModel(kit.drafter, SharedEncoder()))
    return replace(model, drafts_first_token=kit.target.can_branch)


def ending(kit: Kit) -> Drafter:
    """The same, drafting nothing after a token that ends the text."""
    model = _hf.unwrap_compiled(kit.target.model)  # image models have no end token
    ends = _hf.eos_ids(model.generation_config) if model.can_generate() else frozenset()
    shape = replace(kit.shape, ends=ends) if "ends" in vars(kit.shape) else kit.shape
    return shared_encoder(replace(kit, shape=shape))
