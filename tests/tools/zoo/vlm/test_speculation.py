"""Bundled pairs: every exact recipe generates the tokens of the target."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

import mmspec
from mmspec import recipes, zoo
from mmspec.zoo import language
from tests.covering import covering

TARGETS = ("llava", "qwen2.5-vl")


def draws(recipe: str, target: str) -> bool:
    """Whether the zoo has what the recipe drafts with."""
    plan = recipes.get(recipe)
    return not plan.takes_drafter or zoo.drafter_for(f"zoo:{target}", plan) is not None


EXACT = tuple(  # MASSV's projector is not in the zoo, and small models are no MASSV
    (target, n)
    for target in TARGETS
    for n in recipes.names("tokens")
    if recipes.get(n).exact and n != "massv" and draws(n, target)
)
LONGEST = 96
SAMPLED: dict[str, Any] = {"max_new_tokens": LONGEST, "temperature": 1.0}
Asked = tuple[dict[str, Any], torch.Tensor]  # a request, and the answer that is wanted


def requests(name: str, count: int, batch: int) -> Iterator[dict[str, Any]]:
    """Held-out prompts as the processor gives them, left-padded in ragged batches."""
    processor = zoo.processor(name)
    processor.tokenizer.padding_side = "left"
    examples = language.examples(count, split="held-out", seed=11)
    for start in range(0, count, batch):
        group = examples[start : start + batch]
        yield dict(
            processor(
                images=[example.image for example in group],
                text=[language.format_prompt(processor, example.prompt) for example in group],
                padding=True,
                return_tensors="pt",
            )
        )


def accelerated(name: str, model: Any, recipe: str, **parts: Any) -> mmspec.Accelerated:
    """The recipe on a zoo target; recipes that take a drafter get the one they were made for."""
    parts["drafter"] = zoo.drafter_for(f"zoo:{name}", recipes.get(recipe))
    return mmspec.accelerate(model, recipe, **parts)


@cache
def loaded(name: str) -> Any:
    """A target; requests write nothing onto it."""
    return zoo.load(name)


@cache
def greedy(name: str, count: int, batch: int) -> tuple[Asked, ...]:
    """Requests, each with what the target answers by itself."""
    return tuple(
        (one, loaded(name).generate(**one, max_new_tokens=LONGEST, do_sample=False))
        for one in requests(name, count, batch)
    )


@cache
def sampled(name: str, seed: int) -> tuple[Asked, ...]:
    """Requests, each with what plain decoding draws."""
    return tuple(
        (one, mmspec.decode_plain(loaded(name), **one, **SAMPLED, seed=seed).sequences)
        for one in requests(name, 2, 2)
    )


def check(name: str, recipe: str, count: int, batch: int) -> None:
    fast = accelerated(name, loaded(name), recipe)
    for request, wanted in greedy(name, count, batch):
        out = fast.generate(**request, max_new_tokens=LONGEST, do_sample=False)
        assert torch.equal(out.sequences, wanted)
        assert out.stats.fallback is None


@pytest.mark.parametrize(
    ("recipe", "name", "batch"),
    [  # all pairs of values
        ("spd-mllm", "llava", 4),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ("dynamic-tree", "llava", 4),
                ("dynamic-tree", "qwen2.5-vl", 1),
                ("spd-mllm", "qwen2.5-vl", 1),
                ("coupled", "llava", 1),
                ("coupled", "qwen2.5-vl", 4),
                ("token-recycling", "llava", 1),
                ("token-recycling", "qwen2.5-vl", 4),
            )
        ),
    ],
)
def test_bundled_pairs_generate_the_same_tokens(name: str, recipe: str, batch: int) -> None:
    check(name, recipe, max(batch, 2), batch)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(("name", "recipe"), EXACT)
def test_two_hundred_prompts_by_every_exact_recipe(name: str, recipe: str, batch: int) -> None:
    check(name, recipe, 200, batch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TARGETS)
def test_sight_helps_and_the_wrong_picture_hurts(name: str) -> None:
    model = loaded(name)
    sighted = accelerated(name, model, "coupled")
    blind = accelerated(name, model, "spd-mllm")
    given = list(requests(name, 32, 4))
    accepted = {"sighted": 0, "blind": 0, "deceived": 0}
    steps = dict.fromkeys(accepted, 0)
    for request, other in zip(given, given[1:] + given[:1], strict=True):
        pixels = {key: other[key] for key in ("pixel_values", "image_grid_thw") if key in other}
        runs = {
            "sighted": sighted.generate(**request, max_new_tokens=LONGEST),
            "blind": blind.generate(**request, max_new_tokens=LONGEST),
            "deceived": sighted.generate(**request, max_new_tokens=LONGEST, drafter_inputs=pixels),
        }
        for kind, out in runs.items():
            assert torch.equal(out.sequences, runs["sighted"].sequences)
            accepted[kind] += out.stats.num_accepted_draft_tokens
            steps[kind] += out.stats.num_spec_steps
    length = {kind: 1 + accepted[kind] / steps[kind] for kind in accepted}
    assert length["sighted"] > length["blind"] + 0.4
    assert length["sighted"] > length["deceived"] + 0.4
    assert 2.5 <= length["sighted"] <= 5.5


@pytest.mark.parametrize(
    ("recipe", "name", "seed"),
    covering(("coupled", "dynamic-tree", "prompt-lookup"), TARGETS, (0, 1), by_default=False),
)
def test_sampling_with_a_seed_is_plain_decoding_with_it(name: str, recipe: str, seed: int) -> None:
    fast = accelerated(name, loaded(name), recipe)
    for request, wanted in sampled(name, seed):
        assert torch.equal(fast.generate(**request, **SAMPLED, seed=seed).sequences, wanted)
