"""Greedy output is that of `model.generate()`, token for token, in float32, with any drafter."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StoppingCriteria

import mmspec
from mmspec.draft import Round
from mmspec.drafters.oracle import Oracle
from mmspec.trees import Tree
from mmspec.verifiers.coupled import Coupled
from tests import toys
from tests.covering import covering, exhaustive, limited
from tests.partners import noisy, partner

FAMILIES = tuple(family for family in toys.FAMILIES if family != "whisper")
HYBRID = ("lfm2", "lfm2_vl", "qwen3_5")
BRANCHING = tuple(family for family in FAMILIES if family not in HYBRID)
EXACT = tuple(name for name in mmspec.recipes.names("tokens") if mmspec.recipes.get(name).exact)
SIMPLE = ("plain", "coupled", "dynamic-tree", "prompt-lookup", "eagle-3", "swift")
DRAWN = tuple(  # those of other noise: coupled ones are asked to equal plain decoding with a seed
    name
    for name in EXACT
    if name in SIMPLE or not isinstance(mmspec.recipes.get(name).verifier, Coupled)
)
WIDE = Tree.branching([2, 2, 1])
ROOM = 12
BATCHES: dict[str, dict[str, Any]] = {"one": {}, "ragged": {"batch": 4, "ragged": True}}


LAID_OUT = ("llava", "qwen2_5_vl", "idefics3", "llava_onevision")  # in order, grids, rows, counts
INSIDE = 3  # layers, so that one can be left out that is neither the first nor the last


@cache
def pair(family: str, layers: int = 2) -> tuple[Any, Any]:
    """A toy and a drafter that often agrees with it."""
    return toys.model(family, layers=layers), noisy(family, layers=layers)


def reference(model: Any, request: dict[str, Tensor], **settings: Any) -> Tensor:
    tokens: Tensor = model.generate(
        **request, **{"max_new_tokens": ROOM, "do_sample": False, **settings}
    )
    return tokens


@cache
def asked(family: str, batch: str, seed: int, layers: int = 2) -> tuple[dict[str, Tensor], Tensor]:
    """A request of the family's toy, and what `generate()` answers: the same for every drafter."""
    request = toys.inputs(family, seed=seed, **BATCHES[batch])
    return request, reference(pair(family, layers)[0], request)


def speculated(fast: mmspec.Accelerated, request: dict[str, Tensor], **settings: Any) -> Tensor:
    settings = {"max_new_tokens": ROOM, "do_sample": False, **settings}
    out: mmspec.Output = fast.generate(**request, **settings)
    assert out.stats.fallback is None
    return out.sequences


def answers(tokens: Tensor, request: dict[str, Tensor]) -> list[list[int]]:
    new: list[list[int]] = tokens[:, request["input_ids"].shape[1] :].tolist()
    return new


def check_with_a_drafter(family: str, batch: str, seeds: range, **shape: Any) -> None:
    model, drafter = pair(family)
    fast = mmspec.accelerate(model, "coupled", drafter=drafter, **shape)
    kept = drafted = 0
    for seed in seeds:
        request, expected = asked(family, batch, seed)
        assert torch.equal(speculated(fast, request), expected)
        assert fast.last_stats is not None
        kept += fast.last_stats.num_accepted_draft_tokens
        drafted += fast.last_stats.num_draft_tokens
    assert 0 < kept < drafted  # partial acceptance, or the commit is not tested


def check_with_an_oracle(family: str, batch: str, seeds: range) -> None:
    """Right tokens at later siblings: accepted nodes that have to move in the cache."""
    model, _ = pair(family)
    moved = 0
    for seed in seeds:
        request, expected = asked(family, batch, seed)
        oracle = Oracle(answers(expected, request), corruption=0.2, tree=WIDE, seed=seed)
        fast, rounds = mmspec.accelerate(model, "coupled", drafter=oracle), list[Round]()
        assert torch.equal(speculated(fast, request, on_round=rounds.append), expected)
        moved += sum(
            node != step for kept in rounds for p in kept.path for step, node in enumerate(p)
        )
    assert moved > 0


@pytest.mark.parametrize("batch", [pytest.param("one", marks=pytest.mark.slow), "ragged"])
@pytest.mark.parametrize("family", exhaustive(FAMILIES, (*HYBRID, *toys.ONE_EACH)))
def test_a_chain(family: str, batch: str) -> None:
    seeds = range(1 if batch == "ragged" else 4)  # a drafter may be right about one row
    check_with_a_drafter(family, batch, seeds, length=3)


@pytest.mark.parametrize("batch", [pytest.param("one", marks=pytest.mark.exhaustive), "ragged"])
@pytest.mark.parametrize("family", exhaustive(BRANCHING, (*LAID_OUT, *toys.ONE_EACH)))
def test_a_tree(family: str, batch: str) -> None:
    check_with_a_drafter(family, batch, range(1), tree=WIDE)
    check_with_an_oracle(family, batch, range(1))


