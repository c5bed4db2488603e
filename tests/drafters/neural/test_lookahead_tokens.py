"""Look-ahead tokens: what the target predicts after them, in drafting and in training."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import mmspec
from mmspec import recipes
from mmspec.drafters.neural.lookahead_tokens import LookaheadDraft
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.drafters.parallel_chain import ParallelChain
from mmspec.models.heads.lookahead_tokens import LookaheadTokens, LookaheadTokensConfig
from mmspec.models.loading import random_model
from mmspec.training.heads import TrainingExample
from mmspec.training.lookahead_tokens import PASS, lookahead_loss
from mmspec.training.losses import soft_cross_entropy
from tests import toys
from tests.drafters.parallel_heads import Recorder
from tests.drafters.state_heads import ROOM, lesson, target
from tests.toys.readers import backbone

pytestmark = pytest.mark.exhaustive


@lru_cache(maxsize=4)
def tokens_of(family: str, seed: int = 0) -> LookaheadTokens:
    reader = backbone(target(family))
    how = {"num_tokens": 3, "initializer_range": 1.0}
    config = LookaheadTokensConfig.of(reader.config, reader.vocabulary, **how)
    made: LookaheadTokens = random_model(lambda: LookaheadTokens(config), seed)
    return made


@pytest.mark.parametrize("batch", [1, 3])
def test_a_text_model_reads_the_vectors_after_the_context(batch: int) -> None:
    """Of every round and row: one forward without a cache, on embeddings; others are noticed."""
    model, given = target("llama"), toys.inputs("llama", batch=batch, ragged=batch > 1)
    head = tokens_of("llama")
    recorder = Recorder(LookaheadDraft(backbone(model), head))
    drafter = Autoregressive(recorder, ParallelChain(4))
    fast = mmspec.accelerate(model, "coupled", drafter=drafter)
    out = fast.generate(**given, max_new_tokens=ROOM, do_sample=False)
    assert torch.equal(out.sequences[:, -ROOM:], lesson("llama", batch).tokens)
    starts = given["input_ids"].shape[1] - given["attention_mask"].sum(-1)
    compared = 0
    for lengths, logits in recorder.recorded:
        for row, length in enumerate(lengths):
            if length - int(given["attention_mask"][row].sum()) >= ROOM:
                continue
            ids = out.sequences[row, int(starts[row]) :][:length]
            expected = read_once(model, ids, head.embeds)
            assert_close(logits[row], expected, atol=1e-4, rtol=1e-4)
            wrong = read_once(model, ids, tokens_of("llama", 1).embeds)
            assert not torch.allclose(logits[row, 1:], wrong[1:], atol=1e-2)
            compared += 1
    assert compared > batch


@torch.no_grad()
def read_once(model: Any, ids: Tensor, embeds: Tensor) -> Tensor:  # (K + 1, V)
    inputs = torch.cat((model.get_input_embeddings()(ids), embeds))[None]
    logits: Tensor = model(inputs_embeds=inputs).logits[0, len(ids) - 1 :]
    return logits


@torch.no_grad()
def test_the_loss_by_hand() -> None:
    """After token t, vector i is trained on the target's distribution after token t + i."""
    model, example = target("llama"), lesson("llama", 3)
    tokens, head, reader = example.tokens.clone(), tokens_of("llama"), backbone(target("llama"))
    tokens[1, 5:] = -1
    found, length = [], tokens.shape[1]
    for row in range(3):
        prompt = example.inputs["input_ids"][row][example.inputs["attention_mask"][row] > 0]
        whole = torch.cat((prompt, example.tokens[row]))
        targets = model(input_ids=whole[None]).logits[0, len(prompt) :]
        for start in range(length - 1):
            branch = read_once(model, whole[: len(prompt) + start + 1], head.embeds)[1:]
            for step in range(1, 4):
                if start + step < length and tokens[row, start + step] >= 0:
                    pair = branch[step - 1 : step], targets[start + step][None]
                    found.append(soft_cross_entropy(*pair))
    loss = lookahead_loss(reader, head, TrainingExample(example.inputs, tokens))
    assert_close(loss, torch.stack(found).mean(), atol=1e-3, rtol=1e-4)


def test_the_first_token_is_the_targets_own() -> None:
    """Two tokens at least in a round of two forwards, whatever the vectors are."""
    given = toys.inputs("llava", batch=3, ragged=True)
    fast = mmspec.accelerate(target("llava"), "pass-sampling", drafter=tokens_of("llava"))
    for how in ({"do_sample": False}, {"temperature": 1.0, "top_k": 0, "seed": 1}):
        out = fast.generate(**given, max_new_tokens=ROOM, **how)
        assert out.stats.acceptance_histogram[0] == 0


def test_what_does_not_fit_is_refused() -> None:
    reader = backbone(target("llava"))
    counts = torch.ones(reader.vocabulary, dtype=torch.int64)
    with pytest.raises(ValueError, match="num_tokens=0 must be"):
        PASS.begin(reader, counts, num_tokens=0)
    other = LookaheadTokens(LookaheadTokensConfig(hidden_size=32, vocab_size=160))
    with pytest.raises(ValueError, match="32 wide, for 160 tokens"):
        mmspec.accelerate(target("llava"), "pass-sampling", drafter=other)
    recurrent = toys.model("lfm2")
    width = recurrent.config.hidden_size
    some = LookaheadTokensConfig(hidden_size=width, vocab_size=recurrent.config.vocab_size)
    with pytest.raises(ValueError, match="a draft would change its cache"):
        mmspec.accelerate(recurrent, "pass-sampling", drafter=LookaheadTokens(some))
    with pytest.raises(ValueError, match="predicts the next 4 only; give length=4"):
        mmspec.accelerate(target("llava"), "pass-sampling", drafter=tokens_of("llava"), length=5)
    assert recipes.get("pass-sampling").exact
