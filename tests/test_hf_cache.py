"""The cache of transformers is found under its name in 5.23 and in 5.24; devices of hooks."""

from typing import Any

import pytest
import torch
import transformers as hf
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook
from torch import nn

from mmspec import _hf, _hf_cache
from mmspec._hf_cache import execution_device, is_spread
from tests import toys

CPU = torch.device("cpu")


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


def test_a_module_computes_where_its_weights_are() -> None:
    assert execution_device(nn.Embedding(2, 3)) == CPU
    assert execution_device(nn.Embedding(2, 3, device="meta")) == torch.device("meta")


def test_offloaded_weights_come_to_the_device_of_their_hook() -> None:
    model = nn.Sequential(nn.Embedding(2, 3))
    cpu_offload(model, execution_device=CPU)
    assert model[0].weight.device.type == "meta"
    assert execution_device(model[0]) == CPU
    numbered = nn.Embedding(2, 3)  # as accelerate numbers the devices of an accelerator
    vars(numbered)["_hf_hook"] = AlignDevicesHook(execution_device=1)
    assert execution_device(numbered) == torch.device("cuda:1")


def test_maps_of_one_device_are_not_spread() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert not is_spread(model)
    assert not is_spread(dispatch_model(model, {"": "cpu"}, force_hooks=True))
    model.hf_device_map = {"0": "cpu", "1": "disk"}
    assert is_spread(model)


def test_generate_compiles_with_these_arguments_on_every_device() -> None:
    made = _hf_cache.compiled_generation("default")
    assert "_compile_all_devices" in vars(hf.CompileConfig)
    config = hf.GenerationConfig(**made)
    model = toys.model("llama")
    cache = hf.StaticCache(model.config, max_cache_len=8)
    given = {"past_key_values": cache, "cache": cache}  # the second name from transformers 5.24 on
    assert model._valid_auto_compile_criteria(given, config)
    config.compile_config = hf.CompileConfig(mode="default")
    assert not model._valid_auto_compile_criteria(given, config)
