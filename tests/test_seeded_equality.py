"""Sampled output with a seed is that of plain decoding with the seed, whatever is drafted."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec.distributions.noise import KeyedNoise
from mmspec.drafters.oracle import Oracle, RandomDrafter
from mmspec.trees import Tree
from mmspec.verifiers.coupled import Coupled
from tests import toys
from tests.covering import covering
from tests.partners import noisy, partner

COUPLED = tuple(
    name
    for name in mmspec.recipes.names("tokens")
    if mmspec.recipes.get(name).exact and isinstance(mmspec.recipes.get(name).verifier, Coupled)
)
BATCHES: dict[str, dict[str, Any]] = {"one": {}, "ragged": {"batch": 4, "ragged": True}}
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"length": 4},
    "tree": {"tree": Tree.branching([2, 2, 1])},
    "dynamic": {"tree": "dynamic"},
}
PURE: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
}  # generate() samples with top_k=50 unless told
WARPED: dict[str, Any] = {"temperature": 0.8, "top_k": 30, "top_p": 0.9}
ROOM = 10
CPU = torch.device("cpu")


INSIDE = 3  # layers, so that one can be left out that is neither the first nor the last


@cache
def pair(family: str, layers: int = 2) -> tuple[Any, Any]:
    return toys.model(family, layers=layers), noisy(family, layers=layers)


def plain(model: Any, request: dict[str, Tensor], seed: int, **settings: Any) -> Tensor:
    settings = {"max_new_tokens": ROOM, "temperature": 1.0, **settings}
    sequences: Tensor
    sequences = mmspec.decode_plain(model, **request, seed=seed, **settings).sequences
    return sequences


@cache
def asked(family: str, batch: str, seed: int, warped: bool) -> tuple[dict[str, Tensor], Tensor]:
    """A request of the family's toy, and what plain decoding draws: the same for every recipe."""
    request, settings = toys.inputs(family, **BATCHES[batch]), WARPED if warped else PURE
    return request, plain(pair(family, INSIDE)[0], request, seed, **settings)


def speculated(
    fast: mmspec.Accelerated, request: dict[str, Tensor], seed: int, **settings: Any
) -> Tensor:
    settings = {"max_new_tokens": ROOM, "temperature": 1.0, **settings}
    out: mmspec.Output = fast.generate(**request, seed=seed, **settings)
    assert out.stats.fallback is None
    return out.sequences


def bound(name: str, family: str) -> mmspec.Accelerated:
    model = pair(family, INSIDE)[0]
    return mmspec.accelerate(model, name, drafter=partner(name, family, INSIDE))


@pytest.mark.parametrize(
    ("batch", "settings"),
    [pytest.param("one", PURE, marks=pytest.mark.exhaustive), ("ragged", WARPED)],
)
@pytest.mark.parametrize("name", COUPLED)
def test_every_coupled_recipe(name: str, batch: str, settings: dict[str, Any]) -> None:
    fast = bound(name, "llava")  # some recipes need a drafter that sees
    request, expected = asked("llava", batch, 1, settings is WARPED)
    assert torch.equal(speculated(fast, request, 1, **settings), expected)


@pytest.mark.slow
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3"])
@pytest.mark.parametrize("name", COUPLED)
def test_every_coupled_recipe_with_fifty_seeds(name: str, family: str, batch: str) -> None:
    fast = bound(name, family)
    for seed in range(50):
        request = toys.inputs(family, seed=seed % 5, **BATCHES[batch])
        expected = plain(fast.model, request, seed)
        assert torch.equal(speculated(fast, request, seed), expected)


@pytest.mark.parametrize(
    ("family", "shape", "batch"),
    covering(
        ("llava", "qwen2_5_vl", "qwen3_vl", "gemma3"), tuple(SHAPES), tuple(BATCHES), strength=1
    ),
)
def test_shapes_on_vision_models(family: str, shape: str, batch: str) -> None:
    model, drafter = pair(family)
    fast = mmspec.accelerate(model, "coupled", drafter=drafter, **SHAPES[shape])
    request = toys.inputs(family, **BATCHES[batch])
    expected = plain(model, request, 3, top_k=40)
    assert torch.equal(speculated(fast, request, 3, top_k=40), expected)
    assert fast.last_stats is not None
    assert fast.last_stats.num_accepted_draft_tokens > 0


