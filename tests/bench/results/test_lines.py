"""Lines: ranks by spreads, reasons by figures, and what a card says of a draft model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mmspec.bench.results.lines import Line, describe_training, explain, lines_of, rank
from mmspec.bench.results.records import Effort, Record, describe
from mmspec.bench.results.systems import Job, System, plan, read_groups, select
from mmspec.bench.row import Row
from mmspec.modalities.common.measures import COMPILED_GENERATE, OWN_GENERATE, PEERS


def timed(name: str, speed: float | None, least: float = 0.0, most: float = 0.0) -> Line:
    return Line("vlm", name, "zoo:llava", speed=speed, least=least, most=most)


def test_rows_whose_spreads_overlap_share_ranks() -> None:
    lines = [
        *(timed("slow", 0.5, 0.4, 0.6), timed("b", 1.9, 1.7, 2.1), timed("untimed", None)),
        *(timed("a", 2.0, 1.8, 2.2), timed("c", 1.65, 1.6, 1.75), timed("fast", 3.0, 2.9, 3.1)),
    ]
    found = {one.name: one.rank for one in rank(lines)}
    # c overlaps b, not a
    assert found == {"fast": "1", "a": "2-3", "b": "2-4", "c": "3-4", "slow": "5", "untimed": None}


@pytest.mark.parametrize(
    ("speed", "fewer", "trained", "word"),
    [
        (2.5, 3.0, True, "reached"),
        (1.1, 3.0, True, "scale"),
        (1.1, 1.5, True, "drafter"),
        (1.1, 1.5, False, "task"),
        (None, None, True, None),
    ],
)
def test_a_word_says_why_a_figure_is_another(
    speed: float | None, fewer: float | None, trained: bool, word: str | None
) -> None:
    assert explain(System("A", "vlm", "≤ 2x", best=2.0), speed, fewer, trained) == word
    told = System("A", "vlm", "≤ 2x", best=2.0, differs="measure")
    assert explain(told, speed, fewer, trained) == (word and "measure")


def test_a_lossy_system_stands_beside_the_pipeline_in_as_many_calls() -> None:
    (job,) = select(plan(), None, ["speca"])
    facts: dict[str, float | None]
    facts = {"value": 0.9, "error": 0.02, "gap": -0.05, "gap_error": 0.01}
    quality = {"facts right": facts}
    own = Row("speca", False, speedup_end_to_end=1.2, qualities=quality, drafter_saw="nothing")
    control = Row("pipeline, 34 steps", False, speedup_end_to_end=2.9)
    record = Record(
        {"drafters": {}}, (Row("plain"), own), (Row("pipeline"), control), {}, {}, 1, 1, 0
    )
    lines = lines_of(job, record)
    assert [line.name for line in lines] == ["SpeCa", "SpeCa: pipeline, 34 steps"]
    assert [line.headline for line in lines] == ["≤ 7.3x", None]
    assert (lines[0].value, lines[0].error) == (0.9, 0.02)
    assert lines[0].plain_value == pytest.approx(0.95)
    assert lines[0].differs == "task"


def test_rows_that_are_not_measured_say_why() -> None:
    (job,) = select(plan(), None, ["hivis"])
    assert lines_of(job, None)[0].note == "not measured yet"
    why = "recipe 'hivis' needs a feature head; give --drafter DIR or zoo:NAME"
    assert lines_of(job, None, why)[0].note == "needs a feature head, and none is bundled"
    (baselines,) = select(plan(), ["mar"], ["baselines"])
    (line,) = lines_of(
        baselines, Record({"drafters": {}}, (), (), {"prompt_lookup": why}, {}, 1, 1, 0)
    )
    assert (line.name, line.speed, line.note) == (
        "transformers: prompt lookup",
        None,
        "needs a feature head, and none is bundled",
    )


def test_a_study_has_lines_of_the_system_its_variants_and_controls() -> None:
    why, small = "drafts are whole answers", ("zoo:llava", "zoo:llava-drafter")
    own = System("SV", "vlm", "not found", without=why, study="module", small=small)
    job = Job("SV", read_groups()["vlm"], "zoo:llava-chat", (), {}, own)
    facts: dict[str, float | None]
    facts = {"value": 0.8, "error": 0.02, "gap": 0.05, "gap_error": 0.01}
    made = [
        Row(name, False, speedup_over_plain=speed, qualities={"facts right": facts})
        for name, speed in (
            *(("plain", 1.0), ("SV", 0.3), ("SV, keep=2", 0.4)),
            *(("a, alone", 2.0), ("at random", None)),
        )
    ]
    lines = lines_of(
        job, Record(describe(job, Effort()), (*made[:3],), (*made[3:],), {}, {}, 1, 240, 0)
    )
    assert [line.name for line in lines] == ["SV", "SV, keep=2", "SV: a, alone", "SV: at random"]
    assert [line.is_system for line in lines] == [True, False, False, False]
    sv, variant, control, _ = lines
    assert (sv.promise, sv.speed, sv.recipe, sv.model) == ("lossy", 0.3, None, job.model)
    assert (sv.value, sv.error) == (0.8, 0.02)
    assert sv.plain_value == pytest.approx(0.75)
    assert sv.drafter == variant.drafter == "zoo:llava, zoo:llava-drafter"
    assert "for zoo:llava-chat, here: " in (sv.trained or "")
    assert (control.drafter, control.trained, control.headline) == (None, None, None)
    assert (sv.note, variant.note, control.note) == (why, None, None)
    assert lines_of(job, None)[0].note == "not measured yet"


def test_baselines_are_named_by_their_library_and_controls_by_their_system() -> None:
    (own,) = select(plan(), ["diffusion"], ["baselines"])
    record = Record({"drafters": {}}, (Row("plain"),), (Row("pipeline"),), {}, {}, 1, 1, 0)
    assert [line.name for line in lines_of(own, record)] == ["diffusers: pipeline", "plain"]
    (own,) = select(plan(), ["video"], ["baselines"])
    peers = tuple(Row(name) for name in (OWN_GENERATE, COMPILED_GENERATE, *PEERS))
    names = [
        line.name
        for line in lines_of(own, replace(record, rows=(Row("prompt-lookup"),), baselines=peers))
    ]
    assert all(name.startswith("transformers: ") for name in names[:-1])
    assert len(set(names)) == len(names)
    assert names[-1] == "prompt-lookup"  # a recipe


def test_the_card_tells_how_a_draft_model_was_trained() -> None:
    told = describe_training("zoo:whisper-drafter", "specasr")
    assert told == "here: Whisper decoder of one layer, 900 steps, 6 min"
    head = describe_training("zoo:video-feature-head", "sparrow")
    assert head == "here: regression on the target's states; no visual slots, 900 steps, 7 min"
    assert describe_training("/somewhere", "specasr") == "given by the user"
