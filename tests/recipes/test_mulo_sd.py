"""MuLo-SD on tiny models of two sizes: counts, plain decoding at the ends, wrong pairs refused."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import mmspec
from mmspec import recipes
from mmspec.bench import certify
from mmspec.codes.resampling import LatentResampler, PixelResampler, TrainedResampler, compute_mark
from mmspec.distributions.categorical import as_categorical
from mmspec.distributions.noise import KeyedNoise
from mmspec.draft import Draft, Drafter, Kind, Scores
from mmspec.drafters.rows.low_resolution_model import LowResolutionModel
from mmspec.drafters.rows.upsampled import UpsampledDrafter
from mmspec.modalities.image.families import image_family
from mmspec.modalities.image.tiny_models import SETTINGS, class_request, tiny_pair
from mmspec.models.code_resampler import FOLDER, CodeResampler, CodeResamplerConfig
from mmspec.targets.tokens.causal import CausalTarget
from mmspec.targets.tokens.context import Context, Request
from tests import toys
from tests.devices import FIRST, put
from tests.modalities.drawing import logits_of
from tests.toys import image_models

SMALL = image_models.SIDE // 2
HOW: dict[str, Any] = {"guidance": 2.0, "temperature": 1.0, "top_k": 0, "seed": 5}


@lru_cache(maxsize=8)
def model(family: str, side: int = image_models.SIDE) -> Any:
    if family in ("janus", "llamagen-class"):
        return image_models.PAINTERS[family](side)
    return image_models.PAINTERS[family]()


def bound(family: str, **options: Any) -> mmspec.Accelerated:
    return mmspec.accelerate(model(family), "mulo-sd", drafter=model(family, SMALL), **options)


CASES: list[tuple[str, float, dict[str, Any], dict[str, Any]]] = [
    ("janus", 0.02, {}, {}),
    ("llamagen-class", 0.02, {}, {}),
    ("emu3", 0.02, {"ratio": 2}, {"grid": (4, 6)}),
    ("chameleon", 0.1, {"ratio": 2, "upsampler": "latent"}, {"grid": (4, 4), "guidance": 1}),
]


TRIED = [
    case if case[0] in ("emu3", "chameleon") else pytest.param(*case, marks=pytest.mark.exhaustive)
    for case in CASES
]


@pytest.mark.parametrize(
    ("family", "tau", "options", "given"), TRIED, ids=[case[0] for case in CASES]
)
def test_from_everything_kept_to_plain_decoding(
    family: str, tau: float, options: dict[str, Any], given: dict[str, Any]
) -> None:
    how = {**image_models.request(family, batch=2), **HOW, **given}
    plain = mmspec.accelerate(model(family), "plain").generate_images(**how)
    all_of_it = bound(family, **options, tau=0.0).generate_images(**how)
    assert all_of_it.stats.fallback is None
    assert all_of_it.stats.target_calls == 2  # blocks of two rows
    assert all_of_it.stats.over_accepted_mass is not None
    assert all_of_it.stats.over_accepted_mass > 0.2
    nothing = bound(family, **options, tau=1.1).generate_images(**how)
    assert torch.equal(nothing.sequences, plain.sequences)
    assert nothing.stats.over_accepted_mass == 0
    assert nothing.stats.fallback is None
    some = bound(family, **options, tau=tau, neighbours=8).generate_images(**how)
    assert some.stats.fallback is None
    assert 2 < some.stats.target_calls < plain.stats.target_calls
    seeded = bound(family, **options, verifier="coupled")
    assert seeded.recipe.exact
    assert torch.equal(seeded.generate_images(**how).sequences, plain.sequences)


def test_rows_of_a_batch_do_not_disturb_each_other() -> None:
    fast, request = bound("janus", tau=0.02, neighbours=8), image_models.request("janus", batch=3)
    both = fast.generate_images(**request, **HOW).sequences
    for row in range(3):
        alone = {name: value[row : row + 1] for name, value in request.items()}
        single = fast.generate_images(**alone, **HOW, row_ids=[row])
        assert torch.equal(single.sequences[0], both[row])


def test_the_sketch_is_what_the_small_model_draws() -> None:
    """Greedy and guided, row by row behind its own rows, for two prompts at different places."""
    small = model("janus", SMALL)
    plain = mmspec.accelerate(small, "plain")
    drawing = plain.session.prepare_request(**image_models.request("janus", batch=2), guidance=2.0)
    drawn = plain.generate_images(**image_models.request("janus", batch=2), guidance=2.0).sequences
    noise = KeyedNoise.from_seed(0, 2, torch.device("cpu"))
    request = Request(drawing.inputs, drawing.sampling, noise, drawing.grid.length)
    context = CausalTarget(plain.session.bound.backbone).prefill(request)
    sketcher = LowResolutionModel(plain.session.bound.backbone)
    sketch = sketcher.begin(context, drawing.grid)
    assert torch.equal(sketcher.row(context, sketch, [[], []]), drawn[:, :SMALL])
    first = drawn[:, :SMALL].tolist()
    behind = sketcher.row(context, sketch, [first[0], []])
    assert torch.equal(behind[0], drawn[0, SMALL:])
    behind = sketcher.row(context, sketch, [first[0], first[1]])
    assert torch.equal(behind[1], drawn[1, SMALL:])


def resampler(family: str, ratio: int = 2) -> CodeResampler:
    """An untrained one between the codebooks of a family's two sizes."""
    fine, coarse = (
        image_family(model(family, side)).codebook for side in (image_models.SIDE, SMALL)
    )
    made = CodeResampler(CodeResamplerConfig(ratio=ratio, fine=fine.size, coarse=coarse.size))
    made.fine_mark.copy_(compute_mark(fine))
    made.coarse_mark.copy_(compute_mark(coarse))
    made.train(False)
    return made


