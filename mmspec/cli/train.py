"""What `mmspec train RECIPE` does: a head or a small model learns from what that target answers.

OUT/config.json, model.safetensors   the head or small model, when all is done
OUT/training.json                    what was asked for, and how it went
OUT/answers.jsonl                    what the target (or the data) said to each question
OUT/checkpoint.safetensors           all that the next step depends on
OUT/played/                          episodes of a policy, where --data asks for those
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from mmspec import recipes, registry
from mmspec.cli.choosing import check_source
from mmspec.cli.inputs import quiet
from mmspec.cli.loaded import set_threads
from mmspec.cli.output import complain, console, emit, pairs, progress, short, working
from mmspec.cli.taught import (
    Answering,
    AnswerSettings,
    Lessons,
    acceptance,
    beginning,
    check_pictures,
    held_out,
)
from mmspec.cli.training_cost import cost
from mmspec.modality import TrainingData
from mmspec.models.fingerprint import agree, fingerprint
from mmspec.models.folder import configuration
from mmspec.recipe import Recipe
from mmspec.training import checkpoints
from mmspec.training.answers import TaughtAnswer, collect
from mmspec.training.conversations import Question, digest, read_questions
from mmspec.training.feature_cache import FeatureCache
from mmspec.training.feature_size import cache_bytes, check_space, wanted_features
from mmspec.training.head_trainer import HeadTrainer, TrainingSettings
from mmspec.training.processes import Processes

STATE, PLAN, ANSWERS = "checkpoint.safetensors", "training.json", "answers.jsonl"
PLAYED = "played"  # a folder of data that the target made
SHOWN = 4  # reasons for what is left out


@dataclass(frozen=True)
class TrainOptions:
    """What was typed; `None` = as the recipe has it."""

    recipe: str
    target: str
    data: Path
    out: Path
    images: Path | None = None
    answers: str = "target"
    head: Path | None = None
    cache: Path | None = None
    steps: int = 2000
    batch: int = 8
    accumulate: int = 1
    rate: float | None = None
    ema: float = 0.0
    bf16: bool = False
    muon: bool = False
    held_out: int = 32
    every: int = 100
    max_new_tokens: int = 128
    max_length: int = 2048
    temperature: float = 0.0
    seed: int = 0
    knobs: tuple[str, ...] = ()
    threads: int | None = None
    trust_remote_code: bool = False
    dry_run: bool = False
    json: bool = False


def run(**typed: Any) -> None:
    """Train a head, or say what that would take."""
    asked, processes = TrainOptions(**typed), Processes.here()
    _check_share(asked, processes)
    recipe = trainable(asked.recipe)
    owner = registry.find_modality(asked.target)
    recipes.check_decodes(recipe, owner.all_decodes, asked.target, owner.unsupported_options)
    teaching = registry.training_data(owner)
    check_source(asked.target)
    plays = teaching.names_environment(str(asked.data))
    if plays and asked.dry_run:
        raise ValueError(
            f"--dry-run plays nothing; drop it, or give --data a file for {asked.data}"
        )
    questions = [] if plays else _questions(asked)
    _check_out(asked.out)
    set_threads(asked.threads, asked.target)
    quiet()
    how = {"trust_remote_code": asked.trust_remote_code}
    with working(f"loading {asked.target}", asked.json):
        if asked.dry_run:
            model = teaching.skeleton(asked.target)
        else:
            model = registry.plug(owner).load(asked.target, **how)
            model = model if processes.device is None else model.to(processes.device)
        teacher = teaching.teacher(asked.target, model, **how)
    if plays:
        asked = replace(asked, data=_played(asked, teaching, teacher, processes))
        questions = _questions(asked)
    teacher.check(questions)
    if teacher.longest is not None:
        asked = replace(asked, max_new_tokens=min(asked.max_new_tokens, teacher.longest))
    if asked.dry_run:
        _show(cost(asked, recipe, teacher, questions), asked.json)
        return
    _Training(asked, recipe, model, teacher, questions, processes).run()


def _questions(asked: TrainOptions) -> list[Question]:
    """What the data hold. Raises ValueError for data that nothing can be learnt from."""
    questions = read_questions(asked.data, asked.images)
    check_pictures(questions, asked.images)
    if len({one.row for one in questions}) < 2:
        raise ValueError(f"{asked.data} has one row; give two or more, one of them is held out")
    return questions


def _played(
    asked: TrainOptions, teaching: TrainingData, teacher: Any, processes: Processes
) -> Path:
    """Data that the target makes by itself, kept in the training's folder."""
    is_quiet = asked.json or not processes.is_first
    with processes.first_alone(), progress(is_quiet) as bar:
        told = (str(asked.data), teacher, asked.out / PLAYED, asked.seed)
        return teaching.record_episodes(
            *told, lambda stage, done, total, _: bar(stage, done, total)
        )


