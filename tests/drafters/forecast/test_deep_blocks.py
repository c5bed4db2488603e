"""DeepCache: a cached step is the network with the deep feature of an earlier step, and no more."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

import mmspec
from mmspec.drafters.forecast.cached import SamplerCall
from mmspec.drafters.forecast.deep_blocks import DeepBlockCache, DeepBlockHooks, find_deep_blocks
from mmspec.verifiers.first_block import FirstBlockGate
from tests.toys.pipelines import build_request, pipeline

STEPS = 6


def draw(calling: Any, family: str = "sd", **given: Any) -> Tensor:
    output = calling(
        **build_request(family, 2), num_inference_steps=STEPS, output_type="pt", **given
    )
    return torch.as_tensor(output.frames if "frames" in output else output.images)


def plain(pipe: Any, family: str = "sd") -> Tensor:
    torch.manual_seed(5)
    return draw(pipe, family, generator=torch.Generator().manual_seed(5))


def substitute(pipe: Any, interval: int) -> Tensor:
    """Every block is computed in every step, then the last deep output is replaced: the oracle."""
    kept: list[Tensor] = []
    step = iter(range(STEPS))

    def replace(module: Any, args: Any, output: Tensor) -> Tensor | None:
        if next(step) % interval == 0:
            kept[:] = [output]
            return None
        return kept[0]

    handle = pipe.unet.up_blocks[-2].register_forward_hook(replace)
    try:
        return plain(pipe)
    finally:
        handle.remove()


@pytest.mark.parametrize("interval", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_only_the_deep_feature_is_old(interval: int) -> None:
    pipe = pipeline("sd")
    wanted = substitute(pipe, interval)
    fast: Any = mmspec.accelerate(pipe, "deep-cache", interval=interval)
    assert torch.equal(draw(fast, seed=5), wanted)
    assert fast.last_stats.target_calls == -(-STEPS // interval)
    assert not torch.equal(wanted, plain(pipe))
    assert not torch.equal(wanted, substitute(pipe, interval + 1))


def test_features_of_an_earlier_interval_are_not_reused() -> None:
    """As where guidance, with rows of its own, is off in steps 2 and 3; 3 begins an interval."""
    module = nn.Identity()
    hooks = DeepBlockHooks([module], 3)
    found = []
    for step, state in enumerate(("x4", "x4", "x2", "x2", "x4", "x4", "x4")):
        hooks.enter(SamplerCall(state, step, 7, 0.0, 0.0, {}))
        found.append(int(module(torch.tensor(float(step)))))
    hooks.close(True)
    assert found == [0, 0, 2, 3, 4, 4, 6]


@pytest.mark.parametrize(
    "family",
    ["sd", *(pytest.param(one, marks=pytest.mark.exhaustive) for one in ("sdxl", "animatediff"))],
)
def test_it_leaves_the_pipeline_as_it_was(family: str) -> None:
    pipe = pipeline(family)
    before = [set(vars(module)) for module in pipe.unet.modules()]
    wanted = plain(pipe, family)
    off: Any = mmspec.accelerate(pipe, "deep-cache", interval=1)
    assert torch.equal(draw(off, family, seed=5), wanted)
    assert off.last_stats.skipped_work == 0
    fast: Any = mmspec.accelerate(pipe, "deep-cache")
    found = draw(fast, family, seed=5)
    assert fast.last_stats.skipped_work > 0.2
    assert torch.equal(draw(fast, family, seed=5), found)  # nothing is left from the first call
    assert not torch.equal(found, wanted)
    assert [set(vars(module)) for module in pipe.unet.modules()] == before
    assert torch.equal(plain(pipe, family), wanted)


@pytest.mark.exhaustive
def test_blocks_that_write_into_their_input_do_not_reach_the_cache() -> None:
    """FreeU scales the deep feature in place, in full and in cached steps."""
    pipe = pipeline("sd")
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    wanted = plain(pipe)
    off: Any = mmspec.accelerate(pipe, "deep-cache", interval=1)
    assert torch.equal(draw(off, seed=5), wanted)
    seen: list[Tensor] = []
    last = pipe.unet.up_blocks[-1]
    handle = last.register_forward_pre_hook(
        lambda _, args, given: seen.append(given["hidden_states"].clone()), with_kwargs=True
    )
    draw(mmspec.accelerate(pipe, "deep-cache", interval=STEPS), seed=5)
    handle.remove()
    assert len(seen) == STEPS
    assert all(torch.equal(one, seen[0]) for one in seen[1:])


def test_what_does_not_fit_is_refused() -> None:
    pipe = pipeline("sd")
    with pytest.raises(ValueError, match=r"interval=0 must be a whole number of at least 1"):
        mmspec.accelerate(pipe, "deep-cache", interval=0)
    with pytest.raises(ValueError, match=r"depth=0 must be a whole number of at least 1"):
        mmspec.accelerate(pipe, "deep-cache", depth=0)
    with pytest.raises(ValueError, match=r"depth=2 leaves no level of the 2 of UNet2D.*depth=1"):
        draw(mmspec.accelerate(pipe, "deep-cache", depth=2))
    with pytest.raises(ValueError, match=r"DiTTransformer2DModel is not a U-Net .*sea-cache"):
        draw(mmspec.accelerate(pipeline("dit"), "deep-cache"), "dit")
    with pytest.raises(ValueError, match=r"FirstBlockGate has no interval.*an IntervalGate"):
        DeepBlockCache().under(FirstBlockGate())


@pytest.mark.exhaustive
def test_layers_that_are_called_one_by_one_are_refused() -> None:
    network = diffusers.models.StableCascadeUNet(
        in_channels=4,
        out_channels=4,
        conditioning_dim=16,
        block_out_channels=(16, 16),
        num_attention_heads=(0, 2),
        down_num_layers_per_block=(1, 1),
        up_num_layers_per_block=(1, 1),
        down_blocks_repeat_mappers=(1, 1),
        up_blocks_repeat_mappers=(1, 1),
        block_types_per_layer=(("SDCascadeResBlock",), ("SDCascadeResBlock",)),
        switch_level=(False,),
    )
    with pytest.raises(ValueError, match=r"StableCascadeUNet calls the layers .*lite=True"):
        find_deep_blocks(network, 1)