@pytest.mark.parametrize(
    ("batch", "family"), covering(BATCHES, ["qwen3_5", "lfm2", "lfm2_vl"], strength=1)
)
def test_chains_on_recurrent_models(family: str, batch: str) -> None:
    model, drafter = pair(family)
    fast = mmspec.accelerate(model, "coupled", drafter=drafter, length=3)
    request = toys.inputs(family, **BATCHES[batch])
    assert torch.equal(speculated(fast, request, 4), plain(model, request, 4))


@pytest.mark.parametrize(
    ("batch", "tree"), covering(BATCHES, [5, Tree.branching([3, 2, 1])], strength=1), ids=str
)
def test_drafters_that_know_nothing_or_almost_everything(tree: Tree | int, batch: str) -> None:
    model = pair("qwen2_5_vl")[0]
    request = toys.inputs("qwen2_5_vl", **BATCHES[batch])
    expected = plain(model, request, 5)
    rows = expected[:, request["input_ids"].shape[1] :].tolist()
    fast = mmspec.accelerate(model, "coupled", drafter=RandomDrafter(tree=tree))
    assert torch.equal(speculated(fast, request, 5), expected)
    fast = mmspec.accelerate(model, "coupled", drafter=Oracle(rows, 0.2, tree))
    assert torch.equal(speculated(fast, request, 5), expected)
    assert fast.last_stats is not None
    assert fast.last_stats.num_accepted_draft_tokens > 0


@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl"])
def test_a_row_alone_draws_what_it_draws_in_a_batch(family: str) -> None:
    model, drafter = pair(family)
    request = toys.inputs(family, batch=4, ragged=True)
    fast = mmspec.accelerate(model, "coupled", drafter=drafter, length=3)
    rows = speculated(fast, request, 6)[:, -ROOM:]
    single = speculated(fast, toys.alone(request, 2), 6, row_ids=[2])[:, -ROOM:]
    assert torch.equal(single[0], rows[2])
    other = speculated(fast, toys.alone(request, 2), 6)[:, -ROOM:]
    assert not torch.equal(other[0], rows[2])  # row 0 has other noise
    with pytest.raises(ValueError, match="row_ids has 2 entries for 1 rows"):
        fast.generate(**toys.alone(request, 2), max_new_tokens=4, row_ids=[0, 1])


def test_seeds_differ_and_repeat() -> None:
    model, request = pair("llama")[0], toys.inputs("llama")
    texts = {tuple(plain(model, request, seed)[0].tolist()) for seed in range(8)}
    assert len(texts) == 8
    assert tuple(plain(model, request, 3)[0].tolist()) in texts
    batch = toys.inputs("llama", batch=2)
    batch = {name: value[:1].expand(2, -1) for name, value in batch.items()}
    first, second = plain(model, batch, 0)
    assert not torch.equal(first, second)  # equal prompts, other rows


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("done", [1, 5])
def test_a_continued_text_goes_on_as_it_would_have(done: int, batch: str) -> None:
    """Noise is keyed by the absolute position, so an interrupted generation can be taken up."""
    model, drafter = pair("llama")
    request = toys.inputs("llama", **BATCHES[batch])
    whole = plain(model, request, 7)
    length = request["input_ids"].shape[1] + done
    mask = torch.cat((request["attention_mask"], torch.ones(len(whole), done).long()), 1)
    rest = {"input_ids": whole[:, :length], "attention_mask": mask}
    assert torch.equal(plain(model, rest, 7, max_new_tokens=ROOM - done), whole)
    fast = mmspec.accelerate(model, "coupled", drafter=drafter)
    assert torch.equal(speculated(fast, rest, 7, max_new_tokens=ROOM - done), whole)


