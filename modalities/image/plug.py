"""Sessions of image-token models: `generate_images`, and `generate` for models with text output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmspec import zoo
from mmspec.modalities.common import tokens
from mmspec.modalities.common.call_arguments import bind_arguments, bind_hook
from mmspec.modalities.common.text_generation import TextGenerator
from mmspec.modalities.image import guided_text
from mmspec.modalities.image.accelerated import AcceleratedImageModel, AcceleratedUnifiedModel
from mmspec.modalities.image.families import maker, reader
from mmspec.modalities.image.generation import ImageRequest, Images, prepare_request
from mmspec.modality import Loop
from mmspec.models.loading import model_type
from mmspec.recipe import Recipe
from mmspec.registry import ZOO


class ImageSession(tokens.TokenSession):
    """An image-token model bound to a recipe; `processor` tokenizes its text prompts."""

    def __init__(self, bound: tokens.BoundTokens, processor: Any = None) -> None:
        super().__init__(bound)
        self.processor = processor
        self.image_family = bound.backbone.image_family
        writes = bound.backbone.family.writes_text
        self.interface = AcceleratedUnifiedModel if writes else AcceleratedImageModel
        self.signature = self.text({}).signature if writes else None

    def run(self, call: str, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop) -> Any:
        """Run a call: `generate_images`, or text output with the arguments of `generate()`."""
        if call == "generate":
            rest, guidance = guided_text.split_guidance(self.model, bind_arguments(args, arguments))
            return self.text(guidance).generate((), rest, loop)
        if call == "__call__":
            ids = bind_hook(args, arguments)["input_ids"]
            rest, guidance = guided_text.split_hook_guidance(arguments, ids)
            return self.text(guidance).hook(args, rest, loop)
        return self.generate_images(args, arguments, loop)

    def text(self, guidance: Mapping[str, Any]) -> TextGenerator:
        """Text generation with this model and guidance inputs, which set both position ids."""

        def add_guidance(inputs: Mapping[str, Any]) -> dict[str, Any]:
            if guidance and inputs.get("position_ids") is not None:
                raise ValueError(
                    "position_ids belong to one prompt, and guidance reads two; drop them, or pass "
                    "guidance_scale=None"
                )
            return {**inputs, **guidance}

        return TextGenerator(self.bound, add_guidance)

    def generate_images(
        self, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop
    ) -> Images:
        """Generate images, with the same guarantees as text.

        Takes `prompt=`, a text or a list, if `accelerate` was given the processor, or the model's
        own inputs (`input_ids` and `attention_mask`, a class, caption features); `grid=` (height,
        width) in codes or a `Grid`, `guidance=` a scale (default: that of the generation
        configuration, else the published one; 1 = none), `negative=` inputs or texts of
        unconditional prompts, one for all or one each, `num_return_sequences` images per prompt,
        and `seed`, `row_ids` and sampling settings as in `generate`. Defaults are those of the
        model's own `generate()`: its generation configuration, then those of transformers. The
        names of transformers (`guidance_scale`, `negative_prompt_ids`, the processor's
        `image_sizes`) are accepted too.
        """
        if args:
            raise ValueError("generate_images() takes its arguments by name; give prompt=...")
        request = self.prepare_request(**arguments)
        settings = (request.sampling, request.stop, request.seed, request.row_ids)
        call = self.bound.call(request.inputs, *settings, shared={"grid": request.grid})
        call = replace(call, view=request.decode_partial)
        ids = tokens.prompt_ids(
            request.inputs, len(call.request.noise.rows), self.bound.backbone.device
        )
        return request.build_output(*tokens.run_rounds(call, ids, loop), loop.stats())

    def prepare_request(self, **arguments: Any) -> ImageRequest:
        """Check and convert the arguments of `generate_images`."""
        backbone = self.bound.backbone
        max_length = getattr(backbone.config, "max_position_embeddings", None)
        return prepare_request(
            self.image_family,
            self.model,
            backbone.vocabulary,
            max_length,
            arguments,
            self.processor,
        )


def session(model: Any, recipe: Recipe, drafter: Any, parts: Mapping[str, Any]) -> ImageSession:
    """A model bound to a recipe. Raises ValueError for parts that do not fit."""
    processor = parts.get("processor")
    if processor is not None and not callable(processor):
        raise ValueError(
            f"processor={processor!r} is not callable; give the model's own, from AutoProcessor"
        )
    own = {name: value for name, value in parts.items() if name != "processor"}
    return ImageSession(tokens.bind(reader(model), recipe, drafter, own), processor)


def load(source: str | Path, **options: Any) -> Any:
    """A model from a folder, a hub name, or "zoo:NAME", of a class that generates images.

    Raises ValueError as `load_causal` does.
    """
    name = str(source)
    folder = zoo.path(name.removeprefix(ZOO)) if name.startswith(ZOO) else source
    return tokens.load_token_model(source, maker(model_type(folder)), **options)
