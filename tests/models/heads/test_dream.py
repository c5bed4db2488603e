"""DREAM: attention to the target's states, the narrowest early layer, and thinned pictures."""

from __future__ import annotations

from dataclasses import replace
from math import log
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

import mmspec
from mmspec.compressors.dream_topk import DreamTopK
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.feature_head import FeatureDraft
from mmspec.drafters.neural.head_prompt import head_prompt
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.drafters.shapes import Chain
from mmspec.models.heads.dream import DreamHead, DreamHeadConfig, load_dream_head
from mmspec.targets.readers.attention_entropy import (
    EntropyTap,
    NarrowStatesHook,
    candidate_layers,
    entropy_of,
    narrowest,
)
from mmspec.targets.readers.attention_tap import (
    LAST,
    AttentionCall,
    AttentionTap,
    count_question_tokens,
)
from mmspec.training.dream import DREAM, dream_loss
from mmspec.training.heads import TrainingExample, read_example, required_inputs
from mmspec.training.trainable import train_head
from tests import toys
from tests.drafters.heads import Recorder, endless
from tests.drafters.state_heads import ROOM, head_of, lesson, target
from tests.toys.readers import backbone

# --- the cross-attention --------------------------------------------------------------------------


@torch.no_grad()
def test_token_t_hears_the_states_before_it_and_no_other() -> None:
    """By the formula, row by row; the first token, which has none before it, hears nothing."""
    recorded = head_of("gemma3", "dream").layers[1].cross_attn
    generator = torch.Generator().manual_seed(0)
    own, states = (torch.randn(1, 6, 64, generator=generator) for _ in range(2))
    hide = torch.full((6, 6), torch.finfo(torch.float).min).triu(1)[None, None]
    first = torch.tensor([[True] + [False] * 5])
    found = recorded(own, states, first, hide, None)[0]
    assert_close(found[0], torch.zeros(64), atol=0, rtol=0)
    groups, size = recorded.num_key_value_groups, recorded.head_dim
    for t in range(1, 6):
        query = recorded.q_norm(recorded.q_proj(own[0, t]).unflatten(-1, (-1, size)))
        key = recorded.k_norm(recorded.k_proj(states[0, 1 : t + 1]).unflatten(-1, (-1, size)))
        value = recorded.v_proj(states[0, 1 : t + 1]).unflatten(-1, (-1, size))
        key, value = (one.repeat_interleave(groups, 1) for one in (key, value))
        scores = torch.einsum("hd,jhd->hj", query, key) * size**-0.5
        expected = torch.einsum("hj,jhd->hd", scores.softmax(-1), value).flatten()
        assert_close(found[t], recorded.o_proj(expected), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_closed_gates_do_not_hear_the_target() -> None:
    """As a head begins: a language model of embeddings alone. Open gates hear."""
    example, reader = lesson("llava", 1), backbone(target("llava"))
    read = read_example(reader, example, "hidden").prompt
    other = replace(read, features=read.features.flip(1))
    open_head = head_of("llava", "dream")
    closed = DreamHead(open_head.config)
    closed.load_state_dict({**open_head.state_dict(), **_gates(closed)})
    for head, is_same in ((closed, True), (open_head, False)):
        said = []
        for one in (read, other):
            prompt = head_prompt(head, reader, one)
            said.append(
                head(prompt.embeds, prompt.states, None, prompt.positions, None, prompt.marks)
            )
        assert torch.equal(*said) is is_same


def _gates(head: DreamHead) -> dict[str, Tensor]:
    gates = {name: one for name, one in head.state_dict().items() if name.endswith("_gate")}
    assert len(gates) == 2
    assert not any(bool(one) for one in gates.values())
    return gates


# --- the narrowest layer --------------------------------------------------------------------------


def test_candidate_layers_are_the_published_ones() -> None:
    assert candidate_layers(32) == [*range(1, 11)]
    assert candidate_layers(8) == [1]
    assert candidate_layers(7) == candidate_layers(2) == [1]  # reconstructed
    assert candidate_layers(1) == [0]


def test_uniform_attention_over_t_tokens_has_entropy_log_t() -> None:
    keys = torch.randn(2, 2, 90, 8, generator=torch.Generator().manual_seed(0))
    found = entropy_of(AttentionCall(torch.zeros(2, 4, 90, 8), keys, keys, is_causal=True))
    expected = torch.tensor([log(t + 1) for t in range(90)])
    assert_close(found, expected.expand(2, -1), atol=1e-4, rtol=0)


def test_each_token_has_the_states_of_its_narrowest_layer() -> None:
    states = torch.arange(12.0).reshape(1, 2, 3, 2)  # (R, q, k, D)
    entropies = torch.tensor([[[3.0, 1.0]], [[2.0, 1.0]], [[2.5, 0.5]]])  # (k, R, q)
    assert narrowest(states, entropies).tolist() == [[[2.0, 3.0], [10.0, 11.0]]]
    assert torch.equal(narrowest(states[:, :, 1:2], entropies[:1]), states[:, :, 1])  # constant
    tied = torch.ones(3, 1, 2)
    assert torch.equal(narrowest(states, tied), states[:, :, 0])


@torch.no_grad()
@pytest.mark.parametrize("family", ["llava", "gemma3"])
def test_states_and_entropies_are_those_of_the_models_own_outputs(family: str) -> None:
    """Against attentions and hidden states of one eager forward over prompt and answer."""
    example, layers = lesson(family, 1), 13
    own = toys.model(family, layers=layers)
    narrow = NarrowStatesHook(backbone(own))
    read = read_example(backbone(own), example, "hidden", hook=narrow)
    found = narrow.offer(ROOM)
    assert read.prompt.tokens is not None
    ids = read.prompt.tokens
    inputs = {**example.inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in inputs:
            inputs[name] = torch.cat((inputs[name], torch.zeros_like(example.tokens)), 1)
    own.set_attn_implementation("eager")
    out = own(**inputs, output_attentions=True, output_hidden_states=True)
    entropies = [
        -(attention * (attention + 1e-8).log()).sum(-1).mean(1)[:, -ROOM:]
        for attention in out.attentions
    ]
    assert candidate_layers(layers) == [1, 2, 3]
    chosen = [1 + int(torch.stack(entropies[1:4])[:, 0, t].argmin()) for t in range(ROOM)]
    for t, layer in enumerate(chosen):
        expected = out.hidden_states[layer][0, t - ROOM]
        assert_close(found[0, t], expected, atol=1e-4, rtol=1e-4)
    assert family == "gemma3" or len({*chosen}) > 1  # or the choice was not seen


# --- training -------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_loss_is_the_papers() -> None:
    """Term by term; tokens behind the end of a row teach nothing."""
    example, head, reader = lesson("llava", 1), head_of("llava", "dream"), backbone(target("llava"))
    narrow = NarrowStatesHook(reader)
    read = read_example(reader, example, "hidden", hook=narrow)
    prompt = head_prompt(head, reader, read.prompt)
    middle, own = (
        states[:, -ROOM:]
        for states in head.forward_with_middle(
            prompt.embeds, prompt.states, None, prompt.positions, prompt.marks
        )
    )
    wanted, said = reader.head(read.next).softmax(-1), reader.head(own).log_softmax(-1)
    expected = {
        "state_weight": functional.smooth_l1_loss(own, read.next),
        "distribution_weight": functional.kl_div(said, wanted, reduction="none").mean(),
        "middle_weight": functional.smooth_l1_loss(middle, narrow.offer(ROOM)),
    }
    none = dict.fromkeys(expected, 0.0)
    for name, value in expected.items():
        assert float(value) > 0
        loss = dream_loss(reader, head, example, noise=0.0, **{**none, name: 1.0})
        assert_close(loss, value, atol=1e-6, rtol=1e-4)
    cut = example.tokens.clone()
    cut[:, -3:] = -1
    short = dream_loss(reader, head, TrainingExample(example.inputs, cut), noise=0.0)
    assert not torch.allclose(short, dream_loss(reader, head, example, noise=0.0))
    long = dream_loss(
        reader, head, TrainingExample(example.inputs, example.tokens[:, :-3]), noise=0.0
    )
    assert_close(short, long, atol=1e-5, rtol=1e-4)


@pytest.mark.exhaustive
def test_a_head_learns_to_draft_and_opens_its_gates(tmp_path: Any) -> None:
    example, own = lesson("llava", 3), target("llava")
    reader = backbone(own)
    torch.manual_seed(0)
    config = DreamHeadConfig.of(reader.config, reader.vocabulary, visual_keep=0.5)
    head = DreamHead(config)

    def count_accepted(one: DreamHead) -> float:
        fast = mmspec.accelerate(own, "dream", drafter=one, length=3)
        out = fast.generate(**example.inputs, max_new_tokens=ROOM, do_sample=False)
        assert torch.equal(out.sequences[:, -ROOM:], example.tokens)
        return float(out.stats.mean_acceptance_length)

    before = count_accepted(head)
    train_head(
        DREAM, reader, head, endless(example), steps=30, rate=5e-3, distribution_weight=100.0
    )
    assert count_accepted(head) > before + 0.3
    assert all(bool(gate) for name, gate in head.state_dict().items() if name.endswith("_gate"))
    head.save_pretrained(tmp_path)
    loaded = load_dream_head(tmp_path)
    assert loaded.config.visual_keep == 0.5
    assert count_accepted(loaded) == count_accepted(head)


# --- thinned pictures -----------------------------------------------------------------------------


def two_pictures() -> dict[str, Tensor]:
    """One row that holds what two would."""
    given = toys.inputs("llava", batch=2)
    ids = torch.cat((given["input_ids"][0], given["input_ids"][1, 1:]))[None]
    return {**given, "input_ids": ids, "attention_mask": torch.ones_like(ids)}


@torch.no_grad()
def test_the_head_reads_the_slots_that_the_question_attends_to_most() -> None:
    given, reader = two_pictures(), backbone(target("llava"))
    head = head_of("llava", "dream", visual_keep=0.5)
    plain = mmspec.decode_plain(target("llava"), **given, max_new_tokens=ROOM, do_sample=False)
    example = TrainingExample(given, plain.sequences[:, -ROOM:])
    read = read_example(reader, example, *required_inputs(head, reader))
    prompt = head_prompt(head, reader, read.prompt)
    with AttentionTap(
        reader, frozenset({LAST}), count_question_tokens(given, reader.visual_ids)
    ) as tap:
        reader.prefill(given, extra_slots=ROOM)
    scores = tap.offer()[LAST][0]
    ids = torch.cat((given["input_ids"], example.tokens), 1)[0]
    visual = (ids == toys.IMAGE).nonzero()[:, 0]
    pictures = visual.tensor_split((visual.diff() > 1).nonzero()[:, 0] + 1)
    assert len(pictures) == 2
    kept = {at for at, token in enumerate(ids.tolist()) if token != toys.IMAGE}
    for slots in pictures:
        order = scores[slots].argsort(descending=True, stable=True)[: round(len(slots) / 2)]
        kept |= set(slots[order].tolist())
    assert prompt.positions[0].tolist() == sorted(kept)
    whole = head_prompt(head_of("llava", "dream"), reader, read.prompt)
    assert_close(prompt.embeds[0], whole.embeds[0, sorted(kept)])
    assert_close(prompt.states[0], whole.states[0, sorted(kept)])
    assert DreamTopK(0.5).needs == head.attention


@torch.no_grad()
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_drafting_reads_the_prompt_that_training_lays_out(family: str) -> None:
    """The first distribution of ragged rows is that of a lesson, and the answer is the target's."""
    example, reader = lesson(family, 3), backbone(target(family))
    head = head_of(family, "dream", visual_keep=0.4)
    recorder = Recorder(FeatureDraft(reader, head))
    drafter = Autoregressive(recorder, Chain(Fixed(3)))
    fast = mmspec.accelerate(target(family), "coupled", drafter=drafter)
    out = fast.generate(**example.inputs, max_new_tokens=ROOM, do_sample=False)
    assert out.stats.fallback is None
    assert torch.equal(out.sequences[:, -ROOM:], example.tokens)
    prompt = head_prompt(
        head, reader, read_example(reader, example, *required_inputs(head, reader)).prompt
    )
    states = head(
        prompt.embeds, prompt.states, prompt.attention_mask, prompt.positions, marks=prompt.marks
    )
    words = slice(toys.WORDS.start, toys.WORDS.stop)
    expected = reader.head(states[:, -ROOM])[:, words]
    assert_close(
        recorder.recorded[0].distribution.scores[:, 0, words], expected, atol=1e-3, rtol=1e-3
    )


def test_two_pictures_and_text_alone_are_the_targets_own() -> None:
    head = head_of("llava", "dream", visual_keep=0.5)
    fast = mmspec.accelerate(target("llava"), "dream", drafter=head)
    text = toys.inputs("llama", batch=2, ragged=True)
    for given in (two_pictures(), text):
        plain = mmspec.decode_plain(target("llava"), **given, max_new_tokens=ROOM, do_sample=False)
        out = fast.generate(**given, max_new_tokens=ROOM, do_sample=False)
        assert out.stats.fallback is None
        assert torch.equal(out.sequences, plain.sequences)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"visual_keep": 0.0}, "visual_keep=0.0 must be in"),
        ({"visual_keep": 0.5, "visual_slots": "hidden"}, "leaves no image slots"),
        ({"visual_slots": "raw"}, "choose one of fused, placeholder, hidden"),
        ({"num_hidden_layers": 1}, "a DREAM head has 3"),
    ],
)
def test_parts_that_do_not_fit_are_refused(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        head_of("llava", "dream", **parts)


def test_a_head_of_another_target_and_a_layer_without_attention_are_refused() -> None:
    narrow = backbone(toys.model("llama"))
    config = DreamHeadConfig.of(narrow.config, narrow.vocabulary, hidden_size=32, head_dim=16)
    with pytest.raises(ValueError, match="states 32 wide"):
        mmspec.accelerate(target("llava"), "dream", drafter=DreamHead(config))
    reader: Any = backbone(toys.model("lfm2"))
    layer = reader.config.layer_types.index("conv")
    with EntropyTap(reader, [layer]) as tap:
        reader.prefill(toys.inputs("lfm2"), extra_slots=4)
    with pytest.raises(ValueError, match=rf"layers \[{layer}\] of this model have no attention"):
        tap.offer(1)
