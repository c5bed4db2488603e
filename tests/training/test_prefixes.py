"""Turns that go on from what was read of their conversation: as if each were read anew."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.testing import assert_close

from mmspec import registry, zoo
from mmspec.api import accelerate
from mmspec.cli.training_examples import group_turns
from mmspec.training import prefixes
from mmspec.training.conversations import Question, read_questions
from mmspec.training.heads import TargetOutputs, TrainingExample, read_by_target
from mmspec.training.prefixes import PrefixCounts, PrefixReader, report_prefixes
from mmspec.training.turns import Turn
from mmspec.zoo.scene import sample
from mmspec.zoo.scene_tensors import render_pixels
from tests import toys
from tests.cli.running import run
from tests.covering import exhaustive
from tests.drafters.state_heads import target
from tests.toys.readers import backbone

TURNS = (
    ("what is it?", "a red circle."),
    ("is the star red?", "no it is green."),
    ("what is at the top of it?", "the circle. the star is green."),
    ("where?", "it is at the top."),
)
NEW = 10


def teacher_of(name: str) -> Any:
    owner = registry.find_modality(f"zoo:{name}")
    return registry.training_data(owner).teacher(f"zoo:{name}", zoo.load(name).float())


def conversations(folder: Path, has_images: bool) -> list[Question]:
    """Three, of 2 to 4 turns."""
    rows = []
    for number in range(3):
        turns = [
            part
            for asked, answer in TURNS[: 2 + number]
            for part in (
                {"from": "human", "value": f"{asked}{' yes' * number}"},
                {"from": "gpt", "value": answer},
            )
        ]
        row: dict[str, Any] = {"conversations": turns}
        if has_images:
            row["image"] = f"{number}.png"
            image = Image.fromarray(render_pixels(sample(number)))
            image.save(folder / f"{number}.png")
        rows.append(row)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_questions(folder / "rows.jsonl")


def pad(rows: Sequence[Tensor]) -> Tensor:
    """Zeros on the left."""
    flipped = [one.flip(0) for one in rows]
    return torch.nn.utils.rnn.pad_sequence(flipped, batch_first=True).flip(1)


def generated(teacher: Any, inputs: Any, **more: Any) -> list[list[int]]:
    how = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": [], **more}
    out = accelerate(teacher.model, "plain").generate(**inputs, **how)
    found: list[list[int]] = out.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    return found


def anew(
    teacher: Any, questions: Sequence[Question], responses: Sequence[Any], tap: str
) -> TargetOutputs:
    width = max(map(len, responses))
    tokens = torch.tensor([[*one, *[-1] * (width - len(one))] for one in responses])
    inputs = teacher.inputs(questions, [teacher.load_media(one) for one in questions])
    return read_by_target(teacher.reader, TrainingExample(inputs, tokens), tap)


def row_of(read: TargetOutputs, row: int) -> dict[str, Tensor]:
    """What is cached of a row, without padding."""
    prompt, size = read.prompt, int(read.real[row].sum())
    cut = slice(prompt.padding[row], prompt.embeds.shape[1] - read.next.shape[1] + size)
    found = {"next": read.next[row, :size]}
    for name in ("embeds", "features", "tokens"):
        found[name] = vars(prompt)[name][row, cut]
    if prompt.positions is not None:
        axes = prompt.positions.expand(*prompt.positions.shape[:-2], len(read.real), -1)
        found["positions"] = axes[..., row, cut]
    return found


@pytest.mark.parametrize(
    "case",
    exhaustive(("llava, images", "qwen2.5-vl, images", "qwen2.5-vl"), {"llava, images"}),
)
def test_answers_and_features_are_those_of_turns_read_anew(case: str, tmp_path: Path) -> None:
    """Answers of the target, which fork off, and of the data, which later prompts contain."""
    name, _, media_kind = case.partition(", ")
    teacher, questions = teacher_of(name), conversations(tmp_path, bool(media_kind))
    media = [teacher.load_media(one) for one in questions]
    inputs, reader = teacher.inputs(questions, media), PrefixReader(teacher)
    shared = reader.share(questions, media, inputs)
    assert shared is not None
    assert shared.rows == list(range(9))
    sizes = inputs["attention_mask"].sum(-1).tolist()
    lasts = [sizes[at] for at in (1, 4, 8)]
    assert reader.counts == PrefixCounts(sum(lasts) + 9 * shared.tail, sum(sizes), 9, 0)
    answers = generated(teacher, inputs)
    assert generated(teacher, shared.inputs, past_key_values=shared.past.cache) == answers
    told = [teacher.tokens(str(one.answer)) for one in questions]
    for responses, tap, reads in ((answers, "layers:1,2", 1), (told, "hidden", 2)):
        seen, found = [], list(PrefixReader(teacher).read(questions, media, responses, tap))
        assert len(found) == reads
        for rows, own in found:
            seen += rows
            chosen = [questions[at] for at in rows], [responses[at] for at in rows]
            expected = anew(teacher, *chosen, tap)
            for row in range(len(rows)):
                mine, theirs = row_of(own, row), row_of(expected, row)
                assert mine.keys() == theirs.keys()
                for part, one in theirs.items():
                    assert_close(mine[part], one, atol=1e-4, rtol=1e-4)
        assert sorted(seen) == list(range(9))


def test_a_response_in_a_later_prompt_is_not_read_again(tmp_path: Path) -> None:
    teacher, questions = teacher_of("llava"), conversations(tmp_path, True)
    media = [teacher.load_media(one) for one in questions]
    told = [teacher.tokens(str(one.answer)) for one in questions]
    reader = PrefixReader(teacher)
    list(reader.read(questions, media, told, "hidden"))
    sizes = teacher.inputs(questions, media)["attention_mask"].sum(-1).tolist()
    last = [1, 4, 8]
    assert reader.counts.read == sum(sizes[at] + len(told[at]) + 1 for at in last)
    assert reader.counts.unshared == sum(sizes) + sum(map(len, told))


def test_a_template_that_rewrites_earlier_turns_is_noticed(tmp_path: Path) -> None:
    """The last turn comes first here: every turn is read anew."""
    teacher, questions = teacher_of("llava"), conversations(tmp_path, True)
    teacher.processor.chat_template = (
        "{% for one in messages | reverse %}{{ one['role'] }} : {% for part in one['content'] %}"
        "{{ part['text'] if part['type'] == 'text' else '<image>' }} {% endfor %}{% endfor %}"
        "assistant :"
    )
    media = [teacher.load_media(one) for one in questions]
    inputs, reader = teacher.inputs(questions, media), PrefixReader(teacher)
    assert reader.share(questions, media, inputs) is None
    assert reader.counts == PrefixCounts(anew=6)
    answers = generated(teacher, inputs)
    ((rows, found),) = reader.read(questions, media, answers, "hidden")
    assert rows == list(range(9))
    expected = anew(teacher, questions, answers, "hidden")
    assert_close(found.prompt.features, expected.prompt.features)


def test_a_target_whose_tokens_read_later_ones_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any difference beyond rounding, here by slots that are one off."""
    teacher, questions = teacher_of("llava"), conversations(tmp_path, True)
    media = [teacher.load_media(one) for one in questions]
    inputs, reader = teacher.inputs(questions, media), PrefixReader(teacher)
    whole = prefixes._LastTurns.slots

    def shifted(*given: Any) -> Any:
        at, slots = whole(*given)
        return at, (slots - 1).clamp_min(0)

    monkeypatch.setattr(prefixes._LastTurns, "slots", shifted)
    assert reader.share(questions, media, inputs) is None
    assert reader.is_shareable is False
    assert reader.counts.reused == 0
    monkeypatch.undo()
    assert reader.share(questions, media, inputs) is None  # for good


