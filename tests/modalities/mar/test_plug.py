"""Accelerated MAR models against their own plain sampling."""

from __future__ import annotations

import copy
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import mmspec
from mmspec.accelerated import Accelerated
from mmspec.decode import BrokenLogits
from mmspec.modalities.mar.reader import class_tensor
from mmspec.targets.continuous.patches import PatchSettings
from mmspec.verifiers.path_ratio import PathRatio
from tests.toys.mar import PLAN, mar, settings

LABELS = [1, None, 3]
CALL: dict[str, Any] = {"class_labels": LABELS, "seed": 2}
NONE = torch.tensor([1, 5, 3])


def accelerate(model: Any, recipe: str | None = None, **parts: Any) -> Any:
    """An `Accelerated`, as the annotation of `accelerate` has another class."""
    return mmspec.accelerate(model, recipe, **parts)


@pytest.mark.parametrize(("length", "calls"), [(1, 2), (3, 1), (4, 1)])
def test_a_copy_is_fully_accepted_and_gives_the_plain_image(length: int, calls: int) -> None:
    """Bit for bit in float32; a call advances an image by the draft and one more step."""
    model = mar()
    plain = model.sample(NONE, PLAN, seed=2)
    fast = accelerate(model, "cspd-coupled", drafter=copy.deepcopy(model), length=length)
    out = fast.generate_images(**CALL, **settings(PLAN))
    assert torch.equal(out.latents, plain)
    assert out.stats.exact
    assert out.stats.num_accepted_draft_tokens == out.stats.num_draft_tokens
    assert out.stats.target_calls == calls
    assert out.stats.num_new_tokens == 3 * PLAN.steps
    assert out.images is None
    assert out.stats.fallback is None


@pytest.mark.parametrize("last_noise", [False, True])
def test_a_copy_with_one_step_groups_gives_the_plain_image(last_noise: bool) -> None:
    """Groups of one step keep the target's distribution (A = 1), wider groups do not."""
    model, plan = mar(), PatchSettings(**{**asdict(PLAN), "last_noise": last_noise})
    plain = model.sample(NONE, plan, seed=2)
    fast = accelerate(model, "cspd", drafter=copy.deepcopy(model), length=1, prefill=0)
    out = fast.generate_images(**CALL, **settings(plan))
    assert torch.equal(out.latents, plain)
    assert not out.stats.exact
    assert out.stats.target_calls == PLAN.steps
    wide = accelerate(model, "cspd", drafter=copy.deepcopy(model), tau=1.0)
    other = wide.generate_images(**CALL, **settings(plan))
    assert other.stats.target_calls == 2  # step 0, then the group of all others
    assert (other.latents - plain).abs().max() > 1e-3


def test_a_poor_draft_still_ends() -> None:
    """Drafts of another model are rejected and resampled; every image is finished."""
    fast = accelerate(mar(), "cspd-coupled", drafter=mar(7), length=2)
    out = fast.generate_images(**CALL, **settings(PLAN))
    assert out.latents.isfinite().all()
    assert out.stats.fallback is None
    assert out.stats.num_accepted_draft_tokens < out.stats.num_draft_tokens
    assert out.stats.num_new_tokens == 3 * PLAN.steps


def broken_once(model: Any) -> Any:
    """The model, whose head returns NaN in its first call."""
    first = iter((True,))

    def damage(module: Any, given: Any, output: torch.Tensor) -> torch.Tensor | None:
        return output * torch.nan if next(first, False) else None

    model.head.output.register_forward_hook(damage)
    return model


@pytest.mark.parametrize("recipe", ["cspd", "cspd-coupled"])
def test_broken_drafts_cost_speed_and_a_broken_target_is_one_error(recipe: str) -> None:
    fast = accelerate(mar(), recipe, drafter=broken_once(mar(7)))
    out = fast.generate_images(**CALL, **settings(PLAN))
    assert "NaN" in str(out.stats.fallback)
    assert out.latents.isfinite().all()
    fast = accelerate(broken_once(mar()), recipe, drafter=mar(7))
    with pytest.raises(BrokenLogits, match=r"diffusion head has .* NaN or infinite in round"):
        fast.generate_images(**CALL, **settings(PLAN))
    assert fast.generate_images(**CALL, **settings(PLAN)).latents.isfinite().all()


