"""Recipes that pool picture tokens: what they need, what they become, what they report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import mmspec
from mmspec import recipes
from mmspec.codes.codebook import Codebook
from mmspec.draft import Kind
from mmspec.drafters.shapes import StaticTree
from mmspec.modalities.image import families as image
from mmspec.recipe import Deferred
from mmspec.verifiers.annealed import Annealed
from mmspec.verifiers.exact import Exact
from mmspec.verifiers.grouped import Grouped
from mmspec.verifiers.latent_neighbourhood import AdditiveBound, LatentNeighbourhood, Multiplicative
from mmspec.verifiers.recursive import Recursive
from tests import toys
from tests.partners import noisy
from tests.toys import image_models

POOLING = ("lantern", "lantern-pp")
SIZE = int(toys.model("llama").config.vocab_size)
ROOM = 12


def book(size: int = 30, offset: int = 5, vocabulary: int = SIZE) -> Codebook:
    rows = torch.randn(size, 4, generator=torch.Generator().manual_seed(0))
    return Codebook.from_offset(rows, offset, vocabulary)


def bound(name: str, **options: Any) -> mmspec.Accelerated:
    drafter = noisy("llama", scale=0.2) if recipes.get(name).takes_drafter else None
    return mmspec.accelerate(toys.model("llama"), name, drafter=drafter, **options)


@pytest.mark.parametrize("name", POOLING)
def test_a_missing_or_wrong_codebook_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no codebook defines .* give codebook="):
        bound(name)
    with pytest.raises(ValueError, match=f"counts 50 token ids, but .* has {SIZE}"):
        bound(name, codebook=book(vocabulary=50))
    with pytest.raises(ValueError, match="holds 3 codes per code, but neighbours=5"):
        bound(name, codebook=book().neighbours(3), neighbours=5)
    with pytest.raises(TypeError, match="codebook is a Tensor"):
        bound(name, codebook=book().vectors)
    file = tmp_path / "near.safetensors"
    book().neighbours(8).save(file)
    fast = bound(name, codebook=str(file), neighbours=8)
    fast.save_pretrained(tmp_path / "saved")
    again = mmspec.load(tmp_path / "saved", toys.model("llama"))
    assert rule_of(again).table.k == 8


def test_groups_need_vectors() -> None:
    with pytest.raises(TypeError, match="groups need the vectors"):
        bound("gsd", codebook=book().neighbours(3))
    with pytest.raises(ValueError, match="counts 50 token ids"):
        bound("gsd", codebook=book(vocabulary=50))
    with pytest.raises(ValueError, match="a Jacobi window is a chain"):
        bound("gsd", tree=[2, 1])


def test_groups_compare_what_the_model_reads_for_its_codes() -> None:
    """As the released code does with the rows of the input embedding."""
    toy = image_models.emu3()
    verifier = mmspec.accelerate(toy, "gsd", size=6, gap=2.0, distance=50.0).recipe.verifier
    assert isinstance(verifier, Recursive)
    rule: Any = verifier.rule
    rows = toy.get_input_embeddings().weight.double()
    codes = torch.arange(image_models.FIRST, image_models.FIRST + image_models.CODES)
    apart = torch.cdist(rows[codes], rows[codes]).square()
    found = rule.grouping.codebook.squared_distance(codes[:, None], codes)
    assert torch.allclose(found.double(), apart, rtol=1e-4, atol=1e-3)
    assert bool(rule.grouping.codebook.squared_distance(codes[0], torch.tensor(3)).isinf())
    p = torch.zeros(200)
    p[codes] = torch.rand(len(codes), generator=torch.Generator().manual_seed(0))
    x = codes[p[codes].argsort()[30]]  # 3 below it, itself, 2 above
    near = codes[p[codes].argsort()[27:33]]
    kept = near[apart[x - image_models.FIRST, near - image_models.FIRST] < 50.0]
    assert 1 < len(kept) < 6
    masses = rule.grouping.masses(p, p, x)
    assert torch.allclose(masses[0], p[kept].sum())


def test_the_trees_are_those_of_the_code() -> None:
    """total_token=59 of LANTERN counts the root."""
    for name in ("lantern", "vvs"):
        assert recipes.get(name).execution.nodes == 58


def test_annealing_has_a_option() -> None:
    verifier = bound("cool-sd", delta=2, nu=0.5).recipe.verifier
    assert isinstance(verifier, Recursive)
    assert verifier.rule == Annealed(2, 0.5)
    with pytest.raises(ValueError, match=r"delta=0.9.*at least 1"):
        bound("cool-sd", delta=0.9)


def rule_of(fast: mmspec.Accelerated) -> LatentNeighbourhood:
    assert isinstance(fast.recipe.verifier, Recursive)
    rule = fast.recipe.verifier.rule
    assert isinstance(rule, LatentNeighbourhood)
    return rule


def test_options_become_a_rule() -> None:
    for name in (*POOLING, "gsd"):
        assert isinstance(recipes.get(name).verifier, Deferred)
        assert not recipes.get(name).exact
    added = rule_of(bound("lantern", codebook=book(), neighbours=7, delta=0.3))
    assert (added.k, added.bound) == (7, AdditiveBound(0.3))
    assert rule_of(bound("lantern", codebook=book())).k == 29  # all others, where 1000 are too many
    factor = rule_of(bound("lantern-pp", codebook=book(), neighbours=7, factor=2.0))
    assert factor.bound == Multiplicative(2.0)
    grouped = bound("gsd", codebook=book(), size=3).recipe.verifier
    assert isinstance(grouped, Recursive)
    assert isinstance(grouped.rule, Grouped)
    with pytest.raises(ValueError, match="delta is 2"):
        bound("lantern", codebook=book(), delta=2)


def test_a_given_verifier_needs_no_codebook() -> None:
    assert bound("lantern", verifier="coupled").recipe.exact


def test_the_static_tree_has_the_published_widths() -> None:
    shape = recipes.get("lantern-pp").execution
    assert isinstance(shape, StaticTree)
    assert [len(level) for level in shape.tree.levels] == [5, 13, 16, 14, 9]
    assert shape.kinds == (Kind.WOR,)


CASES: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = [
    ("lantern", {"codebook": book(), "delta": 0.0}, {"codebook": book(), "delta": 0.9}),
    ("lantern-pp", {"codebook": book(), "factor": 1.0}, {"codebook": book(), "factor": 5.0}),
    ("gsd", {"size": 0}, {"size": 14, "gap": 1.0}),
]


class Walked(Exact):
    """The exact rule, tested sibling by sibling with the noise of a relaxed rule."""


@pytest.mark.parametrize(("name", "neutral", "relaxed"), CASES, ids=[c[0] for c in CASES])
def test_a_run_is_the_exact_one_where_nothing_is_allowed(
    name: str, neutral: Mapping[str, Any], relaxed: Mapping[str, Any]
) -> None:
    request = toys.inputs("llama", batch=2, ragged=True)
    settings = {"max_new_tokens": ROOM, "temperature": 1.0, "seed": 5}
    exact = bound(name, verifier=Recursive(Walked())).generate(**request, **settings)
    assert exact.stats.over_accepted_mass is None
    same = bound(name, **neutral).generate(**request, **settings)
    assert torch.equal(same.sequences, exact.sequences)
    assert same.stats.over_accepted_mass == pytest.approx(0, abs=1e-6)
    loose = bound(name, **relaxed).generate(**request, **settings)
    assert loose.stats.fallback is None
    assert not loose.stats.exact
    assert loose.stats.over_accepted_mass is not None
    assert loose.stats.over_accepted_mass > 1e-3


def test_groups_are_for_every_jacobi_window() -> None:
    """Groups of one on the tokens that MC-SJD keeps are MC-SJD, and larger ones keep more."""
    request = toys.inputs("llama", batch=2, ragged=True)
    settings = {"max_new_tokens": ROOM, "temperature": 1.0, "seed": 5}
    exact = bound("mc-sjd", length=6).generate(**request, **settings)
    same = bound("gsd", suffix="couple", length=6, size=0).generate(**request, **settings)
    assert torch.equal(same.sequences, exact.sequences)
    assert same.stats.target_calls == exact.stats.target_calls
    other = bound("gsd", length=6, size=0).generate(**request, **settings)
    assert not torch.equal(
        other.sequences, exact.sequences
    )  # another suffix, the same distribution
    loose = bound("gsd", suffix="couple", length=6, size=14, gap=1.0).generate(
        **request, **settings
    )
    assert loose.stats.target_calls < exact.stats.target_calls
    with pytest.raises(ValueError, match=r"suffix='keep' .* one of resample, couple"):
        bound("gsd", suffix="keep")


def test_a_model_that_draws_brings_its_codebook() -> None:
    model = image_models.janus()
    noise = torch.Generator().manual_seed(1)
    small = image_models.janus()
    with torch.no_grad():
        for weight in small.parameters():
            if weight.dim() > 1:
                weight.add_(torch.randn(weight.shape, generator=noise) * weight.std() * 0.1)
    request = image_models.request("janus", batch=2)
    for name in (*POOLING, "cool-sd", "gsd"):
        given = {"drafter": small} if recipes.get(name).takes_drafter else {}
        fast = mmspec.accelerate(model, name, **given)
        if name in POOLING:
            assert rule_of(fast).table.fingerprint == image.image_family(model).codebook.fingerprint
            assert rule_of(fast).table.metric == "normalised"
        out = fast.generate_images(**request, temperature=1.0, seed=3)
        assert out.stats.fallback is None
        assert out.stats.over_accepted_mass is not None
        assert out.ids.shape == (2, image_models.SIDE, image_models.SIDE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 1}, "size=1, so every group holds one code and this is 'sjd', exact"),
        ({"size": 0, "suffix": "couple"}, "this is 'mc-sjd', exact"),
        ({"distance": 1e-6}, "no code has another within distance=1e-06 (the nearest of those"),
        ({"distance": 50.0}, None),
        ({}, None),
    ],
)
def test_groups_of_one_code_are_warned_of(
    options: dict[str, Any], message: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    bound("gsd", codebook=book(), **options)
    found = [one.getMessage() for one in caplog.records]
    assert [message in one for one in found if message] == [True] * len(found)
    assert len(found) == (message is not None)


def test_groups_of_one_code_are_warned_of_by_the_embeddings_of_the_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Embeddings of unit scale are further apart than the distance of the released code."""
    model = image_models.janus()
    with torch.no_grad():
        mmspec.accelerate(model, "gsd")
    wide = "no code has another within distance=0.5" in caplog.text
    codes = image.image_family(model).codebook.ids
    rows = mmspec.accelerate(model, "gsd", distance=float("inf")).session.bound.backbone.embed
    near = torch.cdist(rows(codes[None])[0], rows(codes[None])[0]).fill_diagonal_(torch.inf)
    assert wide == bool(near.min() ** 2 >= 0.5)


