"""Acceptance of a draft model on held-out requests, and with pictures of other requests in sight.

The control replaces what the draft model, and not the target, sees of a picture by that of the next
row of its batch: a draft model that uses the picture must lose by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmspec import _hf, recipes
from mmspec.api import accelerate
from mmspec.distributions.categorical import Categorical
from mmspec.draft import Drafter
from mmspec.drafters.draft_model import DraftModel, DraftNodes, DraftUpdate
from mmspec.recipe import Kit, Recipe
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.context import Context
from mmspec.zoo.training import load_teacher
from tools.zoo.vlm.systems.examples import pad_left
from tools.zoo.vlm.systems.plans import Plan
from tools.zoo.vlm.systems.pool import AnswerPool, TargetAnswer, iterate_prompts, load_pool

LENGTH = 5  # drafted tokens
_BATCH = 10
_SEED = 1


def measure_head(
    plan: Plan, target: str, folder: Path, answers: Path, count: int
) -> dict[str, Any]:
    """Acceptance lengths of the draft model in `folder` on `count` requests per category."""
    pool = held_out_pool(target, answers, count)
    model = load_teacher(target)
    found: dict[str, Any] = {"acceptance": acceptance(plan.recipe, model, folder, pool)}
    if plan.control is not None:
        return {**found, "acceptance_with_other_pictures": f"not measured: {plan.control}"}
    swapped = swap_pictures(recipes.get(plan.recipe), pool.image_token)
    return {**found, "acceptance_with_other_pictures": acceptance(swapped, model, folder, pool)}


def held_out_pool(target: str, answers: Path, count: int) -> AnswerPool:
    """The target's greedy answers to `count` held-out requests per category."""
    return load_pool(target, count, answers, "held-out", _SEED)


def acceptance(
    recipe: Recipe | str, model: Any, folder: Path, pool: AnswerPool
) -> dict[str, float]:
    """Tokens per round of greedy chains, by category and of "all" rounds together."""
    fast = accelerate(model, recipe, drafter=folder, length=LENGTH)
    found, total = {}, _Rounds()
    for category, answers in iterate_prompts(pool):
        rounds = _Rounds()
        for part in split_batches(answers):
            inputs = make_inputs(pool, part)
            limit = max(len(one.tokens) for one in part)
            stats = fast.generate(**inputs, do_sample=False, max_new_tokens=limit).stats
            rounds += _Rounds(stats.num_accepted_draft_tokens, stats.num_spec_steps)
        found[category] = rounds.length
        total += rounds
    return {**found, "all": total.length}


@dataclass(frozen=True)
class _Rounds:
    accepted: int = 0
    steps: int = 0

    def __add__(self, other: _Rounds) -> _Rounds:
        return _Rounds(self.accepted + other.accepted, self.steps + other.steps)

    @property
    def length(self) -> float:
        return round(1 + self.accepted / max(self.steps, 1), 3)


def split_batches(answers: Sequence[TargetAnswer]) -> Iterator[Sequence[TargetAnswer]]:
    """Batches of answers of similar length."""
    ordered = sorted(answers, key=lambda one: len(one.tokens))
    count = max(round(len(ordered) / _BATCH), 1)
    size = -(-len(ordered) // count)
    yield from (ordered[at : at + size] for at in range(0, len(ordered), size))


def make_inputs(pool: AnswerPool, answers: Sequence[TargetAnswer]) -> dict[str, Tensor]:
    """Inputs of `generate`."""
    ids, mask = pad_left([one.prompt for one in answers])
    return {"input_ids": ids, "attention_mask": mask, **pool.media(answers, ids)}


def swap_pictures(recipe: Recipe, visual: int) -> Recipe:
    """The recipe, whose draft model sees the picture of the next row; `visual` is its placeholder.

    A batch of one row stays as it is.
    """

    def swapped(kit: Kit) -> Drafter:
        made: Any = recipe.architecture(kit)
        drafter: Drafter = replace(made, model=SwappedPictures(made.model, kit.target, visual))
        return drafter

    return replace(recipe, architecture=swapped)


@dataclass(frozen=True)
class SwappedPictures(DraftModel):
    """A draft model that begins each request with the picture of the next row."""

    model: DraftModel
    target: Reader
    visual: int

    @property
    def sees(self) -> str:
        return self.model.sees

    @property
    def required_features(self) -> frozenset[str]:
        return self.model.required_features

    @property
    def reads_prompt(self) -> bool:
        return self.model.reads_prompt

    @property
    def max_depth_ahead(self) -> int | None:
        return self.model.max_depth_ahead

    @property
    def is_parallel(self) -> bool:
        return self.model.is_parallel

    def begin(self, context: Context) -> Any:
        return self.model.begin(swap_context(context, self.target, self.visual))

    def predict_first(self, context: Context, state: Any) -> Categorical:
        return self.model.predict_first(context, state)

    def predict(self, context: Context, state: Any, nodes: DraftNodes) -> Categorical:
        return self.model.predict(context, state, nodes)

    def keep(self, context: Context, state: Any, update: DraftUpdate) -> Any:
        return self.model.keep(context, state, update)


@torch.no_grad()
def swap_context(context: Context, target: Reader, visual: int) -> Context:
    """The same request with what was computed of each picture moved to the row before it."""
    inputs, shared = dict(context.request.inputs), dict(context.shared)
    grids = inputs.get("image_grid_thw")
    sizes: Any = 1 if grids is None else grids.prod(-1).tolist()
    first, *others = inputs["pixel_values"].split(sizes)
    inputs["pixel_values"] = torch.cat((*others, first))
    if grids is not None:
        inputs["image_grid_thw"] = grids.roll(-1, 0)
    request = replace(context.request, inputs=inputs)
    if "vision" in shared:  # of the target's encoder, which a draft model may share
        shared["vision"] = _hf.encode_media(target.model, inputs)["mm_encoder_outputs"]
    slots = [
        [at - count for at, token in enumerate(row[:count]) if token == visual]
        for row, count in zip(context.history, context.prompt, strict=True)
    ]
    for name, value in shared.items():
        if isinstance(value, Tensor) and value.is_floating_point() and len(value) == context.batch:
            shared[name] = move_slots(value, slots)
    return replace(context, request=request, shared=shared)


def move_slots(values: Tensor, slots: Sequence[Sequence[int]]) -> Tensor:  # (B, L, ...)
    """Replace what is in the slots of each row, counted from the end, by that of the next row."""
    found = values.clone()
    for row, own in enumerate(slots):
        other = slots[(row + 1) % len(slots)]
        assert len(own) == len(other)
        found[row, own] = values[(row + 1) % len(slots), other]
    return found
