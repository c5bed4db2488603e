"""The bundled Janus models: training from a seed and loading."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from mmspec import zoo
from mmspec.distributions.sampling import guide
from mmspec.modalities.image import janus
from mmspec.training.fitting import CosineDecay, TrainingRun
from mmspec.zoo import train
from mmspec.zoo.catalogue import load_folder
from mmspec.zoo.prompts import iterate_training_scenes, prompts, write_varied_prompt
from mmspec.zoo.scene import Scene
from mmspec.zoo.scene_parser import parse_images, score_picture
from mmspec.zoo.scene_tensors import encode_board
from tools.zoo.image import coding, models
from tools.zoo.image.distil import (
    TargetLogits,
    compute_target_logits,
    distil_drafter,
    generate_target_codes,
    init_from_target,
    mean_divergence,
)
from tools.zoo.image.evaluate import (
    decode_codes,
    generate_codes,
    guidance_branches,
    score_generated_images,
    score_reconstructions,
)
from tools.zoo.image.train import acceptance
from tools.zoo.image.training import (
    PromptEncoder,
    example_batches,
    logits_of,
    lookup_states,
    train_lookup,
)

NAMES = [name for name in zoo.names() if zoo.modality(name).name == "image"]
LEAST_KEPT, LEAST_DRAWN = 0.95, 0.9
TEXTS = ["a large red circle in the center", "a small blue star"]


@pytest.fixture(scope="module")
def processor() -> Any:
    return models.processor()


@pytest.fixture(scope="module")
def model(processor: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return models.janus(models.DRAFTER, processor.tokenizer).eval()


@pytest.fixture(scope="module")
def reader(processor: Any) -> PromptEncoder:
    return PromptEncoder(processor.tokenizer)


def test_the_tokenizer_knows_every_word(processor: Any) -> None:
    words, generator = processor.tokenizer, np.random.default_rng(1)
    for scene in itertools.islice(iterate_training_scenes(1), 200):
        ids = words(write_varied_prompt(scene, generator)).input_ids
        assert words.unk_token_id not in ids
        assert ids[0] == words.bos_token_id


def test_prompts_are_those_of_the_processor_and_of_guidance(
    model: Any, processor: Any, reader: PromptEncoder
) -> None:
    asked = processor(text=TEXTS, generation_mode="image", padding=True, return_tensors="pt")
    wanted = janus.unconditional(model, {"prompt_ids": asked["input_ids"]})["prompt_ids"]
    for prompts_, ids in zip(
        guidance_branches(reader, TEXTS), (asked["input_ids"], wanted), strict=True
    ):
        for row, padded, length, mask in zip(
            prompts_.ids, ids, prompts_.lengths, asked["attention_mask"], strict=True
        ):
            assert row[:length].tolist() == padded[mask.bool()].tolist()


def test_every_place_of_the_board_is_a_square_of_codes() -> None:
    small = (s for s in iterate_training_scenes(0) if {t.size for t in s.things} == {"small"})
    scene = next(s for s in small if len(s.things) > 1)  # large things reach over their places
    drawn, paper = coding.render_images([scene, Scene(())])
    ink = functional.max_pool2d((drawn - paper).abs().amax(0, keepdim=True), 8)[0]
    squares = (ink > 0.05).view(3, 3, 3, 3).any(3).any(1)
    is_there = (encode_board(scene)[:, 0] > 0).view(3, 3)
    assert torch.equal(squares, is_there)
    counted = coding.occupied_codes([scene]).view(3, 3, 3, 3)
    assert torch.equal(counted, is_there[:, None, :, None].expand(3, 3, 3, 3).float())


def test_codes_are_the_nearest(model: Any) -> None:
    coder, shown = model.model.vqmodel, coding.render_tiled_scenes(2, TrainingRun())
    book = functional.normalize(coder.quantize.embedding.weight.detach(), dim=-1)
    with torch.no_grad():
        seen = coding.encode_latents(coder, shown.images).permute(0, 2, 3, 1).flatten(1, 2)
        coder.quantize.embedding.weight.copy_(book)
    nearest = torch.cdist(seen, book.expand(2, -1, -1)).argmin(-1)
    assert torch.equal(coding.encode_images(coder, shown.images), nearest)


def test_where_something_stands_counts_more_in_every_picture() -> None:
    shown = coding.render_tiled_scenes(16, TrainingRun(seed=2))
    assert shown.images.shape == (16, 3, models.PIXELS, models.PIXELS)
    places = shown.weights.view(16, 3, 3, 3, 3)
    assert torch.equal(places.amin((2, 4)), places.amax((2, 4)))  # whole places
    assert {1.0} < set(shown.weights.unique().tolist())
    assert len({int(n) for n in (shown.weights > 1).sum((1, 2)) // 9}) > 3  # one to nine things


def test_teacher_forced_distributions_are_those_of_generation(
    model: Any, processor: Any, reader: PromptEncoder
) -> None:
    """Greedy generation by the model's own loop, prompts of two lengths, guidance 3."""
    asked = processor(text=TEXTS, generation_mode="image", padding=True, return_tensors="pt")
    codes = model.generate(
        **asked, generation_mode="image", do_sample=False, guidance_scale=models.GUIDANCE
    )
    assert codes.shape == (2, models.SIDE**2)
    with torch.no_grad():
        told, silent = (logits_of(model, part, codes) for part in guidance_branches(reader, TEXTS))
    assert torch.equal(guide(told, silent, models.GUIDANCE).argmax(-1), codes)


