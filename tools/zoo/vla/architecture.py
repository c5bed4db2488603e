"""The untrained policy: a narrow OpenVLA with a vocabulary of Scene world words.

The vocabulary has the published layout: words, then action ids, then padding rows, among them the
padding and image tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import LlamaConfig, PreTrainedTokenizerFast

from mmspec.models.prismatic import OpenVLAForActionPrediction
from mmspec.models.prismatic_config import OpenVLAConfig
from mmspec.zoo.scene import COLOURS, DIGITS, SHAPES, SIZES
from tools.zoo.initialization import expand_blocks

PIXELS, PATCH = 72, 12
LAYERS, WIDTH, HEADS = 24, 80, 4
FIRST, NEXT = 4, 12  # layers of the language model in the first and second stage
TOWER = {"embed_dim": 64, "depth": 3, "num_heads": 4, "patch_size": PATCH, "mlp_ratio": 4.0}
HALF = (0.5, 0.5, 0.5)  # mean and deviation of colours, for either tower
KEY = "table_reach"  # of the statistics of its actions
BINS, SPARE = 256, 8
UNKNOWN, BOS, EOS, PAD = "<unk>", "<s>", "</s>", "<pad>"
PROMPT = "In: What action should the robot take to {}?\nOut:"
_SPARE_WORDS = ("a", "and")  # not in instructions; after the image token
_TOWERS = ("vit_small_patch14_reg4_dinov2.lvd142m", "vit_base_patch16_siglip_224.webli")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A word tokenizer of the prompt and the Scene world; other words are unknown."""
    prompt = [*PROMPT.format("").replace(":", "").replace("?", "").split(), ":", "?", "reach"]
    words = [*prompt, *SIZES, *COLOURS, *SHAPES, "digit", *DIGITS]
    actions = [f"<action {number}>" for number in range(BINS)]
    table = {word: i for i, word in enumerate([UNKNOWN, BOS, EOS, *words, *actions, PAD])}
    table |= {word: len(table) + i for i, word in enumerate(_SPARE_WORDS, 1)}
    core = Tokenizer(models.WordLevel(vocab=table, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Split(Regex("[:?.,]"), behavior="isolated"),
        ]
    )
    core.add_special_tokens([UNKNOWN, BOS, EOS, PAD])
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, table[BOS])]
    )
    build: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = build(
        tokenizer_object=core,
        unk_token=UNKNOWN,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        model_max_length=256,
    )
    return tokenizer


def build(
    tokenizer: PreTrainedTokenizerFast, statistics: dict[str, Any], layers: int = LAYERS
) -> OpenVLAForActionPrediction:
    """The untrained model. statistics: q01, q99 and mask of its actions."""
    vocabulary = int(tokenizer.pad_token_id or 0)  # the first row after the actions
    text = LlamaConfig(
        vocab_size=vocabulary + SPARE,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        max_position_embeddings=256,
        initializer_range=0.06,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config = OpenVLAConfig(
        timm_model_ids=list(_TOWERS),
        timm_kwargs=[{**TOWER, "init_values": 1.0}, {**TOWER, "global_pool": "avg"}],
        image_sizes=[PIXELS, PIXELS],
        text_config=text,
        pad_token_id=tokenizer.pad_token_id,
        pad_to_multiple_of=SPARE,
        n_action_bins=BINS,
        norm_stats={KEY: {"action": statistics}},
    )
    model = OpenVLAForActionPrediction(config)
    for module in model.vision_backbone.modules():
        if isinstance(module, nn.Linear):  # narrow towers need larger weights than wide ones
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
    return model


@torch.no_grad()
def deepen(
    model: OpenVLAForActionPrediction, tokenizer: PreTrainedTokenizerFast, layers: int = LAYERS
) -> OpenVLAForActionPrediction:
    """Expand a shallower policy to `layers` with the same outputs."""
    config: Any = model.config
    deep = build(tokenizer, config.norm_stats[KEY]["action"], layers)
    weights = {k: v for k, v in model.state_dict().items() if ".layers." not in k}
    deep.load_state_dict(weights, strict=False)
    expand_blocks(*(one.language_model.model.layers for one in (model, deep)))
    return deep
