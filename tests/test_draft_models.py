"""A new kind of draft model is one file: a custom head runs, is saved, certified and timed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import mmspec
from mmspec import recipes
from mmspec.bench.certify import certify
from mmspec.bench.forwards import record_forwards
from tests import toys
from tests.toys.bigram_head import BIGRAM, BigramHead

ROOM = 8


@pytest.fixture(autouse=True)
def _recipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the custom recipe file where recipes are searched."""
    folder = Path(toys.__file__).parent / "recipes"
    monkeypatch.setattr(recipes, "__path__", [*recipes.__path__, str(folder)])
    reset_recipes()
    yield
    reset_recipes()
    sys.modules.pop("mmspec.recipes.bigram", None)


def reset_recipes() -> None:
    """Clear the cached list of recipes."""
    for cached in (recipes.modules, recipes._list_names, recipes._load):
        cached.cache_clear()


def head() -> BigramHead:
    """One for the LLaVA of the toys."""
    return BIGRAM.random(mmspec.accelerate(toys.model("llava"), "plain").session.bound.backbone, 0)


def test_a_folder_drafts_and_nothing_else_comes_out(tmp_path: Path) -> None:
    model, request = toys.model("llava"), toys.inputs("llava", batch=2, ragged=True)
    head().save_pretrained(tmp_path / "head")
    fast = mmspec.accelerate(model, "bigram", drafter=tmp_path / "head")
    out = fast.generate(**request, max_new_tokens=ROOM)
    expected = model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert torch.equal(out.sequences, expected)
    assert out.stats.drafter_saw == "last token"
    assert out.stats.num_draft_tokens > 0
    fast.save_pretrained(tmp_path / "fast")
    again = mmspec.load(tmp_path / "fast", model)
    ours, theirs = (
        one.generate(**request, max_new_tokens=ROOM, temperature=1.0, seed=3).stats
        for one in (fast, again)
    )
    assert ours.per_step_accepted == theirs.per_step_accepted


def test_what_the_head_knows_is_accepted() -> None:
    """It is trained on the bigrams of the target's output."""
    model, request = toys.model("llava"), toys.inputs("llava")
    said = model.generate(**request, max_new_tokens=ROOM, do_sample=False)[0, -ROOM:].tolist()
    small = head()
    with torch.no_grad():
        for before, after in zip(said[-2::-1], said[:0:-1], strict=True):  # the first one counts
            small.table.weight[before] = torch.nn.functional.one_hot(
                torch.tensor(after), small.table.num_embeddings
            ).float()
    accepted = [
        mmspec.accelerate(model, "bigram", drafter=drafter)
        .generate(**request, max_new_tokens=ROOM)
        .stats.num_accepted_draft_tokens
        for drafter in (small, head())
    ]
    assert accepted[0] > accepted[1]


def test_a_certificate_makes_its_own() -> None:
    found = certify("bigram", seeds=4, samples=300)
    assert found.verdict == "exact"
    assert {check.name: check.outcome for check in found.checks if check.outcome != "skipped"} == {
        "frequencies": "passed",
        "greedy equality": "passed",
        "seeded equality": "passed",
    }


def test_its_forwards_are_timed() -> None:
    small = head()
    fast = mmspec.accelerate(toys.model("llava"), "bigram", drafter=small)
    with record_forwards(fast) as tape:
        fast.generate(**toys.inputs("llava"), max_new_tokens=ROOM)
    assert any(call.module is small for call in tape.forwards)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = toys.model("llava")
    with pytest.raises(ValueError, match="'bigram' needs a bigram head; give drafter="):
        mmspec.accelerate(model, "bigram")
    with pytest.raises(ValueError, match="needs a bigram head, and drafter= is a Llava"):
        mmspec.accelerate(model, "bigram", drafter=model)
    with pytest.raises(ValueError, match=r"or feature head or .*, and drafter= is a BigramHead"):
        mmspec.accelerate(model, "coupled", drafter=head())
    with pytest.raises(ValueError, match="knows 3 tokens, but the target"):
        mmspec.accelerate(model, "bigram", drafter=BigramHead(3))
    with pytest.raises(ValueError, match="holds no bigram head"):
        mmspec.accelerate(model, "bigram", drafter=tmp_path)


def test_what_is_no_source_of_distributions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(BIGRAM), "read", lambda self, model, target, sees: model)
    with pytest.raises(
        ValueError, match=r"a BigramHead is not a source of draft distributions; .*DraftModel"
    ):
        mmspec.accelerate(toys.model("llava"), "bigram", drafter=head())
