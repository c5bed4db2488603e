"""Prismatic vision-language models and OpenVLA (Kim et al. 2024), in the style of transformers.

Names of weights are those of public checkpoints (`vision_backbone`, `projector`, `language_model`).
Image features follow the first token of a prompt:

    input_ids     BOS  image image .. image  In  :  What  action ..
    embeddings    BOS  its projected patches  In  :  What  action ..

`PrismaticProcessor` inserts the `image` ids. Prompts of the public processor have none; `forward`
and `generate` insert them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    GenerationMixin,
    PreTrainedModel,
)
from transformers.initialization import constant_
from transformers.modeling_outputs import BaseModelOutputWithPooling, CausalLMOutputWithPast

from mmspec import _hf, _hf_cache
from mmspec.models.prismatic_config import OpenVLAConfig, PrismaticConfig
from mmspec.models.prismatic_processor import PrismaticImageProcessor, PrismaticProcessor
from mmspec.models.prismatic_vision import (
    PrismaticLayerScale,
    PrismaticProjector,
    PrismaticVisionBackbone,
)


class PrismaticPreTrainedModel(PreTrainedModel):
    """Flags that transformers reads."""

    config: PrismaticConfig
    config_class = PrismaticConfig
    input_modalities = ["image", "text"]  # noqa: RUF012
    supports_gradient_checkpointing = True
    _no_split_modules = ["PrismaticProjector", "LlamaDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = [_hf_cache.CACHE_NAME]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[no-untyped-call]
        if isinstance(module, PrismaticLayerScale):
            constant_(module.scale_factor, module.initial)


class PrismaticForConditionalGeneration(PrismaticPreTrainedModel, GenerationMixin):
    """Generates text from images and text."""

    def __init__(self, config: PrismaticConfig) -> None:
        super().__init__(config)
        text: Any = config.text_config
        is_fused = bool(config.use_fused_vision_backbone)
        self.vision_backbone = PrismaticVisionBackbone(config)
        self.projector = PrismaticProjector(self.vision_backbone.width, text.hidden_size, is_fused)
        self.language_model = AutoModelForCausalLM.from_config(text)
        self.post_init()  # type: ignore[no-untyped-call]

    def get_input_embeddings(self) -> Any:
        return self.language_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.language_model.set_input_embeddings(value)

    def get_output_embeddings(self) -> Any:
        return self.language_model.get_output_embeddings()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.language_model.set_output_embeddings(new_embeddings)

    def get_decoder(self) -> Any:
        return self.language_model.get_decoder()

    def get_image_features(self, pixel_values: Tensor, **_: Any) -> BaseModelOutputWithPooling:
        """Features of images (n, C, H, W) of the towers, and projected ones (`pooler_output`)."""
        features = self.vision_backbone(pixel_values)
        projected: Any = list(self.projector(features))  # one per image, as in transformers
        return BaseModelOutputWithPooling(features, projected)

    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        mm_encoder_outputs: dict[str, Any] | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits (B, L, V). `pixel_values` (n, C, H, W): as many images as in the prompts.

        Without image ids in the prompts, L grows by the patches, in `labels` and masks as well.
        Raises ValueError where images and image ids do not match.
        """
        cache = past_key_values if cache is None else cache  # its name up to transformers 5.23
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if pixel_values is not None and mm_encoder_outputs:
            raise ValueError("give either pixel_values or mm_encoder_outputs")
        if pixel_values is not None:
            mm_encoder_outputs = {"image": self.get_image_features(pixel_values)}
        if mm_encoder_outputs and mm_encoder_outputs.get("image") is not None:
            features = torch.stack(list(mm_encoder_outputs["image"].pooler_output))
            if input_ids is None:
                raise ValueError(
                    "images go with input_ids; inputs_embeds contain their features already"
                )
            if _hf_cache.cached_length(cache) == 0 and not self._image_mask(input_ids).any():
                input_ids, attention_mask, labels = self.insert_image_ids(
                    input_ids, attention_mask, labels
                )
                position_ids = None
            inputs_embeds = self._merge_features(input_ids, features)
            input_ids = None
        out: CausalLMOutputWithPast = self.language_model(
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **{_hf_cache.CACHE_NAME: cache, **kwargs},
        )
        return out

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; the output contains the inserted image ids."""
        library: Any = super()
        kwargs = _hf_cache.name_cache(kwargs)
        ids = kwargs.pop("input_ids", None) if inputs is None else inputs
        if ids is None:
            return library.generate(None, *args, **kwargs)
        given = self.add_image_ids({**kwargs, "input_ids": ids})
        return library.generate(given.pop("input_ids"), *args, **given)

    def add_image_ids(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Insert image ids into the prompts of a request with an image, unless present."""
        given, ids = dict(inputs), inputs.get("input_ids")
        has_image = given.get("pixel_values") is not None or bool(given.get("mm_encoder_outputs"))
        if ids is None or not has_image or bool(self._image_mask(ids).any()):
            return given
        mask = given.get("attention_mask")
        mask = _hf.infer_mask(self, ids) if mask is None else mask
        given["input_ids"], given["attention_mask"], _ = self.insert_image_ids(ids, mask)
        given.pop("position_ids", None)
        return given

    def insert_image_ids(
        self, ids: Tensor, mask: Tensor | None = None, labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Insert the ids of one image after the first token of prompts (B, L): (B, L + patches).

        Mask and labels are extended alike; rows may be padded on the left.
        """
        count = self.vision_backbone.patches
        first = torch.zeros_like(ids[:, :1]) if mask is None else mask.argmax(-1, keepdim=True)
        at = torch.arange(ids.shape[1] + count, device=ids.device)[None]
        is_image = (at > first) & (at <= first + count)
        source = torch.where(at > first, at - count, at).clamp_min(0)

        def insert(value: Tensor | None, image: int) -> Tensor | None:
            if value is None:
                return None
            return value.gather(1, source.expand(len(value), -1)).masked_fill(is_image, image)

        marked = insert(ids, int(self.config.image_token_id or 0))
        assert marked is not None
        return marked, insert(mask, 1), insert(labels, -100)

    def _image_mask(self, ids: Tensor) -> Tensor:  # (B, L) bool
        return ids.eq(int(self.config.image_token_id or 0))

    def _merge_features(
        self, ids: Tensor, features: Tensor
    ) -> Tensor:  # (B, L), (n, P, D) -> (B, L, D)
        """Embed prompts, with features at the positions of the image ids, in order."""
        marks = self._image_mask(ids)
        found, count = int(marks.sum()), features.shape[0] * features.shape[1]
        if found != count:
            raise ValueError(
                f"the prompts have {found} image ids, but {len(features)} images give "
                f"{features.shape[1]} features each; give an image for every "
                f"{features.shape[1]} of them"
            )
        embeds: Tensor = self.get_input_embeddings()(ids)
        return embeds.masked_scatter(marks[..., None], features.to(embeds.device, embeds.dtype))


class OpenVLAForActionPrediction(PrismaticForConditionalGeneration):
    """A policy: it generates ids of action bins after a prompt."""

    config: OpenVLAConfig
    config_class = OpenVLAConfig


MODELS: dict[type[PrismaticConfig], type[PrismaticForConditionalGeneration]] = {
    PrismaticConfig: PrismaticForConditionalGeneration,
    OpenVLAConfig: OpenVLAForActionPrediction,
}


def register() -> None:
    """Register with the Auto classes of transformers, so that folders load without remote code."""
    for config, model in MODELS.items():
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModelForImageTextToText.register(config, model, exist_ok=True)
        processors: dict[str, type] = {"torchvision": PrismaticImageProcessor}
        AutoImageProcessor.register(config, image_processor_classes=processors, exist_ok=True)
        AutoProcessor.register(config, PrismaticProcessor, exist_ok=True)
