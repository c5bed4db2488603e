"""What each modality is measured on: the zoo's held-out requests, or what a user asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from mmspec import registry, zoo
from mmspec.cli.bench import workload as command_workload
from mmspec.cli.models import load_models
from mmspec.modalities.speech.recordings import recordings
from mmspec.modalities.speech.sentences import held_out_sentences
from mmspec.modalities.vlm import LanguageSettings
from mmspec.modalities.vlm.formatting import LanguageFormatter
from mmspec.modality import RunResult, Selection, Workload
from mmspec.zoo import language
from mmspec.zoo.facts import score_caption
from mmspec.zoo.requests import requests, score_turn
from tests.covering import limited


class Typed:
    """Turns prompts into requests, as the formatter of a modality does."""

    def __init__(self, source: str, request: Callable[..., dict[str, Any]], processor: Any = None):
        self.source, self.request, self.processor = source, request, processor
        self.sees = True

    def text(self, output: Any) -> None:
        return None

    def render(self, output: Any, path: Any) -> tuple[Any, ...]:
        return ()


def workload(name: str, model: Any, formatter: Any, settings: Any, **how: Any) -> Workload:
    selection = Selection(**{"prompts": None, "count": 4, "batch": 2, "seed": 0} | how)
    return registry.measures(registry.get(name)).workload(model, formatter, settings, selection)


def words(source: str = "zoo:llava") -> tuple[Any, Any]:
    model, processor = zoo.load("llava"), zoo.processor("llava")

    def request(prompts: Sequence[str], images: Any = None) -> dict[str, Any]:
        texts = [language.format_prompt(processor, one) for one in prompts]
        made = processor(text=texts, images=images, padding=True, return_tensors="pt")
        return {**made, "do_sample": False, "max_new_tokens": 4}

    return model, Typed(source, request, processor)


def test_peers_get_the_first_draft_model_that_decodes_on_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def select(model: Any, formatter: Any, settings: Any, selection: Selection) -> Any:
        return selection.drafter

    monkeypatch.setattr(registry, "measures", lambda _: SimpleNamespace(workload=select))
    head, small = SimpleNamespace(), SimpleNamespace(generate=print)
    cases: tuple[tuple[list[Any], Any], ...] = (([head, small], small), ([head], head), ([], None))
    for drafters, chosen in cases:
        selected = SimpleNamespace(owner=None, settings=None)
        named = dict(enumerate(drafters))
        loaded: Any = SimpleNamespace(selection=selected, drafters=named, model=0, formatter=0)
        assert command_workload(loaded, None, 1, 1, 0) is chosen


def test_text_models_run_held_out_scenes() -> None:
    model, formatter = words()
    found = workload("vlm", model, formatter, LanguageSettings(kind="caption"))
    assert [len(one["input_ids"]) for one in found.timed] == [2, 2]
    assert (found.is_greedy, found.batch, list(found.baselines)) == (True, 2, ["generate"])
    assert found.settings == {"do_sample": False, "max_new_tokens": 4}
    (facts,) = found.qualities
    examples = language.examples(4, "held-out", 0, "caption")
    ids = [formatter.processor.tokenizer(one.answer)["input_ids"] for one in examples]
    right = [RunResult(ids[start : start + 2], 1, 1) for start in (0, 2)]
    assert {value for value, _ in facts.judge(right, {})} == {1}
    assert min(value for value, _ in facts.judge(right[::-1], {})) < 1


def test_every_turn_of_a_conversation_is_measured_behind_the_answers_before() -> None:
    model, settings = zoo.load("llava-chat"), LanguageSettings(kind="conversation")
    formatter = LanguageFormatter("zoo:llava-chat", model, settings)
    found = workload("vlm", model, formatter, settings, count=1, batch=1)
    (asked,) = requests(1, "held-out", 0, "conversation")
    tokenizer = formatter.processor.tokenizer
    texts = [tokenizer.decode(one["input_ids"][0]) for one in found.timed]
    assert [text.count("assistant") for text in texts] == [1, 2, 3, 4]
    assert all("pixel_values" in one for one in found.timed)
    rows = [tokenizer(turn.answer)["input_ids"] for turn in asked.turns]
    results = [RunResult([row], len(row), 1) for row in rows]
    assert found.extras is not None
    assert found.extras(results, {}) == {"tokens per request": sum(map(len, rows))}
    (facts,) = found.qualities
    scored = facts.judge(results, {})
    assert [weight for _, weight in scored] == [
        score_turn(asked, turn, turn.answer)[1] for turn in asked.turns
    ]
    (chart,) = workload(
        "vlm", model, formatter, LanguageSettings(kind="chart"), count=1, batch=1
    ).timed
    assert chart["input_ids"].shape[1] < found.timed[-1]["input_ids"].shape[1]
    for examples, kind, kinds in (
        ("requests", "question", "short-question, text, caption"),
        ("scenes", "chart", "caption, question"),
    ):
        mixed = LanguageSettings(examples=examples, kind=kind)
        with pytest.raises(ValueError, match=f"{examples} has no --kind {kind}; .* of {kinds}"):
            workload("vlm", model, formatter, mixed, count=1, batch=1)


def test_a_text_model_reads_the_scene_in_words() -> None:
    model, settings = zoo.load("text"), LanguageSettings(kind="conversation")
    formatter = LanguageFormatter("zoo:text", model, settings)
    found = workload("vlm", model, formatter, settings, count=1, batch=2)
    (asked,) = requests(1, "held-out", 0, "conversation")
    text = formatter.processor.decode(found.timed[0]["input_ids"][1])
    assert score_caption(asked.scene, text.partition(".")[0])[0] == 4 * len(asked.scene.things)
    assert [len(one["input_ids"]) for one in found.timed] == [2, 2]
    assert not any("pixel_values" in one for one in found.timed)
    rows = [formatter.processor(turn.answer)["input_ids"] for turn in asked.turns]
    results = [RunResult(rows[start : start + 2], 1, 1) for start in (0, 2)]
    (facts,) = found.qualities
    assert {value for value, _ in facts.judge(results, {})} == {1}
    pictured = LanguageSettings(examples="scenes")
    with pytest.raises(ValueError, match=r"zoo:text reads no image, .* drop --examples, or give"):
        workload("vlm", model, formatter, pictured, count=1, batch=1)


@pytest.mark.parametrize("given", [{"kind": "chart"}, {"examples": "requests", "kind": "caption"}])
def test_a_bundled_model_gets_no_request_with_unknown_words(given: dict[str, Any]) -> None:
    """One that lacks the words of a kind is refused; the same request reads where it has them."""
    told = "zoo:llava does not know all words .*; it knows --kind caption, question of --examples"
    made, settings = {}, LanguageSettings(**given)
    for name in ("llava", "llava-chat"):
        model = zoo.load(name)
        made[name] = (model, LanguageFormatter(f"zoo:{name}", model, settings), settings)
    with pytest.raises(
        ValueError, match=f"{told} scenes, and short-question of --examples requests$"
    ):
        workload("vlm", *made["llava"], count=2)
    assert workload("vlm", *made["llava-chat"], count=2).timed


def test_video_models_run_clips_of_the_given_length() -> None:
    model = zoo.load("video")

    def steps(**settings: Any) -> set[int]:
        own = LanguageSettings(video="zoo:clip", **settings)
        found = workload("vlm", model, LanguageFormatter("zoo:video", model, own), own)
        assert len(found.timed) == 2
        return {frames for one in found.timed for frames, *_ in one["video_grid_thw"].tolist()}

    assert steps() == {16}
    assert steps(frames=8) == {4}
    assert steps(fps=1.0) == {8}


def test_a_picture_beside_the_clip_is_not_left_out() -> None:
    model, own = zoo.load("video"), LanguageSettings(image="zoo:scene", video="zoo:clip")
    found = workload("vlm", model, LanguageFormatter("zoo:video", model, own), own)
    assert all({"pixel_values", "pixel_values_videos"} <= one.keys() for one in found.timed)


def test_other_models_run_the_bundled_scene_against_generate() -> None:
    model, formatter = words("folder")
    found = workload("vlm", model, formatter, LanguageSettings(), batch=1)
    assert len(found.timed) == 1
    assert "pixel_values" in found.timed[0]
    assert [quality.name for quality in found.qualities] == ["agreement with generate"]
    for option, value in (("kind", "caption"), ("examples", "requests")):
        told = f"--{option} {value} selects bundled examples.*drop --{option},"
        given: Any = {option: value}
        with pytest.raises(ValueError, match=told):
            workload("vlm", model, formatter, LanguageSettings(**given))


GENERATED: dict[str, tuple[str, dict[str, Any]]] = {  # prompt and settings, by checkpoint
    "llava": ("describe the picture", {}),
    "video": ("what happens?", {"video": "zoo:clip"}),
    "image": ("a red circle", {}),
    "diffusion": ("a red circle", {"grid": "1x2"}),
    "mar": ("3", {}),
    "whisper": ("", {"audio": str(recordings()[0].path)}),
    "codec-lm": (held_out_sentences(1, 0)[0], {}),
    "vla": ("", {}),
}


@pytest.mark.parametrize("model", limited(GENERATED, 5))
def test_what_is_generated_is_what_is_measured(model: str) -> None:
    """The comparison of `mmspec generate` is of the request that it shows."""
    prompt, settings = GENERATED[model]
    owner = registry.find_modality(f"zoo:{model}")
    loaded = load_models(f"zoo:{model}", owner.name, None, [], **settings)
    made = loaded.formatter.request([prompt])
    how = loaded.selection.settings
    (timed,) = workload(
        owner.name, loaded.model, loaded.formatter, how, prompts=[prompt], count=1, batch=1
    ).timed
    assert made.keys() == timed.keys() - {"episode"}
    for name, value in made.items():
        same = value.equal(timed[name]) if isinstance(value, Tensor) else value == timed[name]
        assert same, name


def test_image_token_models_generate_scenes() -> None:
    formatter = Typed("zoo:image", lambda prompts: {"prompt": list(prompts), "temperature": 1.0})
    formatter.processor = zoo.processor("image")
    found = workload("image", zoo.load("image"), formatter, SimpleNamespace(pictures=20))
    assert [len(one["prompt"]) for one in found.timed] == [2, 2]
    assert [len(one["prompt"]) for one in found.judged] == [16]  # whole batches of sixteen
    assert [quality.name for quality in found.qualities] == [
        "facts right",
        "ink per round",
        "log likelihood",
    ]
    assert not found.is_greedy
    timed = workload("image", zoo.load("image"), formatter, SimpleNamespace(pictures=0))
    assert timed.judged == []


def test_continuous_models_generate_classes() -> None:
    formatter = Typed("zoo:mar", lambda prompts: {"class_labels": [int(one) for one in prompts]})
    found = workload("mar", zoo.load("mar"), formatter, SimpleNamespace(pictures=40))
    assert [len(one["class_labels"]) for one in found.timed] == [2, 2]
    assert [len(one["class_labels"]) for one in found.judged] == [32]
    assert found.baselines == {}
    own = workload("mar", zoo.load("mar"), formatter, SimpleNamespace(pictures=0), prompts=["3"])
    assert own.timed == [{"class_labels": [3, 3]}]


def test_pipelines_generate_scenes() -> None:
    formatter = Typed("zoo:diffusion", lambda prompts: {"prompt": list(prompts)})
    found = workload("diffusion", zoo.load("diffusion"), formatter, None)
    assert [len(one["prompt"]) for one in found.timed] == [2, 2]
    assert list(found.baselines) == ["pipeline"]
    names = [quality.name for quality in found.qualities]
    assert names == ["facts right", "relative", "psnr", "psnr_on_ink", "ssim"]


@pytest.mark.parametrize("name", ["vlm", "image", "mar", "diffusion"])
def test_every_modality_has_both(name: str) -> None:
    measures = registry.measures(registry.get(name))
    assert callable(measures.workload)
    assert callable(measures.certify)
