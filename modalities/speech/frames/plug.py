"""Audio models of several codebooks bound to a recipe: `synthesize`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForSpeechSeq2Seq, AutoModelForTextToWaveform, AutoProcessor

from mmspec import _hf
from mmspec._attributes import delegate_to
from mmspec.decode import Parts
from mmspec.distributions.noise import KeyedNoise, fresh_seed
from mmspec.draft import Drafter
from mmspec.draft_models import BoundDraftModel, check_no_shape, draft_model
from mmspec.drafters.shapes import shape_of
from mmspec.errors import check_number, format_value, refuse_fixed, unknown_message
from mmspec.modalities.speech.accelerated import AcceleratedFrameModel
from mmspec.modalities.speech.codecs import Codec
from mmspec.modalities.speech.frames.csm import CsmReader
from mmspec.modalities.speech.frames.dia import DiaReader
from mmspec.modalities.speech.frames.musicgen import MusicgenReader
from mmspec.modalities.speech.frames.settings import OWN, parse_frame_settings
from mmspec.modalities.speech.speech_loop import Speech, SpeechLoop
from mmspec.modality import Call, Loop, Session
from mmspec.models.loading import load_causal, load_text_processor, model_type
from mmspec.recipe import Kit, Recipe, pair, resolve
from mmspec.targets.frames.frames import FrameRequest, FrameSettings, FrameTarget
from mmspec.targets.tokens.context import check_inputs
from mmspec.verifiers.joint_frames import JointFrames

MELODY_INPUTS = (*MusicgenReader.inputs, "input_features")  # chroma (B, T, bins)
INPUTS = tuple(dict.fromkeys((*CsmReader.inputs, *DiaReader.inputs, *MELODY_INPUTS)))
FRAMES = "decoder_input_ids"  # (B, S, K), which the reader checks
ARGUMENTS = ("text", "voice", *INPUTS, *OWN, "seed", "row_ids")
processor = partial(load_text_processor, maker=AutoProcessor, kind="processor")  # of a folder


_READERS: Mapping[str, Any] = {
    "musicgen": MusicgenReader,
    "musicgen_melody": lambda model: MusicgenReader(model, _hf.encode_melody, MELODY_INPUTS),
    "csm": CsmReader,
    "dia": DiaReader,
}


class FrameSession(Session):
    """A model of several codebooks bound to a recipe; `processor` encodes its text prompts."""

    interface = AcceleratedFrameModel

    def __init__(
        self,
        target: Any,
        recipe: Recipe,
        drafter: Drafter,
        small: BoundDraftModel | None,
        processor: Any,
    ) -> None:
        self.reader, self.model, self.recipe = target, target.model, recipe
        self.drafter, self.draft_model, self.processor = drafter, small, processor
        self._codec: Codec | None = None
        if target.has_codec or processor is not None:
            self._codec = target.codec(processor)
        elif self.name is None:
            raise ValueError(
                f"the codec of {type(self.model).__name__} is part of its processor, whose folder "
                "is unknown; give it once, as accelerate(model, processor=...)"
            )

    sees = delegate_to("drafter.sees")

    @property
    def codec(self) -> Codec:
        """The codec; one of the processor's is loaded with it, from the model's folder."""
        if self._codec is None:
            self._codec = self.reader.codec(self._load_processor())
        return self._codec

    def run(
        self, call: str, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop
    ) -> Speech:
        """Synthesize one text, or a list of them; arguments as of `AcceleratedFrameModel`."""
        if len(args) > 1 or (args and "text" in arguments):
            raise ValueError("synthesize() takes one positional argument; give the rest by name")
        given = {**({"text": args[0]} if args else {}), **arguments}
        unknown = sorted(set(given) - set(ARGUMENTS))
        if unknown:
            raise ValueError(unknown_message(unknown, ARGUMENTS, "synthesize()"))
        start = perf_counter()
        inputs, settings = self.prepare_arguments(given)
        batch, seed = len(inputs["input_ids"]), given.get("seed")
        seed = fresh_seed(moves=settings.sampling.do_sample) if seed is None else seed
        noise = KeyedNoise.from_seed(seed, batch, self.model.device, given.get("row_ids"))
        verifier: Any = self.recipe.verifier
        target = FrameTarget(self.reader)
        parts = Parts(target, self.drafter, verifier, self.reader.stop(settings.max_frames))
        framing = self.reader.framing(settings.max_frames)
        speech_loop = SpeechLoop(loop, self.codec, framing, start)
        for _ in speech_loop(Call(parts, FrameRequest(inputs, settings, noise), self.recipe)):
            pass
        return speech_loop.speech()

    def prepare_arguments(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], FrameSettings]:
        """Tensors of the prompts, and the settings of sampling."""
        inputs = self._inputs(given)
        return inputs, parse_frame_settings(self.reader, self.codec, {**given, **inputs})

    def save(self, folder: Path) -> None:
        if self.draft_model is not None:
            self.draft_model.save(folder, self.reader, self.drafter)

    def _inputs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors of the prompts. Raises ValueError for an empty text or no prompt."""
        text, ids = given.get("text"), given.get("input_ids")
        if (text is None) == (ids is None):
            raise ValueError("give synthesize() a text, or the tensors of the model's processor")
        if text is None:
            if given.get("voice") is not None:
                raise ValueError("voice= needs a text; input_ids already contain the speaker")
            if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or not ids.shape[1]:
                raise ValueError(
                    f"input_ids={format_value(ids)} are not prompts (B, L) with tokens"
                )
            unsupported = [name for name in INPUTS if name not in self.reader.inputs]
            why = f"a {type(self.model).__name__} takes no audio prompt here; use model.generate()"
            refuse_fixed(given, unsupported, "synthesize()", why)
            tensors = {name: given[name] for name in INPUTS if given.get(name) is not None}
            tokens = {name: one for name, one in tensors.items() if name != FRAMES}
            check_inputs(tokens)
            for name, one in tensors.items():
                if not isinstance(one, torch.Tensor):
                    raise ValueError(f"{name}={format_value(one)} must be a tensor; give one")
            return tensors
        why = "give either a text, or all the tensors that the processor returns"
        refuse_fixed(given, INPUTS, "synthesize()", why)
        texts = [text] if isinstance(text, str) else text
        if not isinstance(texts, list | tuple) or not texts:
            raise ValueError(
                f"text={format_value(text)} is neither a text nor a list of texts; give one"
            )
        for one in texts:
            if not isinstance(one, str) or not one.strip():
                raise ValueError(f"text={one!r} has no words to synthesize; give a sentence")
        made = self.reader.apply_processor(self._load_processor(), texts, given.get("voice"))
        return {name: torch.as_tensor(one).to(self.model.device) for name, one in made.items()}

    def _load_processor(self) -> Any:
        """The processor, from the model's folder if none was given."""
        if self.processor is None:
            self.processor = processor(self.name)
        return self.processor


