"""Merged tokens count by their size: n copies of a token are one of size n."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec.compressors.bipartite_merge import BipartiteMerge
from mmspec.targets.memory import build_block
from tests import toys
from tests.covering import covering
from tests.partners import noisy
from tests.toys import readers

COPIES = {5: 3, 6: 1, 7: 4}  # place of a merged token -> how many it stands for


def prompt(width: int, copied: bool, pad: int = 0) -> dict[str, Tensor]:
    """A prompt of embeddings with merged tokens, or with the copies they replace."""
    noise = torch.Generator().manual_seed(2)
    embeds, places = torch.randn(12, width, generator=noise), torch.arange(12) * 3
    counts = torch.tensor([COPIES.get(at, 1) for at in range(12)])
    if copied:
        embeds, places = (one.repeat_interleave(counts, 0) for one in (embeds, places))
        counts = torch.ones(len(embeds), dtype=torch.int64)
    mask = torch.tensor([0] * pad + [1] * len(embeds))
    before = torch.zeros(pad, dtype=torch.int64)
    return {
        "inputs_embeds": torch.cat((torch.zeros(pad, width), embeds))[None],
        "position_ids": torch.cat((before, places))[None],
        "attention_mask": mask[None],
        "sizes": torch.cat((before + 1, counts))[None],
    }


@torch.no_grad()
@pytest.mark.parametrize("pad", [0, 2])
def test_a_size_is_so_many_copies(pad: int) -> None:
    """In one layer, whose keys are those of the copies: the prefill, and blocks after it."""
    backbone: Any = readers.backbone(toys.model("llama", layers=1))
    distributions: dict[str, list[Tensor]] = {}
    for how in ("merged", "copied", "unweighted"):
        request = prompt(backbone.config.hidden_size, how == "copied", pad)
        if how == "unweighted":
            request.pop("sizes")
        memory, logits, _ = backbone.prefill(request, extra_slots=8)
        distributions[how] = [logits]
        for tokens in ([9], [10, 11, 12]):
            said, _ = backbone.read(memory, build_block([tokens], None, memory.like))
            distributions[how].append(said)
            memory.advance([len(tokens)])
    for merged, copied, plain in zip(*distributions.values(), strict=True):
        torch.testing.assert_close(merged, copied)
        assert not torch.allclose(merged, plain, atol=1e-2)


@torch.no_grad()
def test_sizes_of_one_leave_everything_as_it_is() -> None:
    backbone: Any = readers.backbone(toys.model("llama"))
    request = prompt(backbone.config.hidden_size, copied=True)
    plain = {name: value for name, value in request.items() if name != "sizes"}
    logits = [backbone.prefill(one, extra_slots=4)[1] for one in (request, plain)]
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("family", "sees"),
    covering(
        ["llava", "qwen2_5_vl", "gemma3", "paligemma"], ["pixels", "target-features"], strength=1
    ),
)
def test_the_targets_output_is_its_own(family: str, sees: str) -> None:
    model, drafter = toys.model(family), noisy(family)
    request = toys.inputs(family, batch=2, ragged=True)
    parts: dict[str, Any] = {"compressor": BipartiteMerge(keep=0.3), "sees": sees, "tree": [2, 2]}
    fast = mmspec.accelerate(model, "coupled", drafter=drafter, **parts)
    out = fast.generate(**request, max_new_tokens=8, do_sample=False)
    expected = model.generate(**request, max_new_tokens=8, do_sample=False)
    assert torch.equal(out.sequences, expected)
    assert out.stats.fallback is None


def test_the_draft_model_is_told() -> None:
    """Other sizes, another distribution; with weighted=false merged tokens count once."""
    weighted, plain = (
        _first_distribution(BipartiteMerge(keep=0.1, weighted=one)) for one in (True, False)
    )
    assert not torch.allclose(weighted, plain, atol=1e-3)


def _first_distribution(compressor: BipartiteMerge) -> Tensor:
    """The draft model's distribution after a prompt, (1, V)."""
    fast = mmspec.accelerate(
        toys.model("llava"), "coupled", drafter=noisy("llava"), compressor=compressor
    )
    reader, distributions = fast.session.bound.drafter.model.backbone, list[Tensor]()
    prefill = reader.prefill

    def watched(*args: Any, **given: Any) -> Any:
        made = prefill(*args, **given)
        distributions.append(made[1])
        return made

    reader.prefill = watched
    fast.generate(**toys.inputs("llava"), max_new_tokens=4, do_sample=False)
    return distributions[0]
