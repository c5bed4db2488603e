"""Beams are those of `generate(num_beams=N)`, token for token, in float32, with any drafter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec._hf_beams import SORTS_DRAWS, BeamSearch
from mmspec.drafters.beams import ModelBeams, make_beam_drafter
from mmspec.modalities.common import beam_generation
from mmspec.modalities.common.tiny_models import tiny_llama
from mmspec.targets.branches import BeamDraft
from mmspec.verifiers.beams import BeamVerdict, BeamVerifier, StrictBeams
from tests import toys
from tests.covering import covering, exhaustive
from tests.partners import noisy

ROOM = 10
FAMILIES = ("llama", "llava", "qwen2_5_vl")
BRANCHING = tuple(
    family for family in toys.FAMILIES if family not in ("whisper", "lfm2", "lfm2_vl", "qwen3_5")
)
SETTINGS: dict[str, dict[str, Any]] = {
    "three": {"num_beams": 3, "num_return_sequences": 2, "repetition_penalty": 1.2},
    "short": {"num_beams": 4, "length_penalty": -1.0, "eos_token_id": [9, 30], "min_new_tokens": 3},
    "early": {"num_beams": 2, "early_stopping": True, "length_penalty": 2.0, "eos_token_id": 9},
    "never": {"num_beams": 3, "early_stopping": "never", "num_return_sequences": 3},
}
BATCHES: dict[str, dict[str, Any]] = {"one": {}, "ragged": {"batch": 2, "ragged": True}}


@cache
def pair(family: str) -> tuple[Any, Any]:
    return toys.model(family), noisy(family)


def search(model: Any, request: dict[str, Tensor], **settings: Any) -> Any:
    return model.generate(
        **request,
        max_new_tokens=ROOM,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **settings,
    )


def check(family: str, batch: str, name: str, recipe: str = "coupled") -> mmspec.Output:
    model, drafter = pair(family)
    request = toys.inputs(family, seed=1, **BATCHES[batch])
    wanted = search(model, request, **SETTINGS[name])
    parts = {} if recipe == "plain" else {"drafter": drafter}
    fast = mmspec.accelerate(model, recipe, **parts)
    out: mmspec.Output = fast.generate(**request, max_new_tokens=ROOM, **SETTINGS[name])
    assert out.stats.fallback is None
    assert torch.equal(out.sequences, wanted.sequences)
    assert out.sequences_scores is not None
    torch.testing.assert_close(out.sequences_scores, wanted.sequences_scores)
    return out


@pytest.mark.parametrize(
    ("family", "batch", "name"),
    [
        ("llava", "one", "short"),
        ("qwen2_5_vl", "ragged", "three"),
        pytest.param("llama", "ragged", "early", marks=pytest.mark.exhaustive),
    ],
)
def test_drafted_beams_are_those_of_generate(family: str, batch: str, name: str) -> None:
    out = check(family, batch, name)
    assert out.stats.target_calls < ROOM - 1
    assert out.stats.tokens_per_target_call > 1.3


@pytest.mark.parametrize(
    ("family", "batch", "name"),
    covering(FAMILIES, tuple(BATCHES), tuple(SETTINGS), by_default=False),
)
def test_every_setting_is_that_of_generate(family: str, batch: str, name: str) -> None:
    check(family, batch, name)
    check(family, batch, name, "plain")


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", BRANCHING)
def test_every_class_that_reads_trees_searches_beams(family: str) -> None:
    check(family, "ragged", "three", "dynamic-tree")


def test_without_drafts_a_call_adds_one_token() -> None:
    assert check("llama", "one", "early", "plain").stats.tokens_per_target_call == 1


@dataclass(frozen=True)
class DraftedOnly(BeamVerifier):
    """Wrong: the target chooses among drafted beams, although better ones were not drafted."""

    lossless: bool = True

    def verify(
        self, searches: Sequence[BeamSearch], draft: BeamDraft, logits: Tensor
    ) -> BeamVerdict:
        children = draft.children()[0]
        if children and draft.depth:
            logits = logits.clone()
            drafted = {node for node, _ in children}
            for node in drafted:
                own = [token for parent, token in children if parent == node]
                kept = logits[0, node - draft.first, own].clone()
                logits[0, node - draft.first] = -1e4
                logits[0, node - draft.first, own] = kept
        return StrictBeams().verify(searches, draft, logits)


def test_a_search_among_drafted_beams_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beam_generation, "StrictBeams", DraftedOnly)
    with pytest.raises(AssertionError):
        check("llama", "one", "three")


@pytest.mark.parametrize("batch", exhaustive(BATCHES, ["one"]))
@pytest.mark.parametrize("family", exhaustive(FAMILIES, ["qwen2_5_vl"]))
def test_the_hook_of_transformers_gets_its_beams(family: str, batch: str) -> None:
    model, drafter = pair(family)
    request = toys.inputs(family, seed=2, **BATCHES[batch])
    settings = {"num_beams": 3, "num_return_sequences": 2, "repetition_penalty": 1.2}

    def allowed(row: int, ids: Tensor) -> list[int]:
        return list(range(5 + row, 60))

    wanted = search(model, request, **settings, prefix_allowed_tokens_fn=allowed)
    fast = mmspec.accelerate(model, "coupled", drafter=drafter)
    found = model.generate(
        **request,
        **settings,
        max_new_tokens=ROOM,
        prefix_allowed_tokens_fn=allowed,
        return_dict_in_generate=True,
        custom_generate=fast,
    )
    assert type(found) is type(wanted)
    assert torch.equal(found.sequences, wanted.sequences)
    torch.testing.assert_close(found.sequences_scores, wanted.sequences_scores)


def test_a_model_that_asks_for_beams_gets_them(tmp_path: Path) -> None:
    """`num_beams` of the model's own configuration; a saved recipe; a prompt of embeddings."""
    model, drafter = toys.model("llama"), noisy("llama")
    model.generation_config.num_beams = 2
    request = toys.inputs("llama", seed=1)
    mmspec.accelerate(model, "coupled", drafter=drafter).save_pretrained(tmp_path)
    fast = mmspec.load(tmp_path, model)
    wanted = model.generate(**request, max_new_tokens=6)
    assert torch.equal(fast.generate(**request, max_new_tokens=6).sequences, wanted)
    embeds = model.get_input_embeddings()(request["input_ids"])
    given = {"input_ids": request["input_ids"]}
    found = fast.generate(inputs_embeds=embeds, drafter_inputs=given, max_new_tokens=6).sequences
    assert torch.equal(found, wanted[:, request["input_ids"].shape[1] :])


