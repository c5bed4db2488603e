"""The bookkeeping of beams follows `generate()`, whatever computes the logits."""

from typing import Any

import pytest
import torch

from mmspec import _hf
from mmspec._hf_beams import BeamSearch, best_sequences
from mmspec.modalities.common.tiny_models import tiny_llama

PROMPT = torch.tensor([3, 9, 4, 3])
SETTINGS: dict[str, dict[str, Any]] = {
    "penalty": {"num_beams": 3, "length_penalty": -0.5, "num_return_sequences": 2},
    "early": {"num_beams": 4, "early_stopping": True, "eos_token_id": [5, 6, 7]},
    "never": {"num_beams": 2, "early_stopping": "never", "eos_token_id": 7, "length_penalty": 1.5},
}


def search(model: Any, **settings: Any) -> BeamSearch:
    config = _hf.merge_config(model, None, {"max_new_tokens": 12, "do_sample": False, **settings})
    _hf.set_special_tokens(model, config, torch.device("cpu"), 1, True)
    length = len(PROMPT)
    config = _hf.set_lengths(model, config, length, default_max=True, default_min=True)
    made = _hf.make_logits_processors(model, config, length, torch.device("cpu"))
    return BeamSearch(config, PROMPT, made, _hf.make_stopping_criteria(model, config))


@torch.no_grad()
@pytest.mark.parametrize("name", SETTINGS)
def test_a_search_is_that_of_generate(name: str) -> None:
    model = tiny_llama(24, seed=4)
    own = search(model, **SETTINGS[name], no_repeat_ngram_size=3)
    while not own.is_done:
        own.advance(model(own.sequences[0, :, : own.length]).logits[:, -1])
    wanted = model.generate(
        PROMPT[None],
        max_new_tokens=12,
        no_repeat_ngram_size=3,
        return_dict_in_generate=True,
        output_scores=True,
        **SETTINGS[name],
    )
    sequences, scores = best_sequences([own])
    assert torch.equal(sequences, wanted.sequences)
    torch.testing.assert_close(scores, wanted.sequences_scores)


def test_parents_and_tokens_describe_the_newest_step() -> None:
    own = search(tiny_llama(24), num_beams=2)
    logits = torch.zeros(2, 24)
    logits[:, [5, 8]] = torch.tensor([3.0, 2.0])
    own.advance(logits)
    assert (own.parents, own.tokens) == ([0, 0], [5, 8])
    logits[0] = 0
    logits[1, 11] = 9.0
    own.advance(logits)
    assert own.parents[0] == 1
    assert own.tokens[0] == 11
    assert own.sequences[0, 0, len(PROMPT) : own.length].tolist() == [8, 11]


def test_broken_logits_are_named() -> None:
    with pytest.raises(ValueError, match="NaN after 0 tokens"):
        search(tiny_llama(24), num_beams=2).advance(torch.full((2, 24), torch.nan))
