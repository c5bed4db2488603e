"""Prismatic and OpenVLA: public names, pictures behind the first token, batches, folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, DynamicCache
from transformers.models.llama import LlamaForCausalLM

from mmspec.models import prismatic
from mmspec.models.loading import load_causal
from mmspec.models.prismatic_config import DINO_SIGLIP, OpenVLAConfig, PrismaticConfig
from tests.toys import prismatic as toys
from tests.toys.prismatic import BOS, DINO, PATCHES, SIDE, SIGLIP, VOCAB, WORDS

Model = prismatic.PrismaticForConditionalGeneration


@pytest.fixture(scope="module")
def policy() -> Any:
    return toys.openvla()


def prompts(pads: tuple[int, ...] = (0,), length: int = 6) -> tuple[Tensor, Tensor]:
    """Ids (B, L) without image ids and their mask, padded on the left."""
    ids = torch.randint(3, WORDS, (len(pads), length))
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        ids[row, :pad], mask[row, :pad], ids[row, pad] = WORDS, 0, BOS
    return ids, mask


def pictures(count: int, channels: int = 6) -> Tensor:
    return torch.randn(count, channels, SIDE, SIDE)


def published_names(config: OpenVLAConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the public layout, written down from the published sizes' rules."""
    text: Any = config.text_config
    width, inner, heads = text.hidden_size, text.intermediate_size, text.num_attention_heads
    keys = width // heads * text.num_key_value_heads
    found: dict[str, tuple[int, ...]] = {}

    def linear(name: str, rows: int, columns: int) -> None:
        found[f"{name}.weight"], found[f"{name}.bias"] = (rows, columns), (rows,)

    def norm(name: str, size: int) -> None:
        found[f"{name}.weight"] = found[f"{name}.bias"] = (size,)

    assert config.timm_kwargs is not None
    ratios, joined = (4.0, 3.7362), 0
    for tower, sizes in zip(("featurizer", "fused_featurizer"), config.timm_kwargs, strict=True):
        size, side = sizes["embed_dim"], sizes["patch_size"]
        own = f"vision_backbone.{tower}"
        joined += size
        found[f"{own}.pos_embed"] = (1, PATCHES, size)
        found[f"{own}.patch_embed.proj.weight"] = (size, 3, side, side)
        found[f"{own}.patch_embed.proj.bias"] = (size,)
        wide = int(size * ratios[tower == "fused_featurizer"])
        for block in range(sizes["depth"]):
            at = f"{own}.blocks.{block}"
            norm(f"{at}.norm1", size)
            norm(f"{at}.norm2", size)
            linear(f"{at}.attn.qkv", 3 * size, size)
            linear(f"{at}.attn.proj", size, size)
            linear(f"{at}.mlp.fc1", wide, size)
            linear(f"{at}.mlp.fc2", size, wide)
            if tower == "featurizer":
                found[f"{at}.ls1.scale_factor"] = found[f"{at}.ls2.scale_factor"] = (size,)
        norm(f"{own}.norm", size)
        if tower == "featurizer":
            found[f"{own}.cls_token"], found[f"{own}.reg_token"] = (1, 1, size), (1, 4, size)
            continue
        pool = f"{own}.attn_pool"
        found[f"{pool}.latent"] = (1, 1, size)
        linear(f"{pool}.q", size, size)
        linear(f"{pool}.kv", 2 * size, size)
        linear(f"{pool}.proj", size, size)
        norm(f"{pool}.norm", size)
        linear(f"{pool}.mlp.fc1", wide, size)
        linear(f"{pool}.mlp.fc2", size, wide)
    linear("projector.fc1", 4 * joined, joined)
    linear("projector.fc2", width, 4 * joined)
    linear("projector.fc3", width, width)
    found["language_model.model.embed_tokens.weight"] = (text.vocab_size, width)
    found["language_model.lm_head.weight"] = (text.vocab_size, width)
    found["language_model.model.norm.weight"] = (width,)
    for layer in range(text.num_hidden_layers):
        at = f"language_model.model.layers.{layer}"
        found[f"{at}.self_attn.q_proj.weight"] = (width, width)
        found[f"{at}.self_attn.k_proj.weight"] = (keys, width)
        found[f"{at}.self_attn.v_proj.weight"] = (keys, width)
        found[f"{at}.self_attn.o_proj.weight"] = (width, width)
        found[f"{at}.mlp.gate_proj.weight"] = found[f"{at}.mlp.up_proj.weight"] = (inner, width)
        found[f"{at}.mlp.down_proj.weight"] = (width, inner)
        found[f"{at}.input_layernorm.weight"] = (width,)
        found[f"{at}.post_attention_layernorm.weight"] = (width,)
    return found


