"""Further outputs of `generate()`: scores, logits and cache, or an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec.drafters.oracle import Oracle
from mmspec.recipe import CTC_HEAD
from mmspec.trees import Tree
from tests import toys
from tests.targets.tokens.test_turns import BATCHES, assert_same_cache

ROOM = 10
ASKED: dict[str, Any] = {
    "max_new_tokens": ROOM,
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
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
