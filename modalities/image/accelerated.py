"""What `mmspec.accelerate` returns for models that generate images as tokens of a codebook."""

from __future__ import annotations

from typing import Any, ClassVar

from mmspec.accelerated import Accelerated
from mmspec.modalities.image.generation import Images


class AcceleratedImageModel(Accelerated):
    """A model that generates image tokens: Emu3, Janus, Chameleon, LlamaGen."""

    calls: ClassVar[tuple[str, ...]] = ("generate_images",)

    def generate_images(self, *args: Any, **arguments: Any) -> Images:
        """Generate images.

        Args:
            prompt: A text or a list of texts, where `accelerate` was given the processor; or what
                the model is conditioned on: `input_ids` and `attention_mask` (B, L), `class_ids`,
                caption features.
            grid: (height, width) in codes, or a `Grid`. Default: the model's own.
            guidance: Scale of classifier-free guidance, 1 = none. Default: that of the generation
                configuration, else the published one. `guidance_scale` means the same.
            negative: Unconditional prompts: inputs or texts, one for all or one each.
                `negative_prompt_ids` means the same.
            num_return_sequences: Images per prompt.
            arguments: Sampling settings of `generate` (`temperature`, `top_k`, `top_p`, ...).
                Default: the model's generation configuration.
            seed, row_ids, on_round: See `mmspec.Accelerated`.

        Returns:
            `Images`: `images` (PIL), `ids` (B, H, W) int64, `sequences` (B, L) int64, `rounds`
            (B, H, W) int64 with the round of each code, `stats`.

        Raises:
            ValueError: A grid or a setting that the model does not take, before it is run.

        Example:
            >>> fast = mmspec.accelerate("zoo:image", processor=mmspec.zoo.processor("image"))
            >>> fast.generate_images(prompt="a large red circle", seed=0).images[0].save("out.png")
        """
        return self._run("generate_images", args, arguments)  # type: ignore[no-any-return]

    def _missing_call(self, call: str) -> str:
        """A model may write text too, with another reader, as Janus does."""
        writes = call in ("generate", "__call__") and self.model.can_generate()
        more = ", or accelerate(model, modality='vlm') for text" if writes else ""
        return super()._missing_call(call) + more


class AcceleratedUnifiedModel(Accelerated):
    """A model that generates image tokens and text: Janus, Chameleon."""

    calls: ClassVar[tuple[str, ...]] = ("generate_images", "generate", "__call__")
    generate_images = AcceleratedImageModel.generate_images

    def generate(self, *args: Any, **inputs: Any) -> Any:
        """Generate text, as `model.generate` does; see `AcceleratedLanguageModel.generate`."""
        return self._run("generate", args, inputs)

    def __call__(self, *args: Any, **arguments: Any) -> Any:
        """The `custom_generate` hook of transformers: `model.generate(custom_generate=fast)`."""
        return self._run("__call__", args, arguments)
