"""`mmspec train RECIPE`: train a head or a small model on the answers of a target.

OUT/config.json, model.safetensors   the head or small model, when all is done
OUT/training.json                    the options, and the history
OUT/answers.jsonl                    the answer of the target (or the data) to each question
OUT/bad_rows.jsonl                   rows of the data that were left out, and why
OUT/downloads/                       images of the network, with --allow-urls
OUT/checkpoint.safetensors           all that the next step depends on
OUT/logs/                            of trackers, with --track
OUT/played/                          episodes of a policy, where --data asks for those
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mmspec import recipes, registry
from mmspec.cli.models import check_source, set_threads
from mmspec.cli.options import flag
from mmspec.cli.output import (
    console,
    print_error,
    print_json,
    show_progress,
    show_report,
    show_status,
    silence_libraries,
)
from mmspec.cli.placement import Keywords, check_placement, place
from mmspec.cli.training_cost import estimate_cost
from mmspec.cli.training_data import check_rows, list_bad_rows, read_data
from mmspec.cli.training_endpoint import EndpointCollector, wait_for_others
from mmspec.cli.training_examples import (
    ResponseCollector,
    ResponseOptions,
    TrainingExamples,
    initial_head,
    measure_acceptance,
    measure_coverage,
    select_held_out,
)
from mmspec.cli.training_folder import TrainingFolder
from mmspec.cli.training_plan import (
    TrainOptions,
    check_share,
    get_trainable,
)
from mmspec.modality import Modality, TrainingData
from mmspec.models.compatibility import fingerprint
from mmspec.models.placement import Placement
from mmspec.recipe import Recipe
from mmspec.training import checkpoints
from mmspec.training.conversations import DataSet, digest
from mmspec.training.feature_cache import FeatureCache
from mmspec.training.feature_size import cache_bytes, check_space, required_features
from mmspec.training.head_trainer import HeadTrainer, TrainingSettings
from mmspec.training.packing import check_packing
from mmspec.training.prefixes import PrefixReader, report_prefixes
from mmspec.training.processes import Processes
from mmspec.training.responses import (
    GenerateResponses,
    Response,
    collect_responses,
    digest_responses,
)
from mmspec.training.sharding import check_sharded, sharding_options
from mmspec.training.trackers import Trackers

SHOWN = 4  # reasons for what is left out
PADDING = "tokens per step, share of padding"


def run(**typed: Any) -> None:
    """Train a head, or report what that would take."""
    options = TrainOptions(**typed)
    processes = Processes.from_environment(options.shard_target and not options.dry_run)
    check_share(options, processes)
    recipe = get_trainable(options.recipe)
    owner = registry.find_modality(options.target)
    recipes.check_decodes(recipe, owner.all_decodes, options.target, owner.unsupported_options)
    teaching = registry.training_data(owner)
    check_source(options.target)
    if options.head is not None:
        check_source(str(options.head))
    plays = teaching.names_environment(str(options.data))
    if plays and options.dry_run:
        raise ValueError(
            f"--dry-run records nothing; drop it, or give --data a file for {options.data}"
        )
    if plays and options.shard_target:
        raise ValueError(
            f"--data {options.data} is recorded by one process, which holds a share of the target "
            "with --shard-target; drop that, or record the episodes first"
        )
    TrainingFolder(options.out).check()
    data = DataSet(options.data, []) if plays else read_data(options, teaching, processes)
    set_threads(options.threads, options.target)
    silence_libraries()
    keywords = {"trust_remote_code": options.trust_remote_code}
    placement = _place(options, owner, processes)
    with show_status(f"loading {options.target}", options.json):
        if options.dry_run:
            model = teaching.skeleton(options.target)
        else:
            plug = registry.plug(owner)
            model = _load(options, plug, processes, **placement, **keywords)
        teacher = teaching.teacher(options.target, model, **keywords)
    if plays:
        options = replace(options, data=_record_episodes(options, teaching, teacher, processes))
        data = read_data(options, teaching, processes)
    data = data.leave_out(teacher.check(data.questions))
    check_rows(data, options)
    if teacher.max_answer_tokens is not None:
        options = replace(
            options, max_new_tokens=min(options.max_new_tokens, teacher.max_answer_tokens)
        )
    if options.dry_run:
        found = estimate_cost(options, recipe, teacher, data.questions)
        show_report(
            {**found, "bad rows": list_bad_rows(data) if options.json else len(data.bad)},
            options.json,
        )
        return
    _Training(options, recipe, model, teacher, data, processes).run()


def _load(options: TrainOptions, plug: Any, processes: Processes, **keywords: Any) -> Any:
    """Load the target, or this process's share of it. Raises ValueError where it has no shares."""
    if not options.shard_target:
        model = plug.load(options.target, **keywords)
        return model if processes.device is None else model.to(processes.device)
    model = plug.load(options.target, **keywords, **sharding_options(processes.size))
    check_sharded(model, processes.size)
    return model