@pytest.mark.parametrize(
    ("family", "options", "given"), [(case[0], *case[2:]) for case in CASES[::2]]
)
def test_a_trained_resampler_drafts_within_both_promises(
    family: str, options: dict[str, Any], given: dict[str, Any]
) -> None:
    """Codes alone (Janus), and codes among structural tokens (Emu3)."""
    how = {**image_models.request(family, batch=2), **HOW, **given}
    options = {**options, "upsampler": resampler(family)}
    plain = mmspec.accelerate(model(family), "plain").generate_images(**how)
    for exact in ("coupled", "rejection"):
        fast = bound(family, **options, verifier=exact)
        out = fast.generate_images(**how)
        assert fast.recipe.exact
        assert out.stats.fallback is None
        assert (exact == "coupled") == torch.equal(out.sequences, plain.sequences)
    nothing = bound(family, **options, tau=1.1).generate_images(**how)
    assert torch.equal(nothing.sequences, plain.sequences)
    all_of_it = bound(family, **options, tau=0.0).generate_images(**how)
    assert all_of_it.stats.fallback is None
    assert all_of_it.stats.target_calls == 2


def test_a_resampler_lies_in_the_drafters_folder(tmp_path: Path) -> None:
    """By itself, by its folder, and again from where the accelerated model was saved."""
    model("janus", SMALL).save_pretrained(tmp_path / "small")
    plain = mmspec.accelerate(
        model("janus"), "mulo-sd", drafter=tmp_path / "small"
    ).session.bound.drafter
    assert isinstance(plain, UpsampledDrafter)
    assert isinstance(plain.sampler, PixelResampler)
    given = resampler("janus")
    given.save_pretrained(tmp_path / "small" / FOLDER)
    fast = mmspec.accelerate(model("janus"), "mulo-sd", drafter=tmp_path / "small")
    fast.save_pretrained(tmp_path / "saved")
    again = mmspec.load(tmp_path / "saved", model=model("janus"))
    named = bound("janus", upsampler=str(tmp_path / "small" / FOLDER))
    for one in (fast, again, named):
        assert isinstance(one.session.bound.drafter, UpsampledDrafter)
        assert isinstance(one.session.bound.drafter.sampler, TrainedResampler)
        assert torch.equal(one.session.bound.drafter.sampler.model.say.weight, given.say.weight)
    with pytest.raises(ValueError, match="makes images 4 times larger, the models need 2"):
        bound("janus", upsampler=resampler("janus", 4))
    with pytest.raises(ValueError, match="the resampler lies on meta:0 and the target on cpu"):
        bound("janus", upsampler=put(given, FIRST))