def test_public_layout_loads_with_nothing_missing_and_nothing_left(tmp_path: Path) -> None:
    config = toys.openvla_config()
    weights = {name: torch.randn(shape) for name, shape in published_names(config).items()}
    config.save_pretrained(tmp_path)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    prismatic.register()
    auto: Any = AutoModelForImageTextToText
    model, found = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(model, prismatic.OpenVLAForActionPrediction)
    assert not any(found.values())
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name


def test_default_configuration_is_the_published_one() -> None:
    """Sizes of openvla-7b, without making 7 billion weights."""
    with torch.device("meta"):
        model = prismatic.OpenVLAForActionPrediction(OpenVLAConfig())
    assert isinstance(model.language_model, LlamaForCausalLM)
    assert model.vision_backbone.patches == 256
    sizes = [tuple(layer.weight.shape) for layer in (model.projector.fc1, model.projector.fc2)]
    assert sizes == [(8704, 2176), (4096, 8704)]
    assert model.get_output_embeddings().weight.shape == (32064, 4096)
    assert model.config.image_token_id == 32001
    assert len(model.vision_backbone.featurizer.blocks) == 24


def test_features_stand_right_behind_the_first_token(policy: Any) -> None:
    ids, _ = prompts()
    pixels = pictures(1)
    with torch.no_grad():
        seen = policy.projector(policy.vision_backbone(pixels))
        words = policy.get_input_embeddings()(ids)
        joined = torch.cat((words[:, :1], seen, words[:, 1:]), 1)
        expected = policy.language_model(inputs_embeds=joined).logits
        marked, _, _ = policy.insert_image_ids(ids)
        assert torch.equal(policy(input_ids=ids, pixel_values=pixels).logits, expected)
        assert torch.equal(policy(input_ids=marked, pixel_values=pixels).logits, expected)
        blind = policy(input_ids=marked, pixel_values=torch.zeros_like(pixels)).logits
    assert not torch.allclose(blind, expected)


def test_towers_give_their_last_block_but_one(policy: Any) -> None:
    """Changing the last block changes nothing; the one before it does."""
    pixels = pictures(1)
    with torch.no_grad():
        before = policy.vision_backbone(pixels)
        assert before.shape == (1, PATCHES, DINO["embed_dim"] + SIGLIP["embed_dim"])
        for tower in (policy.vision_backbone.featurizer, policy.vision_backbone.fused_featurizer):
            by_hand = tower.forward_intermediates(pixels[:, :3])[1]
            assert len(by_hand) == 3
            for block, same in ((2, True), (1, False)):
                bias = tower.blocks[block].mlp.fc2.bias
                bias.add_(1.0)
                assert torch.equal(policy.vision_backbone(pixels), before) is same
                bias.sub_(1.0)
            before = policy.vision_backbone(pixels)


def test_several_tokens_behind_a_cache_score_as_the_whole(policy: Any) -> None:
    ids, mask = prompts((0, 2))
    marked, seen, _ = policy.insert_image_ids(ids, mask)
    more = torch.randint(3, WORDS, (2, 4))
    pixels = pictures(2)
    with torch.no_grad():
        long = torch.cat((marked, more), 1)
        whole = torch.cat((seen, torch.ones_like(more)), 1)
        places = (whole.cumsum(-1) - 1).clamp_min(0)
        expected = policy(
            input_ids=long, attention_mask=whole, position_ids=places, pixel_values=pixels
        ).logits[:, -4:]
        cache, length = DynamicCache(), marked.shape[1]
        policy(
            input_ids=marked,
            attention_mask=seen,
            position_ids=places[:, :length],
            pixel_values=pixels,
            past_key_values=cache,
        )
        found = policy(
            input_ids=more,
            attention_mask=whole,
            position_ids=places[:, length:],
            past_key_values=cache,
        ).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("has_image_ids", [False, True])
