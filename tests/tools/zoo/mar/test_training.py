"""The bundled MAR pair: training from a seed, correct classes, and distillation."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import mmspec
from mmspec import zoo
from mmspec.codes.image_family import to_images
from mmspec.modalities.mar.checkpoints import LABELS, classes, facts_of, label, load
from mmspec.models.mar_head import HeadGrid
from mmspec.targets.continuous.patches import PatchSettings
from mmspec.training.fitting import TrainingRun
from mmspec.zoo import train
from mmspec.zoo.catalogue import load_vae
from mmspec.zoo.scene_parser import parse_image
from tools.zoo.mar import distil as mar_distil
from tools.zoo.mar import evaluate as mar_evaluate
from tools.zoo.mar import models as mar_models
from tools.zoo.mar import training as mar_training
from tools.zoo.mar.evaluate import PLAN
from tools.zoo.mar.train import acceptance

LEAST_FACTS = 0.75  # of 32 pictures; the card says how many of more
LEAST_LENGTH = 1.4  # steps per round with one drafted
TINY = mar_models.MarShape(encoder=1, decoder=1, width=16, heads=2, head_width=16, head_depth=1)


@pytest.fixture(scope="module")
def target() -> Any:
    return zoo.load("mar")


@pytest.fixture(scope="module")
def drafter() -> Any:
    return zoo.load("mar-drafter")


@pytest.fixture(scope="module")
def vae() -> Any:
    return zoo.vae("mar")


def pool(count: int = 56) -> mar_training.TokenPool:
    tokens = torch.randn(count, 36, 16, generator=torch.Generator().manual_seed(0))
    return mar_training.TokenPool(tokens, torch.arange(count), 0.3)


def test_classes_and_cells_are_uniform() -> None:
    made = list(mar_training.sample_scenes(56 * 9, 0))
    things = [scene.things[0] for _, scene in made]
    assert (
        len({(number, t.row, t.column) for (number, _), t in zip(made, things, strict=True)})
        == 56 * 9
    )
    assert all(len(scene.things) == 1 for _, scene in made)
    for number, scene in made[::71]:
        assert LABELS[number] == label(scene.things[0])
        assert facts_of([number], [scene.render(48)]) == [(1, 1)]
        assert facts_of([(number + 1) % 56], [scene.render(48)]) == [(0, 1)]


def test_training_examples_mask_their_targets() -> None:
    found = pool()
    lesson = next(mar_training.example_batches(found, 16, 3))
    asked = torch.zeros_like(lesson.shown).scatter(1, lesson.positions, True)
    assert torch.equal(asked, ~lesson.shown)
    picked = mar_training.gather_tokens(lesson.tokens, lesson.positions).unflatten(
        0, lesson.positions.shape
    )
    for row in range(16):
        assert torch.equal(picked[row], lesson.tokens[row, lesson.positions[row]])
    told = lesson.classes < len(LABELS)
    away = lesson.tokens[told] - found.tokens[lesson.classes[told]]
    assert float(away.std()) == pytest.approx(found.noise, rel=0.05)


def test_the_tables_of_training_are_those_of_sampling() -> None:
    kernel, found = HeadGrid.cosine(100, 100).kernel, mar_training.HeadSchedule.of(100)
    assert_close(found.alpha.flip(0), kernel.alpha[:-1].float())
    assert_close(found.sigma.flip(0), kernel.sigma[:-1].float())
    assert_close(found.to_clean.flip(0), kernel.clean.float(), atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_a_head_that_knows_the_token_has_no_loss_but_that_of_its_variances() -> None:
    """For tokens 0 the velocity is alpha times noise; a wrong one has a larger loss."""
    schedule = mar_training.HeadSchedule.of(100)

    class Knowing(torch.nn.Module):
        def __init__(self, gain: float) -> None:
            super().__init__()
            self.gain = gain

        def forward(self, states: Any, time: Any, conditions: Any) -> Any:
            alpha, sigma = schedule.alpha[time, None], schedule.sigma[time, None]
            velocity = self.gain * alpha / sigma * states
            return torch.cat((velocity, -torch.ones_like(states)), -1)

    found = []
    for gain in (1.0, 0.5):
        torch.manual_seed(0)
        head: Any = Knowing(gain)
        loss = mar_training.head_loss(head, schedule, torch.zeros(4000, 2), torch.zeros(4000, 1))
        found.append(float(loss))
    assert abs(found[0]) < 0.06  # of the first step alone, one of a hundred
    assert found[1] > found[0] + 0.05


@torch.no_grad()
def test_a_distribution_is_not_apart_from_itself() -> None:
    torch.manual_seed(0)
    one, other = mar_models.mar(TINY, 3.0), mar_models.mar(TINY, 3.0)
    for model in (one, other):
        torch.nn.init.normal_(model.head.output.weight, std=0.1)
    lesson = next(mar_training.example_batches(pool(), 8, 0))
    distributions = [
        mar_distil.distribution(model, lesson, PLAN) for model in (one, copy.deepcopy(one), other)
    ]
    clean = mar_training.gather_tokens(lesson.tokens, lesson.positions)
    assert float(
        mar_distil.path_divergence(distributions[0], distributions[1], clean)
    ) == pytest.approx(0, abs=1e-4)
    assert float(mar_distil.path_divergence(distributions[0], distributions[2], clean)) > 0.1


def test_a_drafter_begins_with_the_last_layers_of_its_target() -> None:
    deep: Any = mar_models.mar(mar_models.MarShape(3, 2, 16, 2, 16, 3), 3.0)
    small: Any = mar_models.mar(TINY, 3.0)
    mar_distil.init_from_target(small, deep)
    assert torch.equal(small.class_table.weight, deep.class_table.weight)
    assert torch.equal(small.encoder[0].qkv.weight, deep.encoder[2].qkv.weight)
    assert torch.equal(small.head.blocks[0].fc1.weight, deep.head.blocks[2].fc1.weight)


@pytest.mark.exhaustive
def test_training_writes_a_model_that_loads(tmp_path: Path) -> None:
    stages: list[str] = []
    report = train("mar", tmp_path, steps=1, progress=lambda *told: stages.append(told[0]))
    assert list(dict.fromkeys(stages)) == ["encode", "draw"]
    config: Any = load(zoo.info("mar"), tmp_path).config
    assert config.label2id["red circle"] == 0
    assert load_vae(tmp_path).config["latent_channels"] == 4
    assert report["steps"] == 2  # falls of the rate
    assert "zoo train mar\n" in (tmp_path / "README.md").read_text()


@pytest.mark.exhaustive
def test_training_writes_a_drafter_that_loads(tmp_path: Path) -> None:
    report = train("mar-drafter", tmp_path, steps=1)
    assert (
        load(zoo.info("mar-drafter"), tmp_path).config.num_hidden_layers
        == mar_models.DRAFTER.encoder
    )
    assert 1 <= report["acceptance_length"] <= 2


def test_the_pair_fits_together(target: Any, drafter: Any) -> None:
    for model in (target, drafter):
        assert model.config.id2label[8] == "red square"
    assert target.config.num_hidden_layers >= 4 * drafter.config.num_hidden_layers
    mmspec.accelerate(target, "cspd", drafter="zoo:mar-drafter")


def test_the_autoencoder_keeps_the_facts(target: Any, vae: Any) -> None:
    scale = target.config.latent_scale
    made, _ = mar_training.encode_pool(vae, 56, TrainingRun(3), scale)
    noisy = made.tokens + made.noise * torch.randn_like(made.tokens)
    assert 0.8 < float(noisy.std()) < 1.25
    with torch.no_grad():
        images = to_images(vae.decode(target.to_vae_latents(noisy) / scale)[0])
    assert sum(right for right, _ in facts_of(made.classes.tolist(), images)) >= 54


@pytest.mark.exhaustive
def test_pictures_show_their_class_and_no_other(target: Any, vae: Any) -> None:
    asked = classes(32, seed=5)
    images = list(mar_evaluate.generate_images(target, vae, asked, seed=5))
    right = sum(r for r, _ in facts_of(asked, images))
    assert right >= LEAST_FACTS * len(asked)
    assert sum(r for r, _ in facts_of(asked[1:] + asked[:1], images)) <= 3
    assert (
        len({parse_image(image).things[0].place for image in images if parse_image(image).things})
        >= 5
    )


@pytest.mark.exhaustive
def test_the_drafter_follows_and_an_untrained_one_does_not(target: Any, drafter: Any) -> None:
    asked = classes(4, seed=2)
    torch.manual_seed(0)
    untrained = mar_models.mar(mar_models.DRAFTER, target.config.latent_scale)
    assert acceptance(drafter, target, asked) >= LEAST_LENGTH
    assert acceptance(untrained, target, asked) < 1.1


def test_a_copy_gives_the_plain_image_by_name_and_by_number(target: Any, vae: Any) -> None:
    asked = {"steps": 12, "head_steps": 8, "guidance": 1.5, "last_noise": True}
    plan = PatchSettings(**asked)  # type: ignore[arg-type]
    plain = target.sample(torch.tensor([0, 19]), plan, seed=4)
    fast: Any = mmspec.accelerate(target, "cspd-coupled", drafter=copy.deepcopy(target), length=3)
    out = fast.generate_images(prompt=["a red circle", "Yellow triangle"], **asked, seed=4, vae=vae)
    assert_close(out.latents, plain, atol=2e-3, rtol=1e-3)
    assert out.stats.target_calls == 3
    assert [image.size for image in out.images] == [(48, 48)] * 2
    again = fast.generate_images(prompt=["0", "19"], **asked, seed=4)
    assert torch.equal(again.latents, out.latents)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"prompt": "a red digit"},
            r"prompt='a red digit' is not a class.*56 names.*'black circle'",
        ),
        ({"prompt": "red ring", "class_labels": [1]}, "class_labels= and prompt= both give"),
        ({"prompt": "56"}, "class_labels=56 is not known"),
    ],
)
def test_classes_that_are_not_known(
    target: Any, drafter: Any, given: dict[str, Any], message: str
) -> None:
    fast: Any = mmspec.accelerate(target, "cspd-coupled", drafter=drafter)
    with pytest.raises(ValueError, match=message):
        fast.generate_images(**given, last_noise=True)


def test_what_the_pair_has_not_got() -> None:
    with pytest.raises(ValueError, match="mar is conditioned on classes and has no processor"):
        zoo.processor("mar")
    with pytest.raises(
        ValueError, match=r"llava has no autoencoder of its own; choose one of: diffusion, .*mar"
    ):
        zoo.vae("llava")
