"""Models that draw with picture tokens: `generate_images`, and `generate` where they write too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmspec import zoo
from mmspec.modalities.common import tokens
from mmspec.modalities.common.text import HOOK, Text, placed
from mmspec.modalities.image import drawing, guided_text
from mmspec.modalities.image.families import maker, reader
from mmspec.modality import Loop
from mmspec.models.loading import load_causal, model_type
from mmspec.recipe import Recipe
from mmspec.registry import ZOO


class DrawingSession(tokens.TokenSession):
    """A model of picture tokens bound to a recipe; `processor` reads its prompts in words."""

    def __init__(self, bound: tokens.BoundTokens, processor: Any = None) -> None:
        super().__init__(bound)
        self.processor = processor
        self.image_family = bound.backbone.image_family
        writes = bound.backbone.family.writes
        self.calls = ("generate_images", *(("generate", "__call__") if writes else ()))
        self.signature = self.text({}).signature if writes else None

    def run(self, call: str, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop) -> Any:
        """`generate_images` takes what `draw` says; others what the model's `generate()` does."""
        if call == "generate":
            rest, guidance = guided_text.of_call(self.model, placed(args, arguments))
            return self.text(guidance).generate((), rest, loop)
        if call == "__call__":
            given = HOOK.bind(*args, **arguments)
            rest, guidance = guided_text.of_hook(arguments, given.arguments["input_ids"])
            return self.text(guidance).hook(args, rest, loop)
        return self.draw(args, arguments, loop)

    def text(self, guidance: Mapping[str, Any]) -> Text:
        """What writes with this model, guided by further inputs; both prompts are placed by it."""

        def prepared(inputs: Mapping[str, Any]) -> dict[str, Any]:
            if guidance and inputs.get("position_ids") is not None:
                raise ValueError(
                    "position_ids are places of one prompt, and guidance reads two; drop them, or "
                    "pass guidance_scale=None"
                )
            return {**inputs, **guidance}

        return Text(self.bound, prepared)

    def draw(self, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop) -> drawing.Images:
        """Pictures, under the same promises as text.

        Takes `prompt=`, a text or a list, where `accelerate` was given the processor, or what the
        model draws behind (`input_ids` and `attention_mask`, a class, caption features); `grid=`
        (height, width) in codes or a `Grid`, `guidance=` a scale (default: that of the generation
        configuration, else the published one; 1 = none), `negative=` inputs or words of
        unconditional prompts, one for all or one each, `num_return_sequences` pictures of every
        prompt, and `seed`, `row_ids` and sampling settings as `generate` does. What is not said is
        as in the model's own `generate()`: its generation configuration, transformers' defaults.
        Names of transformers' scripts are taken too (`guidance_scale`, `negative_prompt_ids`, the
        processor's `image_sizes`).
        """
        if args:
            raise ValueError("generate_images() takes its arguments by name; give prompt=...")
        made = self.drawing(**arguments)
        how = (made.sampling, made.stop, made.seed, made.row_ids)
        call = self.bound.call(made.inputs, *how, shared={"grid": made.grid})
        call = replace(call, view=made.partial)
        ids = tokens.prompt_ids(
            made.inputs, len(call.request.noise.rows), self.bound.backbone.device
        )
        return made.finish(*tokens.spoken(call, ids, loop), loop.stats())

    def drawing(self, **arguments: Any) -> drawing.Drawing:
        """What `generate_images` makes of its arguments, before anything is drawn."""
        backbone = self.bound.backbone
        most = getattr(backbone.config, "max_position_embeddings", None)
        return drawing.prepare(
            self.image_family, self.model, backbone.vocabulary, most, arguments, self.processor
        )


def session(model: Any, recipe: Recipe, drafter: Any, parts: Mapping[str, Any]) -> DrawingSession:
    """A model bound to a recipe. Raises ValueError for parts that do not fit."""
    reads = parts.get("processor")
    if reads is not None and not callable(reads):
        raise ValueError(
            f"processor={reads!r} cannot read prompts; give the model's own, of AutoProcessor"
        )
    own = {name: value for name, value in parts.items() if name != "processor"}
    return DrawingSession(tokens.bind(reader(model), recipe, drafter, own), reads)


def load(source: str | Path, **options: Any) -> Any:
    """A model from a folder, a hub name, or "zoo:NAME"; of a class that draws.

    Raises ValueError as `load_causal` does.
    """
    name = str(source)
    if name.startswith(ZOO):
        return zoo.load(name.removeprefix(ZOO))
    return load_causal(name, maker=maker(model_type(source)), **options)