@pytest.mark.parametrize("seed", [None, 8])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_bfloat16_differs_from_plain_decoding_by_ties_only(shape: str, seed: int | None) -> None:
    """Every token is the best of its row up to rounding, by one forward over the whole text.

    Kernels of other shapes round differently in bfloat16, so token equality is too much to ask
    there: the winner's score may lie below the row's best by a few units in the last place of the
    largest logit. Another seed's noise does not pass.
    """
    model, drafter = toys.model("llava", layers=2).bfloat16(), noisy("llava", layers=2).bfloat16()
    request = toys.inputs("llava")
    request["pixel_values"] = request["pixel_values"].bfloat16()
    fast = mmspec.accelerate(model, "coupled", drafter=drafter, **SHAPES[shape])
    settings = {"do_sample": False} if seed is None else {**PURE, "seed": seed}
    text = fast.generate(**request, max_new_tokens=24, **settings).sequences
    start = request["input_ids"].shape[1]
    whole = {**request, "input_ids": text, "attention_mask": torch.ones_like(text)}
    with torch.no_grad():
        logits = model(**whole).logits[0, start - 1 : -1].float()
    ordinary = logits[:, toys.WORDS.start : toys.WORDS.stop]  # the others have a bias of -10 000
    tolerance = 4 * 2.0**-8 * float(ordinary.abs().max())
    assert gap(logits, text[0, start:], start, seed) <= tolerance
    if seed is not None:
        assert gap(logits, text[0, start:], start, seed + 1) > 4 * tolerance


def gap(logits: Tensor, tokens: Tensor, start: int, seed: int | None) -> float:
    """How far the tokens lie below the best of logits plus noise, at most."""
    scores = logits
    if seed is not None:
        position = torch.arange(start, start + len(tokens))[None]
        noise = KeyedNoise.from_seed(seed, 1, CPU).shared_keys(position).gumbel(logits.shape[-1])[0]
        scores = logits + noise
    own = scores.gather(1, tokens[:, None])[:, 0]
    return float((scores.amax(-1) - own).max())


@pytest.mark.parametrize(
    "settings", [PURE, {"temperature": 1.7, "top_k": 20}], ids=["distribution", "warped"]
)
def test_plain_decoding_draws_from_the_distribution(settings: dict[str, Any]) -> None:
    """Chi-square of 6 000 first tokens; it fails by chance once in a million seeds."""
    model, count = pair("llama")[0], 6000
    prompt = toys.inputs("llama")["input_ids"][:, -3:]
    drawn = plain(
        model,
        {"input_ids": prompt.expand(count, -1)},
        11,
        max_new_tokens=1,
        row_ids=range(count),
        **settings,
    )[:, -1]
    with torch.no_grad():
        logits = model(input_ids=prompt).logits[0, -1].double()
    logits = logits / settings["temperature"]
    if settings["top_k"]:
        logits[logits < logits.topk(settings["top_k"]).values[-1]] = -torch.inf
    assert fit(drawn, logits.softmax(-1)) > 1e-6


def test_the_chi_square_notices_another_distribution() -> None:
    distribution = torch.full((20,), 0.05, dtype=torch.float64)
    other = distribution.clone()
    other[:2] = torch.tensor([0.065, 0.035])
    random = torch.Generator().manual_seed(0)
    assert fit(torch.multinomial(distribution, 6000, True, generator=random), distribution) > 1e-3
    assert fit(torch.multinomial(other, 6000, True, generator=random), distribution) < 1e-6


def fit(drawn: Tensor, distribution: Tensor) -> float:
    """p-value of Pearson's chi-square; rare tokens share one bin."""
    assert bool((distribution[drawn] > 0).all())
    counts = torch.bincount(drawn, minlength=len(distribution)).double()
    expected = distribution * len(drawn)
    rare = expected < 5
    counts = torch.cat((counts[~rare], counts[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    if expected[-1] < 5:  # too small for a bin of its own
        counts = torch.cat((counts[:-2], counts[-2:].sum()[None]))
        expected = torch.cat((expected[:-2], expected[-2:].sum()[None]))
    statistic = ((counts - expected) ** 2 / expected).sum()
    half = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, statistic / 2))