@pytest.mark.parametrize("use_cache", [True, False])
def test_rows_of_a_ragged_batch_write_what_they_write_alone(
    policy: Any, has_image_ids: bool, use_cache: bool
) -> None:
    ids, mask = prompts((0, 3, 1))
    pixels = pictures(3)
    settings = {"max_new_tokens": 7, "do_sample": False, "use_cache": use_cache}
    given: tuple[Tensor, Any] = (ids, mask)
    if has_image_ids:
        given = policy.insert_image_ids(ids, mask)[:2]
    batch = policy.generate(
        input_ids=given[0], attention_mask=given[1], pixel_values=pixels, **settings
    )
    for row, pad in enumerate((0, 3, 1)):
        one = policy.generate(
            ids[row : row + 1, pad:], pixel_values=pixels[row : row + 1], **settings
        )
        assert torch.equal(one[0, -7:], batch[row, -7:])
    assert len({tuple(row) for row in batch[:, -7:].tolist()}) == 3


def test_two_pictures_in_one_prompt_keep_their_order(policy: Any) -> None:
    ids, _ = prompts()
    marked, _, _ = policy.insert_image_ids(ids)
    twice, _, _ = policy.insert_image_ids(marked)
    first, second = pictures(2)
    with torch.no_grad():
        both = policy(input_ids=twice, pixel_values=torch.stack((first, second))).logits
        other = policy(input_ids=twice, pixel_values=torch.stack((second, first))).logits
    assert not torch.allclose(both, other)


def test_labels_learn_words_and_not_pictures(policy: Any) -> None:
    ids, mask = prompts((0, 2))
    out = policy(input_ids=ids, attention_mask=mask, pixel_values=pictures(2), labels=ids)
    logits = out.logits[:, :-1]
    _, _, labels = policy.insert_image_ids(ids, mask, ids)
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    )
    assert int((labels == -100).sum()) == 2 * PATCHES
    torch.testing.assert_close(out.loss, expected)
    out.loss.backward()
    assert policy.projector.fc1.weight.grad.abs().sum() > 0
    policy.zero_grad()


@pytest.mark.parametrize("tied", [False, True])
def test_saved_folder_comes_back(tmp_path: Path, tied: bool) -> None:
    model = toys.openvla(text_config=toys.text_config(tie_word_embeddings=tied))
    is_one = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert is_one is tied
    model.save_pretrained(tmp_path)
    prismatic.register()
    again = load_causal(tmp_path, maker=AutoModelForImageTextToText)
    ids, _ = prompts()
    pixels = pictures(1)
    with torch.no_grad():
        assert torch.equal(
            again(input_ids=ids, pixel_values=pixels).logits,
            model(input_ids=ids, pixel_values=pixels).logits,
        )
    assert again.config.norm_stats == model.config.norm_stats


def test_one_tower_has_a_projector_of_two_layers() -> None:
    model = toys.prismatic()
    assert model.vision_backbone.fused_featurizer is None
    assert model.projector.fc3 is None
    assert model.projector.fc1.weight.shape == (64, SIGLIP["embed_dim"])
    ids, _ = prompts()
    out = model.generate(ids, pixel_values=pictures(1, 3), max_new_tokens=3, do_sample=False)
    assert out.shape == (1, 6 + PATCHES + 3)
    assert model.config.arch_specifier == "no-align+gelu-mlp"