def _place(options: TrainOptions, owner: Modality, processes: Processes) -> Keywords:
    """The keyword arguments that load the target. Raises ValueError for what cannot be."""
    check_placement(options.placed, owner, options.target)
    several = [name for name in ("device", "device_map") if name in options.placed]
    if several and processes.device is not None:
        raise ValueError(
            f"{flag(several[0])}: with several processes each has its own device "
            f"({processes.device}); drop it"
        )
    if options.dry_run and options.placed:
        raise ValueError(
            f"{flag(next(iter(options.placed)))}: a plan is of the target's configuration; drop "
            "it, or --dry-run"
        )
    if options.dry_run:  # nothing is loaded, so it need not fit this machine
        return {}
    if options.shard_target:  # each process holds a share
        return {"placement": Placement(**options.placed)} if options.placed else {}
    return place(options.placed, options.target)[0]


def _record_episodes(
    options: TrainOptions, teaching: TrainingData, teacher: Any, processes: Processes
) -> Path:
    """Episodes of the target, recorded in the folder of the training."""
    is_quiet = options.json or not processes.is_first
    with processes.main_process_first(), show_progress(is_quiet) as bar:
        given = (str(options.data), teacher, TrainingFolder(options.out).episodes, options.seed)
        return teaching.record_episodes(
            *given, lambda stage, done, total, _: bar(stage, done, total)
        )