class PromptTeacher:
    """Prompts of a tiny model: its own one, and four words more for each turn."""

    def __init__(self, family: str) -> None:
        self.family, self.reader = family, backbone(target(family))

    def inputs(self, questions: Sequence[Question], opened: Sequence[Any]) -> dict[str, Tensor]:
        given, sizes = toys.inputs(self.family), [4 * len(one.turns) for one in questions]
        words = torch.arange(40, 40 + max(sizes))
        found = {n: x.repeat(len(sizes), *[1] * (x.dim() - 1)) for n, x in given.items()}
        rows = [torch.cat((found["input_ids"][0], words[:size])) for size in sizes]
        found["input_ids"] = pad(rows)
        found["attention_mask"] = pad([torch.ones_like(one) for one in rows])
        if "token_type_ids" in given:
            found["token_type_ids"] = pad(
                [torch.cat((given["token_type_ids"][0], words[:size] * 0)) for size in sizes]
            )
        return found


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "is_shareable"),
    [
        ("llama", True),
        ("mistral-sliding", True),
        ("gemma3", True),
        ("lfm2", False),
        ("paligemma", False),
    ],
)
def test_the_target_decides_whether_turns_share(family: str, is_shareable: bool) -> None:
    """Not with recurrent states, nor where a prompt attends to all of itself."""
    teacher = PromptTeacher(family)
    questions = [Question((Turn("user", ("a",)),) * n, (), None, "", 0) for n in (1, 3, 5)]
    reader = PrefixReader(teacher)
    shared = reader.share(questions, [None] * 3, teacher.inputs(questions, [None] * 3))
    assert (shared is not None) == is_shareable
    assert reader.is_shareable is is_shareable
    assert reader.counts.reused == 3 * is_shareable


