"""Small models are taught what they are going to read, in two stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmspec.draft import Draft, Kind
from mmspec.drafters.neural.draft_inputs import TargetFeatureInputs
from mmspec.drafters.neural.massv import Projector
from mmspec.targets.memory import build_block
from mmspec.training.head_trainer import HeadTrainer, TrainingSettings
from mmspec.training.heads import TrainingExample
from mmspec.training.small_model import MASSV, TrainableSmallModel, new_model
from tests import toys
from tests.toys.readers import backbone


def _pair(family: str) -> tuple[Any, TrainableSmallModel, TrainingExample]:
    target = backbone(toys.model(family))
    given = toys.inputs(family, batch=2, ragged=True)
    torch.manual_seed(0)
    small = toys.model("llama", layers=1, hidden_size=48)
    width = target.tower_width or target.config.hidden_size
    tokens = torch.tensor([[5, 9, 7], [4, 6, -1]])
    return target, TrainableSmallModel(small, Projector(width, 48)), TrainingExample(given, tokens)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_an_example_is_read_as_in_drafting(family: str) -> None:
    """The same logits behind a ragged prompt with pictures, token by token."""
    target, head, example = _pair(family)
    reader, tokens = target.make_reader(head.language_model), example.tokens.clamp_min(0)
    layout = target.feature_layout(tower=True)
    with torch.no_grad():
        view = TargetFeatureInputs(layout, target, None, head.projector)
        prompt = view.build_uncompressed(example.inputs, reader)
        taught = head.logits(prompt, tokens, reader)
        memory, first, _ = reader.prefill(prompt, extra_slots=8)
        layed = build_block(
            tokens[:, :1].tolist(), Draft.chain(tokens[:, 1:], Kind.DET), memory.like
        )
        behind, _ = reader.read(memory, layed)
    drafted = torch.cat((first[:, None], behind[:, :-1]), 1)
    torch.testing.assert_close(taught, drafted, atol=1e-5, rtol=1e-5)
    other = {**example.inputs, "pixel_values": example.inputs["pixel_values"].flip(-1) + 1}
    with torch.no_grad():
        seen = head.logits(view.build_uncompressed(other, reader), tokens, reader)
    assert not torch.allclose(seen, taught, atol=1e-5)  # it does see the picture


def test_the_projector_learns_alone_and_then_both_learn() -> None:
    target, head, example = _pair("llava")
    trainer = HeadTrainer(MASSV, target, head, TrainingSettings(10, 1e-3))
    assert [stage.decay.steps for stage in trainer.stages] == [2, 8]
    assert trainer.stages[0].decay.rate == pytest.approx(10 * trainer.stages[1].decay.rate)

    def weights(part: torch.nn.Module) -> torch.Tensor:
        return torch.cat([one.detach().flatten() for one in part.parameters()])

    assert head.projector is not None
    own, eyes = weights(head.language_model), weights(head.projector)
    moved = []
    for _ in range(3):
        trainer.step([lambda: example])
        changed = [weights(head.language_model), weights(head.projector)]
        moved.append([not torch.equal(changed[0], own), not torch.equal(changed[1], eyes)])
        own, eyes = changed
    assert moved == [[False, True], [False, True], [True, True]]


def test_an_average_of_a_weight_with_two_names_is_kept() -> None:
    """Embeddings and output head are one table; its average must not be lost to the other name."""
    target, _, example = _pair("llava")
    torch.manual_seed(0)
    tied = new_model(target, num_hidden_layers=1, tie_word_embeddings=True)
    width = int(target.tower_width)
    head = TrainableSmallModel(tied, Projector(width, target.config.hidden_size))
    trainer = HeadTrainer(MASSV, target, head, TrainingSettings(4, 1e-2, ema=0.9))
    for _ in range(4):
        trainer.step([lambda: example])
    table = trainer.trained_head().language_model.lm_head.weight
    (name,) = (one for one in trainer.average if "embed_tokens" in one)
    assert torch.equal(table, trainer.average[name])
    assert not torch.equal(table, trainer.head.language_model.lm_head.weight)


@pytest.mark.parametrize(
    ("family", "made"),
    [
        ("llava", "LlamaForCausalLM"),
        ("qwen2_vl", "Qwen2ForCausalLM"),
        ("qwen2_5_vl", "Qwen2ForCausalLM"),
        ("qwen3_vl", "Qwen3ForCausalLM"),
    ],
)
def test_a_small_model_has_the_layers_of_its_targets_decoder(family: str, made: str) -> None:
    target = backbone(toys.model(family))
    model = new_model(target, num_hidden_layers=1)
    assert type(model).__name__ == made
    assert model.config.vocab_size == target.vocabulary
    assert "mrope_section" not in model.config.rope_parameters
    assert model.config.rope_parameters["rope_theta"] == target.config.rope_parameters["rope_theta"]
    own, of_target = (
        {name: tuple(weight.shape) for name, weight in one.layers[0].named_parameters()}
        for one in (model.get_decoder(), target.model.get_decoder())
    )
    assert own == of_target


def test_a_decoder_that_is_no_language_model_needs_a_small_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mmspec.training.small_model.LANGUAGE_MODELS", {})
    target = backbone(toys.model("qwen2_5_vl"))
    with pytest.raises(ValueError, match=r"no small language model can be made of .*--drafter"):
        MASSV.begin(target, torch.ones(3))
    with pytest.raises(ValueError, match="wide is not a field of LlamaConfig"):
        MASSV.begin(backbone(toys.model("llava")), torch.ones(3), wide=3)