def test_lookup_positions_are_those_of_generation(model: Any, reader: PromptEncoder) -> None:
    """With the true previous code, the lookup state is that of generation."""
    told = reader(TEXTS)
    offsets = torch.tensor([[1], [1]])
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        states = lookup_states(model, told, offsets)
        torch.manual_seed(3)
        first = torch.randint(models.CODES, offsets.shape)
        wanted = logits_of(model, told, first.expand(-1, 3))[:, 1]
        found = model.model.generation_head(states)[:, 0]
    assert torch.allclose(found, wanted, atol=1e-5)


def test_some_training_prompts_are_unconditional(model: Any, reader: PromptEncoder) -> None:
    scenes = list(itertools.islice(iterate_training_scenes(0), 64))
    drawn = torch.arange(64)[:, None].expand(-1, models.SIDE**2)
    taught = list(itertools.islice(example_batches(scenes, drawn, reader, 32, 0), 10))
    pad = reader.tokenizer.pad_token_id
    silent = [
        bool((row[1 : length - 1] == pad).all())
        for lesson in taught
        for row, length in zip(lesson.prompts.ids, lesson.prompts.lengths, strict=True)
    ]
    assert 10 < sum(silent) < 60
    assert sorted(torch.cat([taught[0].codes, taught[1].codes])[:, 0].tolist()) == list(range(64))


def test_reading_is_learnt(processor: Any, reader: PromptEncoder) -> None:
    losses: list[float] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        small = models.janus(models.DRAFTER, processor.tokenizer)
        course = TrainingRun(progress=lambda *told: losses.append(told[3]))
        train_lookup(small, reader, 25, course, 16)
    assert np.mean(losses[-3:]) < 0.7 * np.mean(losses[:3])


@pytest.mark.exhaustive
def test_a_drafter_comes_to_follow(model: Any, processor: Any, reader: PromptEncoder) -> None:
    seen = compute_target_logits(
        model,
        processor,
        *generate_target_codes(model, processor, 8, TrainingRun(), batch=4),
        batch=4,
    )
    assert seen.logits.shape == (8, 2, models.SIDE**2, models.CODES)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        small: Any = models.janus(models.DRAFTER, processor.tokenizer)
        before = _distance(small, reader, seen)
        init_from_target(small, model)
        words = small.get_input_embeddings().weight
        assert torch.equal(words, model.get_input_embeddings().weight)
        distil_drafter(small, reader, seen, CosineDecay(12, 2e-3), TrainingRun(), batch=4)
    assert _distance(small, reader, seen) < 0.7 * before