def test_pictures_do_not_depend_on_their_batch() -> None:
    """Up to rounding, for accepted, rejected and resampled steps."""
    fast = accelerate(mar(), "cspd-coupled", drafter=mar(7), length=2)
    together = fast.generate_images(**CALL, **settings(PLAN)).latents
    alone = fast.generate_images(class_labels=3, seed=2, row_ids=[2], **settings(PLAN)).latents
    assert_close(together[2:], alone, rtol=1e-3, atol=1e-3)


def test_classes_may_be_numbers_of_numpy() -> None:
    for given in (np.array([3, 1]), torch.tensor([3, 1]), [3, 1]):
        assert class_tensor(mar(), given).tolist() == [3, 1]
    assert class_tensor(mar(), np.int64(3)).tolist() == [3]
    with pytest.raises(ValueError, match=r"class_labels=0\.5 is not known"):
        class_tensor(mar(), np.array([0.5]))


def test_a_vae_makes_pixels() -> None:
    def decode(latents: torch.Tensor) -> tuple[torch.Tensor]:
        return (latents.clamp(-1, 1).repeat(1, 2, 1, 1)[:, :3],)

    model = mar()
    fast = accelerate(model, "cspd", drafter=mar(7))
    out = fast.generate_images(**CALL, **settings(PLAN), vae=SimpleNamespace(decode=decode))
    assert out.images is not None
    assert [image.size for image in out.images] == [(3, 3)] * 3


def test_repr_of_an_accelerated_model() -> None:
    fast = accelerate(mar(), drafter=mar(7))
    assert isinstance(fast, Accelerated)
    assert repr(fast) == "Accelerated(MarForImageGeneration, cspd-coupled, drafter sees nothing)"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "'cspd-coupled' needs a draft model; give drafter= a model, a folder"),
        ({"drafter": mar(side=4)}, "draft model has side=4 and the target side=3"),
        ({"drafter": torch.nn.Linear(1, 1)}, "needs a draft model, and drafter= is a Linear"),
        (
            {"drafter": mar(1), "recipe": "sjd"},
            "decodes tokens.*recipes for it: cspd, cspd-coupled",
        ),
        ({"drafter": mar(1), "tau": 3.0}, "unknown keyword tau.*prefill"),
        ({"drafter": mar(1), "recipe": "cspd", "tau": -1.0}, "tau=-1.0 must be positive; 42 is"),
        ({"drafter": mar(1), "length": "auto"}, "a fixed number of steps at a time"),
        ({"drafter": mar(1), "length": 0}, "length=0 drafts nothing"),
        ({"drafter": mar(1), "prefill": 2.0}, "prefill=2.0 is not a share"),
    ],
)
def test_parts_that_do_not_fit(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        accelerate(mar(), **given)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"class_labels": 5}, "class_labels=5 is not known; give classes of this model, 0 to 4"),
        ({"class_labels": []}, "are not classes"),
        ({"steps": 10}, "steps=10 must be at most the number of cells"),
        ({"head_steps": 99}, "head_steps=99 do not fit the 8 training steps"),
        ({"last_noise": False}, "no noise in step 3 of 4.*give last_noise=True"),
        ({"guidence": 2.0}, "unknown keyword guidence.*did you mean 'guidance'"),
        ({"row_ids": [1]}, "row_ids has 1 entries for 3 rows"),
    ],
)
def test_calls_that_do_not_fit(more: dict[str, Any], message: str) -> None:
    fast = accelerate(mar(), "cspd-coupled", drafter=mar(1))
    with pytest.raises(ValueError, match=message):
        fast.generate_images(**{**CALL, **settings(PLAN), **more})


def test_an_exact_verifier_may_be_given() -> None:
    fast = accelerate(mar(), "cspd-coupled", drafter=mar(1), verifier=PathRatio(8))
    assert fast.recipe.verifier == PathRatio(8)
