"""Models with their own generate() around the loop of transformers: it runs unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.bark.generation_configuration_bark import BarkSemanticGenerationConfig

import mmspec
from mmspec.modalities.vlm.tiny_configs import tiny_config
from mmspec.models.loading import random_model

ENDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIDES = ("encoder", "decoder", "t2u_encoder", "t2u_decoder")
LANGUAGES = {"fra": 7, "deu": 9}


def seamless() -> Any:
    sizes = {f"{side}_{what}": size for side in SIDES for what, size in SIZES.items()}
    speech = {f"speech_encoder_{what}": size for what, size in SPEECH.items()}
    places = {"max_position_embeddings": 64, "t2u_max_position_embeddings": 64}
    maker: Any = transformers.SeamlessM4TConfig
    config = maker(
        **{"vocab_size": 60, "hidden_size": 16, "decoder_start_token_id": 3, **ENDS},
        **{**sizes, **speech, **places},
    )
    return transformers.SeamlessM4TForTextToText(config)


SIZES = {"layers": 1, "attention_heads": 2, "ffn_dim": 24}
SPEECH = {"layers": 1, "attention_heads": 2, "intermediate_size": 24}


def bark() -> Any:
    sizes: dict[str, Any] = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "block_size": 64}
    config = transformers.BarkSemanticConfig(input_vocab_size=70, output_vocab_size=50, **sizes)
    return transformers.BarkSemanticModel(config)


@pytest.fixture(scope="module")
def translator() -> Any:
    model = random_model(seamless, 1)
    model.generation_config.eos_token_id = None
    model.generation_config.text_decoder_lang_to_code_id = LANGUAGES
    return model


def make_ids(batch: int = 1) -> Tensor:
    return torch.randint(4, 60, (batch, 6), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("language", LANGUAGES)
def test_what_it_prepares_counts(translator: Any, language: str, batch: int) -> None:
    fast = mmspec.accelerate(translator, "prompt-lookup")
    how: dict[str, Any] = {"tgt_lang": language, "max_new_tokens": 10, "do_sample": False}
    expected = translator.generate(make_ids(batch), **how)
    assert expected[0, 1] == LANGUAGES[language]
    assert torch.equal(fast.generate(make_ids(batch), **how).sequences, expected)
    assert torch.equal(fast.generate(input_ids=make_ids(batch), **how).sequences, expected)
    assert torch.equal(translator.generate(make_ids(batch), **how, custom_generate=fast), expected)


def test_rows_keep_their_noise(translator: Any) -> None:
    fast = mmspec.accelerate(translator, "prompt-lookup")
    how: dict[str, Any] = {"tgt_lang": "fra", "max_new_tokens": 8, "temperature": 1.5, "seed": 3}
    both = fast.generate(make_ids(2), **how, row_ids=[5, 6]).sequences
    assert torch.equal(fast.generate(make_ids(2)[1:], **how, row_ids=[6]).sequences, both[1:])
    assert torch.equal(
        mmspec.decode_plain(translator, input_ids=make_ids(2), **how, row_ids=[5, 6]).sequences,
        both,
    )


def test_a_streamer_gets_what_is_verified(translator: Any) -> None:
    class Heard(transformers.generation.streamers.BaseStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: Tensor) -> None:
            self.tokens += value.reshape(-1).tolist()

        def end(self) -> None:
            self.tokens.append(-1)

    heard, how = Heard(), {"tgt_lang": "deu", "max_new_tokens": 8, "do_sample": False}
    fast = mmspec.accelerate(translator, "prompt-lookup")
    made = fast.generate(make_ids(), **how, streamer=heard).sequences
    assert heard.tokens == [*made[0].tolist(), -1]


@pytest.mark.exhaustive
def test_a_compiled_model_runs_its_own_generate(translator: Any) -> None:
    compiled: Any = torch.compile(translator, backend="eager")
    how: dict[str, Any] = {"tgt_lang": "fra", "max_new_tokens": 6, "do_sample": False}
    fast = mmspec.accelerate(compiled, "prompt-lookup")
    assert torch.equal(
        fast.generate(make_ids(), **how).sequences, translator.generate(make_ids(), **how)
    )


def test_what_it_makes_of_tokens_counts() -> None:
    """Bark's first stage suppresses what is no meaning, and leaves its prompt out."""
    model = random_model(bark, 1)
    how: dict[str, Any] = {"eos_token_id": 39, "semantic_pad_token": 40, "semantic_vocab_size": 39}
    how |= {"text_pad_token": 5, "text_encoding_offset": 20, "semantic_infer_token": 41}
    how |= {"max_input_semantic_length": 6, "max_new_tokens": 12, "min_eos_p": None}
    config = BarkSemanticGenerationConfig(**how)
    ids = torch.randint(6, 20, (1, 6), generator=torch.Generator().manual_seed(0))
    expected = model.generate(ids, semantic_generation_config=config)
    fast = mmspec.accelerate(model, "prompt-lookup")
    assert fast.generate(ids, semantic_generation_config=config).sequences.tolist() == (
        expected.tolist()
    )
    with pytest.raises(ValueError, match="`semantic_generation_config` has to be provided"):
        fast.generate(ids, max_new_tokens=4)