@pytest.mark.parametrize(
    ("name", "options", "temperature", "is_warned"),
    [
        ("gsd", {"size": 14, "gap": 1.0, "distance": 50.0}, 1.0, False),
        ("gsd", {"size": 14, "distance": 1e-6}, 1.0, True),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ("lantern", {"neighbours": 5, "delta": 0.5}, 1.0, False),
                ("lantern", {"neighbours": 5, "delta": 0.0}, 1.0, True),
                ("lantern-pp", {"neighbours": 5, "factor": 1.0}, 1.0, True),
                ("lantern", {"neighbours": 5, "delta": 0.5}, 0.0, True),  # greedy is exact
            )
        ),
        ("sjd", {}, 1.0, False),
    ],
)
def test_a_run_that_relaxed_nothing_is_warned_of_once(
    name: str,
    options: dict[str, Any],
    temperature: float,
    is_warned: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with_codes = {} if name == "sjd" else {"codebook": book()}
    fast: Any = bound(name, **with_codes, **options)
    request = toys.inputs("llama")
    for seed in range(2):
        fast.generate(**request, max_new_tokens=120, temperature=temperature, seed=seed)
    assert fast.last_stats.target_calls >= 24
    found = [one for one in caplog.messages if "only what exact verification does" in one]
    assert len(found) == is_warned


def test_a_wavefront_as_wide_as_the_image_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = image_models.janus(side=6)
    request = image_models.request("janus")
    for window in (2, 6):
        caplog.clear()
        fast: Any = mmspec.accelerate(model, "zipar", window=window)
        fast.generate_images(**request, seed=0)
        found = [one for one in caplog.messages if "this was plain decoding" in one]
        assert len(found) == (window == 6)


def test_no_phrases_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    bound("sjd-pv")
    assert caplog.messages == [
        "without phrases= 'sjd-pv' is the recipe 'sjd'; `mmspec train phrases` builds a library"
    ]
