"""A small decoder that listens to what the target's encoder made of the source: one encoder, once.

Distil-Whisper (Gandhi et al. 2023) keeps the encoder of its teacher, so that a draft model of two
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
from mmspec.drafters.neural.sight import Sight
from mmspec.drafters.neural.small_model import SMALL_MODEL, SmallModel, grown, small_model
from mmspec.models.folder import configuration
from mmspec.models.loading import load_causal
from mmspec.recipe import DraftModelKind, Kit
from mmspec.targets.readers.encoder_decoder import EncoderDecoder
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.context import Context

SOURCE = "source"  # what is wanted of the target
ENCODER = "encoder"  # what such a draft model sees


@dataclass(frozen=True)
class SharedEncoder(Sight):
    """The decoder's prompt, and the encoder states of the target."""

    name: str = ENCODER
    wants: ClassVar[frozenset[str]] = frozenset({SOURCE})

    def inputs(self, context: Context, backbone: Reader) -> Mapping[str, Any]:
        given = context.request.inputs
        kept = {name: given.get(name) for name in ("input_ids", "source_mask")}
        return {**kept, "encoder_outputs": context.shared[SOURCE]}


@dataclass(frozen=True)
class SharedEncoderKind(DraftModelKind):
    """Decoders without an encoder, models with the target's own, and any other draft model.

    One that shares no encoder is read as by `SMALL_MODEL`, and sees what it sees there.
    """

    @property
    def words(self) -> str:
        return SMALL_MODEL.words

    def accepts(self, model: Any) -> bool:
        return SMALL_MODEL.accepts(model)

    def owns(self, folder: Path) -> bool:
        return SMALL_MODEL.owns(folder)

    def load(self, source: str | Path, target: Reader, dtype: torch.dtype | None = None) -> Any:
        """A decoder saved alone is loaded as one."""
        if (Path(source) / "config.json").is_file():
            named = configuration(Path(source) / "config.json").get("architectures") or ("",)
            if isinstance(target, EncoderDecoder) and named[0].endswith("ForCausalLM"):
                return load_causal(source, dtype or "auto")
        return SMALL_MODEL.load(source, target, dtype)

    def default_sees(self, model: Any, target: Reader, asked: str) -> str:
        if asked in ("auto", ENCODER) and shares(model, target):
            return ENCODER
        return SMALL_MODEL.default_sees(model, target, "auto" if asked == ENCODER else asked)

    def read(self, model: Any, target: Reader, sees: str) -> Reader:
        """Raises ValueError for a decoder of states of another width or type."""
        if sees != ENCODER:
            return SMALL_MODEL.read(model, target, sees)
        ours, theirs = (_hf.uncompiled(one).config.hidden_size for one in (target.model, model))
        if ours != theirs:
            raise ValueError(
                f"the target's encoder gives states {ours} wide, but the draft model's decoder "
                f"reads {theirs}; give a draft model with an encoder of its own"
            )
        kinds = [_hf.uncompiled(one).dtype for one in (target.model, model)]
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"the target's encoder gives states in {kinds[0]}, but the draft model is in "
                f"{kinds[1]}; load both alike, or call .to({kinds[0]}) on it"
            )
        return SMALL_MODEL.read(whole(model, target), target, "auto")

    def random(self, target: Reader, seed: int) -> Any:
        """With the target's encoder, where it has one."""
        made = SMALL_MODEL.random(target, seed)
        if isinstance(target, EncoderDecoder):
            own = _hf.uncompiled(target.model).get_encoder()
            made.get_encoder().load_state_dict(own.state_dict())
        return made

    def save(self, model: Any, folder: Path, target: Any, drafter: Any) -> None:
        SMALL_MODEL.save(model, folder, target, drafter)


SHARED_ENCODER = SharedEncoderKind()


def shares(model: Any, target: Reader) -> bool:
    """Whether a draft model has no encoder, or one with the very weights of the target's."""
    if not isinstance(target, EncoderDecoder):
        return False
    inner, own = _hf.uncompiled(model), _hf.uncompiled(target.model)
    if not isinstance(inner, PreTrainedModel) or type(inner.config) is not type(own.config):
        return False
    if not inner.config.is_encoder_decoder:
        return True
    ours, theirs = (one.get_encoder().state_dict() for one in (own, inner))
    return ours.keys() == theirs.keys() and all(
        value.shape == theirs[name].shape and torch.equal(value, theirs[name].to(value))
        for name, value in ours.items()
    )


def whole(model: Any, target: Reader) -> Any:
    """The draft model's decoder on the target's encoder; the weights are theirs."""
    inner, own = _hf.uncompiled(model), _hf.uncompiled(target.model)
    config = copy.deepcopy(inner.config)
    config.is_encoder_decoder = True
    with torch.device("meta"):
        made = type(own)(config)
    made.set_encoder(own.get_encoder())
    made.set_decoder(inner.get_decoder())
    made.set_output_embeddings(inner.get_output_embeddings())
    return made.eval()


def shared_encoder(kit: Kit) -> Drafter:
    """A small decoder on the target's encoder; a draft model of its own where that is none.

    What hears by itself drafts the first token, too, so that prompt and draft are one forward.
    """
    if kit.sees != ENCODER:
        return small_model(kit)
    assert isinstance(kit.drafter, Reader)
    made = grown(kit, SmallModel(kit.drafter, SharedEncoder()))
    return replace(made, opens=kit.target.can_branch)


def ending(kit: Kit) -> Drafter:
    """The same, drafting nothing behind a token that ends the text."""
    model = _hf.uncompiled(kit.target.model)  # one that draws pictures ends no text
    ends = _hf.eos_ids(model.generation_config) if model.can_generate() else frozenset()
    shape = replace(kit.shape, ends=ends) if "ends" in vars(kit.shape) else kit.shape
    return shared_encoder(replace(kit, shape=shape))
