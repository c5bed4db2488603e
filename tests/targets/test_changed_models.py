"""Models that their user changes after `accelerate`: the answer is that of the model as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mmspec
from tests import toys
from tests.covering import covering
from tests.partners import noisy
from tests.toys import readers

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


class Adapted(nn.Module):
    """A layer with an adapter beside it, as libraries of adapters put it in its place."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner, self.more = inner, nn.Linear(inner.in_features, inner.out_features, bias=False)
        nn.init.normal_(self.more.weight, std=0.2)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(states) + self.more(states)
        return made


def adapt_a_layer(model: Any) -> None:
    layer = model.get_decoder().layers[0]
    layer.mlp.up_proj = Adapted(layer.mlp.up_proj)


def adapt_the_head(model: Any) -> None:
    model.set_output_embeddings(Adapted(model.get_output_embeddings()))


def grow(model: Any) -> None:
    """New words are said, too."""
    count = model.get_input_embeddings().weight.shape[0]
    words, head = model.resize_token_embeddings(2 * count), model.get_output_embeddings()
    with torch.no_grad():
        words.weight[count:] = words.weight[:count]
        head.weight[count:] = 2 * head.weight[:count]
        if head.bias is not None:
            head.bias[count:] = head.bias[:count]


def replace_the_decoder(model: Any) -> None:
    own = model.get_decoder()
    other = copy.deepcopy(own)
    noise = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in other.layers.parameters():
            weight.add_(torch.randn(weight.shape, generator=noise), alpha=0.3)
    for holder in list(model.modules()):
        for name, part in list(holder.named_children()):
            if part is own:
                setattr(holder, name, other)


@pytest.mark.parametrize(
    ("family", "size"), [("mistral-sliding", None), ("mistral-sliding", 4), ("gemma3", 100)]
)
def test_another_window_is_seen(family: str, size: int | None) -> None:
    """Masks are made of the configuration as it is, so `generate()` follows it at once."""
    model, request = toys.model(family, layers=3), toys.inputs(family, batch=2, ragged=True)
    fast = mmspec.accelerate(model, "coupled", drafter=noisy(family), length=3)
    usual = model.generate(**request, **GREEDY)
    assert torch.equal(fast.generate(**request, **GREEDY).sequences, usual)
    model.config.get_text_config(decoder=True).sliding_window = size
    expected = model.generate(**request, **GREEDY)
    assert not torch.equal(expected, usual)
    assert torch.equal(fast.generate(**request, **GREEDY).sequences, expected)


@pytest.mark.parametrize(
    ("change", "family"),
    covering(
        [adapt_a_layer, adapt_the_head, grow, replace_the_decoder],
        ["llama", "llava", "qwen2_5_vl"],
        strength=1,
    ),
)
def test_the_answer_is_that_of_the_model_as_it_is(
    family: str, change: Callable[[Any], None]
) -> None:
    model = copy.deepcopy(toys.model(family))
    request = toys.inputs(family)
    drafted = mmspec.accelerate(model, "coupled", drafter=noisy(family))
    itself = mmspec.accelerate(model, "swift", skip=[1])
    usual = model.generate(**request, **GREEDY)
    for fast in (drafted, itself):
        assert torch.equal(fast.generate(**request, **GREEDY).sequences, usual)
    change(model)
    expected = model.generate(**request, **GREEDY)
    assert not torch.equal(expected, usual), "a change that says nothing else shows nothing"
    for fast in (drafted, itself):
        assert torch.equal(fast.generate(**request, **GREEDY).sequences, expected)
        assert torch.equal(model.generate(**request, **GREEDY, custom_generate=fast), expected)


@pytest.mark.parametrize(("recipe", "sees"), [("coupled", "pixels"), ("tabed", "auto")])
def test_a_draft_model_does_not_read_tokens_that_it_lacks(recipe: str, sees: str) -> None:
    """Nor an accelerator, whose kernel would end the process; those of a prompt neither."""
    model, request = toys.model("llava"), toys.inputs("llava")
    fast = mmspec.accelerate(model, recipe, drafter=noisy("llava"), sees=sees)
    count = model.get_input_embeddings().weight.shape[0]
    grow(model)
    words = {**request, "input_ids": request["input_ids"].clone()}
    words["input_ids"][:, -1] += count
    for given in (request, words):
        expected = model.generate(**given, **GREEDY)
        assert int(expected.max()) >= count
        out = fast.generate(**given, **GREEDY)
        assert torch.equal(out.sequences, expected)
        assert f"but the draft model only {count} tokens" in out.stats.fallback


def test_a_model_that_learns_without_a_cache_is_refused() -> None:
    model = copy.deepcopy(toys.model("llama"))
    fast, request = mmspec.accelerate(model, "prompt-lookup"), toys.inputs("llama")
    model.gradient_checkpointing_enable()
    model.train()
    with pytest.raises(ValueError, match=r"gradient checkpointing.*call model\.eval\(\)"):
        fast.generate(**request, **GREEDY)
    model.eval()
    expected = model.generate(**request, **GREEDY)
    assert torch.equal(fast.generate(**request, **GREEDY).sequences, expected)


def test_a_reader_with_layers_left_out_stays_so() -> None:
    thin = readers.backbone(toys.model("llama")).skip_layers([0])
    thin.prefill(toys.inputs("llama"), 4)
    assert len(thin.layers) == 1


@pytest.mark.parametrize("recipe", ["std", "prompt-lookup", "swift"])
def test_numbers_are_of_the_model_s_kind_whatever_the_default(recipe: str) -> None:
    """A script may have set torch's default to half precision to load another model."""
    model, request = toys.model("llava"), toys.inputs("llava", batch=2, ragged=True)
    fast = mmspec.accelerate(model, recipe)
    expected = model.generate(**request, **GREEDY)
    drawn = fast.generate(**request, max_new_tokens=12, do_sample=True, seed=3).sequences
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(fast.generate(**request, **GREEDY).sequences, expected)
        again = fast.generate(**request, max_new_tokens=12, do_sample=True, seed=3).sequences
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(again, drawn)
