"""DistillSpec: the loss is 1 - acceptance on the draft model's own responses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmspec.training.distillspec import (
    DISTILLSPEC,
    on_policy_loss,
    sample_response,
    score_response,
)
from mmspec.training.head_trainer import HeadTrainer, TrainingSettings
from mmspec.training.heads import TrainingExample
from mmspec.training.small_model import TrainableSmallModel, draft_prompt
from tests import toys
from tests.partners import noisy
from tests.toys.readers import backbone


def pair(scale: float) -> tuple[Any, TrainableSmallModel, TrainingExample]:
    target = backbone(toys.model("llama"))
    given = toys.inputs("llama", batch=2, ragged=True)
    tokens = torch.tensor([[5, 9, 7, 6], [4, 6, 8, -1]])
    return target, TrainableSmallModel(noisy("llama", scale), None), TrainingExample(given, tokens)


def test_the_target_itself_has_nothing_to_learn() -> None:
    target, head, example = pair(0.0)
    torch.manual_seed(0)
    loss = on_policy_loss(target, head, example)
    assert float(loss) < 1e-4
    worse = on_policy_loss(*pair(0.5))
    assert float(worse) > 0.05  # negative control: any other model has


def test_the_loss_is_what_is_not_accepted() -> None:
    """Mean of 1 - sum min(p, q), each computed by plain forwards over the sampled text."""
    target, head, example = pair(0.3)
    reader = target.make_reader(head.language_model)
    torch.manual_seed(3)
    loss = on_policy_loss(target, head, example)
    torch.manual_seed(3)
    prompt = draft_prompt(target, head, example.inputs, reader)
    tokens = sample_response(reader, prompt, 4)
    lost = []
    for row in range(2):
        ids = example.inputs["input_ids"][row]
        real = ids[example.inputs["attention_mask"][row].bool()]
        text = torch.cat((real, tokens[row]))[None]
        with torch.no_grad():
            p, q = (
                model(input_ids=text).logits[0, -5:-1].softmax(-1)
                for model in (target.model, head.language_model)
            )
        lost += (1 - torch.minimum(p, q).sum(-1))[: int((example.tokens[row] >= 0).sum())].tolist()
    assert float(loss) == pytest.approx(sum(lost) / len(lost), abs=1e-5)


def test_responses_are_the_draft_models_own() -> None:
    _, head, example = pair(0.3)
    with torch.no_grad():  # so sure that a sample is its best token
        head.language_model.lm_head.weight.mul_(1e3)
    reader = backbone(head.language_model)
    tokens = sample_response(reader, example.inputs, 5)
    own = head.language_model.generate(**example.inputs, max_new_tokens=5, do_sample=False)
    assert torch.equal(tokens, own[:, -5:])


def test_training_makes_more_of_it_accepted() -> None:
    target, head, example = pair(0.3)
    trainer = HeadTrainer(DISTILLSPEC, target, head, TrainingSettings(30, 1e-3))
    losses = [trainer.step([lambda: example]) for _ in range(30)]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_the_target_reads_its_own_prompt() -> None:
    """With the image, which a text-only draft model does not see."""
    target = backbone(toys.model("llava"))
    given, tokens = toys.inputs("llava"), torch.tensor([[5, 9, 7]])
    logits = score_response(target, given, tokens)
    torch.testing.assert_close(
        logits, target.score_stepwise(given, tokens)[:, :-1], atol=1e-4, rtol=1e-4
    )
    other = {**given, "pixel_values": given["pixel_values"].flip(-1) + 1}
    assert not torch.allclose(score_response(target, other, tokens), logits, atol=1e-3)
