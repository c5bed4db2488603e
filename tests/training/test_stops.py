"""Stop heads are trained on the acceptance of drafted tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmspec
from mmspec.drafters.lengths.learned import SpecDecPP, StopHead
from mmspec.training.stops import fit_stop, train_stop
from tests import toys
from tests.partners import noisy


def test_a_head_is_trained_on_drafts_and_decides_their_length(tmp_path: Any) -> None:
    model, drafter = toys.model("llama"), noisy("llama", scale=0.2)
    request = toys.inputs("llama", batch=2)

    def bind(shape: Any) -> mmspec.Accelerated:
        return mmspec.accelerate(model, "speculative-sampling", drafter=drafter, tree=shape)

    given = {**request, "max_new_tokens": 12, "do_sample": False}
    found = train_stop(bind, [given], length=4, steps=20)
    assert found.num_tokens > 8
    assert 0 < found.acceptance < 1
    found.head.save(tmp_path / "stop.safetensors")
    length = SpecDecPP(tmp_path / "stop.safetensors", threshold=0.9)
    out = mmspec.accelerate(model, drafter=drafter, length=length).generate(**given)
    assert out.stats.fallback is None
    assert torch.equal(out.sequences, model.generate(**given))
    with pytest.raises(ValueError, match="no token was drafted"):
        train_stop(bind, [{**given, "max_new_tokens": 1}], length=4, steps=20)
    (tmp_path / "other.safetensors").write_bytes(b"x" * 40)
    with pytest.raises(ValueError, match="no stop head"):
        StopHead.load(tmp_path / "other.safetensors")


def test_uncertain_places_are_learned() -> None:
    """Refused where the entropy is high; a constant cannot tell these apart."""
    noise = torch.Generator().manual_seed(0)
    features = torch.rand(300, 4, generator=noise)
    labels = (features[:, 0] < 0.5).float()
    found = fit_stop(features, labels, steps=150, rate=0.05)
    chances = found.head(features).sigmoid()
    assert ((chances > 0.5) == (labels > 0.5)).float().mean() > 0.9
    assert torch.equal(found.head(features), fit_stop(features, labels, 150, 0.05).head(features))
