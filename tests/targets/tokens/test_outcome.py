"""Further outputs of `generate()`: scores, logits and cache, or an error."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import mmspec
from mmspec import recipes, zoo
from mmspec.drafters.oracle import Oracle
from mmspec.modalities.common.tiny_models import random_drafter
from mmspec.recipe import CTC_HEAD
from mmspec.targets.tokens.turns import KEPT, KeptFeatures
from mmspec.trees import Tree
from mmspec.zoo import language
from tests import toys
from tests.covering import covering
from tests.targets.tokens.test_turns import BATCHES, assert_same_cache, next_turn

READ_THE_CACHE = ("aasd", "pass-sampling")  # drafters that keep nothing of their own
ROOM = 10
ASKED: dict[str, Any] = {
    "max_new_tokens": ROOM,
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
}
TURN: dict[str, Any] = {
    "max_new_tokens": 9,
    "do_sample": False,
    "return_dict_in_generate": True,
}
SHAPES: dict[str, Any] = {"chain": 3, "tree": Tree.branching([2, 2, 1])}
Request = dict[str, Any]


def ends(model: Any, request: Request) -> int:
    """An id that ends the first row early."""
    said = model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    return int(said[0, request["input_ids"].shape[1] + 4])


def assert_steps(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("batch", ["one", "ragged"])
@pytest.mark.parametrize(
    ("family", "shape"),
    [("llama", "tree"), ("qwen2_5_vl", "chain"), ("lfm2", "chain")],
)
def test_scores_and_logits_are_those_of_generate(family: str, batch: str, shape: str) -> None:
    """Also of rows that have ended, which `generate()` reads on over padding."""
    model, request = toys.model(family), toys.inputs(family, **BATCHES[batch])
    settings = {
        **ASKED,
        "do_sample": False,
        "repetition_penalty": 1.3,
        "eos_token_id": ends(model, request),
    }
    expected = model.generate(**request, **settings)
    rows = expected.sequences[:, request["input_ids"].shape[1] :].tolist()
    drafter = Oracle(rows, 0.5, tree=SHAPES[shape], seed=1)
    fast = mmspec.accelerate(model, "coupled", drafter=drafter)
    inside = model.generate(**request, **settings, custom_generate=fast)
    assert type(inside) is type(expected)
    for out in (fast.generate(**request, **settings), inside):
        assert torch.equal(out.sequences, expected.sequences)
        assert_steps(out.scores, expected.scores)
        assert_steps(out.logits, expected.logits)
        assert_same_cache(out.past_key_values, expected.past_key_values)


@pytest.mark.parametrize("renormalize", [False, True])
def test_sampled_scores_are_warped_as_generate_warps_them(renormalize: bool) -> None:
    """Its draws are others, so each row of scores is made again from the logits."""
    model, request = toys.model("llama"), toys.inputs("llama", batch=2, ragged=True)
    settings = {**ASKED, "do_sample": True, "temperature": 0.7, "top_k": 9}
    settings["renormalize_logits"] = renormalize
    out = mmspec.accelerate(model, "prompt-lookup").generate(**request, **settings, seed=3)
    for logits, scores in zip(out.logits, out.scores, strict=True):
        warm = logits / 0.7
        kept = warm >= warm.topk(9).values[:, -1:]
        expected = warm.masked_fill(~kept, -torch.inf)
        expected = expected.log_softmax(-1) if renormalize else expected
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)
    width = request["input_ids"].shape[1]
    own = model(out.sequences, attention_mask=whole(request, out.sequences)).logits
    assert_steps(out.logits, own[:, width - 1 : -1].float().unbind(1))


def whole(request: Request, sequences: Tensor) -> Tensor:
    mask = torch.ones_like(sequences)
    mask[:, : request["input_ids"].shape[1]] = request["attention_mask"]
    return mask


def test_scores_of_an_encoder_decoder() -> None:
    model, request = toys.model("whisper"), toys.inputs("whisper", batch=2)
    expected = model.generate(**request, **ASKED, do_sample=False)
    fast = mmspec.accelerate(model, "prompt-lookup")
    out = fast.generate(**request, **ASKED, do_sample=False)
    assert_steps(out.scores, expected.scores)
    assert out.past_key_values is None


def test_outputs_that_were_not_requested_are_none() -> None:
    model, request = toys.model("llama"), toys.inputs("llama")
    fast = mmspec.accelerate(model, "prompt-lookup")
    out = fast.generate(**request, max_new_tokens=4, output_logits=True)
    assert (out.scores, out.past_key_values) == (None, None)
    assert len(out.logits) == 4
    assert isinstance(model.generate(**request, max_new_tokens=4, custom_generate=fast), Tensor)


def test_a_gate_that_skips_has_no_scores() -> None:
    gated = [name for name in mmspec.recipes.names() if mmspec.recipes.get(name).gate is not None]
    texts = [name for name in gated if mmspec.recipes.get(name).decodes == "tokens"]
    model = toys.model("llama")
    for name in texts:
        recipe = mmspec.recipes.get(name)
        if recipe.takes_drafter or CTC_HEAD in recipe.needs:
            continue
        fast = mmspec.accelerate(model, recipe)
        with pytest.raises(ValueError, match=r"output_scores.*gate.*choose another"):
            fast.generate(**toys.inputs("llama"), **ASKED)


HEADS = [
    name
    for name in recipes.names("tokens")
    if recipes.get(name).training is not None
    and name not in ("distillspec", "massv", "specvlm", "spd-mllm")
]


def head_on(name: str, family: str = "qwen2_5_vl") -> Any:
    model = toys.model(family, layers=7)
    return mmspec.accelerate(model, name, drafter=random_drafter(recipes.get(name), model, 0))


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        *(("eagle-3", batch) for batch in ("one", "ragged")),
        *covering(
            [name for name in HEADS if name != "eagle-3"],
            ("one", "ragged"),
            strength=1,
            by_default=False,
        ),
    ],
)
def test_a_head_goes_on_with_the_cache_of_a_turn(name: str, batch: str) -> None:
    """In three turns, as in a run over the whole conversation: tokens, drafts, what they read."""
    fast, request = head_on(name), toys.inputs("qwen2_5_vl", **BATCHES[batch])
    media = {name: request[name] for name in ("pixel_values", "image_grid_thw")}
    question, cache = request, None
    for seed in range(3):
        out = fast.generate(**question, **TURN, past_key_values=cache)
        given = question if seed == 0 else {**question, **media}
        fresh = fast.generate(**given, **TURN)
        assert torch.equal(out.sequences, fresh.sequences)
        assert out.stats.per_step_accepted == fresh.stats.per_step_accepted
        assert out.stats.fallback is None
        cache = out.past_key_values
        own, theirs = (vars(one)[KEPT] for one in (cache, fresh.past_key_values))
        assert (own is None) == (theirs is None) == (name in READ_THE_CACHE)
        if own is not None:
            new = own.embeds.shape[1] - question["attention_mask"].shape[1]
            padding = functional.pad(question["attention_mask"], (0, new), value=1) == 0
            for mine, other in zip(parts_of(own), parts_of(theirs), strict=True):
                mine, other = (one.float().clone() for one in (mine, other))
                mine[padding] = other[padding] = 0
                torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3)
        question = next_turn(question, out.sequences, seed=seed)


def parts_of(kept: KeptFeatures) -> list[Tensor]:  # (B, L, ...) each
    assert kept.positions is not None
    return [kept.embeds, kept.positions[-3:].permute(1, 2, 0), *kept.states.values()]


def test_states_that_are_not_the_conversations_draft_otherwise() -> None:
    """Output stays that of plain decoding; the drafts of a trained head are others."""
    processor, model = zoo.processor("llava"), zoo.load("llava").float()
    one = language.examples(1, "held-out", 0, "caption")[0]
    text = language.format_prompt(processor, one.prompt)
    request = dict(processor(images=one.image, text=text, return_tensors="pt"))
    fast = mmspec.accelerate(model, "eagle-3", drafter=zoo.path("llava-eagle3"))
    long = {**TURN, "max_new_tokens": 24}
    first = fast.generate(**request, **long)
    ids = processor.tokenizer(f" user : {one.prompt} assistant :", add_special_tokens=False)
    said = torch.cat((first.sequences, torch.tensor([ids.input_ids])), 1)
    question = {"input_ids": said, "attention_mask": torch.ones_like(said)}
    found = []
    for is_wrong in (False, True):
        cache = copy.deepcopy(first.past_key_values)
        if is_wrong:
            kept = vars(cache)[KEPT]
            states = {name: -3 * one.flip(1) for name, one in kept.states.items()}
            setattr(cache, KEPT, replace(kept, states=states, embeds=kept.embeds.flip(1)))
        found.append(fast.generate(**question, **long, past_key_values=cache))
    fresh = fast.generate(**question, pixel_values=request["pixel_values"], **long)
    assert all(torch.equal(one.sequences, fresh.sequences) for one in found)
    good, wrong = (one.stats.per_step_accepted for one in found)
    assert good == fresh.stats.per_step_accepted
    assert sum(good) > 0
    assert wrong != good


def test_a_cache_without_the_states_of_a_head_is_refused() -> None:
    """Of `generate()`, of another recipe, or of other layers; a cut one is enough."""
    fast, request = head_on("eagle-3", "llama"), toys.inputs("llama")
    model = fast.model
    mine = fast.generate(**request, **TURN)
    question = next_turn(request, mine.sequences)
    cut = copy.deepcopy(mine.past_key_values)
    cut.crop(-3)
    assert torch.equal(
        fast.generate(**question, **TURN, past_key_values=cut).sequences,
        fast.generate(**question, **TURN).sequences,
    )
    message = r"needs features of the whole prompt \(layers:.*cache of a turn of this recipe"
    others = (model, mmspec.accelerate(model, "prompt-lookup"), head_on("eagle", "llama"))
    for other in others:
        cache = other.generate(**request, **TURN).past_key_values
        with pytest.raises(ValueError, match=message):
            fast.generate(**question, **TURN, past_key_values=cache)
    again = model.generate(**question, **TURN, past_key_values=mine.past_key_values)
    longer = next_turn(question, again.sequences)
    with pytest.raises(ValueError, match=message):  # `generate()` went on with it
        fast.generate(**longer, **TURN, past_key_values=again.past_key_values)
    sighted, request = head_on("eagle-3", "llava"), toys.inputs("llava")
    first = sighted.generate(**request, **TURN)
    whole = next_turn(request, first.sequences)
    new = {**whole, "input_ids": whole["input_ids"][:, first.sequences.shape[1] - 1 :]}
    with pytest.raises(ValueError, match="by the ids of all tokens; give the whole conversation"):
        sighted.generate(**new, **TURN, past_key_values=first.past_key_values)