def test_text_alone_is_read_by_the_language_model(policy: Any) -> None:
    ids, _ = prompts()
    with torch.no_grad():
        found = policy(input_ids=ids).logits
        assert torch.equal(found, policy.language_model(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"image_sizes": [64, 80]}, "differ"),
        ({"image_sizes": [64]}, "image_sizes has 1 entries"),
        ({"timm_kwargs": [DINO]}, "timm_kwargs has 1 entries"),
        ({"image_resize_strategy": "squash"}, "squash"),
        ({"arch_specifier": "no-align+linear"}, "fused-gelu-mlp"),
        ({"image_token_id": VOCAB}, "image_token_id"),
        ({"use_fused_vision_backbone": False}, "asks for 1"),
    ],
)
def test_configurations_that_cannot_be_are_refused(facts: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        toys.openvla_config(**facts)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"timm_model_ids": [DINO_SIGLIP[0], "no_such_tower"]}, "no_such_tower"),
        ({"timm_kwargs": [DINO, {**SIGLIP, "wings": 2}]}, "wings"),
        ({"timm_kwargs": [DINO, {**SIGLIP, "patch_size": 32}]}, "16 and 4 patches"),
        ({"timm_kwargs": [DINO, {**SIGLIP, "depth": 1}]}, "two or more blocks"),
        ({"timm_model_ids": [DINO_SIGLIP[0], "resnet18"], "timm_kwargs": [DINO, {}]}, "resnet18"),
    ],
)
def test_towers_that_cannot_be_are_refused(facts: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        toys.openvla(**facts)


def test_pictures_that_do_not_fit_are_refused(policy: Any) -> None:
    ids, _ = prompts()
    with pytest.raises(ValueError, match=r"\(1, 3, 64, 64\)"):
        policy(input_ids=ids, pixel_values=pictures(1, 3))
    with pytest.raises(ValueError, match="2 images give"):
        policy(input_ids=ids, pixel_values=pictures(2))
    with pytest.raises(ValueError, match="inputs_embeds"):
        policy(inputs_embeds=torch.zeros(1, 4, 64), pixel_values=pictures(1))
    with pytest.raises(ValueError, match="either"):
        policy(pixel_values=pictures(1))


def test_prismatic_and_openvla_are_distinguished(tmp_path: Path) -> None:
    prismatic.register()
    toys.prismatic().save_pretrained(tmp_path)
    model: Any = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert type(model) is Model
    assert type(model.config) is PrismaticConfig


PUBLISHED = {  # config.json of openvla-7b, of whose statistics one entry
    "arch_specifier": "no-align+fused-gelu-mlp",
    "architectures": ["OpenVLAForActionPrediction"],
    "auto_map": {
        "AutoConfig": "configuration_prismatic.OpenVLAConfig",
        "AutoModelForVision2Seq": "modeling_prismatic.OpenVLAForActionPrediction",
    },
    "hf_llm_id": "meta-llama/Llama-2-7b-hf",
    "image_resize_strategy": "resize-naive",
    "image_sizes": [224, 224],
    "llm_backbone_id": "llama2-7b-pure",
    "llm_max_length": 2048,
    "model_type": "openvla",
    "n_action_bins": 256,
    "norm_stats": {"bridge_orig": {"action": toys.SPAN, "num_transitions": 2135463}},
    "output_projector_states": False,
    "pad_to_multiple_of": 64,
    "pad_token_id": 32000,
    "text_config": {
        "model_type": "llama",
        "pad_token_id": 32000,
        "torch_dtype": "bfloat16",
        "vocab_size": 32064,
    },
    "timm_model_ids": list(DINO_SIGLIP),
    "timm_override_act_layers": [None, None],
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_fused_vision_backbone": True,
    "vision_backbone_id": "dinosiglip-vit-so-224px",
}


def test_published_configuration_is_read_without_its_code(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    prismatic.register()
    found = AutoConfig.from_pretrained(tmp_path, trust_remote_code=False)
    assert type(found) is OpenVLAConfig
    default = OpenVLAConfig()
    for name in ("timm_model_ids", "image_sizes", "timm_kwargs", "image_token_id", "pad_token_id"):
        assert getattr(found, name) == getattr(default, name)
    text: Any = found.text_config
    assert (text.hidden_size, text.num_hidden_layers, text.vocab_size) == (4096, 32, 32064)
    assert found.dtype == torch.bfloat16
    assert found.norm_stats == PUBLISHED["norm_stats"]
