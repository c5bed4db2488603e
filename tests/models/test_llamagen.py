"""LlamaGen against a direct reading of its formulas, and its public weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from mmspec.models.llamagen import LlamaGenConfig, LlamaGenForImageGeneration, rotary
from mmspec.models.llamagen_weights import from_public, load_public, to_public
from tests.toys import image_models

KINDS = ("llamagen-class", "llamagen-caption")


def condition(toy: Any) -> tuple[Tensor, Tensor]:
    """A condition (2, T, ...) and its mask; the second caption is padded on the left."""
    if toy.config.condition == "class":
        return torch.tensor([[1], [3]]), torch.ones(2, 1, dtype=torch.bool)
    mask = torch.ones(2, image_models.CONDITION, dtype=torch.bool)
    mask[1, :3] = False
    return torch.randn(2, image_models.CONDITION, image_models.FEATURES), mask


def direct(
    public: dict[str, Tensor], config: LlamaGenConfig, given: Tensor, mask: Tensor, codes: Tensor
) -> Tensor:
    """Logits of the published architecture: fused projections, pairs of neighbours, all at once."""
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    assert keys is not None
    width = config.hidden_size // heads

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x * x).mean(-1, keepdim=True).add(config.rms_norm_eps).rsqrt() * public[name]

    def turn(x: Tensor) -> Tensor:  # (B, L, heads, width)
        out = torch.zeros_like(x)
        for slot in range(x.shape[1]):
            cell = slot - config.condition_length
            if cell < 0:
                continue  # cosine and sine are zero there
            place = divmod(cell, config.side)
            for pair in range(width // 2):
                axis, index = divmod(pair, width // 4)
                angle = place[axis] * 10_000.0 ** (-2 * index / (width // 2))
                left, right = x[:, slot, :, 2 * pair], x[:, slot, :, 2 * pair + 1]
                cos, sin = math.cos(angle), math.sin(angle)
                out[:, slot, :, 2 * pair] = left * cos - right * sin
                out[:, slot, :, 2 * pair + 1] = right * cos + left * sin
        return out

    if config.condition == "class":
        slots = public["cls_embedding.embedding_table.weight"][given]
    else:
        inner = given @ public["cls_embedding.cap_proj.fc1.weight"].T
        inner = functional.gelu(inner, approximate="tanh")
        slots = inner @ public["cls_embedding.cap_proj.fc2.weight"].T
    x = torch.cat((slots, public["tok_embeddings.weight"][codes]), 1)
    batch, length = x.shape[:2]
    seen = torch.ones(length, length, dtype=torch.bool).tril().expand(batch, -1, -1).clone()
    seen[:, :, : mask.shape[1]] &= mask[:, None]
    seen |= torch.eye(length, dtype=torch.bool)
    for layer in range(config.num_hidden_layers):
        name = f"layers.{layer}."
        fused = norm(x, name + "attention_norm.weight") @ public[name + "attention.wqkv.weight"].T
        q, k, v = fused.split([heads * width, keys * width, keys * width], -1)
        q, k = turn(q.view(batch, length, -1, width)), turn(k.view(batch, length, -1, width))
        v = v.view(batch, length, -1, width)
        k, v = (part.repeat_interleave(heads // keys, 2) for part in (k, v))
        weights = torch.einsum("bqhd,bkhd->bhqk", q, k) / width**0.5
        weights = weights.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        mixed = torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2)
        x = x + mixed @ public[name + "attention.wo.weight"].T
        inner = norm(x, name + "ffn_norm.weight")
        gate = functional.silu(inner @ public[name + "feed_forward.w1.weight"].T)
        gate = gate * (inner @ public[name + "feed_forward.w3.weight"].T)
        x = x + gate @ public[name + "feed_forward.w2.weight"].T
    return norm(x, "norm.weight") @ public["output.weight"].T


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_logits_are_those_of_the_published_architecture(kind: str) -> None:
    toy = image_models.PAINTERS[kind]()
    given, mask = condition(toy)
    codes = torch.randint(image_models.CODES, (2, 9))
    embeds = torch.cat((toy.model.condition(given), toy.model.embed_tokens(codes)), 1)
    whole = torch.cat((mask, torch.ones(2, 9, dtype=torch.bool)), 1)
    ours = toy(inputs_embeds=embeds, attention_mask=whole.long()).logits
    theirs = direct(to_public(toy), toy.config, given, mask, codes)
    first = toy.config.condition_length - 1  # padded slots say nothing
    assert_close(ours[:, first:], theirs[:, first:], atol=1e-4, rtol=1e-4)


def test_rotary_positions_are_rows_and_columns() -> None:
    config = LlamaGenConfig(hidden_size=32, num_attention_heads=2, side=4, condition_length=2)
    cos, sin = rotary(config, torch.arange(18)[None], torch.float64)
    assert cos.shape == sin.shape == (1, 18, 16)
    assert not cos[0, :2].any()
    assert not sin[0, :2].any()
    for cell in range(16):
        row, column = divmod(cell, 4)
        for channel in range(8):
            place = row if channel < 4 else column
            angle = place / 10_000 ** (2 * (channel % 4) / 8)
            for half in (channel, channel + 8):
                assert math.isclose(cos[0, 2 + cell, half], math.cos(angle), abs_tol=1e-6)
                assert math.isclose(sin[0, 2 + cell, half], math.sin(angle), abs_tol=1e-6)


PUBLIC = {
    "cls_embedding.embedding_table.weight",
    *("tok_embeddings.weight", "norm.weight", "output.weight"),
    *("layers.0.attention.wqkv.weight", "layers.0.attention.wo.weight"),
    *(f"layers.0.feed_forward.w{part}.weight" for part in (1, 2, 3)),
    *("layers.0.attention_norm.weight", "layers.0.ffn_norm.weight"),
}
PUBLIC_PICTURE = {
    "quantize.embedding.weight",
    *("decoder.mid.0.norm1.weight", "decoder.mid.1.proj_out.bias", "decoder.mid.2.conv2.weight"),
    *("decoder.conv_blocks.0.res.0.conv1.weight", "decoder.conv_blocks.0.attn.1.q.weight"),
    *("decoder.conv_blocks.0.upsample.conv.bias", "decoder.conv_blocks.1.res.1.norm2.bias"),
    *("decoder.conv_in.weight", "decoder.norm_out.weight", "decoder.conv_out.bias"),
    "post_quant_conv.weight",
}


def test_public_names_are_those_of_the_checkpoints() -> None:
    names = set(to_public(image_models.llamagen_class()))
    layers = {name for name in names if name.startswith("layers.")}
    picture = {name for name in names if name.startswith(("decoder.", "quantize.", "post_"))}
    plain = names - layers - picture
    first = {name for name in layers if name.startswith("layers.0.")}
    assert plain | first == PUBLIC
    assert not PUBLIC_PICTURE - picture
    caption = set(to_public(image_models.llamagen_caption()))
    ends = ("cap_proj.fc1.weight", "cap_proj.fc2.weight", "uncond_embedding")
    assert {f"cls_embedding.{end}" for end in ends} <= caption


@pytest.mark.parametrize("kind", KINDS)
def test_public_weights_round_trip_through_files(kind: str, tmp_path: Path) -> None:
    toy = image_models.PAINTERS[kind]()
    public = to_public(toy)
    # what the public files have besides: an encoder that decodes nothing
    extra = {"encoder.conv_in.weight": torch.zeros(2), "quant_conv.bias": torch.zeros(2)}
    picture = {n: v for n, v in public.items() if n.startswith(("decoder.", "quantize", "post_"))}
    words = {name: value for name, value in public.items() if name not in picture}
    for name, tensors in (("words", words), ("picture", picture | extra)):
        kept = {key: value.contiguous() for key, value in tensors.items()}
        save_file(kept, tmp_path / f"{name}.safetensors")
    other = LlamaGenForImageGeneration(toy.config)
    load_public(other, tmp_path / "words.safetensors", tmp_path / "picture.safetensors")
    for name, value in toy.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    with pytest.raises(ValueError, match="picture="):
        load_public(other, tmp_path / "words.safetensors")


def test_weights_that_do_not_fit_are_refused() -> None:
    toy = image_models.llamagen_class()
    public = to_public(toy)
    short = {name: value for name, value in public.items() if name != "norm.weight"}
    with pytest.raises(ValueError, match=r"lack norm\.weight"):
        from_public(short, toy)
    with pytest.raises(ValueError, match=r"lm_head\.weight has shape"):
        from_public({**public, "output.weight": torch.zeros(3, 3)}, toy)
    with pytest.raises(ValueError, match="condition='sound'"):
        LlamaGenForImageGeneration(LlamaGenConfig(condition="sound"))


def test_saved_folders_load(tmp_path: Path) -> None:
    toy = image_models.llamagen_caption()
    toy.save_pretrained(tmp_path)
    other = LlamaGenForImageGeneration.from_pretrained(tmp_path)
    for name, value in toy.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
