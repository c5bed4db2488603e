"""Beams are those of `generate(num_beams=N)`, token for token, in float32, with any drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec._hf_beams import BeamSearch
from mmspec.drafters.beams import ModelBeams
from mmspec.modalities.common import beam_generation
from mmspec.targets.branches import BeamDraft
from mmspec.verifiers.beams import BeamVerdict, BeamVerifier, StrictBeams
from tests import toys
from tests.covering import exhaustive
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


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", FAMILIES)
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
    "sampled": ("llama", "plain", {"do_sample": True}, "do_sample=True"),
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
