"""Image-to-image pipelines: the loop gives the output of the pipeline's own call, or refuses."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from diffusers.callbacks import SDXLCFGCutoffCallback
from torch import Tensor
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection

import mmspec
from mmspec.modalities.diffusion.inpainting import InpaintingDetector
from mmspec.modalities.diffusion.step_callback import StepCallback
from tests.covering import exhaustive, limited
from tests.modalities.sampling import FROZEN, PLAIN, STEPS, check_rows, run_pipeline_alone
from tests.toys.clip_pipelines import BUILDERS as CLIPS
from tests.toys.clip_pipelines import clip_of, frame
from tests.toys.image_to_image_pipelines import BUILDERS, from_picture, mask, picture
from tests.toys.pipelines import pipeline


def sample(fast: Any, given: dict[str, Any], **more: Any) -> Tensor:
    settings = {"num_inference_steps": STEPS, "output_type": "latent", **given, **more}
    found: Tensor = fast(**settings)[0]
    return found


def free(pipe: Any, name: str) -> Tensor | None:
    """The free elements of the latents under an inpainting mask."""
    if not name.endswith("-inpaint"):
        return None
    channels = 16 if name == "sd3-inpaint" else 4
    shown = mask().repeat(1, channels, 1, 1)
    return ((pipe._pack_latents(shown, 1, 4, 8, 8) if name == "flux-inpaint" else shown) > 0)[0]


@pytest.mark.parametrize("name", limited(exhaustive(BUILDERS, [*BUILDERS][::2]), 4))
def test_plain_sampling_is_the_pipelines_own(name: str) -> None:
    pipe, given = from_picture(name)
    where = free(pipe, name)
    expected = run_pipeline_alone(pipe, 1, lambda one: sample(pipe, given, generator=one), where)
    steps = pipe.num_timesteps
    assert steps < STEPS or "strength" not in given
    fast: Any = mmspec.accelerate(pipe, PLAIN)
    found = sample(fast, given, generator=torch.Generator().manual_seed(5))
    assert expected.std() > 0.05
    torch.testing.assert_close(found, expected, atol=1e-4 * float(expected.std()), rtol=1e-4)
    assert fast.last_stats.target_calls == steps


@pytest.mark.parametrize(
    "name", exhaustive(["sd-image", "sd-inpaint", "flux-control"], {"sd-inpaint"})
)
def test_a_seed_is_a_picture_and_windows_keep_its_known_part(name: str) -> None:
    pipe, given = from_picture(name)
    fast: Any = mmspec.accelerate(pipe, FROZEN)
    one, again, other = (sample(fast, given, seed=seed) for seed in (0, 0, 1))
    assert fast.last_stats.num_draft_tokens > 0
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    where = free(pipe, name)
    if where is not None:
        plain = sample(mmspec.accelerate(pipe, PLAIN), given, seed=0)
        assert torch.equal(one[:, ~where], plain[:, ~where])  # the picture, as it was encoded


@pytest.mark.parametrize(
    "name",
    limited(
        [
            pytest.param(name, marks=pytest.mark.slow)
            if name in ("hunyuan-behind", "wan-2.2")
            else name
            for name in CLIPS
        ],
        2,
    ),
)
def test_clips_of_a_first_frame_are_the_pipelines_own(name: str) -> None:
    """The image is after the latents, before them, or inside them; with separate timesteps."""
    pipe, given = clip_of(name)
    expected = run_pipeline_alone(pipe, 1, lambda one: sample(pipe, given, generator=one))
    fast: Any = mmspec.accelerate(pipe, PLAIN)
    one, other = (
        sample(fast, {**given, "image": image}, generator=torch.Generator().manual_seed(5))
        for image in (given["image"], frame(4))
    )
    scale = float(expected.std())
    assert scale > 0.05
    torch.testing.assert_close(one, expected, atol=1e-4 * scale, rtol=1e-4)
    assert not torch.allclose(one, other, atol=1e-2 * scale)
    check_rows(pipe, given)


def test_a_chain_starts_from_the_picture_and_not_from_noise() -> None:
    """At strength 1 all steps run, and the initial state is still the noised image."""
    pipe, given = from_picture("sdxl-image")
    fast: Any = mmspec.accelerate(pipe, PLAIN)
    shown: list[Tensor] = []
    pipe.unet.register_forward_pre_hook(lambda module, args: shown.append(args[0]))
    starts = []
    for image in (given["image"], 1 - given["image"]):
        sample(fast, {**given, "image": image, "strength": 1.0}, seed=0)
        starts.append(shown[-STEPS])
    assert fast.last_stats.target_calls == STEPS
    assert not torch.equal(*starts)


def pasted(mask: Tensor) -> InpaintingDetector:
    """Two runs of three steps in which `mask` of a state overwrites the latents."""
    found, states = InpaintingDetector(), iter(torch.randn(6, 2, 4, 8, 8))
    for _ in range(2):
        found.begin_run()
        for _ in range(2):
            state = next(states)
            found.add(state, mask * state + (1 - mask) * 0.5)
    return found


def test_only_a_hard_mask_shared_by_all_images_is_supported() -> None:
    hard = mask().expand(2, 4, 8, 8)
    found = pasted(hard)
    assert found.is_sure(3)
    places, known = found.split_states(torch.zeros(2, 4, 8, 8))
    assert places.tolist() == hard[0].flatten().nonzero().flatten().tolist()
    assert known.shape == (3, 2, 4 * 8 * 8)
    with pytest.raises(ValueError, match=r"depending on their values.*without a soft mask"):
        pasted(0.9 * hard).is_sure(3)
    with pytest.raises(ValueError, match="masks of these pictures differ"):
        pasted(torch.stack((hard[0], 1 - hard[0]))).is_sure(3)
    with pytest.raises(ValueError, match="in some steps only"):
        pasted(hard).is_sure(4)
    half = InpaintingDetector()
    half.begin_run()
    half.add(torch.ones(1, 2), torch.tensor([[1.0, 0.0]]))
    assert not half.is_sure(2)  # one draw proves nothing


def test_a_callback_sees_every_step_in_order() -> None:
    pipe, given = from_picture("sd-image")
    told: list[list[Any]] = [[], [], []]

    def watching(place: int) -> Any:
        def watch(one: Any, step: int, timestep: Any, tensors: dict[str, Tensor]) -> Any:
            told[place].append((step, int(timestep), tensors["latents"].clone()))
            return tensors

        return {"callback_on_step_end": watch}

    run_pipeline_alone(pipe, 1, lambda g: sample(pipe, given, generator=g, **watching(0)))
    generator = torch.Generator().manual_seed(5)
    sample(mmspec.accelerate(pipe, PLAIN), given, generator=generator, **watching(1))
    sample(mmspec.accelerate(pipe, FROZEN), {**given, "prompt": ["a", "b"]}, seed=0, **watching(2))
    for own, found in zip(told[0], told[1], strict=True):
        assert own[:2] == found[:2]
        torch.testing.assert_close(found[2], own[2], atol=1e-4, rtol=1e-4)
    assert [one[:2] for one in told[2]] == [one[:2] for one in told[0]]
    assert told[2][0][2].shape[0] == 2


def test_a_callback_must_be_read_only() -> None:
    pipe, given = from_picture("sd-image")
    fast: Any = mmspec.accelerate(pipe, FROZEN)

    def changing(one: Any, step: int, timestep: Any, tensors: dict[str, Tensor]) -> Any:
        return {"latents": tensors["latents"] + 1}

    with pytest.raises(ValueError, match=r"changes latents in step 0.*make it read-only"):
        sample(fast, given, seed=0, callback_on_step_end=changing)
    names = ["latents", "prompt_embeds"]
    settings: dict[str, Any] = {"callback_on_step_end_tensor_inputs": names}
    with pytest.raises(ValueError, match="has more than the states"):
        sample(fast, given, seed=0, callback_on_step_end=lambda *news: {}, **settings)
    with pytest.raises(ValueError, match="callback_on_step_end=5 is not callable; give"):
        sample(fast, given, seed=0, callback_on_step_end=5)
    with pytest.raises(ValueError, match="callback is deprecated; give callback_on_step_end"):
        StepCallback.of({"callback": changing})


def test_a_callback_that_changes_the_pipeline_is_refused_every_time() -> None:
    pipe, given = from_picture("sdxl-image")
    fast: Any = mmspec.accelerate(pipe, FROZEN)

    def setting(name: str, value: Any) -> Any:
        def change(one: Any, step: int, timestep: Any, tensors: dict[str, Tensor]) -> Any:
            setattr(one, name, value)
            return tensors

        return change

    for name, value in [("_interrupt", True), ("_interrupt", True), ("_guidance_scale", 1.5)]:
        with pytest.raises(ValueError, match=rf"changes pipe\.{name} in step 0.*make it read-only"):
            sample(fast, given, seed=0, callback_on_step_end=setting(name, value))
    assert not {"_interrupt", "_guidance_scale"} & vars(pipe).keys()
    cut = SDXLCFGCutoffCallback(cutoff_step_ratio=0.5)  # has its own tensor inputs
    with pytest.raises(ValueError, match=r"inputs=\['prompt_embeds', .* has more"):
        sample(fast, given, seed=0, callback_on_step_end=cut)


def test_a_callback_is_shown_the_pipeline_as_it_was_called() -> None:
    pipe, given = from_picture("sdxl-image")
    told: list[Any] = []

    def watch(one: Any, step: int, timestep: Any, tensors: dict[str, Tensor]) -> Any:
        told.append((type(one), one.num_timesteps, one.guidance_scale, one.unet is pipe.unet))
        return tensors

    fast: Any = mmspec.accelerate(pipe, FROZEN)
    sample(fast, given, seed=0, guidance_scale=3.5, callback_on_step_end=watch)
    assert told == [(type(pipe), len(told), 3.5, True)] * len(told)
    assert told


def test_a_seed_fixes_images_whose_number_is_unknown() -> None:
    parts = {**pipeline("sd").components, "feature_extractor": CLIPImageProcessor(size=8)}
    for name in ("text_encoder", "tokenizer"):
        del parts[name]
    seeing = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=37,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
        projection_dim=32,
    )
    parts["image_encoder"] = CLIPVisionModelWithProjection(seeing)
    pipe = diffusers.StableDiffusionImageVariationPipeline(**parts, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    fast: Any = mmspec.accelerate(pipe, FROZEN)
    given = {"image": picture(), "height": 8, "width": 8, "num_images_per_prompt": 2}
    one, again, other = (sample(fast, given, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert not torch.equal(one[0], one[1])
    with pytest.raises(
        ValueError, match=r"row_ids=\[3, 4\].*do not determine the number.*drop row_ids"
    ):
        sample(fast, given, seed=0, row_ids=[3, 4])
