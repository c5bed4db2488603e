"""Compressors with weights: against torch's own modules, and from disk and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

import mmspec
from mmspec.compressors import parse_compressor
from mmspec.compressors.attn_topk import AttentionTopK
from mmspec.compressors.average_pool import AveragePool
from mmspec.compressors.contract import Features
from mmspec.compressors.conv import Conv
from mmspec.compressors.elastic_gate import BRANCHES, ElasticGate, KeepGate
from mmspec.compressors.hide_all import HideAll
from mmspec.compressors.latent import Latent
from mmspec.compressors.learned import Attention, Learned, initial, save
from mmspec.compressors.q_former import QFormer
from mmspec.compressors.resampler import QueryResampler
from mmspec.compressors.space_to_depth import SpaceToDepth
from tests import toys
from tests.compressors.catalogue import GRIDS, WIDTH, random_features, signals
from tests.partners import noisy

torch.set_num_threads(1)

DESIGNS: list[Learned] = [
    Conv(3),
    ElasticGate(heads=4),
    Latent(5),
    QFormer(5, 4),
    QueryResampler(5, 4),
    SpaceToDepth(3),
]
LIKE = torch.zeros(1)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("design", [Conv(2, untrained=True), SpaceToDepth(2, untrained=True)])
def test_initial_weights_average(design: Learned, grid: tuple[int, ...] | None) -> None:
    features = random_features(grid)
    thin = design.build(WIDTH, LIKE).compress(features, {})
    expected = AveragePool(2).compress(features, {})
    assert_close(thin.features, expected.features)
    assert torch.equal(thin.positions, expected.positions)
    assert torch.equal(thin.sizes, expected.sizes)


def test_convolution_is_torchs() -> None:
    features = random_features((4, 6))
    network: Any = initial(Conv(2), WIDTH)
    for weight in network.parameters():
        nn.init.normal_(weight)
    image = features.values.T.view(1, WIDTH, 4, 6)
    kernel = network.depthwise.view(WIDTH, 1, 2, 2)
    expected = functional.conv2d(image, kernel, stride=2, groups=WIDTH)
    expected = functional.conv2d(expected, network.pointwise[..., None, None])
    assert_close(network(features, {}).features, expected[0].flatten(1).T)


def test_space_to_depth_is_torchs() -> None:
    features = random_features((4, 6))
    network: Any = initial(SpaceToDepth(2), WIDTH)
    nn.init.normal_(network.weight)
    image = features.values.T.view(1, WIDTH, 4, 6)
    deep = functional.pixel_unshuffle(image, 2)[0].flatten(1).T  # channels first, then places
    deep = deep.view(-1, WIDTH, 4).transpose(1, 2).flatten(1)
    assert_close(network(features, {}).features, deep @ network.weight.T)


def test_resampler_is_the_formula_and_knows_no_order() -> None:
    features = random_features(None)
    network: Any = initial(QueryResampler(5, 4), WIDTH)
    key, value = network.k_proj(features.values), network.v_proj(features.values)
    heads = []
    for head in range(4):
        own = slice(2 * head, 2 * head + 2)
        share = (network.q[:, head] @ key[:, own].T / 2**0.5).softmax(-1)
        heads.append(share @ value[:, own])
    thin = network(features, {})
    assert_close(thin.features, network.o_proj(torch.cat(heads, -1)))
    assert torch.equal(thin.positions, features.positions[-5:])
    mixed = Features(features.values[torch.randperm(21)], features.positions)
    assert_close(network(mixed, {}).features, thin.features)


def test_latents_are_convex_combinations() -> None:
    features = random_features((4, 6))
    network: Any = initial(Latent(5), WIDTH)
    thin = network(features, {})
    share = functional.softmax(network.weight @ features.values.T, -1)
    assert_close(thin.features, share @ features.values)
    assert torch.equal(thin.positions, features.positions[:5])
    assert bool((thin.features <= features.values.amax(0)).all())


def test_attention_is_torchs() -> None:
    ours, theirs = Attention(WIDTH, 4), nn.MultiheadAttention(WIDTH, 4, batch_first=True)
    parts = (ours.query, ours.key, ours.value)
    theirs.in_proj_weight.data = torch.cat([part.weight.data for part in parts])
    theirs.in_proj_bias.data = torch.cat([part.bias.data for part in parts])
    theirs.out_proj.weight.data, theirs.out_proj.bias.data = (
        ours.out.weight.data,
        ours.out.bias.data,
    )
    asking, asked = torch.randn(5, WIDTH), torch.randn(21, WIDTH)
    expected, _ = theirs(asking[None], asked[None], asked[None])
    assert_close(ours(asking, asked), expected[0])


def test_one_block_without_its_other_parts_is_attention_to_the_image() -> None:
    features = random_features(None)
    network: Any = initial(QFormer(5, 4, blocks=1), WIDTH)
    block = network.blocks[0]
    with torch.no_grad():
        for part in (block.own.out, block.down):
            part.weight.zero_()
            part.bias.zero_()
    found = block.cross(block.norms[1](network.queries), features.values)
    assert_close(network(features, {}).features, network.queries + found)


@pytest.mark.parametrize("branch", BRANCHES)
def test_the_gate_takes_its_best_branch(branch: str) -> None:
    features, told = random_features((4, 6)), signals(24)
    design = ElasticGate(0.3, 2, 5, 4)
    network: Any = initial(design, WIDTH)
    hidden = functional.silu(network.up(told["text"].mean(0)))
    assert_close(network.logits(told["text"]), network.down(hidden))
    with torch.no_grad():
        network.down.bias[BRANCHES.index(branch)] += 100
    made: dict[str, Any] = {
        "prune": lambda: AttentionTopK(0.3).compress(features, told),
        "pool": lambda: AveragePool(2).compress(features, told),
        "conv": lambda: network.conv(features, told),
        "resampler": lambda: network.resampler(features, told),
        "drop": lambda: HideAll().compress(features, told),
    }
    expected = made[branch]()
    for one in (network, KeepGate(WIDTH, ElasticGate(0.3, 2, 5, 4, branch))):
        one.load_state_dict(network.state_dict())
        assert_close(one(features, told).features, expected.features)


@pytest.mark.parametrize("design", DESIGNS, ids=repr)
def test_networks_come_back_from_disk(design: Learned, tmp_path: Path) -> None:
    network = initial(design, WIDTH)
    for weight in network.parameters():
        nn.init.normal_(weight)
    save(tmp_path, design, network, WIDTH)
    features, told = random_features((5, 6)), signals(30)
    maker: Any = type(design)
    own = {name: value for name, value in vars(design).items() if name != "weights"}
    again = maker(**own, weights=str(tmp_path)).build(WIDTH, LIKE)
    assert_close(again.compress(features, told).features, network(features, told).features)
    with pytest.raises(ValueError, match=r"has width 8, but 16 is required here"):
        maker(**own, weights=str(tmp_path)).build(16, LIKE)


def test_initial_weights_follow_from_their_seed() -> None:
    one, same, other = (
        QueryResampler(5, 4, seed=seed, untrained=True).build(WIDTH, LIKE) for seed in (1, 1, 2)
    )
    features = random_features(None)
    thin = one.compress(features, {}).features
    assert torch.equal(thin, same.compress(features, {}).features)
    assert not torch.equal(thin, other.compress(features, {}).features)


@pytest.mark.parametrize("name", ["conv", "elastic-gate", "latent", "q-former", "resampler"])
def test_untrained_ones_are_refused_unless_meant(name: str) -> None:
    model, drafter = toys.model("llava"), noisy("llava")
    with pytest.raises(ValueError, match="has trained parameters, and none were given; give wei"):
        mmspec.accelerate(model, "coupled", drafter=drafter, compressor=name)
    text = f"{name}:untrained=true"
    assert mmspec.accelerate(model, "coupled", drafter=drafter, compressor=text)


def test_folders_of_others_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no compressor.json and compressor.safetensors"):
        parse_compressor(f"conv:weights={tmp_path}").build(WIDTH, LIKE)
    save(tmp_path, Conv(2), initial(Conv(2), WIDTH), WIDTH)
    with pytest.raises(ValueError, match="has class Conv, but SpaceToDepth is required"):
        parse_compressor(f"space-to-depth:weights={tmp_path}").build(WIDTH, LIKE)
    with pytest.raises(ValueError, match=r"has parameters {'stride': 2}, but {'stride': 3} is"):
        parse_compressor(f"conv:stride=3,weights={tmp_path}").build(WIDTH, LIKE)


def test_a_design_does_not_thin() -> None:
    with pytest.raises(ValueError, match=r"a design without parameters; call build"):
        Conv().compress(random_features(None), {})


@pytest.mark.parametrize("name", ["compressor.json", "compressor.safetensors"])
def test_damaged_folders_are_named(tmp_path: Path, name: str) -> None:
    design = QueryResampler(5, 4)
    save(tmp_path, design, initial(design, WIDTH), WIDTH)
    (tmp_path / name).write_bytes(b"{")
    with pytest.raises(ValueError, match=r"compressor.*; copy (or download )?it again"):
        QueryResampler(5, 4, weights=str(tmp_path)).build(WIDTH, LIKE)


def test_what_is_no_name_is_refused() -> None:
    with pytest.raises(ValueError, match="None is not a name of a compressor"):
        parse_compressor(None)  # type: ignore[arg-type]
