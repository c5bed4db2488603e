"""The rows of the page: the systems of the survey and the baselines beside them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

from mmspec import recipes, zoo
from mmspec.errors import unknown_message
from mmspec.registry import ZOO

SOURCE = "Speculative Decoding for Multimodal Models: A Survey, table 5"
BASELINES = "baselines"  # the job that measures the library's own methods on a target
CATEGORY = "category"  # jobs of the second table


@dataclass(frozen=True)
class Group:
    """A section of the page; the first of `models` that has draft models is its target."""

    name: str
    title: str
    models: tuple[str, ...]
    baselines: tuple[str, ...]  # recipes beside the library's own methods
    quality: tuple[str, ...]  # measures that the page shows
    kinds: int = 1  # of requests: a row has at least one of each
    controls: bool = False  # whether lossy recipes are measured beside as many calls of the target
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the modality
    baselines_of: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of another target
    systems_of: str | None = None  # section whose systems with a draft model of `model` it has too

    @property
    def model(self) -> str:
        """The target."""
        known = {zoo.info(name).target for name in zoo.names() if zoo.is_present(name)}
        ready = (one for one in self.present if one.removeprefix(ZOO) in known)
        return next(ready, self.models[-1])

    @property
    def present(self) -> tuple[str, ...]:
        """Those of `models` that are bundled and trained."""
        known = {f"{ZOO}{name}" for name in zoo.names() if zoo.is_present(name)}
        return tuple(one for one in self.models if one in known)


@dataclass(frozen=True)
class System:
    """A system of the survey, and what its paper reports."""

    name: str
    group: str
    headline: str
    recipe: str | None = None
    model: str | None = None  # another target than that of its group
    best: float | None = None  # upper end of the headline; None = it has no figure
    of: str | None = None  # what the figure is, if not speed over plain decoding
    differs: str | None = None  # one of `lines.DIFFERS`
    study: str | None = None  # module that measures a system without a recipe: `measure`
    without: str | None = None  # why it has none
    small: Sequence[str] = ()  # models that the study asks beside `model`
    options: Mapping[str, Any] = field(default_factory=dict)  # of a row beside the defaults

    @property
    def paper(self) -> str | None:
        return None if self.recipe is None else str(recipes.describe(self.recipe)["paper"])


@dataclass(frozen=True)
class Job:
    """One measurement: recipes of one target, beside `generate()` and plain decoding.

    `name` is that of a system, or says which baselines these are.
    """

    name: str
    group: Group
    model: str
    recipes: tuple[str, ...]
    settings: Mapping[str, Any]
    system: System | None = None  # None = baselines

    @property
    def runners(self) -> tuple[str, ...]:
        """Names of the rows that are the system's own: recipes, or its name of a study."""
        return self.recipes or (self.name,)

    @property
    def peers(self) -> bool:
        """Whether the library's own methods are measured, too: once, or as controls."""
        is_lossy = not all(recipes.describe(name)["exact"] for name in self.recipes)
        return self.is_baselines or (self.group.controls and is_lossy)

    @property
    def options(self) -> Mapping[str, Any]:
        """Recipe options of a second row."""
        return {} if self.system is None else self.system.options

    def count_requests(self, wanted: int) -> int:
        """Requests of this measurement: `wanted`, or more for one of each kind."""
        return wanted if self.is_category else max(wanted, self.group.kinds)

    @property
    def is_baselines(self) -> bool:
        return self.name.startswith(BASELINES)

    @property
    def is_category(self) -> bool:
        return self.name.startswith(CATEGORY)


@cache
def read_groups() -> Mapping[str, Group]:
    """The sections of the page, in their order."""
    found = {}
    for name, one in _read()["groups"].items():
        lists = {key: tuple(value) for key, value in one.items() if isinstance(value, list)}
        found[name] = Group(name, **{**one, **lists})
    return found


@cache
def read_systems() -> tuple[System, ...]:
    """The systems of the survey, in the order of its table."""
    systems = _read()["systems"].items()
    return tuple(
        System(name, **{**one, "small": tuple(one.get("small", ()))}) for name, one in systems
    )


@cache
def _read() -> dict[str, Any]:
    text = files("mmspec.bench.results").joinpath("systems.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def plan(vlm_model: str | None = None) -> list[Job]:
    """All measurements: of each section the baselines on each target, then the systems.

    Studies come last; with another vision-language target that section has none.
    """
    jobs: list[Job] = []
    for group in read_groups().values():
        if vlm_model is not None and group.name == "vlm":
            group = replace(group, models=(vlm_model,))
        systems = _systems(group)
        studies = [one for one in read_systems() if one.group == group.name and one.study]
        targets = dict.fromkeys([group.model, *(one.model for one in systems if one.model)])
        for target in targets:
            own = _fitting(group, target)
            settings = group.settings if target == group.model else {}
            jobs.append(Job(f"{BASELINES} of {target}", group, target, own, settings))
        for one in systems:
            target = one.model or group.model
            settings = group.settings if target == group.model else {}
            assert one.recipe is not None
            jobs.append(Job(one.name, group, target, (one.recipe,), settings, one))
        for one in () if group.models == (vlm_model,) else studies:  # of models of its own
            jobs.append(Job(one.name, group, one.model or group.model, (), {}, one))
    return jobs


def _systems(group: Group) -> list[System]:
    """The systems with a recipe of a section."""
    own = group.systems_of or group.name
    found = [one for one in read_systems() if one.group == own and one.recipe]
    if group.systems_of is None:
        return found
    return [replace(one, model=None) for one in found if _has_drafter(group.model, one.recipe)]


def _has_drafter(target: str, recipe: str | None) -> bool:
    """Whether a recipe needs no draft model, or the target has one that sees what it asks for."""
    plan_ = recipes.get(str(recipe))
    name = zoo.drafter_for(target, plan_)
    if not plan_.takes_drafter or name is None:
        return not plan_.takes_drafter
    return plan_.sees in ("auto", zoo.info(name).sees)


def _fitting(group: Group, target: str) -> tuple[str, ...]:
    """The baselines of a section that have a draft model for a target, where they need one."""
    return tuple(
        name
        for name in group.baselines_of.get(target, group.baselines)
        if not (found := recipes.get(name)).takes_drafter or zoo.drafter_for(target, found)
    )


def select(
    jobs: Sequence[Job], modality: Sequence[str] | None, only: Sequence[str] | None
) -> list[Job]:
    """The jobs of some sections, or of some systems or recipes. Raises ValueError for others."""
    known = read_groups()
    if unknown := [one for one in modality or () if one not in known]:
        raise ValueError(unknown_message(unknown, known, "the page of results"))
    names = {one.name.lower() for one in read_systems()} | {BASELINES}
    names |= {recipe for job in jobs for recipe in job.recipes}
    if unknown := [one for one in only or () if one.lower() not in names]:
        raise ValueError(unknown_message(unknown, sorted(names), "the page of results"))
    wanted = {one.lower() for one in only or ()}

    def is_wanted(job: Job) -> bool:
        if modality and job.group.name not in modality:
            return False
        first = BASELINES if job.system is None else job.name.lower()
        own = () if job.system is None else job.recipes
        return not wanted or not wanted.isdisjoint((first, *own))

    return [job for job in jobs if is_wanted(job)]
