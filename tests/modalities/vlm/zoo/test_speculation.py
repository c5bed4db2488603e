"""The zoo's trained pairs: every exact recipe says what the target says by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

import mmspec
from mmspec import recipes, zoo
from mmspec.stats import Stats
from mmspec.zoo import language

TARGETS = ("llava", "qwen2.5-vl")
# all but MASSV, for which the zoo has no projector: its training is not part of the package yet
EXACT = tuple(n for n in recipes.names("tokens") if recipes.get(n).exact and n != "massv")
LONGEST = 96


def requests(name: str, count: int, batch: int) -> Iterator[dict[str, Any]]:
    """DraftedCode-out prompts as the processor gives them, left-padded in ragged batches."""
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
    if recipes.get(recipe).takes_drafter:
        suffix = "-text-drafter" if recipe == "spd-mllm" else "-drafter"
        parts["drafter"] = zoo.load(name + suffix)
    return mmspec.accelerate(model, recipe, **parts)


def plain(model: Any, request: Mapping[str, Any]) -> torch.Tensor:
    answer = model.generate(**request, max_new_tokens=LONGEST, do_sample=False)
    assert isinstance(answer, torch.Tensor)
    return answer


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest) -> tuple[str, Any]:
    return request.param, zoo.load(request.param)


def check(target: tuple[str, Any], fast: mmspec.Accelerated, count: int, batch: int) -> list[Stats]:
    name, model = target
    seen = []
    for request in requests(name, count, batch):
        out = fast.generate(**request, max_new_tokens=LONGEST, do_sample=False)
        assert torch.equal(out.sequences, plain(model, request))
        assert out.stats.fallback is None
        seen.append(out.stats)
    return seen


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("recipe", ["coupled", "dynamic-tree", "spd-mllm", "token-recycling"])
def test_the_zoo_says_the_same(target: tuple[str, Any], recipe: str, batch: int) -> None:
    fast = accelerated(target[0], target[1], recipe)
    check(target, fast, max(batch, 2), batch)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("recipe", EXACT)
def test_two_hundred_prompts_by_every_exact_recipe(
    target: tuple[str, Any], recipe: str, batch: int
) -> None:
    check(target, accelerated(target[0], target[1], recipe), 200, batch)


@pytest.mark.parametrize(
    "name", [TARGETS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in TARGETS[1:])]
)
def test_sight_helps_and_the_wrong_picture_hurts(name: str) -> None:
    model = zoo.load(name)
    sighted = accelerated(name, model, "coupled")
    blind = accelerated(name, model, "spd-mllm")
    given = list(requests(name, 12, 1))
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


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("recipe", ["coupled", "dynamic-tree", "prompt-lookup"])
def test_sampling_with_a_seed_is_plain_decoding_with_it(
    target: tuple[str, Any], recipe: str, seed: int
) -> None:
    name, model = target
    fast = accelerated(name, model, recipe)
    for request in requests(name, 2, 2):
        settings = {"max_new_tokens": LONGEST, "temperature": 1.0, "seed": seed}
        wanted = mmspec.decode_plain(model, **request, **settings)
        out = fast.generate(**request, **settings)
        assert torch.equal(out.sequences, wanted.sequences)
