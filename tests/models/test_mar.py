"""MAR against a direct reading of its formulas, under the names of its public weights."""

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

from mmspec.distributions.noise import KeyedNoise
from mmspec.models.mar import MarConfig, MarForImageGeneration
from mmspec.models.mar_head import HeadGrid
from mmspec.models.mar_weights import from_public, load_public, to_public
from mmspec.targets.continuous.patches import PatchSettings, cell_keys, draw_order
from tests.toys.mar import CLASSES, PLAN, SIZES, mar


def norm(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    return functional.layer_norm(
        x, x.shape[-1:], weights.get(name + "weight"), weights.get(name + "bias"), 1e-6
    )


def linear(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    return x @ weights[name + "weight"].T + weights[name + "bias"]


def transformer(x: Tensor, weights: dict[str, Tensor], name: str, depth: int, heads: int) -> Tensor:
    """Blocks of one picture (P, D)."""
    for layer in range(depth):
        block = f"{name}_blocks.{layer}."
        fused = linear(norm(x, weights, block + "norm1."), weights, block + "attn.qkv.")
        q, k, v = (part.view(len(x), heads, -1).transpose(0, 1) for part in fused.chunk(3, -1))
        scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1)
        mixed = (scores @ v).transpose(0, 1).flatten(1)
        x = x + linear(mixed, weights, block + "attn.proj.")
        inner = linear(norm(x, weights, block + "norm2."), weights, block + "mlp.fc1.")
        x = x + linear(functional.gelu(inner), weights, block + "mlp.fc2.")
    return norm(x, weights, f"{name}_norm.")


def conditions(
    weights: dict[str, Tensor], config: MarConfig, latents: Tensor, shown: Tensor, label: int | None
) -> Tensor:
    """What the transformer says about every place of one picture."""
    buffer = config.buffer_size
    front = weights["fake_latent"][0] if label is None else weights["class_emb.weight"][label]
    x = torch.cat((front.expand(buffer, -1), linear(latents, weights, "z_proj.")))
    x = norm(x + weights["encoder_pos_embed_learned"][0], weights, "z_proj_ln.")
    seen = [*range(buffer), *(buffer + i for i in range(config.cells) if shown[i])]
    heads, depth = config.num_attention_heads, config.num_hidden_layers
    x = transformer(x[seen], weights, "encoder", depth, heads)
    places = weights["mask_token"][0].repeat(buffer + config.cells, 1)
    places[seen] = linear(x, weights, "decoder_embed.")
    places = places + weights["decoder_pos_embed_learned"][0]
    heads, depth = config.decoder_num_attention_heads, config.decoder_num_hidden_layers
    out = transformer(places, weights, "decoder", depth, heads)[buffer:]
    return out + weights["diffusion_pos_embed_learned"][0]


def head(weights: dict[str, Tensor], config: MarConfig, x: Tensor, time: int, z: Tensor) -> Tensor:
    """The output (2 C) of the diffusion head in one state."""
    weights = {k.removeprefix("diffloss.net."): v for k, v in weights.items() if "diffloss" in k}
    angle = [time * 10_000 ** (-i / 128) for i in range(128)]
    waves = torch.tensor([math.cos(a) for a in angle] + [math.sin(a) for a in angle])
    told = linear(
        functional.silu(linear(waves, weights, "time_embed.mlp.0.")), weights, "time_embed.mlp.2."
    )
    told = told + linear(z, weights, "cond_embed.")
    x = linear(x, weights, "input_proj.")
    for layer in range(config.head_depth):
        block = f"res_blocks.{layer}."
        shift, scale, gate = linear(
            functional.silu(told), weights, block + "adaLN_modulation.1."
        ).chunk(3)
        inner = norm(x, weights, block + "in_ln.") * (1 + scale) + shift
        inner = linear(
            functional.silu(linear(inner, weights, block + "mlp.0.")), weights, block + "mlp.2."
        )
        x = x + gate * inner
    shift, scale = linear(functional.silu(told), weights, "final_layer.adaLN_modulation.1.").chunk(
        2
    )
    return linear(norm(x, weights, "") * (1 + scale) + shift, weights, "final_layer.linear.")


def schedule(base: int, steps: int) -> tuple[list[int], list[float]]:
    """Time and cumulative signal of each step taken, time rising; floats, as published."""

    def wanted(t: float) -> float:
        return math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2

    product, shares = 1.0, []
    for i in range(base):
        product *= 1 - min(1 - wanted((i + 1) / base) / wanted(i / base), 0.999)
        shares.append(product)
    taken = [round(i * (base - 1) / (steps - 1)) for i in range(steps)]
    return taken, [shares[i] for i in taken]


def slow_sample(
    model: MarForImageGeneration, labels: list[int], plan: PatchSettings, seed: int
) -> Tensor:
    """The published sampler, cell by cell; (B, L, C)."""
    weights, config = to_public(model), model.config
    noise = KeyedNoise.from_seed(seed, len(labels), torch.device("cpu"))
    turns, total = draw_order(noise, config.cells), config.cells
    times, shares = schedule(config.base_steps, plan.head_steps)
    pictures = []
    for row, label in enumerate(labels):
        latents = torch.zeros(total, config.token_size)
        hidden, shown = total, torch.zeros(total, dtype=torch.bool)
        for step in range(plan.steps):
            seen = conditions(weights, config, latents, shown, label)
            blind = conditions(weights, config, latents, shown, None)
            left = math.floor(total * math.cos(math.pi / 2 * (step + 1) / plan.steps))
            left = max(1, min(hidden - 1, left))
            scale = 1 + (plan.guidance - 1) * (total - left) / total
            if step == plan.steps - 1:
                left = 0
            cells = turns[row, total - hidden : total - left].tolist()
            for cell in cells:
                driving = cell_keys(noise, torch.tensor([[cell]] * len(labels)))
                drive = driving.normal(plan.head_steps + 1, config.token_size)[row, 0]
                x = drive[0]
                for index, now in enumerate(reversed(range(plan.head_steps))):
                    share, before = shares[now], shares[now - 1] if now else 1.0
                    beta = 1 - share / before
                    with_class = head(weights, config, x, times[now], seen[cell])
                    without = head(weights, config, x, times[now], blind[cell])
                    (eps, spread), (free, _) = with_class.chunk(2), without.chunk(2)
                    eps = free + scale * (eps - free)
                    clean = x / share**0.5 - (1 / share - 1) ** 0.5 * eps
                    mean = beta * before**0.5 / (1 - share) * clean
                    mean = mean + (1 - before) * (1 - beta) ** 0.5 / (1 - share) * x
                    first = max(now, 1)
                    low = (1 - shares[first] / shares[first - 1]) * (1 - shares[first - 1])
                    low = math.log(low / (1 - shares[first]))
                    part = (spread + 1) / 2
                    std = (0.5 * (part * math.log(beta) + (1 - part) * low)).exp()
                    noisy = now > 0 or plan.last_noise
                    x = mean + (plan.temperature * std * drive[index + 1] if noisy else 0)
                latents[cell] = x
            shown[cells] = True
            hidden = left
        pictures.append(latents)
    return torch.stack(pictures)


@torch.no_grad()
def test_the_transformer_is_the_published_one() -> None:
    """Rows that show different numbers of places, one of them none."""
    model = mar()
    latents = torch.randn(3, 9, 2, generator=torch.Generator().manual_seed(1))
    shown = torch.zeros(3, 9, dtype=torch.bool)
    shown[1, [2, 7]] = True
    shown[2, [0, 3, 4, 8]] = True
    found = model(latents, shown, torch.tensor([1, CLASSES, 4]))
    for row, label in enumerate((1, None, 4)):
        expected = conditions(to_public(model), model.config, latents[row], shown[row], label)
        assert_close(found[row], expected, atol=2e-6, rtol=1e-5)
    assert (found[0] - found[1]).abs().max() > 0.01


@torch.no_grad()
@pytest.mark.parametrize(
    "more", [{}, {"last_noise": False}, {"temperature": 0.7, "schedule": "linear"}], ids=str
)
def test_sampling_is_the_published_one(more: dict[str, Any]) -> None:
    plan = PatchSettings(
        **{"steps": 3, "guidance": 2.0, "head_steps": 3, "last_noise": True, **more}
    )
    model = mar()
    found = model.sample(torch.tensor([1, 3]), plan, seed=4)
    expected = model.to_vae_latents(slow_sample(model, [1, 3], plan, seed=4))
    assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert found.std() > 0.1


@torch.no_grad()
def test_a_picture_depends_on_its_own_seed_alone() -> None:
    model = mar()
    pair = model.sample(torch.tensor([1, 3]), PLAN, seed=4)
    alone = model.sample(torch.tensor([3]), PLAN, seed=4, row_ids=[1])
    assert_close(pair[1:], alone, atol=1e-4, rtol=1e-4)
    assert (pair[1:] - model.sample(torch.tensor([3]), PLAN, seed=5)).abs().max() > 0.1


def test_the_grid_of_the_head() -> None:
    """Means of `GaussianKernel.ancestral` and the bounds of the variance, step by step."""
    times, shares = schedule(50, 7)
    grid = HeadGrid.cosine(50, 7)
    assert grid.times.tolist() == times[::-1]
    assert grid.kernel.is_random == (True,) * 6 + (False,)
    assert all(HeadGrid.cosine(50, 7, last_noise=True).kernel.is_random)
    for index, now in enumerate(reversed(range(7))):
        before = shares[now - 1] if now else 1.0
        beta = 1 - shares[now] / before
        assert grid.high[index].item() == pytest.approx(math.log(beta))
        clean = beta * before**0.5 / (1 - shares[now])
        assert grid.kernel.clean[index].item() == pytest.approx(clean, rel=1e-9)
        small = beta * (1 - before) / (1 - shares[now])
        if now:
            assert grid.low[index].item() == pytest.approx(math.log(small))
            assert grid.kernel.std[index].item() == pytest.approx(small**0.5)
    assert grid.low[-1] == grid.low[-2]


@torch.no_grad()
def test_a_head_may_predict_velocity() -> None:
    """x = alpha clean + sigma eps and v = alpha eps - sigma clean, with guidance on v."""
    model = mar(prediction="velocity")
    head = model.make_sampler(PLAN)
    generator = torch.Generator().manual_seed(3)
    states, condition = (torch.randn(*size, generator=generator) for size in ((6, 2), (6, 2, 24)))
    step = torch.tensor([0, 1, 2, 3, 0, 2])
    scale = torch.linspace(1, 3, 6)
    seen = head.predict(states, step, condition, scale)
    time = head.grid.times[step]
    told, silent = (model.head(states, time, condition[:, b]).chunk(2, -1)[0] for b in (0, 1))
    velocity = silent + scale[:, None] * (told - silent)
    alpha, sigma = (t.float()[step, None] for t in (head.kernel.alpha, head.kernel.sigma))
    assert_close(seen.clean, alpha * states - sigma * velocity, atol=1e-5, rtol=1e-4)
    other = mar().make_sampler(PLAN).predict(states, step, condition, scale)
    assert (other.clean - seen.clean).abs().max() > 0.1
    with pytest.raises(ValueError, match=r"prediction='speed' is not known.*'noise' or 'velocity'"):
        mar(prediction="speed")


def test_pictures_are_laid_out_as_the_vae_has_them() -> None:
    model = mar(channels=3, patch_size=2)
    latents = torch.randn(2, 9, 12)
    picture = model.to_vae_latents(latents)
    assert picture.shape == (2, 3, 6, 6)
    for cell, channel, y, x in [(0, 0, 0, 0), (5, 2, 1, 0), (8, 1, 1, 1), (3, 0, 0, 1)]:
        row, column = divmod(cell, 3)
        found = picture[:, channel, 2 * row + y, 2 * column + x]
        assert torch.equal(found, latents[:, cell, channel * 4 + y * 2 + x])


def test_public_weights_and_back(tmp_path: Path) -> None:
    model, other = mar(0), mar(1)
    public = {name: value.contiguous() for name, value in to_public(model).items()}
    for name in ("encoder_blocks.1.attn.qkv.weight", "diffloss.net.res_blocks.0.in_ln.bias"):
        assert name in public
    save_file(public, tmp_path / "mar.safetensors")
    load_public(other, tmp_path / "mar.safetensors")
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    public.pop("z_proj.bias")
    with pytest.raises(ValueError, match=r"the public weights lack z_proj\.bias"):
        from_public(public, other)
    with pytest.raises(ValueError, match=r"class_table\.weight has shape.*configuration asks"):
        from_public(to_public(model), mar(num_classes=7))


def test_a_folder_and_back(tmp_path: Path) -> None:
    model = mar()
    model.save_pretrained(tmp_path)
    loaded = MarForImageGeneration.from_pretrained(tmp_path)
    assert loaded.config.cells == SIZES["side"] ** 2
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="head_steps=9 do not fit the 8 training steps"):
        mar().make_sampler(PatchSettings(steps=2, head_steps=9)).kernel  # noqa: B018
    with pytest.raises(ValueError, match="a width of 16 is not divisible by 3 heads"):
        mar(num_attention_heads=3)
