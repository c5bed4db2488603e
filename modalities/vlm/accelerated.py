"""What `mmspec.accelerate` returns for text, vision-language and video-language models."""

from __future__ import annotations

from typing import Any, ClassVar

from mmspec.accelerated import Accelerated
from mmspec.modalities.common.text_generation import Output


class AcceleratedLanguageModel(Accelerated):
    """A language model of transformers, with or without images and clips in its prompt."""

    calls: ClassVar[tuple[str, ...]] = ("generate", "__call__")

    def generate(self, *args: Any, **inputs: Any) -> Output:
        """Generate tokens, as `model.generate` does.

        Args:
            args, inputs: What `model.generate` takes: `input_ids` and `attention_mask` (B, L), or
                `inputs_embeds` (B, L, D), the image and video tensors of the model's processor,
                generation settings (`max_new_tokens`, `do_sample`, `temperature`, `top_k`, `top_p`,
                penalties, `eos_token_id`, ...), `generation_config`, `logits_processor`,
                `stopping_criteria`, `streamer`, `past_key_values` (also as `cache`, its name since
                transformers 5.24). Sampling is on with `do_sample=True` or with any sampling
                setting.
            seed, row_ids, on_round: See `mmspec.Accelerated`.
            drafter_inputs: Inputs of the drafter alone: tensors for a draft model that reads others
                than the target, or what a recipe takes (`hsd`: "draft", `ibed`: "captions").

        Returns:
            `Output`: `sequences` (B, L + T) int64, finished rows padded, and `stats`; `scores`,
            `logits` and `past_key_values` where they were requested.

        Raises:
            ValueError: An argument or a setting that cannot be honoured, with the value, the rule
                and the fix, before anything is decoded. `mmspec.decode.BrokenLogits` for NaN or
                all -inf logits; it has the verified tokens.

        Example:
            >>> fast = mmspec.accelerate(model, recipe="prompt-lookup")
            >>> inputs = processor(images=image, text=prompt, return_tensors="pt").to(model.device)
            >>> out = fast.generate(**inputs, max_new_tokens=128, do_sample=False)
            >>> processor.batch_decode(out.sequences, skip_special_tokens=True)
        """
        return self._run("generate", args, inputs)  # type: ignore[no-any-return]

    def __call__(self, *args: Any, **arguments: Any) -> Any:
        """The `custom_generate` hook of transformers: `model.generate(custom_generate=fast)`.

        transformers calls it with what it prepared for its own decoding loop; it returns what
        `model.generate` returns.
        """
        return self._run("__call__", args, arguments)