@pytest.mark.parametrize("family", exhaustive(FAMILIES, ("lfm2", "qwen2_5_vl")))
def test_a_batch_without_padding(family: str) -> None:
    """Without a padded row a mask of ones says nothing, and may as well be missing."""
    model, drafter = pair(family)
    request = toys.inputs(family, seed=1, batch=2)
    assert bool(request["attention_mask"].all())
    expected = reference(model, request)
    shapes: list[dict[str, Any]] = [{"length": 3}]
    if family in BRANCHING:
        shapes.append({"tree": WIDE})
    for shape in shapes:
        fast = mmspec.accelerate(model, "coupled", drafter=drafter, **shape)
        assert torch.equal(speculated(fast, request), expected)
    bare = {name: value for name, value in request.items() if name != "attention_mask"}
    assert torch.equal(speculated(fast, bare), expected)
    assert torch.equal(reference(model, request, custom_generate=fast), expected)
    plain = mmspec.decode_plain(model, **request, max_new_tokens=ROOM, do_sample=False)
    assert torch.equal(plain.sequences, expected)


@pytest.mark.parametrize("family", exhaustive(toys.VLMS, (*LAID_OUT, "qwen3_5")))
def test_rows_with_different_numbers_of_pictures(family: str) -> None:
    """Two, one and none: the model itself hands features out in order."""
    model, drafter = pair(family)
    request = toys.unequal(family)
    expected = reference(model, request)
    fast = mmspec.accelerate(model, "coupled", drafter=drafter, length=3)
    assert torch.equal(speculated(fast, request), expected)
    if family in BRANCHING:
        fast = mmspec.accelerate(model, "coupled", drafter=drafter, tree=WIDE)
        assert torch.equal(speculated(fast, request), expected)


@pytest.mark.parametrize(
    "family",
    limited(
        [f if f in LAID_OUT else pytest.param(f, marks=pytest.mark.slow) for f in toys.VLMS], 2
    ),
)
def test_they_are_taken_by_every_entry_point(family: str) -> None:
    model, drafter = pair(family)
    request = toys.unequal(family)
    expected = reference(model, request)
    fast = mmspec.accelerate(model, "coupled", drafter=drafter, sees="pixels", length=3)
    assert torch.equal(reference(model, request, custom_generate=fast), expected)
    rounds = list(fast.stream(**request, max_new_tokens=ROOM, do_sample=False))
    rows = [[token for kept in rounds for token in kept.tokens[row]] for row in range(3)]
    assert rows == answers(expected, request)
    for other in (mmspec.accelerate(model, "plain"), mmspec.accelerate(model, "prompt-lookup")):
        assert torch.equal(speculated(other, request), expected)
    again = mmspec.accelerate(model, "coupled", drafter=toys.model(family, layers=2), length=3)
    speculated(again, request)
    assert again.last_stats is not None
    assert again.last_stats.target_calls == ROOM // 4  # a copy that sees them all is always right


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3", "lfm2_vl"])
def test_a_picture_too_few_is_one_error_everywhere(family: str) -> None:
    """`generate()` refuses it too, in words of the model's own."""
    model, drafter = pair(family)
    request = toys.unequal(family)
    rows = len(request["input_ids"])
    if "image_grid_thw" in request:
        last = int(request["image_grid_thw"][-1].prod())
        request["pixel_values"] = request["pixel_values"][:-last]
    for name in {*request} - {"input_ids", "attention_mask", "pixel_values"}:
        if len(request[name]) == rows and not name.endswith("type_ids"):
            request[name] = request[name][:-1]
    if "image_grid_thw" not in request:
        request["pixel_values"] = request["pixel_values"][:-1]
    with pytest.raises((ValueError, StopIteration)):
        reference(model, request)
    fast = mmspec.accelerate(model, "coupled", drafter=drafter, length=3)
    for asked_by in (speculated, lambda fast, given: reference(model, given, custom_generate=fast)):
        with pytest.raises(ValueError, match=rf"^{type(model).__name__}.*cannot take this request"):
            asked_by(fast, request)
    with pytest.raises(ValueError, match="cannot take this request"):
        list(fast.stream(**request, max_new_tokens=2))


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
@pytest.mark.parametrize("sees", ["target-features", "nothing"])
def test_a_drafter_may_see_them_too(family: str, sees: str) -> None:
    model, request = pair(family)[0], toys.unequal(family)
    fast = mmspec.accelerate(
        model, "coupled", drafter=toys.model(family, layers=2), sees=sees, length=3
    )
    assert torch.equal(speculated(fast, request), reference(model, request))
    if sees == "target-features":
        assert fast.last_stats is not None
        assert fast.last_stats.target_calls == ROOM // 4  # as a copy that sees it all