@pytest.mark.exhaustive
def test_sampled_beams_of_the_hook_and_of_single_rows() -> None:
    model, drafter = pair("llama")
    request = toys.inputs("llama", seed=1, batch=2)
    settings = {"max_new_tokens": ROOM, "do_sample": True, "num_beams": 3}
    fast = mmspec.accelerate(model, "coupled", drafter=drafter)
    both = fast.generate(**request, **settings, seed=2).sequences
    second = {name: value[1:] for name, value in request.items()}
    alone = fast.generate(**second, **settings, seed=2, row_ids=[1]).sequences
    assert torch.equal(both[1:, : alone.shape[1]], alone)
    torch.manual_seed(5)
    hooked = model.generate(**request, **settings, custom_generate=fast)
    torch.manual_seed(5)
    assert torch.equal(model.generate(**request, **settings, custom_generate=fast), hooked)
    assert hooked.shape[0] == 2
    assert not torch.equal(model.generate(**request, **settings, custom_generate=fast), hooked)


SAMPLED: dict[str, dict[str, Any]] = {
    "plain": {"num_beams": 3, "seed": 3},
    "warped": {"num_beams": 2, "temperature": 0.7, "top_p": 0.95, "eos_token_id": 9, "seed": 5},
}


@pytest.mark.parametrize("batch", exhaustive(BATCHES, ["ragged"]))
@pytest.mark.parametrize("name", exhaustive(SAMPLED, ["warped"]))
def test_drafted_sampled_beams_are_those_without_a_draft(name: str, batch: str) -> None:
    model, drafter = pair("llama")
    request = toys.inputs("llama", seed=1, **BATCHES[batch])
    settings = {"max_new_tokens": ROOM, "do_sample": True, **SAMPLED[name]}
    plain = mmspec.accelerate(model, "plain").generate(**request, **settings)
    fast = mmspec.accelerate(model, "coupled", drafter=drafter)
    out = fast.generate(**request, **settings)
    assert out.stats.fallback is None
    assert torch.equal(out.sequences, plain.sequences)
    torch.testing.assert_close(out.sequences_scores, plain.sequences_scores)
    assert out.stats.target_calls < plain.stats.target_calls
    other = fast.generate(**request, **{**settings, "seed": 4})
    assert other.sequences.tolist() != out.sequences.tolist()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("left_out", "temperature"),
    [("nothing", 1.0), ("nothing", 0.4), ("noise", 1.0), ("warpers", 0.4)],
)
def test_sampled_beams_are_drafted_as_the_target_draws_them(
    left_out: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the target drafts most of its beams only with its noise and its warpers."""
    propose, make = ModelBeams.propose, make_beam_drafter
    if left_out == "noise":
        monkeypatch.setattr(ModelBeams, "propose", lambda self, *a: propose(self, *a[:4]))
    if left_out == "warpers":
        monkeypatch.setattr(beam_generation, "make_beam_drafter", lambda *a: make(*a[:5]))
    fast = mmspec.accelerate(toys.model("llama"), "coupled", drafter=noisy("llama", 0.0))
    settings = {"num_beams": 2, "do_sample": True, "temperature": temperature, "seed": 3}
    out = fast.generate(**toys.inputs("llama", seed=1), max_new_tokens=17, **settings)
    assert (out.stats.target_calls <= 7) == (left_out == "nothing")


@pytest.mark.parametrize("reads_processors", [True, False])
def test_constrained_beams_are_drafted_among_allowed_tokens(
    reads_processors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of items: the function is only asked about prefixes of items, and few calls do."""
    model, request = toys.model("llama"), toys.inputs("llama", seed=1)
    length = request["input_ids"].shape[1]
    items = [tuple((7 * item + 11 * place) % 80 + 10 for place in range(4)) for item in range(40)]

    def allowed(row: int, ids: Tensor) -> list[int]:
        begun = tuple(ids[length:].tolist())
        return sorted({item[len(begun)] for item in items if item[: len(begun)] == begun})

    if not reads_processors:
        make = make_beam_drafter
        monkeypatch.setattr(beam_generation, "make_beam_drafter", lambda *a: make(*a[:5]))
    settings = {"max_new_tokens": 4, "num_beams": 3, "prefix_allowed_tokens_fn": allowed}
    fast = mmspec.accelerate(model, "coupled", drafter=noisy("llama"))
    out = fast.generate(**request, **settings)
    assert torch.equal(out.sequences, model.generate(**request, **settings, do_sample=False))
    assert out.stats.fallback is None
    assert (out.stats.target_calls == 1) == reads_processors


@pytest.mark.exhaustive
@pytest.mark.parametrize("counts_rows", [True, False])
def test_no_row_is_drafted_beyond_its_items_for_the_sake_of_another(
    counts_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty list, here after an item, is an error of transformers."""
    model, request = toys.model("llama"), toys.inputs("llama", seed=1, batch=2, ragged=True)
    length, propose = request["input_ids"].shape[1], ModelBeams.propose

    def allowed(row: int, ids: Tensor) -> list[int]:
        place = len(ids) - length
        some = [10, 11, 12] if place == 0 else [place + 20]
        return [] if place == 8 else some if row == 0 else list(range(10, 90))

    def propose_alike(self: ModelBeams, tree: Any, scores: Tensor, left: Any, *rest: Any) -> Any:
        return propose(self, tree, scores, [max(left)] * len(left), *rest)

    if not counts_rows:
        monkeypatch.setattr(ModelBeams, "propose", propose_alike)
    settings = {"max_new_tokens": 8, "num_beams": 3, "prefix_allowed_tokens_fn": allowed}
    fast = mmspec.accelerate(model, "coupled", drafter=noisy("llama", 2.0))
    out = fast.generate(**request, **settings)
    assert torch.equal(out.sequences, model.generate(**request, **settings, do_sample=False))
    assert (out.stats.fallback is None) == counts_rows


def test_sampled_beams_among_drafted_ones_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beam_generation, "StrictBeams", DraftedOnly)
    with pytest.raises(AssertionError):
        test_drafted_sampled_beams_are_those_without_a_draft("plain", "one")


def order_probabilities(scores: Tensor, count: int) -> dict[tuple[int, ...], float]:
    """Draws of `count` without replacement from softmax(scores), in order."""
    found = {}
    probs = scores.double().softmax(-1).tolist()
    for order in permutations(range(len(probs)), count):
        mass, left = 1.0, 1.0
        for one in order:
            mass, left = mass * probs[one] / left, left - probs[one]
        found[order] = mass
    return found


@torch.no_grad()
def best_of_two_tokens(model: Any, prompt: list[int]) -> dict[tuple[int, int], float]:
    """The distribution of the returned sequence of `generate(do_sample=True, num_beams=2)`.

    A step draws four continuations without replacement and goes on with the best two of them. The
    last one returns the best of all draws, before transformers 5.24 the better of the first two.
    """
    looked_at = 4 if SORTS_DRAWS else 2

    def following(tokens: list[int]) -> Tensor:
        logits: Tensor = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1]
        return logits.float().log_softmax(-1)

    first, found = following([]), dict[tuple[int, int], float]()
    for drawn, mass in order_probabilities(first, 4).items():
        beams = sorted(drawn, key=lambda token: -float(first[token]))[:2]
        scores = torch.cat([first[token] + following([token]) for token in beams])
        for last, share in order_probabilities(scores, looked_at).items():
            best = max(last, key=lambda one: float(scores[one]))
            key = (beams[best // len(first)], best % len(first))
            found[key] = found.get(key, 0.0) + mass * share
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["generate", "plain", "coupled"])
def test_sampled_beams_have_their_distribution(way: str) -> None:
    """That of `generate()`, which is enumerated. Chance of a false alarm: 1e-6."""
    model, prompt = tiny_llama(5), [1, 2, 3]
    count = 3000 if way == "generate" else 400
    parts = {"drafter": tiny_llama(5, 1, 3)} if way == "coupled" else {}
    run = model if way == "generate" else mmspec.accelerate(model, way, **parts)
    settings = {"num_beams": 2, "do_sample": True, "top_k": 0, "return_dict_in_generate": True}
    ids = torch.tensor([prompt] * count)
    mask = torch.ones_like(ids)
    out = run.generate(input_ids=ids, attention_mask=mask, max_new_tokens=2, **settings)
    wanted = best_of_two_tokens(model, prompt)
    assert sum(wanted.values()) == pytest.approx(1)
    seen = Counter(tuple(row) for row in out.sequences[:, 3:].tolist())
    assert set(seen) <= set(wanted)
    assert p_value(seen, wanted, count) > 1e-6
    first, *others = wanted.values()
    shifted = dict(zip(wanted, [*others, first], strict=True))
    assert p_value(seen, shifted, count) < 1e-6


def p_value(seen: Counter[tuple[int, ...]], wanted: dict[Any, float], count: int) -> float:
    """Of a chi-square test; sequences that are expected less than five times are one cell."""
    often = [one for one, mass in wanted.items() if count * mass >= 5]
    masses = [wanted[one] for one in often]
    counts = [seen[one] for one in often]
    rest = max(1 - sum(masses), 1e-9)
    chi = sum((n - count * m) ** 2 / (count * m) for n, m in zip(counts, masses, strict=True))
    if count * rest >= 5:
        chi += (count - sum(counts) - count * rest) ** 2 / (count * rest)
    half = torch.tensor([len(often) / 2, chi / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def test_a_drafter_that_fails_does_not_fail_the_request() -> None:
    model, drafter = toys.model("llama"), noisy("llama")
    fast = mmspec.accelerate(model, "coupled", drafter=drafter)
    request = toys.inputs("llama", seed=1)
    wanted = model.generate(**request, max_new_tokens=4, num_beams=2)
    drafter.lm_head = torch.nn.Linear(3, 3)
    out = fast.generate(**request, max_new_tokens=4, num_beams=2)
    assert torch.equal(out.sequences, wanted)
    assert ModelBeams.__name__ in str(out.stats.fallback)


REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "no draft model": ("llama", "prompt-lookup", {}, "PromptLookup.*coupled.*num_beams=1"),
    "recurrent": ("lfm2", "plain", {}, "recurrent state.*num_beams=1"),
    "lossy": ("llama", "lenience", {}, "'lenience' is lossy.*coupled"),
    "too few to draw": ("llama", "plain", {"do_sample": True, "top_k": 2}, "draws 6 different"),
    "scores": ("llama", "plain", {"output_scores": True}, "output_scores=True"),
    "observed": ("llama", "plain", {"on_round": print}, "nothing to stream"),
    "window": ("mistral-sliding", "plain", {"max_new_tokens": 40}, "window.*16"),
    "several rows": (
        "llama",
        "plain",
        {"stopping_criteria": [lambda ids, _: torch.zeros(len(ids), dtype=torch.bool)], "batch": 2},
        "one prompt per call",
    ),
    "groups": ("llama", "plain", {"num_beam_groups": 3}, "num_beam_groups=3"),
}


@pytest.mark.parametrize("name", exhaustive(REFUSED, ["no draft model", "lossy"]))
def test_what_beams_cannot_be_is_refused(name: str) -> None:
    family, recipe, settings, message = REFUSED[name]
    settings = {"max_new_tokens": 4, **settings}
    request = toys.inputs(family, batch=settings.pop("batch", 1))
    fast = mmspec.accelerate(toys.model(family), recipe, **_drafter(recipe, family))
    with pytest.raises(ValueError, match=message):
        fast.generate(**request, num_beams=3, **settings)


def _drafter(recipe: str, family: str) -> dict[str, Any]:
    return {"drafter": noisy(family)} if mmspec.recipes.get(recipe).takes_drafter else {}
