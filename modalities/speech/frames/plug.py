"""Models of several codebooks: `synthesize`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForTextToWaveform, AutoProcessor

from mmspec.declared import answered_by
from mmspec.decode import Parts
from mmspec.distributions.noise import KeyedNoise, fresh_seed
from mmspec.draft import Drafter
from mmspec.draft_models import BoundDraftModel, draft_model
from mmspec.drafters.shapes import shape_of
from mmspec.errors import check_number, described, refuse_fixed, unknown_message
from mmspec.modalities.speech.frames.asked import OWN, settings
from mmspec.modalities.speech.frames.csm import CsmReader
from mmspec.modalities.speech.frames.families import reader
from mmspec.modalities.speech.spoken import SpeakingLoop, Speech
from mmspec.modality import Call, Loop, Session
from mmspec.models.loading import load_causal, word_reader
from mmspec.recipe import Kit, Recipe, pair, resolve
from mmspec.targets.frames.frames import FrameRequest, FrameSettings, FrameTarget
from mmspec.targets.tokens.inputs import check_inputs
from mmspec.verifiers.joint_frames import JointFrames

INPUTS = CsmReader.inputs
ARGUMENTS = ("text", "voice", *INPUTS, *OWN, "seed", "row_ids")
processor = partial(word_reader, maker=AutoProcessor, kind="processor")  # of a folder


class FrameSession(Session):
    """A model of several codebooks bound to a recipe; `processor` reads its prompts in words."""

    calls = ("synthesize",)

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
        self.codec = target.codec()

    sees = answered_by("drafter.sees")

    def run(
        self, call: str, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop
    ) -> Speech:
        """Speak or play one text, or a list of them.

        Takes the text by place or as `text=` (and `voice=`, a speaker of the model), or the tensors
        of the model's processor; `max_new_tokens` frames as its `generate()` counts them, or
        `seconds`; `guidance`, `temperature`, `top_k`, `top_p`, `do_sample`, `seed`, `row_ids`. What
        is not said is as in the model's generation configuration.
        """
        if len(args) > 1 or (args and "text" in arguments):
            raise ValueError("synthesize() takes the text by place, once, and the rest by name")
        given = {**({"text": args[0]} if args else {}), **arguments}
        unknown = sorted(set(given) - set(ARGUMENTS))
        if unknown:
            raise ValueError(unknown_message(unknown, ARGUMENTS, "synthesize()"))
        inputs, how = self.asked(given)
        batch, seed = len(inputs["input_ids"]), given.get("seed")
        seed = fresh_seed() if seed is None else seed
        noise = KeyedNoise.seeded(seed, batch, self.model.device, given.get("row_ids"))
        verifier: Any = self.recipe.verifier
        target = FrameTarget(self.reader)
        parts = Parts(target, self.drafter, verifier, self.reader.stop(how.most))
        speaking = SpeakingLoop(loop, self.codec, self.reader.framing(how.most))
        for _ in speaking(Call(parts, FrameRequest(inputs, how, noise), self.recipe)):
            pass
        return speaking.speech()

    def asked(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], FrameSettings]:
        """Tensors of the prompts, and how frames are drawn behind them."""
        inputs = self._inputs(given)
        return inputs, settings(self.reader, self.codec, {**given, **inputs})

    def save(self, folder: Path) -> None:
        if self.draft_model is not None:
            self.draft_model.save(folder, self.reader, self.drafter)

    def _inputs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors of the prompts. Raises ValueError for an empty text, and for no prompt."""
        text, ids = given.get("text"), given.get("input_ids")
        if (text is None) == (ids is None):
            raise ValueError("give synthesize() a text, or the tensors of the model's processor")
        if text is None:
            if given.get("voice") is not None:
                raise ValueError("voice= goes with a text; input_ids hold their speaker already")
            if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or not ids.shape[1]:
                raise ValueError(f"input_ids={described(ids)} are no prompts (B, L) with tokens")
            heard = [name for name in INPUTS if name not in self.reader.inputs]
            why = f"a {type(self.model).__name__} goes on from no sound here; use model.generate()"
            refuse_fixed(given, heard, "synthesize()", why)
            kept = {name: given[name] for name in INPUTS if given.get(name) is not None}
            check_inputs(kept)
            return kept
        why = "a text is read by itself; give all the tensors that the processor makes, or the text"
        refuse_fixed(given, INPUTS, "synthesize()", why)
        texts = [text] if isinstance(text, str) else text
        if not isinstance(texts, list | tuple) or not texts:
            raise ValueError(f"text={described(text)} is neither a text nor a list of texts")
        for one in texts:
            if not isinstance(one, str) or not one.strip():
                raise ValueError(f"text={one!r} has no words to speak; give some")
        if self.processor is None:
            self.processor = processor(self.name)
        made = self.reader.prepared(self.processor, texts, given.get("voice"))
        return {name: torch.as_tensor(one).to(self.model.device) for name, one in made.items()}


def session(model: Any, recipe: Recipe, drafter: Any, parts: Mapping[str, Any]) -> FrameSession:
    """A model bound to a recipe. Raises ValueError for parts that do not fit."""
    target = reader(model)
    own = drafter if isinstance(drafter, Drafter) else None
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
            "depend on each other; use recipe 'frame-depth' or 'frame-coupled'"
        )
    paired = pair(own or recipe.architecture(kit), verifier, target)
    return FrameSession(target, recipe, paired, small, parts.get("processor"))


def load(source: str | Path, **options: Any) -> Any:
    """A model from a folder or a hub name."""
    return load_causal(str(source), maker=AutoModelForTextToWaveform, **options)