@pytest.mark.parametrize(
    "family",
    exhaustive(
        ("llama", "gemma3-text", "lfm2", "llava", "qwen2_5_vl", "gemma3"),
        ("lfm2", "llava", "qwen2_5_vl"),
    ),
)
def test_padding_without_a_mask(family: str) -> None:
    """`generate()` infers the mask from the padding token; drafters see the same prompt."""
    model, drafter = pair(family)
    request = toys.inputs(family, seed=1, batch=3, ragged=True)
    del request["attention_mask"]
    expected = reference(model, request, repetition_penalty=1.1)
    fast = mmspec.accelerate(model, "coupled", drafter=drafter, length=3)
    assert torch.equal(speculated(fast, request, repetition_penalty=1.1), expected)
    model.generation_config.eos_token_id = toys.PAD  # then it tells nothing: both attend to it
    expected = reference(model, request)
    assert torch.equal(speculated(fast, request), expected)
    model.generation_config.eos_token_id = None


@pytest.mark.slow
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_chain_of_twenty_prompts(family: str, batch: str) -> None:
    check_with_a_drafter(family, batch, range(20), length=4)


@pytest.mark.slow
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", BRANCHING)
def test_trees_of_twenty_prompts(family: str, batch: str) -> None:
    check_with_a_drafter(family, batch, range(20), tree=[3, 2, 1])
    check_with_a_drafter(family, batch, range(20), tree="dynamic")
    check_with_an_oracle(family, batch, range(20))


def test_trees_of_a_recurrent_draft_model_are_refused() -> None:
    model, drafter = pair("lfm2")
    with pytest.raises(ValueError, match=r"recurrent state.*length="):
        mmspec.accelerate(model, "coupled", drafter=drafter, tree=WIDE)


@pytest.mark.parametrize(
    ("family", "corruption", "batch"), covering(HYBRID, (0.3, 1.0), (1, 2), strength=1)
)
def test_recurrent_models_replay_what_is_pending(
    family: str, corruption: float, batch: int
) -> None:
    """Long enough for several settled replays (`CausalTarget.longest_replay`)."""
    model, _ = pair(family)
    request = toys.inputs(family, batch=batch, ragged=batch > 1)
    expected = reference(model, request, max_new_tokens=32)
    oracle = Oracle(answers(expected, request), corruption, tree=3)
    fast = mmspec.accelerate(model, "coupled", drafter=oracle)
    assert torch.equal(speculated(fast, request, max_new_tokens=32), expected)


@pytest.mark.parametrize("family", limited(["lfm2", "qwen3_5"], 1))
def test_a_settled_replay_leaves_rows_without_pending_tokens_alone(family: str) -> None:
    """One row rejects until its replay is settled, the other accepts everything all along."""
    model, _ = pair(family)
    request = toys.inputs(family, batch=2, ragged=True)
    room, waits = 40, 6  # tokens that may wait for a replay: the other row goes on for longer
    expected = reference(model, request, max_new_tokens=room)
    right, wrong = answers(expected, request)
    wrong = [(token + 1) % toys.WORDS.stop for token in wrong]
    for rows in ([right, wrong], [wrong, right]):
        picked = request if rows[0] is right else _swapped(request)
        fast = mmspec.accelerate(model, "coupled", drafter=Oracle(rows, tree=3))
        bound = fast.session.bound
        bound.target = replace(bound.target, longest_replay=waits)
        result = speculated(fast, picked, max_new_tokens=room)
        assert torch.equal(result, expected if rows[0] is right else expected.flip(0))


def _swapped(request: dict[str, Tensor]) -> dict[str, Tensor]:
    if "image_grid_thw" not in request:
        return {name: value.flip(0) for name, value in request.items()}
    sizes = request["image_grid_thw"].prod(-1).tolist()
    pixels = torch.cat(torch.split(request["pixel_values"], sizes)[::-1])
    return {name: value.flip(0) for name, value in request.items()} | {"pixel_values": pixels}