class _Training:
    """One run: new, or resumed."""

    def __init__(
        self,
        options: TrainOptions,
        recipe: Recipe,
        model: Any,
        teacher: Any,
        data: DataSet,
        processes: Processes,
    ) -> None:
        self.options, self.recipe, self.model, self.teacher = options, recipe, model, teacher
        self.data, self.questions, self.processes = data, data.questions, processes
        self.folder = TrainingFolder(options.out)
        assert recipe.training is not None
        self.rate = recipe.training.rate if options.rate is None else options.rate
        self.fingerprint = fingerprint(teacher.reader)  # by all processes of a sharded target
        self.history: list[dict[str, Any]] = []
        self.tap = ""  # the features that are cached
        self.cache: FeatureCache | None = None
        self.prefixes = PrefixReader(teacher)

    def run(self) -> None:
        options, reader, training = self.options, self.teacher.reader, self.recipe.training
        assert training is not None
        head = self._head(torch.ones(reader.vocabulary, dtype=torch.int64))
        training.stages(head, options.steps, self.rate, options.muon)  # refused now
        if options.pack is not None:
            check_packing(training, head, options.pack)
        if options.cache is not None:
            self.tap = required_features(training, reader, head)
        given = (options, self.recipe.name, self.rate, digest(options.data, self.data.bad))
        is_quiet = options.json or not self.processes.is_first
        with self.processes.main_process_first():
            self.folder.begin(*given, self.fingerprint)
            self.folder.write_bad_rows(list_bad_rows(self.data))
        with show_progress(is_quiet) as bar:
            shared = (self.processes, lambda stage, done, total, _: bar(stage, done, total))
            if self.processes.is_first:
                self.folder.report_missing_answers(len(self.questions))
            generate, size = self._answering()
            answers = collect_responses(
                self.folder.answers, self.questions, generate, size, *shared
            )
            usable = [one for one in answers if one.skipped is None]
            skipped = [one.skipped for one in answers if one.skipped is not None]
            left_out = [*map(str, self.data.bad), *skipped]
            if not usable:
                raise ValueError(
                    f"none of {len(answers)} questions can be trained on: {skipped[0]}"
                )
            held_out = select_held_out(self.questions, options.held_out, options.seed)
            trained_on = [one for one in usable if one.question not in held_out]
            judged = [one for one in usable if one.question in held_out]
            self.judged = [self.questions[one.question] for one in judged]
            if not trained_on or not self.judged:
                raise ValueError(
                    f"{len(usable)} questions are left, too few to learn from some and judge by "
                    "others; give more data"
                )
            seed = options.seed
            with self.processes.main_process_first():
                self.cache = self._cache(trained_on)
            settings = (options.batch, seed, self.cache, options.pack, self.prefixes)
            examples = TrainingExamples(self.teacher, self.questions, trained_on, *settings)
            tokens, padding = examples.padding()
            self.padding = [tokens * options.accumulate, padding]
            trainer = self._trainer(examples.counts())
            self.coverage = [measure_coverage(trainer.head, one) for one in (trained_on, judged)]
            self.processes.wait()  # all have read what the first one writes from here on
            with trainer.arithmetic():
                examples.cache_features(self.tap, options.steps * options.accumulate, *shared)
            counts = self.processes.gather(self.prefixes.counts)[: self.processes.count]
            self.sharing = report_prefixes(counts)
            self._steps(trainer, examples, bar)
            if self.processes.is_first:
                head = trainer.trained_head().to(self.teacher.reader.model.dtype)
                self.folder.save(head, self.history)
        if self.processes.is_first:
            self._report(trained_on, left_out)
        self.processes.wait()

    def _cache(self, trained_on: Sequence[Response]) -> FeatureCache | None:
        """The feature cache; refused before anything is written if the disk is too small."""
        options, reader = self.options, self.teacher.reader
        if options.cache is None:
            return None
        media = {each for one in self.questions for each in (*one.images, *one.videos)}
        sizes = sorted((one.name, one.size()) for one in media)
        owner = {
            "data": digest(options.data, self.data.bad),
            "answers": digest_responses(trained_on),
            "pictures": hashlib.sha256(repr(sizes).encode()).hexdigest(),
            "dtype": f"{reader.model.dtype}, bf16={options.bf16}",
        }
        writer = self.processes.index if self.processes.writes else None
        cache = FeatureCache(options.cache, owner, self.fingerprint, process=writer)
        size = cache_bytes(reader, self.tap, ((one.prompt, len(one.tokens)) for one in trained_on))
        check_space(options.cache, size, cache.shards)
        if not options.json and self.processes.is_first:
            console().print(f"feature cache {options.cache}: {size / 2**30:.3g} GiB", markup=False)
        return cache

    def _answering(self) -> tuple[GenerateResponses, int]:
        """What answers questions, and how many of them at a time."""
        options = self.options
        sizes = (options.max_new_tokens, options.max_length)
        settings = ResponseOptions(
            options.answers == "data", *sizes, options.temperature, options.seed
        )
        if (endpoint := options.chat_endpoint()) is not None:
            ask = EndpointCollector(endpoint, self.teacher, settings, options.concurrency)
            return (ask if self.processes.writes else wait_for_others), 1
        collector = ResponseCollector(self.model, self.teacher, settings, self.prefixes)
        return partial(map, collector), 4 * options.batch

    def _trainer(self, counts: torch.Tensor) -> HeadTrainer:
        """The trainer of a new head, or of the checkpoint."""
        options, training, reader = self.options, self.recipe.training, self.teacher.reader
        assert training is not None
        more = (options.seed, options.ema, options.bf16, options.muon)
        settings = TrainingSettings(options.steps, self.rate, *more)
        trainer = HeadTrainer(training, reader, self._head(counts), settings, self.processes)
        if self.folder.checkpoint.exists():
            state, content = checkpoints.read(self.folder.checkpoint)
            trainer.restore(state, content["taken"])
            self.history = content["history"]
        return trainer

    def _head(self, counts: torch.Tensor) -> Any:
        options = self.options
        made = (counts, options.head, options.overrides, options.seed)
        return initial_head(self.recipe, self.teacher.reader, *made)

    def _steps(self, trainer: HeadTrainer, examples: TrainingExamples, bar: Any) -> None:
        """The remaining steps, with a checkpoint every `every` steps."""
        options, total = self.options, 0.0
        if not self.history:
            self.history.append({"step": 0, "loss": None, "acceptance": self._judge(trainer)})
        self.processes.wait()  # measuring may take longer than the limit of a step
        last = self.history[-1]
        trackers = self._start_trackers(trainer.num_steps_done)
        try:
            while trainer.num_steps_done < options.steps:
                rate = trainer.rate
                loss = trainer.step(
                    examples.example_makers(trainer.num_steps_done, options.accumulate)
                )
                total += loss
                trackers.log({"loss": loss, "learning rate": rate}, trainer.num_steps_done)
                since = trainer.num_steps_done - last["step"]
                note = f"loss {total / since:.3f}  acceptance {last['acceptance']:.2f}"
                bar("learning", trainer.num_steps_done, options.steps, note)
                if (
                    trainer.num_steps_done % options.every
                    and trainer.num_steps_done < options.steps
                ):
                    continue
                found = {"step": trainer.num_steps_done, "loss": total / since}
                last = {**found, "acceptance": self._judge(trainer)}
                self.history.append(last)
                trackers.log({"acceptance length": last["acceptance"]}, trainer.num_steps_done)
                total = 0.0
                content = {"taken": trainer.num_steps_done, "history": self.history}
                if self.processes.is_first:
                    checkpoints.write(self.folder.checkpoint, trainer.state(), content)
                self.processes.wait()
        except KeyboardInterrupt as stopped:
            raise KeyboardInterrupt(
                f"interrupted at step {trainer.num_steps_done}; the same command goes on from step "
                f"{last['step']}"
            ) from stopped
        finally:
            trackers.finish()

    def _start_trackers(self, done: int) -> Trackers:
        """Trackers of the first process, after `done` steps."""
        names = self.options.track if self.processes.is_first else ()
        settings = {name: str(value) for name, value in asdict(self.options).items()}
        trackers = Trackers.start(names, self.folder.logs, settings, done)
        if not done:
            trackers.log({"acceptance length": self.history[0]["acceptance"]}, 0)
        return trackers

    def _judge(self, trainer: HeadTrainer) -> float:
        options = self.options
        if not self.processes.measures:
            return float("nan")
        data = (self.teacher, self.judged, options.batch, options.max_new_tokens)
        return measure_acceptance(self.model, self.recipe, trainer.trained_head(), *data)

    def _report(self, trained_on: list[Any], left_out: list[str]) -> None:
        first, last = self.history[0], self.history[-1]
        found = {
            "out": str(self.options.out),
            "recipe": self.recipe.name,
            "steps": last["step"],
            "questions": len(trained_on),
            "held out": len(self.judged),
            "left out": len(left_out),
            "tokens": sum(len(one.tokens) for one in trained_on),
            PADDING: self.padding,
            "loss": last["loss"],
            "acceptance length before": first["acceptance"],
            "acceptance length": last["acceptance"],
        }
        found |= self.sharing
        if None not in self.coverage:
            found["draft vocabulary covers, of trained and held-out answers"] = self.coverage
        if self.options.json:
            print_json({**found, "reasons": left_out[:SHOWN], "history": self.history})
            return
        show_report(found, False)
        for reason in left_out[:SHOWN]:
            print_error(f"left out: {reason}")