class LoopOfItsOwn(transformers.LlamaForCausalLM):
    def generate(self, *args: Any, **rest: Any) -> Any:
        return rest["input_ids"].flip(1)


def test_a_loop_of_its_own_is_refused() -> None:
    fast = mmspec.accelerate(random_model(lambda: LoopOfItsOwn(llama_config()), 0), "prompt-lookup")
    with pytest.raises(ValueError, match=r"0 times instead of once.*use model.generate\(\)"):
        fast.generate(make_ids(), max_new_tokens=4)


class StepsOfItsOwn(transformers.LlamaForCausalLM):
    def _sample(self, input_ids: Any, *args: Any, **rest: Any) -> Any:
        return input_ids.flip(1)


def test_a_model_with_another_loop_is_refused_before_a_request() -> None:
    model = random_model(lambda: StepsOfItsOwn(llama_config()), 0)
    for recipe in ("plain", "prompt-lookup"):
        with pytest.raises(ValueError, match=r"overrides _sample.*use model.generate\(\)"):
            mmspec.accelerate(model, recipe)


def test_a_generate_that_was_set_on_a_model_counts() -> None:
    """As `from_pretrained` does for a repository with a `custom_generate` folder."""
    model: Any = random_model(lambda: transformers.LlamaForCausalLM(llama_config()), 0)
    own, how = model.generate, {"max_new_tokens": 4, "do_sample": False}
    model.generate = lambda *args, **rest: own(*args, **rest)[:, 1:]
    fast = mmspec.accelerate(model, "prompt-lookup")
    assert torch.equal(
        fast.generate(make_ids(), **how).sequences, model.generate(make_ids(), **how)
    )
    model.generate = lambda input_ids, **_: input_ids.flip(1)
    with pytest.raises(ValueError, match="0 times instead of once"):
        mmspec.accelerate(model, "prompt-lookup").generate(make_ids(), max_new_tokens=4)


def llama_config() -> Any:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    return transformers.LlamaConfig(vocab_size=60, num_attention_heads=2, **sizes, **ENDS)


def test_scores_come_beside_the_tokens(translator: Any) -> None:
    how: dict[str, Any] = {"tgt_lang": "fra", "max_new_tokens": 5, "do_sample": False}
    how["output_scores"] = True
    theirs = translator.generate(make_ids(), **how, return_dict_in_generate=True)
    ours = mmspec.accelerate(translator, "prompt-lookup").generate(make_ids(), **how)
    for mine, wanted in zip(ours.scores, theirs.scores, strict=True):
        torch.testing.assert_close(mine, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"top_p": float("nan")}, "top_p=nan must be a number"),
        ({"temperature": "warm"}, "temperature='warm'"),
        ({"generation_config": {}}, "generation_config={} is none"),
    ],
)
def test_settings_are_looked_at_before(
    translator: Any, given: dict[str, Any], message: str
) -> None:
    fast = mmspec.accelerate(translator, "prompt-lookup")
    with pytest.raises(ValueError, match=message):
        fast.generate(make_ids(), tgt_lang="fra", max_new_tokens=3, **given)


def test_an_indexer_of_few_heads_is_refused() -> None:
    """Scores of its heads are clamped at zero, so that few heads tie: a block selects otherwise."""
    config: Any = tiny_config(transformers.DeepseekV4Config)
    for heads in (2, 15):
        config.index_n_heads = heads
        model = random_model(lambda: transformers.DeepseekV4ForCausalLM(config), 0)
        with pytest.raises(ValueError, match=rf"index_n_heads={heads} heads.*model.generate\(\)"):
            mmspec.accelerate(model, "prompt-lookup")
    config.index_n_heads = 32
    mmspec.accelerate(random_model(lambda: transformers.DeepseekV4ForCausalLM(config), 0))