@torch.no_grad()
def _distance(model: Any, reader: PromptEncoder, seen: TargetLogits) -> float:
    offered = [logits_of(model, told, seen.codes) for told in guidance_branches(reader, seen.texts)]
    pairs = zip(seen.logits.float().unbind(1), offered, strict=True)
    return sum(float(mean_divergence(p, q)) for p, q in pairs)


@pytest.mark.exhaustive
def test_a_model_follows_itself(model: Any, processor: Any) -> None:
    assert acceptance(model, model, processor, TEXTS) > 5.5
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        other: Any = models.janus(models.DRAFTER, processor.tokenizer).eval()
    with torch.no_grad():
        other.model.generation_head.vision_head.weight.mul_(100)  # of strong opinions
    assert acceptance(other, model, processor, TEXTS) < 2


@pytest.mark.exhaustive
def test_training_writes_a_janus_that_loads(tmp_path: Path) -> None:
    stages: list[str] = []
    report = train("image", tmp_path, steps=1, progress=lambda *told: stages.append(told[0]))
    assert list(dict.fromkeys(stages)) == ["render", "see", "paint", "read", "encode", "draw"]
    loaded: Any = load_folder(tmp_path, sees=True)
    assert type(loaded).__name__ == "JanusForConditionalGeneration"
    assert loaded.generation_config.generation_kwargs["boi_token_id"] > 0
    assert report["steps"] == 1 + 3  # four falls of the rate
    assert 0 <= report["facts"] <= 1
    assert "zoo train image" in (tmp_path / "README.md").read_text()


def test_generation_is_a_function_of_its_seed(model: Any, processor: Any) -> None:
    one, again, other = (generate_codes(model, processor, TEXTS, seed) for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.fixture(scope="module")
def target() -> Any:
    return zoo.load("image")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["image-drafter", "image-head"])
def test_training_writes_drafters_that_load(tmp_path: Path, name: str) -> None:
    report = train(name, tmp_path, steps=1)
    assert 1 <= report["acceptance_length"] <= 6
    assert f"zoo train {name}" in (tmp_path / "README.md").read_text()


def test_they_fit_together(target: Any, processor: Any) -> None:
    drafter = zoo.load("image-drafter")
    layers = [m.config.text_config.num_hidden_layers for m in (target, drafter)]
    assert layers[0] >= 12 * layers[1]
    for name in NAMES:
        assert zoo.processor(name).tokenizer.get_vocab() == processor.tokenizer.get_vocab()


@pytest.mark.exhaustive
def test_the_codes_keep_the_facts_and_are_all_of_one_length(target: Any) -> None:
    right, asked = score_reconstructions(target, [p.scene for p in prompts(40, seed=2)])
    assert right >= LEAST_KEPT * asked
    coder = target.model.vqmodel
    book = coder.quantize.embedding.weight
    assert torch.allclose(book.norm(dim=-1), torch.ones(len(book)), atol=2e-3)
    codes = coding.encode_images(coder, coding.render_tiled_scenes(64, TrainingRun(seed=3)).images)
    shares = torch.bincount(codes.flatten()) / codes.numel()
    assert len(codes.unique()) > 256
    assert float(shares.max()) < 0.05  # none stands for all that is blank


@pytest.mark.exhaustive
def test_images_match_their_prompts(target: Any, processor: Any) -> None:
    asked = prompts(16, seed=3)
    right, total = score_generated_images(target, processor, asked)
    assert right >= LEAST_DRAWN * total
    drawn = generate_codes(target, processor, [p.text for p in asked])
    read = parse_images(list(decode_codes(target, drawn)))
    others = [score_picture(p.scene, r) for p, r in zip(asked[1:], read[:-1], strict=True)]
    assert sum(r for r, _ in others) < 0.6 * sum(a for _, a in others)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["image-drafter", "image-head"])
def test_a_drafter_follows_and_an_untrained_one_does_not(
    target: Any, processor: Any, name: str
) -> None:
    texts = [p.text for p in prompts(4, seed=4)]
    trained = acceptance(zoo.load(name), target, processor, texts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        untrained = models.janus(models.DRAFTER, processor.tokenizer).eval()
    assert trained > acceptance(untrained, target, processor, texts) + 0.5
