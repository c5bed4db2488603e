"""Configurations of Prismatic models and of OpenVLA, with the fields of the published config.json.

Sizes are free: `timm_kwargs` change the published vision towers, `text_config` the language model.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.configuration_utils import SubConfigSpec

DINO_SIGLIP = ("vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224")
STRATEGIES = ("letterbox", "resize-naive", "resize-crop")
PROJECTORS = {False: "gelu-mlp", True: "fused-gelu-mlp"}  # two towers fused


class PrismaticConfig(PreTrainedConfig):
    """One vision tower, or two whose features are joined, and a language model.

    Lists have one entry per tower: `timm_model_ids` names of timm, `timm_override_act_layers` their
    activations (None = the tower's own), `image_sizes` sides in pixels, `timm_kwargs` arguments of
    `timm.create_model` that change a tower (`{}` = as published). `image_token_id` is the
    placeholder of an image feature in `input_ids`; default: the second of the `pad_to_multiple_of`
    rows that pad the published vocabulary (the first is the padding token).

    Raises ValueError for lists of other lengths, ids out of range and unknown strategies.
    """

    model_type = "prismatic"
    sub_configs_defaults = {  # noqa: RUF012 - as transformers declares it
        "text_config": SubConfigSpec(config_class=AutoConfig, model_type="llama")
    }

    vision_backbone_id: str = "dinosiglip-vit-so-224px"
    llm_backbone_id: str = "llama2-7b-pure"
    hf_llm_id: str | None = None
    arch_specifier: str | None = None
    use_fused_vision_backbone: bool | None = None
    timm_model_ids: list[str] | None = None
    timm_override_act_layers: list[str | None] | None = None
    timm_kwargs: list[dict[str, Any]] | None = None
    image_sizes: list[int] | None = None
    image_resize_strategy: str = "resize-naive"
    text_config: dict[str, Any] | PreTrainedConfig | None = None
    llm_max_length: int = 2048
    pad_token_id: int | None = 32000
    pad_to_multiple_of: int = 64
    image_token_id: int | None = None
    output_projector_states: bool = False
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if self.text_config is None:
            size = {"vocab_size": 32064, "pad_token_id": self.pad_token_id}
            self.text_config = {"model_type": "llama", **size}
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]
        text: Any = self.text_config
        self.tie_word_embeddings = bool(text.tie_word_embeddings)
        if self.timm_model_ids is None:
            self.timm_model_ids = list(DINO_SIGLIP)
        count = len(self.timm_model_ids)
        if self.use_fused_vision_backbone is None:
            self.use_fused_vision_backbone = count == 2
        if self.arch_specifier is None:
            self.arch_specifier = f"no-align+{PROJECTORS[bool(self.use_fused_vision_backbone)]}"
        self.image_sizes = self.image_sizes or [224] * count
        self.timm_override_act_layers = self.timm_override_act_layers or [None] * count
        self.timm_kwargs = self.timm_kwargs or [{} for _ in range(count)]
        if self.image_token_id is None:
            self.image_token_id = text.vocab_size - self.pad_to_multiple_of + 1
        _check_towers(self)
        if not 0 <= self.image_token_id < text.vocab_size:
            raise ValueError(
                f"image_token_id={self.image_token_id} is none of the {text.vocab_size} rows of "
                "the vocabulary; give an unused one"
            )


class OpenVLAConfig(PrismaticConfig):
    """A robot policy: `norm_stats[key]["action"]` holds q01, q99 and mask of each dimension."""

    model_type = "openvla"

    norm_stats: dict[str, Any] | None = None
    n_action_bins: int = 256


def check_per_tower(settings: Any, *names: str) -> None:
    """Refuse lists without one entry per tower, and unknown resizing. Raises ValueError."""
    count = 2 if settings.use_fused_vision_backbone else 1
    for name in names:
        found = len(getattr(settings, name))
        if found != count:
            raise ValueError(
                f"{name} has {found} entries, but use_fused_vision_backbone="
                f"{settings.use_fused_vision_backbone} asks for {count}; give one per tower"
            )
    if settings.image_resize_strategy not in STRATEGIES:
        raise ValueError(
            f"image_resize_strategy={settings.image_resize_strategy!r} is not known; choose one of "
            + ", ".join(STRATEGIES)
        )


def _check_towers(config: PrismaticConfig) -> None:
    """Refuse towers that cannot be built or joined. Raises ValueError."""
    check_per_tower(
        config, "timm_model_ids", "image_sizes", "timm_override_act_layers", "timm_kwargs"
    )
    sizes = config.image_sizes or []
    if len(set(sizes)) > 1:
        raise ValueError(
            f"image_sizes={sizes} differ, but fused towers read one image; give the same size"
        )
    count = 2 if config.use_fused_vision_backbone else 1
    projector = PROJECTORS[bool(config.use_fused_vision_backbone)]
    if (config.arch_specifier or "").split("+")[-1] != projector:
        raise ValueError(
            f"arch_specifier={config.arch_specifier!r} names another projector than {projector!r}, "
            f"the one of {count} tower{'s' * (count > 1)}; give 'no-align+{projector}'"
        )