@pytest.mark.parametrize(
    ("family", "batch"),
    [
        ("llava", "ragged"),
        pytest.param("qwen2_5_vl", "one", marks=pytest.mark.exhaustive),
        pytest.param("llava", "one", marks=pytest.mark.slow),
        pytest.param("qwen2_5_vl", "ragged", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", exhaustive(EXACT, DRAWN))
def test_every_exact_recipe(name: str, family: str, batch: str) -> None:
    model = pair(family, INSIDE)[0]
    fast = mmspec.accelerate(model, name, drafter=partner(name, family, INSIDE))
    request, expected = asked(family, batch, 1, INSIDE)
    assert torch.equal(speculated(fast, request), expected)
    stats = fast.last_stats
    assert stats is not None
    assert (stats.recipe, stats.exact) == (name, True)
    assert stats.num_new_tokens == ROOM * len(expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", EXACT)
def test_every_exact_recipe_on_every_family(name: str, family: str) -> None:
    model = pair(family, INSIDE)[0]
    try:
        fast = mmspec.accelerate(model, name, drafter=partner(name, family, INSIDE))
    except ValueError as error:
        told = ("sees=", "attends to everything")  # nothing to see, or no layer that sees all
        if family in HYBRID or any(one in str(error) for one in told):  # no trees there
            return
        raise
    for seed in range(3):
        for batch in BATCHES:
            request, expected = asked(family, batch, seed, INSIDE)
            assert torch.equal(speculated(fast, request), expected)


def test_a_text_drafter_for_a_vision_model() -> None:
    model, request = pair("llava")[0], toys.inputs("llava", batch=3, ragged=True)
    fast = mmspec.accelerate(model, "spd-mllm", drafter=pair("llama")[0])
    assert torch.equal(speculated(fast, request), reference(model, request))


@pytest.mark.parametrize("shape", [{"length": 5}, {"tree": WIDE}], ids=str)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl"])
def test_an_end_inside_an_accepted_run(family: str, batch: str, shape: dict[str, Any]) -> None:
    model = toys.model(family, layers=2)
    request = toys.inputs(family, **BATCHES[batch])
    row = answers(reference(model, request), request)[0]
    place = next(i for i in range(3, ROOM) if row[i] not in row[:i])  # behind two accepted tokens
    model.generation_config.eos_token_id = [row[place], toys.WORDS.stop - 1]
    expected = reference(model, request)
    fast = mmspec.accelerate(model, "coupled", drafter=toys.model(family, layers=2), **shape)
    result = speculated(fast, request)
    assert result[0, request["input_ids"].shape[1] + place] == row[place]
    assert torch.equal(result, expected)


PROCESSORS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.2},
    {"no_repeat_ngram_size": 2},
    {"min_new_tokens": 9, "eos_token_id": list(range(4, 40))},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 1, "bad_words_ids": [[7], [8, 9]]},
]
FORKS: list[dict[str, Any]] = [{"length": 4}, {"tree": WIDE}, {"tree": "dynamic"}]


@pytest.mark.parametrize(
    ("settings", "batch", "shape"), covering(PROCESSORS, tuple(BATCHES), FORKS, strength=1), ids=str
)
def test_processors_that_look_at_the_tokens_before(
    settings: dict[str, Any], batch: str, shape: dict[str, Any]
) -> None:
    model, drafter = pair("llama")
    request = toys.inputs("llama", seed=2, **BATCHES[batch])
    fast = mmspec.accelerate(model, "coupled", drafter=drafter, **shape)
    expected = reference(model, request, **settings)
    assert torch.equal(speculated(fast, request, **settings), expected)


@pytest.mark.parametrize("room", range(1, 7))
@pytest.mark.parametrize("shape", [{"length": 3}, {"tree": WIDE}, {"tree": "dynamic"}], ids=str)
def test_the_length_is_cut_anywhere(shape: dict[str, Any], room: int) -> None:
    model = pair("llama")[0]
    request = toys.inputs("llama", seed=3)
    fast = mmspec.accelerate(model, "coupled", drafter=toys.model("llama", layers=2), **shape)
    expected = reference(model, request, max_new_tokens=room)
    assert torch.equal(speculated(fast, request, max_new_tokens=room), expected)


class Pairs(StoppingCriteria):
    """Stops behind two tokens whose sum is divisible by 7."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, -2:].sum(-1) % 7 == 0


@pytest.mark.parametrize("seed", range(4))
def test_a_stopping_criterion_is_asked_at_every_token(seed: int) -> None:
    model = pair("llama")[0]
    request = toys.inputs("llama", seed=seed)
    expected = reference(model, request, max_new_tokens=30, stopping_criteria=[Pairs()])
    assert expected.shape[1] < request["input_ids"].shape[1] + 30
    fast = mmspec.accelerate(model, "coupled", drafter=toys.model("llama", layers=2), length=6)
    result = speculated(fast, request, max_new_tokens=30, stopping_criteria=[Pairs()])
    assert torch.equal(result, expected)


def test_rows_of_a_batch_end_at_their_own_time() -> None:
    """Rows that have ended are padded while others go on."""
    model, drafter = pair("llava")
    request = toys.inputs("llava", batch=4, ragged=True)
    rows = answers(reference(model, request), request)
    model = toys.model("llava", layers=2)
    model.generation_config.eos_token_id = [rows[0][4], rows[2][8]]
    expected = reference(model, request)
    fast = mmspec.accelerate(model, "coupled", drafter=drafter, length=4)
    assert torch.equal(speculated(fast, request), expected)
    assert int((expected == toys.PAD).sum()) > int((request["input_ids"] == toys.PAD).sum())