def test_options_become_parts() -> None:
    def sampler(**options: Any) -> Any:
        drafter = bound("janus", **options).session.bound.drafter
        assert isinstance(drafter, UpsampledDrafter)
        assert drafter.ratio == 2
        return drafter.sampler

    assert isinstance(sampler(), PixelResampler)
    assert isinstance(sampler(upsampler="latent"), LatentResampler)
    smooth = PixelResampler(
        image_family(model("janus")), image_family(model("janus", SMALL)), 2, "bilinear"
    )
    assert sampler(upsampler=smooth) is smooth
    llamagen = bound("llamagen-class").session.bound.drafter
    assert isinstance(llamagen, UpsampledDrafter)
    assert isinstance(llamagen.sampler, LatentResampler)


def test_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="target generates 4 x 4 codes, the drafter 3 x 3"):
        mmspec.accelerate(model("janus"), "mulo-sd", drafter=model("janus", 3))
    with pytest.raises(ValueError, match="do not give length= or tree="):
        bound("janus", length=3)
    with pytest.raises(ValueError, match=r"has no encoder .* upsampler='latent'"):
        bound("llamagen-class", upsampler="pixels")
    with pytest.raises(ValueError, match="upsampler='sharp' is neither a known name nor a folder"):
        bound("janus", upsampler="sharp")
    for ratio in (0, True):
        with pytest.raises(ValueError, match=f"ratio={ratio} is not a number of codes"):
            bound("janus", ratio=ratio)
    with pytest.raises(ValueError, match=r"reads the prompt as tokens.*give sees='prompt'"):
        bound("janus", sees="nothing")
    with pytest.raises(ValueError, match=r"LlamaForCausalLM .* generates no image tokens"):
        mmspec.accelerate(model("janus"), "mulo-sd", drafter=toys.model("llama"))
    with pytest.raises(ValueError, match="tau is -1"):
        bound("janus", tau=-1.0)


def test_a_grid_that_is_not_divided_is_drawn_plainly() -> None:
    """The size is the request's: it is refused when drawing begins, with a warning."""
    how = {**image_models.request("emu3"), **HOW, "grid": (3, 4)}
    out = bound("emu3").generate_images(**how)
    assert out.stats.fallback is not None
    assert "3 x 4 cannot be made 2 times smaller" in out.stats.fallback


class Recorder(Drafter):
    """A drafter that writes down what the target says right behind what is committed."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.new: list[list[list[int]]] = []
        self.said: list[Tensor] = []

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return self.inner.kinds

    def begin(self, context: Context) -> Any:
        return self.inner.begin(context)

    def propose(self, context: Context, state: Any) -> Draft:
        self.new.append([list(row) for row in context.generated_tokens()])
        return self.inner.propose(context, state)

    def observe(
        self, context: Context, state: Any, draft: Draft, scores: Scores, *more: Any
    ) -> Any:
        self.said.append(as_categorical(scores.distribution).scores[:, 0])
        return self.inner.observe(context, state, draft, scores, *more)


@pytest.mark.parametrize("family", ["janus", "llamagen-class"])
def test_nothing_in_memory_was_read_behind_a_token_that_changed(family: str) -> None:
    """The distribution behind every committed prefix, against a forward over that prefix alone."""
    options: dict[str, Any] = {"tau": 0.15, "neighbours": 8}
    recorder = Recorder(bound(family, **options).session.bound.drafter)
    fast = mmspec.accelerate(model(family), "mulo-sd", drafter=recorder, **options)
    asked = image_models.request(family, batch=2)
    out = fast.generate_images(**asked, **HOW | {"guidance": 1})
    assert out.stats.fallback is None
    assert len(recorder.said) == out.stats.target_calls > 4
    given = image_family(model(family)).request(asked)
    for said, rows in zip(recorder.said, recorder.new, strict=True):
        for row, new in enumerate(rows):
            if len(new) < image_models.SIDE**2:
                fresh = logits_of(model(family), family, given, row, torch.tensor(new))
                assert_close(said[row], fresh, atol=1e-4, rtol=1e-4)


@pytest.mark.exhaustive
def test_it_is_certified_as_lossy() -> None:
    found = certify("mulo-sd", samples=100, seeds=1)
    assert found.verdict == "lossy"
    checks = {check.name: check.outcome for check in found.checks}
    assert (
        checks["enumeration"] == "skipped"
    )  # it judges cells, and those of no single distribution
    fast = tiny_pair(recipes.get("mulo-sd"), 0)
    assert isinstance(fast.session.bound.drafter, UpsampledDrafter)
    assert isinstance(fast.session.bound.drafter.sampler, LatentResampler)
    out = fast.generate_images(**class_request(2), **SETTINGS, seed=0)
    assert out.stats.fallback is None