def trainable(name: str) -> Recipe:
    """A recipe whose drafter can be trained. Raises ValueError naming those that can be."""
    recipe = recipes.get(name)
    if recipe.training is None:
        able = [one for one in recipes.names("tokens") if recipes.get(one).training is not None]
        raise ValueError(
            f"recipe {name!r} drafts with nothing that `mmspec train` teaches; choose one of "
            f"{', '.join(able)}"
        )
    return recipe


class _Training:
    """One run: new, or gone on with."""

    def __init__(
        self,
        asked: TrainOptions,
        recipe: Recipe,
        model: Any,
        teacher: Any,
        questions: list[Question],
        processes: Processes,
    ) -> None:
        self.asked, self.recipe, self.model, self.teacher = asked, recipe, model, teacher
        self.questions, self.out, self.processes = questions, asked.out, processes
        assert recipe.training is not None
        self.rate = recipe.training.rate if asked.rate is None else asked.rate
        self.history: list[dict[str, Any]] = []
        self.tap = ""  # the features that are cached
        self.cache: FeatureCache | None = None

    def run(self) -> None:
        asked = self.asked
        if asked.cache is not None:  # what no cache can hold is refused now
            head = self._head(torch.ones(self.teacher.reader.vocabulary, dtype=torch.int64))
            assert self.recipe.training is not None
            self.tap = wanted_features(self.recipe.training, self.teacher.reader, head)
        is_quiet = asked.json or not self.processes.is_first
        with self.processes.first_alone():
            self._begin()
        with progress(is_quiet) as bar:
            with self.processes.first_alone():
                answers = collect(
                    self.out / ANSWERS,
                    self.questions,
                    Answering(self.model, self.teacher, self._answering()),
                    4 * asked.batch,
                    lambda stage, done, total, _: bar(stage, done, total),
                )
            kept = [one for one in answers if one.skipped is None]
            left_out = [one.skipped for one in answers if one.skipped is not None]
            if not kept:
                raise ValueError(f"none of {len(answers)} questions can be learnt: {left_out[0]}")
            apart = held_out(self.questions, asked.held_out, asked.seed)
            learnt = [one for one in kept if one.question not in apart]
            self.judged = [self.questions[one.question] for one in kept if one.question in apart]
            if not learnt or not self.judged:
                raise ValueError(
                    f"{len(kept)} questions are left, too few to learn from some and judge by "
                    "others; give more data"
                )
            seed = asked.seed
            self.cache = self._cache(learnt)
            how = (asked.batch, seed, self.cache)
            lessons = Lessons(self.teacher, self.questions, learnt, *how)
            trainer = self._trainer(lessons.counts())
            self.processes.wait()  # all have read what the first one writes from here on
            self._steps(trainer, lessons, bar)
            if self.processes.is_first:
                self._save(trainer.learnt())
        if self.processes.is_first:
            self._report(learnt, left_out)
        self.processes.wait()

    def _cache(self, learnt: Sequence[TaughtAnswer]) -> FeatureCache | None:
        """The features on disk, with what they take said before any is written."""
        asked, reader = self.asked, self.teacher.reader
        if asked.cache is None:
            return None
        said = hashlib.sha256(repr([(one.question, one.tokens) for one in learnt]).encode())
        pictures = sorted({picture for one in self.questions for picture in one.pictures})
        sizes = [(one.name, one.stat().st_size) for one in pictures if one.is_file()]
        owner = {
            "data": digest(asked.data),
            "answers": said.hexdigest(),
            "pictures": hashlib.sha256(repr(sizes).encode()).hexdigest(),
            "dtype": f"{reader.model.dtype}, bf16={asked.bf16}",
        }
        cache = FeatureCache(asked.cache, owner, fingerprint(reader))
        size = cache_bytes(reader, self.tap, ((one.prompt, len(one.tokens)) for one in learnt))
        check_space(asked.cache, size, cache.shards)
        if not asked.json:
            console().print(f"feature cache {asked.cache}: {size / 2**30:.3g} GiB", markup=False)
        return cache

    def _answering(self) -> AnswerSettings:
        asked = self.asked
        sizes = (asked.max_new_tokens, asked.max_length)
        return AnswerSettings(asked.answers == "data", *sizes, asked.temperature, asked.seed)

    def _begin(self) -> None:
        """Note what is asked for, or see that what lies there was asked for likewise."""
        asked, file = self.asked, self.out / PLAN
        names = ("answers", "steps", "batch", "accumulate", "ema", "bf16", "held_out", "every")
        more = ("muon", "max_new_tokens", "max_length", "temperature", "seed")
        plan = {
            "recipe": self.recipe.name,
            "head": None if asked.head is None else str(asked.head),
            "rate": self.rate,
            **{name: value for name, value in asdict(asked).items() if name in (*names, *more)},
            "set": list(asked.knobs),
            "data": digest(asked.data),
        }
        ours = fingerprint(self.teacher.reader)
        if file.exists():
            there = configuration(file)
            theirs = there["fingerprint"]
            if ours is not None and theirs is not None and not agree(ours, theirs):
                raise ValueError(
                    f"{self.out} was begun with another target ({there['target']}), and "
                    f"{asked.target} says otherwise; give that one, or another --out"
                )
            other = [name for name in plan if there["plan"].get(name) != plan[name]]
            if other:
                was, now = there["plan"].get(other[0]), plan[other[0]]
                raise ValueError(
                    f"{self.out} was begun with {other[0]}={was}, not {now}; give the same to go "
                    "on, or another --out"
                )
            return
        head = self._head(torch.ones(self.teacher.reader.vocabulary, dtype=torch.int64))
        assert self.recipe.training is not None
        self.recipe.training.stages(head, asked.steps, self.rate, asked.muon)  # refused now
        self.out.mkdir(parents=True, exist_ok=True)
        begun = {"target": asked.target, "fingerprint": ours, "plan": plan, "history": []}
        checkpoints.write_text(file, json.dumps(begun, indent=1))

    def _trainer(self, counts: torch.Tensor) -> HeadTrainer:
        """The head as it began, or as the checkpoint has it."""
        asked, training, reader = self.asked, self.recipe.training, self.teacher.reader
        assert training is not None
        how = (asked.seed, asked.ema, asked.bf16, asked.muon)
        settings = TrainingSettings(asked.steps, self.rate, *how)
        trainer = HeadTrainer(training, reader, self._head(counts), settings, self.processes)
        if (self.out / STATE).exists():
            state, content = checkpoints.read(self.out / STATE)
            trainer.restore(state, content["taken"])
            self.history = content["history"]
        return trainer

    def _head(self, counts: torch.Tensor) -> Any:
        asked = self.asked
        made = (counts, asked.head, asked.knobs, asked.seed)
        return beginning(self.recipe, self.teacher.reader, *made)

    def _steps(self, trainer: HeadTrainer, lessons: Lessons, bar: Any) -> None:
        """All steps that are left; a checkpoint every so many."""
        asked, total = self.asked, 0.0
        if not self.history:
            self.history.append({"step": 0, "loss": None, "acceptance": self._judge(trainer)})
        last = self.history[-1]
        try:
            while trainer.taken < asked.steps:
                total += trainer.step(lessons.makers(trainer.taken, asked.accumulate))
                since = trainer.taken - last["step"]
                note = f"loss {total / since:.3f}  acceptance {last['acceptance']:.2f}"
                bar("learning", trainer.taken, asked.steps, note)
                if trainer.taken % asked.every and trainer.taken < asked.steps:
                    continue
                found = {"step": trainer.taken, "loss": total / since}
                last = {**found, "acceptance": self._judge(trainer)}
                self.history.append(last)
                total = 0.0
                if self.cache is not None:
                    self.cache.flush()  # so that going on reads the very same
                content = {"taken": trainer.taken, "history": self.history}
                if self.processes.is_first:
                    checkpoints.write(self.out / STATE, trainer.state(), content)
        except KeyboardInterrupt as stopped:
            raise KeyboardInterrupt(
                f"interrupted at step {trainer.taken}; the same command goes on from step "
                f"{last['step']}"
            ) from stopped

    def _judge(self, trainer: HeadTrainer) -> float:
        asked = self.asked
        if not self.processes.is_first:
            return float("nan")
        how = (self.teacher, self.judged, asked.batch, asked.max_new_tokens)
        return acceptance(self.model, self.recipe, trainer.learnt(), *how)

    def _save(self, head: Any) -> None:
        """Write the head in the target's dtype, all or nothing."""
        with TemporaryDirectory(prefix=".mmspec-", dir=self.out) as scratch:
            head.to(self.teacher.reader.model.dtype).save_pretrained(scratch)
            for file in sorted(Path(scratch).iterdir()):
                file.replace(self.out / file.name)
        content = configuration(self.out / PLAN)
        text = json.dumps({**content, "history": self.history}, indent=1)
        checkpoints.write_text(self.out / PLAN, text)

    def _report(self, learnt: list[Any], left_out: list[str]) -> None:
        first, last = self.history[0], self.history[-1]
        found = {
            "out": str(self.out),
            "recipe": self.recipe.name,
            "steps": last["step"],
            "questions": len(learnt),
            "held out": len(self.judged),
            "left out": len(left_out),
            "tokens": sum(len(one.tokens) for one in learnt),
            "loss": last["loss"],
            "acceptance length before": first["acceptance"],
            "acceptance length": last["acceptance"],
        }
        if self.asked.json:
            emit({**found, "reasons": left_out[:SHOWN], "history": self.history})
            return
        _show(found, False)
        for reason in left_out[:SHOWN]:
            complain(f"left out: {reason}")


def _check_share(asked: TrainOptions, processes: Processes) -> None:
    """Refuse what several processes cannot share. Raises ValueError."""
    if asked.accumulate % processes.count:
        raise ValueError(
            f"--accumulate {asked.accumulate} batches a step cannot be shared evenly by "
            f"{processes.count} processes; give a multiple of {processes.count}"
        )
    if asked.cache is not None and processes.count > 1:
        raise ValueError(
            f"--cache is written by one process, and {processes.count} were launched; drop it, or "
            "launch one"
        )


def _check_out(out: Path) -> None:
    """Refuse a folder that holds anything but a training. Raises ValueError."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; give --out a folder")
    others = [one for one in out.iterdir() if one.name != PLAYED] if out.exists() else []
    if others and not (out / PLAN).is_file():
        raise ValueError(f"{out} holds something else than a training; give --out a new folder")


def _show(found: Mapping[str, Any], json: bool) -> None:
    if json:
        emit(found)
    else:
        console().print(f"[bold]{found['recipe']}[/bold]")
        pairs([(name, short(value)) for name, value in found.items() if name != "recipe"])
