"""The systems of the page: all 47 of the survey, once each, with recipes that exist."""

from __future__ import annotations

from collections import Counter

import pytest

from mmspec import recipes
from mmspec.bench.results.lines import DIFFERS
from mmspec.bench.results.records import Effort, describe
from mmspec.bench.results.systems import plan, read_groups, read_systems, select
from mmspec.modalities.vlm.verdicts import SMALL

OF_TABLE_5 = {"vlm": 17, "vla": 4, "video": 6, "speech": 6, "image": 11, "diffusion": 3}
MERGED = {"recognition": "speech", "synthesis": "speech", "mar": "image"}


def test_the_systems_are_those_of_the_survey() -> None:
    found = Counter(MERGED.get(one.group, one.group) for one in read_systems())
    assert found == OF_TABLE_5
    assert sum(found.values()) == len({one.name for one in read_systems()}) == 47


def test_a_system_has_a_recipe_or_says_why_not() -> None:
    known = recipes.names()
    for one in read_systems():
        assert (one.recipe in known) != bool(one.without), one.name
        assert one.group in read_groups()
        assert one.differs is None or one.differs in DIFFERS
        assert (one.best is None) == (one.headline == "not found")
        assert one.best is None or f"{one.best:g}" in one.headline or f"{one.best}" in one.headline


def test_every_system_with_a_recipe_is_measured_and_every_target_has_baselines() -> None:
    jobs = plan()
    shared = {name for name, group in read_groups().items() if group.systems_of}
    named = [job.name for job in jobs if job.system is not None and job.group.name not in shared]
    assert named == [
        one.name
        for group in read_groups()
        for one in sorted(read_systems(), key=lambda one: one.recipe is None)
        if one.group == group
    ]
    assert all((one.recipe is None) == (one.study is not None) for one in read_systems())
    targets = {(job.group.name, job.model) for job in jobs if job.system is None or job.recipes}
    assert {(j.group.name, j.model) for j in jobs if j.is_baselines} == targets
    assert all(job.peers for job in jobs if job.is_baselines)
    lossy = next(job for job in jobs if job.name == "SpeCa")
    assert lossy.peers  # beside the pipeline in as many calls
    assert not next(job for job in jobs if job.name == "ASD").peers


def test_a_section_of_another_family_has_the_systems_that_have_a_draft_model() -> None:
    """Of its own: a recipe for text-only draft models has no row with one that sees pixels."""
    found = {job.name: job for job in plan() if job.group.name == "vlm-qwen"}
    assert {job.model for job in found.values()} == {"zoo:qwen2.5-vl-chat"}
    assert {"ViSpec", "SAGE", "TABED", "HSD"} < found.keys()
    assert not {"SPD-MLLM", "MASSV", "DREAM", "SV"} & found.keys()
    assert found["SAGE"].settings == read_groups()["vlm"].settings
    (baselines,) = (job for job in found.values() if job.is_baselines)
    assert baselines.recipes == read_groups()["vlm"].baselines


@pytest.mark.parametrize(
    ("name", "small"), [("SV", SMALL), ("VideoSpeculateRAG", ("zoo:video-rag-drafter",))]
)
def test_a_study_is_measured_with_its_own_models_and_found_by_all_of_their_weights(
    name: str, small: tuple[str, ...]
) -> None:
    jobs = [job for job in plan() if job.system is not None and job.system.study]
    job = next(job for job in jobs if job.name == name)
    assert (job.recipes, job.runners, job.peers, len(jobs)) == ((), (name,), False, 2)
    assert job.system is not None
    assert job.system.small == small
    found = describe(job, Effort())
    assert {*found["weights"]} == {job.model, *small}
    assert found["drafters"] == {name: ", ".join(small)}
    assert select(plan(), None, [name.lower()]) == [job]
    others = {one.name for one in plan("zoo:qwen2.5-vl")}
    assert (name in others) == (job.group.name != "vlm")


def test_options_of_a_row_are_those_of_its_recipe() -> None:
    jobs = [job for job in plan() if job.options]
    assert {job.name for job in jobs} == {"VVS", "MuLo-SD"}
    for job in jobs:
        assert job.options.keys() <= recipes.get(job.recipes[0]).options.keys()
    assert "options" in describe(jobs[0], Effort())
    assert "options" not in describe(next(job for job in plan() if not job.options), Effort())


def test_another_target_is_of_the_vision_language_rows_alone() -> None:
    jobs = plan("zoo:qwen2.5-vl")
    assert {job.model for job in jobs if job.group.name == "vlm"} == {"zoo:qwen2.5-vl"}
    assert {job.model for job in jobs if job.group.name == "mar"} == {"zoo:mar"}


def test_rows_are_selected_by_section_system_and_recipe() -> None:
    jobs = plan()
    assert {job.group.name for job in select(jobs, ["mar"], None)} == {"mar"}
    of_llava = select(jobs, ["vlm"], ["hivis", "MASSV"])
    assert [job.name for job in of_llava] == ["MASSV", "HiViS"]
    assert all(job.is_baselines for job in select(jobs, None, ["baselines"]))
    for modality, only in ((["vlmm"], None), (None, ["hivs"])):
        with pytest.raises(ValueError, match="did you mean"):
            select(jobs, modality, only)


def test_a_row_has_a_request_of_each_kind() -> None:
    (job,) = select(plan(), ["vlm"], ["vispec"])
    assert [job.count_requests(one) for one in (1, 4, 8)] == [6, 6, 8]
    (other,) = select(plan(), None, ["speca"])
    assert other.count_requests(1) == 1
