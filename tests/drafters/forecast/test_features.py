"""The modules that are forecast, and the handling of rows and outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import nn

from mmspec.drafters.forecast.features import (
    Forecast,
    ForwardOverride,
    Idle,
    find_modules,
    flatten_groups,
    rebuild_output,
    replace_rows,
    select_rows,
    tensors,
)
from tests.drafters.forecast.networks import PIPELINES

WANTED = {
    "dit": {"attn1", "ff"},
    "sd3": {"attn", "attn2", "ff", "ff_context"},
    "flux": {"attn", "ff", "ff_context", "proj_out"},
}


@pytest.mark.parametrize("name", PIPELINES)
def test_attention_and_feed_forward_are_forecast(name: str) -> None:
    network = PIPELINES[name]().transformer
    paths = {module: path for path, module in network.named_modules()}
    found = find_modules(network)
    kept = [paths[module] for module, kind in found.modules if kind is Forecast]
    idle = [paths[module] for module, kind in found.modules if kind is Idle]
    assert {path.rsplit(".", 1)[1] for path in kept} == WANTED[name]
    assert all(path.startswith("single_transformer_blocks") for path in idle)
    assert len(idle) == (6 if name == "flux" else 0)  # two blocks of attn, proj_mlp, act_mlp
    last = "single_transformer_blocks.1" if name == "flux" else "transformer_blocks.2"
    assert found.last is network.get_submodule(last)


def test_blocks_of_an_unknown_kind_are_refused() -> None:
    network = nn.Module()
    network.blocks = nn.ModuleList([nn.Sequential(nn.Linear(2, 2))])
    with pytest.raises(ValueError, match="a Sequential has none of attn, attn1"):
        find_modules(network)


def test_groups_gather_the_halves_of_guidance() -> None:
    """Row r belongs to group r mod G: samples 0 and 1, then both again."""
    rows = torch.tensor([[0.0, 1.0], [10.0, 11.0], [2.0, 3.0], [12.0, 13.0]])
    assert flatten_groups(rows, 2).tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]]
    assert flatten_groups(rows, 1).tolist() == [[0, 1, 10, 11, 2, 3, 12, 13]]
    assert flatten_groups((rows[:, :1], None, rows[:, 1:]), 4).tolist() == rows.tolist()


def test_rows_are_taken_from_what_has_rows() -> None:
    rows, batch = torch.tensor([1, 2]), torch.arange(3)
    given: dict[str, Any] = {
        "hidden_states": batch,
        "timestep": torch.tensor(7),
        "img_ids": batch,  # three positions, not three rows
        "kwargs": {"scale": 0.5, "masks": [batch], "image_rotary_emb": (batch, batch)},
        "flag": True,
    }
    found = select_rows(given, rows, 3)
    assert found["hidden_states"].tolist() == [1, 2]
    assert found["timestep"] == 7
    assert found["img_ids"] is batch
    assert found["kwargs"]["masks"][0].tolist() == [1, 2]
    assert found["kwargs"]["image_rotary_emb"][0] is batch
    assert found["flag"] is True


def test_outputs_are_rebuilt_as_they_were() -> None:
    one, two = torch.zeros(3, 2), torch.ones(3, 2)
    assert rebuild_output(one, [two]) is two
    assert rebuild_output((None, one), [two]) == (None, two)
    output = rebuild_output(Transformer2DModelOutput(sample=one), [two])
    assert isinstance(output, Transformer2DModelOutput)
    assert tensors(output)[0] is two
    mixed = replace_rows((None, one), (None, two[:1]), torch.tensor([2]))
    assert mixed[0] is None
    assert mixed[1].tolist() == [[0, 0], [0, 0], [1, 1]]


def test_idle_outputs_take_no_memory() -> None:
    feature = Idle()
    feature.record(torch.ones(2, 5, 7), torch.ones(2, 1), None)
    found = feature.forecast(torch.ones(2, 2))
    assert found.shape == (2, 5, 7)
    assert not found.any()
    assert found.untyped_storage().nbytes() == 4


def test_a_forward_is_taken_over_and_given_back() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    want, before = layer(x), set(vars(layer))
    outer = ForwardOverride(layer, lambda original, x: -original(x))
    assert torch.equal(layer(x), -want)
    inner = ForwardOverride(layer, lambda original, x: 2 * original(x))
    assert torch.equal(layer(x), -2 * want)
    inner.restore()
    assert torch.equal(layer(x), -want)
    outer.restore()
    assert torch.equal(layer(x), want)
    assert set(vars(layer)) == before
