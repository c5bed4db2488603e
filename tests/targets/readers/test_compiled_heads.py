"""Drafters whose forwards are graphs: the tokens of eager ones, and what docs/compile.md lists.

As in `test_compiled.py`, the functions run uncompiled (`compile="none"`).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import mmspec
from mmspec import recipes
from mmspec.drafters.compiled import CompiledShape
from mmspec.drafters.neural.lookahead_tokens import embedding_width, lookahead_nodes
from mmspec.modalities.common.families import make_reader
from mmspec.models.heads.dflash import DFlashHead, DFlashHeadConfig
from mmspec.models.heads.hydra import HydraHeads, HydraHeadsConfig
from mmspec.models.heads.medusa import MedusaHeads, MedusaHeadsConfig
from mmspec.models.heads.p_eagle import PEagleHead, PEagleHeadConfig
from mmspec.targets.graphs import EAGER
from mmspec.targets.memory import build_block
from mmspec.targets.readers.compiled import compile_readers
from tests import toys
from tests.covering import covering, limited
from tests.partners import partner
from tests.targets.readers.test_compiled import request_of

GUIDE = Path(__file__).parents[3] / "docs" / "compile.md"
OTHERS = "no draft, or lookups and Jacobi windows, which run no model of their own"

HEADS: dict[str, tuple[Any, Any]] = {
    "medusa": (MedusaHeads, MedusaHeadsConfig),
    "hydra": (HydraHeads, HydraHeadsConfig),
    "hydra-pp": (HydraHeads, HydraHeadsConfig),
    "p-eagle": (PEagleHead, PEagleHeadConfig),
    "dflash": (DFlashHead, DFlashHeadConfig),
}


def _make_heads(model: Any, name: str) -> Any:
    text, (kind, config) = model.config.get_text_config(), HEADS[name]
    more: dict[str, Any] = {"mask_token_id": text.vocab_size - 1}
    if name in ("medusa", "hydra", "hydra-pp"):
        more = {"hydra_head_arch": "prefix-mlp"} if name == "hydra-pp" else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(config.of(text, text.vocab_size, **more)).eval()


ALIKE = ("medusa", "hydra", "p-eagle", "dflash", "hydra-pp")


@pytest.mark.parametrize(("batch", "name"), limited(covering([1, 3], ALIKE, strength=1), 3))
def test_heads_beside_the_target_are_graphs(name: str, batch: int) -> None:
    model, request = toys.model("llava", layers=4), request_of("llava", batch)
    heads = _make_heads(model, name)
    eager, fast = (
        mmspec.accelerate(model, name, drafter=heads, **more) for more in ({}, {"compile": EAGER})
    )
    expected, out = (one.generate(**request, max_new_tokens=8) for one in (eager, fast))
    assert torch.equal(out.sequences, expected.sequences)
    assert out.stats.per_step_accepted == expected.stats.per_step_accepted
    assert out.stats.compile["drafter"].startswith("compiled")
    assert out.stats.compiled_forwards > out.stats.target_calls


@pytest.mark.parametrize("batch", [1, 3])
def test_look_ahead_tokens_are_read_compiled(batch: int) -> None:
    model, request = toys.model("llava", layers=4), request_of("llava", batch)
    tokens = partner("pass-sampling", "llava", 4)
    eager, fast = (
        mmspec.accelerate(model, "pass-sampling", drafter=tokens, **more)
        for more in ({}, {"compile": EAGER})
    )
    expected, out = (one.generate(**request, max_new_tokens=8) for one in (eager, fast))
    assert torch.equal(out.sequences, expected.sequences)
    assert out.stats.per_step_accepted == expected.stats.per_step_accepted
    assert out.stats.compiled_forwards > out.stats.target_calls


@torch.no_grad()
def test_embeddings_are_read_in_place_of_tokens() -> None:
    """The scores of eager blocks, of other embeddings than those that it was compiled with."""
    model, request = toys.model("llama"), request_of("llama")
    compiled, eager = make_reader(model), make_reader(model)
    log = compile_readers(compiled, None, (), EAGER)
    memories = [reader.prefill(request, 20)[0] for reader in (compiled, eager)]
    compiled.prepare_graphs(memories[0], 20)
    scores = []
    for _ in range(2):
        nodes = lookahead_nodes(torch.randn(1, 3, embedding_width(eager)))
        block = build_block([[5]], nodes, memories[0].like)
        pair = zip((compiled, eager), memories, strict=True)
        own, expected = (reader.read(memory, block)[0] for reader, memory in pair)
        assert torch.allclose(own, expected, atol=2e-5)
        scores.append(own)
    assert not torch.allclose(scores[0], scores[1], atol=1e-2)
    assert log.runs["target"] == 2


def test_heads_of_another_kind_say_that_they_run_eager() -> None:
    model, request = toys.model("llava", layers=4), request_of("llava")
    fast = mmspec.accelerate(
        model, "kangaroo", drafter=partner("kangaroo", "llava", 4), compile=EAGER
    )
    stats = fast.generate(**request, max_new_tokens=6).stats
    assert stats.compiled_forwards == stats.target_calls
    assert "not written as functions of padded blocks" in stats.compile["drafter"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("recipe", ["layer-skip", "swift", "ibed", "uad", "sparrow"])
def test_layers_views_and_translated_models_read_compiled_blocks(recipe: str, batch: int) -> None:
    model, request = toys.model("qwen2_5_vl", layers=4), request_of("qwen2_5_vl", batch)
    parts = {"drafter": partner(recipe, "qwen2_5_vl", 4)}
    how: dict[str, Any] = {"max_new_tokens": 10, "do_sample": True, "seed": 3}
    eager, fast = (
        mmspec.accelerate(model, recipe, **parts, **more) for more in ({}, {"compile": EAGER})
    )
    expected, out = (one.generate(**request, **how) for one in (eager, fast))
    assert torch.equal(out.sequences, expected.sequences)
    assert out.stats.per_step_accepted == expected.stats.per_step_accepted
    assert out.stats.compile["drafter"].startswith("compiled")
    assert out.stats.compiled_forwards > out.stats.target_calls


@pytest.mark.exhaustive
def test_a_draft_model_that_is_read_row_by_row_runs_eager() -> None:
    model, small = toys.model("llava"), toys.model("lfm2_vl")
    fast = mmspec.accelerate(model, "coupled", drafter=small, sees="nothing", compile=EAGER)
    out = fast.generate(**request_of("llava"), max_new_tokens=6)
    assert torch.equal(out.sequences, model.generate(**request_of("llava"), max_new_tokens=6))
    assert "conv" in out.stats.compile["drafter"]


def describe_drafter(recipe: str, family: str = "llava") -> str | None:
    """How the drafter of a recipe runs, as docs/compile.md lists it; None if not for this model."""
    model = toys.model(family, layers=4)
    try:
        fast = mmspec.accelerate(model, recipe, drafter=partner(recipe, family, 4), compile=EAGER)
    except ValueError:
        return None
    stats = fast.generate(**request_of(family), max_new_tokens=24, do_sample=True, seed=1).stats
    found = stats.compile["drafter"]
    for phrase, row in (
        ("it ran no forward of its own", OTHERS),
        ("changes its size", "a graph per forward, as a draft changes its size"),
        ("its one forward", "one forward, which is a graph"),
        ("each forward is a graph", "a graph per forward"),
        ("not written as functions", "eager: its forwards are not functions of padded blocks"),
        ("a part of the target's cache", "eager: it reads a part of the target's cache"),
        ("keys and values of one shape", "eager: keys and values of different shapes"),
    ):
        if phrase in found:
            return row
    assert found == "compiled", found
    is_whole = isinstance(vars(fast.session.bound.drafter).get("shape"), CompiledShape)
    return "one graph" if is_whole else "a graph per forward"


def make_table() -> str:
    """The table of docs/compile.md, from a run of every recipe."""
    rows: dict[str, list[str]] = {}
    for recipe in recipes.names("tokens"):
        found = describe_drafter(recipe)
        if found is not None:
            rows.setdefault(found, []).append(f"`{recipe}`")
    return "\n".join(f"| {found} | {' '.join(names)} |" for found, names in sorted(rows.items()))


@pytest.mark.slow
def test_the_guide_lists_every_recipe(caplog: pytest.LogCaptureFixture) -> None:
    """Print `make_table()` to renew it."""
    caplog.set_level(logging.CRITICAL)
    assert make_table() in GUIDE.read_text()
