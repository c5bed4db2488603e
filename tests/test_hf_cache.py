"""The cache of transformers is found under its name in 5.23 and in 5.24."""

import pytest
import torch
import transformers as hf

from mmspec import _hf, _hf_cache
from tests import toys


@pytest.mark.parametrize("family", ["llama", "llava", "lfm2", "whisper"])
def test_models_take_and_return_the_cache_under_one_name(family: str) -> None:
    model, request = toys.model(family), toys.inputs(family)
    assert _hf.cache_name(model) == _hf_cache.CACHE_NAME in _hf.forward_names(model)
    if family == "whisper":
        request["decoder_input_ids"] = torch.tensor([[1, 2]])
    out = model(**request, use_cache=True)
    assert isinstance(_hf_cache.output_cache(out), hf.Cache)
    assert _hf_cache.output_cache(model(**request, use_cache=False)) is None
    out = model.generate(**toys.inputs(family), max_new_tokens=2, return_dict_in_generate=True)
    assert isinstance(_hf_cache.output_cache(out), hf.Cache)


def test_the_cache_of_mamba_is_found() -> None:
    config = hf.MambaConfig(vocab_size=16, hidden_size=8, state_size=4, num_hidden_layers=1)
    model = hf.MambaForCausalLM(config)
    assert _hf.cache_name(model) in ("cache", "cache_params")
    cache = _hf_cache.output_cache(model(torch.tensor([[5, 6]]), use_cache=True))
    assert not _hf_cache.counts_tokens(cache)
    assert _hf_cache.has_unknown_length(cache)


@pytest.mark.parametrize("name", _hf_cache.CACHE_NAMES)
def test_a_cache_is_renamed(name: str) -> None:
    cache = hf.DynamicCache()
    given = {name: cache, "top_k": 3}
    assert _hf_cache.name_cache(given) == {_hf_cache.CACHE_NAME: cache, "top_k": 3}
    assert _hf_cache.name_cache({name: None, "top_k": 3}) == {"top_k": 3}
    assert _hf_cache.pop_cache(given) is cache
    assert given == {"top_k": 3}
    both = dict.fromkeys(_hf_cache.CACHE_NAMES[:2], cache)
    with pytest.raises(ValueError, match="cache and past_key_values are the same argument"):
        _hf_cache.pop_cache(both)
