"""Training of clip models: packed questions are independent, block expansion is exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmspec import zoo
from mmspec.modalities.vlm import clips as films
from mmspec.modalities.vlm.formatting import format_chat
from mmspec.training.fitting import CosineDecay, TrainingRun
from mmspec.zoo import train
from mmspec.zoo.motion import BUNDLED_CLIP, FRAMES, MovingScene, sample_moving_scenes
from mmspec.zoo.scene import COLOURS, SHAPES
from tools.zoo.initialization import mimetic_init
from tools.zoo.vlm import clips
from tools.zoo.vlm.architecture import LanguageShape, clip_qwen
from tools.zoo.vlm.batches import IGNORED
from tools.zoo.vlm.clip_batches import (
    GRIDS,
    SIDE,
    SLOTS,
    STORY_CLASSES,
    ClipBatcher,
    TrainingStage,
    clip_features,
    clip_inputs,
    clip_states,
    render_frames,
    slot_labels,
)
from tools.zoo.vlm.processors import clip_processor
from tools.zoo.vlm.slot_embeddings import SlotEmbeddings

SMALL = LanguageShape(2, 96, 96, 3, vision_layers=1, vision_width=64)


def lessons_of(batch: int, moments: int = GRIDS) -> TrainingStage:
    return TrainingStage(CosineDecay(1, 1e-3), batch, moments)


@pytest.fixture(scope="module")
def scenes() -> list[MovingScene]:
    return [scene for scene, _ in sample_moving_scenes(2)]


@pytest.fixture(scope="module")
def processor() -> Any:
    return clip_processor()


@pytest.fixture(scope="module")
def model(processor: Any) -> Any:
    torch.manual_seed(0)
    return clip_qwen(SMALL, processor.tokenizer).eval()


def test_frames_are_read_as_the_processor_reads_them(scenes: Any, processor: Any) -> None:
    frames = render_frames(scenes[0])
    shown = torch.from_numpy(frames).permute(0, 3, 1, 2)
    asked = processor.video_processor([shown], do_sample_frames=False, return_tensors="pt")
    own = clip_inputs(frames[None])
    assert torch.equal(own["video_grid_thw"], asked["video_grid_thw"])
    torch.testing.assert_close(own["pixel_values_videos"], asked["pixel_values_videos"])


@torch.no_grad()
def test_moments_that_are_alike_are_looked_at_once(scenes: Any, model: Any) -> None:
    """A tower that takes one moment at a time makes of a clip what it makes of its moments."""
    whole = torch.cat([clip_features(model, render_frames(scene)[None]) for scene in scenes])
    taken: list[int] = []
    counted = model.model.visual.register_forward_pre_hook(
        lambda _, __, given: taken.append(len(given["grid_thw"])), with_kwargs=True
    )
    found = clips.compute_features(model, [(scene, 0) for scene in scenes], TrainingRun())
    counted.remove()
    torch.testing.assert_close(found, whole.half(), rtol=2e-3, atol=2e-3)
    assert len(taken) == len(scenes)
    assert all(count < GRIDS for count in taken)


@torch.no_grad()
def test_packed_questions_are_read_as_each_alone(scenes: Any, processor: Any, model: Any) -> None:
    features = torch.cat([clip_features(model, render_frames(one)[None]) for one in scenes])
    item = next(
        ClipBatcher(model, processor, 3).iterate_rendered(scenes, features, lessons_of(2), 0)
    )
    states, at = clip_states(model, item), 0
    for row, known in enumerate(item.features):
        clip = next(i for i in range(2) if torch.equal(features[i], known))
        film = films.read(torch.from_numpy(render_frames(scenes[clip])).permute(0, 3, 1, 2), FRAMES)
        for group in (1, 2, 3):
            ids = item.ids[row][item.groups[row] == group]
            learnt = item.labels[row][item.groups[row] == group] != IGNORED
            asked = processor.decode(ids[: int(learnt.nonzero()[0])]).split("<|im_end|>")[0]
            text = format_chat(processor, asked.strip(), ["video"])
            inputs = dict(
                processor(text=[text], **films.processor_arguments([film]), return_tensors="pt")
            )
            told = ids[int(learnt.nonzero()[0]) + 1 :]
            inputs["input_ids"] = torch.cat((inputs["input_ids"], told[None]), 1)
            inputs["mm_token_type_ids"] = torch.nn.functional.pad(
                inputs["mm_token_type_ids"], (0, len(told))
            )
            inputs.pop("attention_mask")
            whole = model.model(**inputs, use_cache=False).last_hidden_state[0]
            wanted = whole[-int(learnt.sum()) :]
            torch.testing.assert_close(states[at : at + len(wanted)], wanted, rtol=1e-4, atol=1e-4)
            at += len(wanted)
    assert at == len(states)
    assert features.shape[1] == SLOTS


def test_what_is_to_be_seen_is_where_it_is() -> None:
    orange, purple = (1 + COLOURS.index(name) for name in ("orange", "purple"))
    story = slot_labels(BUNDLED_CLIP).unflatten(0, (GRIDS, SIDE, SIDE))
    star = story[..., 1] == orange
    corner, middle = slice(0, 2), slice(2, 4)
    for grid, columns in ((0, slice(0, 2)), (GRIDS - 1, slice(4, 6))):
        seen = torch.zeros(SIDE, SIDE, dtype=torch.bool)
        seen[corner, columns] = True
        assert torch.equal(star[grid], seen)
    name, _, size, way, here, origin, order, moved = story[0, 0, 0].tolist()
    assert (name, size, way, here, origin, order) == (1 + SHAPES.index("star"), 2, 0, 1, 1, 1)
    assert moved == 0
    moving = story[3][star[3]]  # frames 6 and 7; it leaves after frame 4
    assert len(moving) in (2, 4)
    assert moving[:, 3:].unique(dim=0).tolist() == [[2, 2, 1, 2, 2]]  # right, at the top, first
    there = story[-1][star[-1]]
    assert there[:, 3:].unique(dim=0).tolist() == [[0, 3, 1, 2, 2]]
    assert (story[:, middle, middle, 1] == purple).all()
    assert (story[:, middle, middle, 3:] == torch.tensor([0, 5, 5, 1, 0])).all()
    assert int(story[-1, 4:, 0:2, 6].min()) == 3  # the ring was the second to move
    assert not story[0, 2:4, 4:].any()


def test_slot_heads_are_trained_on_slot_labels(scenes: Any) -> None:
    torch.manual_seed(0)
    heads = clips.SlotHeads(8, STORY_CLASSES)
    story = torch.stack([slot_labels(scene) for scene in scenes])
    states = torch.randn(2, SLOTS, 8)
    first = heads.loss(states, story)
    with torch.no_grad():  # what says "nothing" is right where nothing is
        heads.heads.weight.zero_()
        heads.heads.bias.fill_(-20)
        starts = torch.tensor([0, *STORY_CLASSES[:-1]]).cumsum(0)
        heads.heads.bias[starts] = 20.0
    there = story[..., 0] > 0
    wrong = [(part[there] > 0).float().mean() for part in story.unbind(-1)]
    wanted = 40 * torch.stack(wrong).mean() / 2
    torch.testing.assert_close(heads.loss(states, story), wanted, rtol=1e-3, atol=1e-3)
    assert first.isfinite()


def test_batches_of_some_moments_keep_questions_and_position_ids(
    scenes: Any, processor: Any, model: Any
) -> None:
    """Slots have the features, the story and the positions that they have in the whole clip."""
    teacher, features = ClipBatcher(model, processor, 2), torch.randn(2, SLOTS, 96)
    whole, part = (
        next(teacher.iterate_rendered(scenes, features, lessons_of(2, n), 0)) for n in (GRIDS, 7)
    )
    slot = model.config.video_token_id
    for row in range(2):
        found, wanted = (one.positions[:, row, one.ids[row] == slot].T for one in (part, whole))
        at = (wanted[None] == found[:, None]).all(-1).int().argmax(1)
        assert at.diff().min() > 0
        assert len(at) == 7 * SIDE**2
        assert torch.equal(wanted[at], found)
        assert torch.equal(part.features[row], whole.features[row, at])
        assert torch.equal(part.story[row], whole.story[row, at])
        moments = set((at // SIDE**2).tolist())
        assert {0, GRIDS - 1} <= moments
        moving = whole.story[row].unflatten(0, (GRIDS, -1))[..., [3, 6]].flatten(0, 1)
        orders = {int(order) for way, order in moving if way}
        shown = {int(order) for way, order in part.story[row][:, [3, 6]] if way}
        assert shown == orders


def test_a_question_counts_by_the_root_of_its_length(
    scenes: Any, processor: Any, model: Any
) -> None:
    torch.manual_seed(0)
    features = torch.randn(2, SLOTS, 96)
    item = next(
        ClipBatcher(model, processor, 2).iterate_rendered(scenes, features, lessons_of(2, 7), 0)
    )
    logits = torch.randn(int((item.labels != IGNORED).sum()), 200)
    said, at, total = 0.0, 0, 0.0
    lengths = set()
    for row in range(2):
        for group in (1, 2):
            labels = item.labels[row][item.groups[row] == group]
            labels = labels[labels != IGNORED]
            mine = logits[at : at + len(labels)]
            loss = torch.nn.functional.cross_entropy(mine, labels)
            said, total = said + float(loss) * len(labels) ** 0.5, total + len(labels) ** 0.5
            at += len(labels)
            lengths.add(len(labels))
    assert len(lengths) > 1
    assert abs(float(clips.response_loss(logits, item)) - said / total) < 1e-4


@torch.no_grad()
def test_slot_embeddings_distinguish_their_labels(scenes: Any, processor: Any, model: Any) -> None:
    torch.manual_seed(0)
    words = SlotEmbeddings.from_model(model, processor.tokenizer)
    story = torch.stack([slot_labels(scene) for scene in scenes])
    shown = words.embed(story)
    for column, table in enumerate(words.tables):
        rest = shown - table[story[..., column]]
        away = (rest[..., None, :] + table - shown[..., None, :]).square().sum(-1)
        assert torch.equal(away.argmin(-1), story[..., column])
    right = words.loss(shown, story)
    assert right < words.loss(0.5 * shown, story) < words.loss(-shown, story)
    others = story.roll(1, 1)
    assert right < words.loss(words.embed(others), story)
    red = model.get_input_embeddings().weight[processor.tokenizer.vocab["red"]]
    assert torch.equal(words.tables[1][1 + COLOURS.index("red")], red)


@torch.no_grad()
def test_attention_that_begins_with_likeness_finds_and_copies(processor: Any) -> None:
    torch.manual_seed(0)
    layers = clip_qwen(SMALL, processor.tokenizer).model.language_model.layers
    mimetic_init(layers)
    given = torch.randn(8, 96)
    attention = layers[0].self_attn
    distribution = (attention.q_proj(given) @ attention.k_proj(given).T).softmax(-1)
    assert distribution.diagonal().min() > 0.99
    copied = attention.o_proj(attention.v_proj(given))
    torch.testing.assert_close(copied, 0.25 * given, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_deeper_model_begins_with_the_answers_of_the_shallow_one(
    scenes: Any, processor: Any, model: Any
) -> None:
    deep = clips.deepen(model, processor, LanguageShape(**{**vars(SMALL), "layers": 6}))
    features = clip_features(model, render_frames(scenes[0])[None])
    item = next(
        ClipBatcher(model, processor, 1).iterate_rendered(scenes[:1], features, lessons_of(1), 0)
    )
    torch.testing.assert_close(clip_states(deep.eval(), item), clip_states(model, item))
    assert len(deep.model.language_model.layers) == 6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["video", "video-drafter"])
def test_training_writes_a_checkpoint_that_loads(name: Any, tmp_path: Any) -> None:
    stages: list[str] = []
    train(name, tmp_path, steps=1, progress=lambda *told: stages.append(told[0]))
    assert {"see", "look", "tell"} <= set(stages)
    assert f"zoo train {name}" in (tmp_path / "README.md").read_text()


@pytest.mark.exhaustive
def test_the_shipped_pair_is_as_good_as_its_cards_say() -> None:
    for name, margin in (("video", 0.1), ("video-drafter", 0.5)):
        entry, folder = zoo.info(name), zoo.path(name)
        rows = (folder / "README.md").read_text().splitlines()
        told = {key.strip(): value.strip() for _, key, value, _ in map(cells, rows) if value}
        for figure, found in clips.measure(entry, folder, 24).items():
            assert found >= float(told[figure.replace("_", " ")]) - margin


def cells(line: str) -> tuple[str, str, str, str]:
    """The two columns of a line of a table, empty for other lines."""
    parts = line.split("|")
    return ("", "", "", "") if len(parts) != 4 else (parts[0], parts[1], parts[2], parts[3])