def make_reader(model: Any) -> Any:
    """The reader of a model. Raises ValueError for families that are not supported."""
    kind = model.config.model_type
    if kind not in _READERS:
        raise ValueError(
            f"{type(model).__name__} ({kind}) is not supported: its codebook layout is not known; "
            f"use model.generate(), or a model of {', '.join(_READERS)}"
        )
    return _READERS[kind](model)


def session(model: Any, recipe: Recipe, drafter: Any, parts: Mapping[str, Any]) -> FrameSession:
    """A model bound to a recipe. Raises ValueError for parts that do not fit."""
    target = make_reader(model)
    own = drafter if isinstance(drafter, Drafter) else None
    if own is not None:
        check_no_shape(own, parts)
    small = None if own is not None else draft_model(recipe, drafter, target)
    length = parts.get("length")
    if length is not None:
        check_number("length", length, 1, whole=True, example=3)
    recipe = replace(recipe, execution=shape_of(recipe.execution, None, length))
    read = None if small is None else small.reader
    kit = Kit(target, read, recipe.execution, recipe.sees, None, recipe.options)
    recipe = replace(recipe, verifier=resolve(recipe.verifier, kit))
    verifier: Any = recipe.verifier
    if isinstance(verifier, JointFrames) and not target.is_parallel:
        raise ValueError(
            f"JointFrames tests codes that are independent, and those of {type(model).__name__} "
            "depend on one another; use recipe 'frame-depth' or 'frame-coupled'"
        )
    paired = pair(own or recipe.architecture(kit), verifier, target)
    return FrameSession(target, recipe, paired, small, parts.get("processor"))


def load(source: str | Path, **options: Any) -> Any:
    """A model from a folder or a hub name."""
    return load_causal(str(source), maker=auto_class(model_type(source)), **options)


def auto_class(kind: str | None) -> Any:
    """The Auto class of a model type; that of Dia is the one of speech recognition."""
    return AutoModelForSpeechSeq2Seq if kind == "dia" else AutoModelForTextToWaveform