def test_questions_of_their_own_share_nothing(tmp_path: Path) -> None:
    teacher, questions = teacher_of("llava"), conversations(tmp_path, True)
    firsts = [questions[at] for at in (0, 2, 5)]
    media = [teacher.load_media(one) for one in firsts]
    reader = PrefixReader(teacher)
    assert reader.share(firsts, media, teacher.inputs(firsts, media)) is None
    assert report_prefixes([reader.counts]) == {}


def test_conversations_stay_together() -> None:
    keys = [(0, ()), (0, ()), (1, ()), (2, ("image",)), (2, ("image",)), (3, ()), (3, ())]
    turns, others = group_turns([[6, 1, 3], [2, 0, 5], [4]], keys)
    assert turns == [[0, 1], [5, 6], [3, 4]]
    assert others == [[2]]
    assert group_turns([[0, 1]], [(0, ()), (1, ())]) == ([], [[0, 1]])


@pytest.mark.exhaustive
@pytest.mark.parametrize("source", ["target", "data"])
def test_a_training_on_conversations_is_that_of_turns_read_anew(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    conversations(tmp_path, True)
    given = ["train", "eagle-3", "--target", "zoo:llava", "--data", str(tmp_path / "rows.jsonl")]
    given += [
        "--answers",
        source,
        "--steps",
        "3",
        "--every",
        "1",
        "--batch",
        "4",
        "--held-out",
        "1",
    ]
    given += ["--max-new-tokens", "6", "--rate", "1e-3"]
    found = {}
    for name in ("shared", "anew"):
        if name == "anew":
            monkeypatch.setattr(PrefixReader, "_plan", lambda *_: [])
        own = ["--out", str(tmp_path / name), "--cache", str(tmp_path / f"{name}-states")]
        found[name] = run(capsys, *given, *own)
    read, unshared = found["shared"]["tokens of conversations read, and turn by turn"]
    assert read < 0.8 * unshared
    assert found["shared"]["turns read anew"] == 0
    assert "turns read anew" not in found["anew"]
    answers = [(tmp_path / name / "answers.jsonl").read_text() for name in found]
    assert answers[0] == answers[1]
    for ours, theirs in zip(found["shared"]["history"], found["anew"]["history"], strict=True):
        assert ours["loss"] == (theirs["loss"] and pytest.approx(theirs["loss"], rel=1e-3))
