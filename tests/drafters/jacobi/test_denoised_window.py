"""Slots that start as noise: the output is exact, and noisy slots may not be accepted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import mmspec
from mmspec.draft import Draft
from mmspec.drafters.jacobi.denoised_window import (
    DenoisedWindow,
    EmbeddingSpace,
    Levels,
    NoisyWindow,
)
from mmspec.drafters.jacobi.suffix import CoupleMax, Resample, SuffixPolicy
from mmspec.drafters.jacobi.tree import ProactiveTree
from mmspec.drafters.jacobi.window import Jacobi
from mmspec.drafters.plain import NoDraft
from mmspec.targets.tokens.context import Context
from mmspec.verifiers.coupled import Coupled
from mmspec.verifiers.recursive import Recursive
from tests import toys
from tests.covering import limited
from tests.drafters.tables import TableTarget, sample, z_score
from tests.toys import image_models

TARGET = TableTarget(size=2, room=6, scale=2.0, seed=4)
ROWS = 6_000


def space(size: int) -> EmbeddingSpace:
    """Token embeddings that `TableTarget` distinguishes by their largest entry."""
    table = torch.eye(size)
    return EmbeddingSpace.of(lambda tokens: table[tokens], torch.arange(size))


def window(steps: int, length: int = 4, suffix: SuffixPolicy | None = None) -> DenoisedWindow:
    inner = Jacobi(length, suffix or Resample())
    return DenoisedWindow(inner, space(TARGET.size), Levels.karras(steps))


@dataclass(frozen=True, eq=False)
class Hasty(DenoisedWindow):
    """Wrong: noisy slots are proposals too, although they were not read as tokens."""

    def propose(self, context: Context, state: NoisyWindow) -> Draft:
        draft = super().propose(context, state)
        return replace(draft, mask=torch.ones_like(draft.mask))


@pytest.mark.parametrize("steps", [0, 1, 3, 20])
def test_deterministic_denoising_keeps_signal_and_noise(steps: int) -> None:
    """If e_l = a_l x + s_l n, one step gives a_(l-1) x + s_(l-1) n; the last step gives x."""
    levels = Levels.karras(steps)
    assert levels.last == steps
    pairs = list(zip(levels.signal, levels.noise, strict=True))
    clean, noise = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(0))
    for level in range(1, steps + 1):
        (a, s), (below, rest) = pairs[level], pairs[level - 1]
        assert a**2 + s**2 == pytest.approx(1)
        at = torch.full((7,), level)
        found = levels.denoise(a * clean + s * noise, at, clean)
        assert_close(found, below * clean + rest * noise, atol=1e-5, rtol=1e-5)
    assert torch.equal(levels.denoise(noise, torch.zeros(7, dtype=torch.int64), clean), clean)
    assert_close(levels.add_noise(clean, noise), pairs[-1][0] * clean + pairs[-1][1] * noise)


def test_the_space_has_no_scale_of_its_own() -> None:
    table = torch.randn(50, 6, generator=torch.Generator().manual_seed(1)) * torch.arange(1, 7) + 3
    made = EmbeddingSpace.of(lambda tokens: table[tokens], torch.arange(50))
    slots = made.clean(torch.arange(50)[None])
    assert_close(slots.mean(1), torch.zeros(1, 6), atol=1e-5, rtol=0)
    assert_close(slots.std(1, correction=0), torch.ones(1, 6), atol=1e-5, rtol=0)
    assert_close(made.to_embeddings(slots)[0], table, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("steps", "suffix"), limited([(1, Resample()), (2, Resample()), (3, CoupleMax())], 2)
)
def test_the_joint_distribution_is_the_target_s(steps: int, suffix: SuffixPolicy) -> None:
    """Chi-square on all sequences; z > 3 has probability 0.4 % under the right distribution."""
    assert abs(z_score(TARGET, window(steps, suffix=suffix), Recursive(), ROWS)) < 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_the_joint_distribution_on_many_rows(steps: int) -> None:
    assert abs(z_score(TARGET, window(steps, 5), Recursive(), 40_000, seed=1)) < 3


def test_keeping_noisy_slots_is_seen() -> None:
    hasty = Hasty(Jacobi(4), space(TARGET.size), Levels.karras(2))
    assert z_score(TARGET, hasty, Recursive(), ROWS) > 20


@pytest.mark.parametrize("suffix", [Resample(), CoupleMax()], ids=repr)
def test_one_level_is_the_window_itself(suffix: SuffixPolicy) -> None:
    expected, before = sample(TARGET, Jacobi(4, suffix), Recursive(), 2000)
    drawn, rounds = sample(TARGET, window(0, suffix=suffix), Recursive(), 2000)
    assert drawn == expected
    assert [kept.accepted for kept in rounds] == [kept.accepted for kept in before]
    assert sample(TARGET, window(1, suffix=suffix), Recursive(), 2000)[0] != expected


def test_the_coupled_verifier_gives_what_plain_decoding_gives() -> None:
    plain, _ = sample(TARGET, NoDraft(), Coupled(), 1000, seed=3)
    drawn, rounds = sample(TARGET, window(2), Coupled(), 1000, seed=3)
    assert drawn == plain
    assert sum(sum(kept.accepted) for kept in rounds) > 100


def wide(steps: int, **options: Any) -> mmspec.Accelerated:
    return mmspec.accelerate(toys.model("llama"), "sjd2", length=6, steps=steps, **options)


def test_a_clean_window_is_sjd_on_a_model() -> None:
    request = toys.inputs("llama", batch=3, ragged=True)
    settings = {"max_new_tokens": 14, "temperature": 1.0, "seed": 2}
    sjd = mmspec.accelerate(toys.model("llama"), "sjd", length=6).generate(**request, **settings)
    same = wide(0).generate(**request, **settings)
    assert torch.equal(same.sequences, sjd.sequences)
    assert same.stats.per_step_accepted == sjd.stats.per_step_accepted
    noisy = wide(2).generate(**request, **settings)
    assert noisy.stats.fallback is None
    assert not torch.equal(noisy.sequences, sjd.sequences)


@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl", "gemma3", "lfm2"])
def test_greedy_output_is_the_model_s_own(family: str) -> None:
    """Nothing of the noise stays in the memory, or later tokens would differ."""
    model, request = toys.model(family), toys.inputs(family, batch=2, ragged=True)
    expected = model.generate(**request, max_new_tokens=16, do_sample=False)
    fast = mmspec.accelerate(model, "sjd2", length=6, steps=2)
    out = fast.generate(**request, max_new_tokens=16, do_sample=False)
    assert out.stats.fallback is None
    assert out.stats.exact
    assert torch.equal(out.sequences, expected)


@pytest.mark.parametrize("family", ["janus", "llamagen-caption", "emu3"])
def test_pictures_are_guided_with_noise_in_the_window(family: str) -> None:
    model, request = image_models.PAINTERS[family](), image_models.request(family, batch=2)
    given = dict[str, Any]() if family != "emu3" else {"grid": (3, 4)}
    plain = mmspec.accelerate(model, "plain").generate_images(**request, **given, guidance=2.0)
    fast = mmspec.accelerate(model, "sjd2", length=6, steps=2)
    out = fast.generate_images(**request, **given, guidance=2.0)
    assert out.stats.fallback is None
    assert torch.equal(out.sequences, plain.sequences)
    assert out.stats.target_calls <= plain.stats.target_calls


def test_an_encoding_reaches_noisy_slots_only() -> None:
    request = toys.inputs("llama", batch=2)
    settings = {"max_new_tokens": 14, "temperature": 1.0, "seed": 2}
    example = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)) * 9
    width = wide(2).session.bound.backbone.embed(request["input_ids"]).shape[-1]
    example = example[:, :1].expand(-1, width)
    plain, other = wide(2).generate(**request, **settings), wide(2, encoding=example)
    assert not torch.equal(other.generate(**request, **settings).sequences, plain.sequences)
    clean = wide(0, encoding=example[:1]).generate(**request, **settings)
    assert torch.equal(clean.sequences, wide(0).generate(**request, **settings).sequences)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="steps=-1"):
        Levels.karras(-1)
    with pytest.raises(ValueError, match="a clean slot has signal 1 and noise 0"):
        Levels((0.5,), (0.5,))
    with pytest.raises(ValueError, match="must grow"):
        Levels((1, 0.5, 0.4), (0, 0.9, 0.2))
    with pytest.raises(ValueError, match="no siblings"):
        DenoisedWindow(Jacobi(4, proactive=ProactiveTree(2, 2)), space(2), Levels())
    with pytest.raises(ValueError, match=r"encoding has shape \(2, 3\), but \(3, "):
        wide(2, encoding=torch.zeros(2, 3))
    with pytest.raises(ValueError, match="takes no decoder embeddings"):
        mmspec.accelerate(toys.model("whisper"), "sjd2")
