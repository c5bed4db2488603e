"""Train the judge of Speculative Verdict: a target that reads what other models answered."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from mmspec.modalities.vlm.verdicts import PROMPTS, SMALL, measure_accuracy
from mmspec.modality import Entry
from mmspec.registry import ZOO
from mmspec.training.fitting import (
    CosineDecay,
    TrainingProgress,
    TrainingRun,
    fit,
    split_parameters,
)
from mmspec.zoo.catalogue import path
from mmspec.zoo.language import write
from mmspec.zoo.scene_tensors import render_pixels
from mmspec.zoo.training import load_teacher, save_on_exit
from tools.zoo.vlm.batches import Batch, Encoder, Sample, group_by_length, iterate_scenes
from tools.zoo.vlm.distillation import generate_responses
from tools.zoo.vlm.families import FAMILIES
from tools.zoo.vlm.processors import request_processor
from tools.zoo.vlm.requests import weight_words
from tools.zoo.vlm.systems.pool import default_folder
from tools.zoo.vlm.train import PLANS as TARGETS
from tools.zoo.vlm.train import save
from tools.zoo.vlm.training import answer_loss

ABOUT = f"""\
The judge of Speculative Verdict (`mmspec.modalities.vlm.consensus`): it reads a question about a
picture of the Scene world, what up to three other models answered, and answers itself.

Trained on questions about random scenes with the real answers of three models, right or wrong, in
random order; with all three, with two of them, and with none. The answer to learn is the right one.
The models: {", ".join(SMALL)}.
"""
NOTES = """\
The upper 12 layers were trained, the others are those of `llava-chat`. Figures are shares of facts
in greedy answers to held-out questions, with standard errors (`error of`): of each small model, of
their majority (the answer that most of them give, ties drawn), of the judge without and with their
answers, as selected by consensus or at random. Measured on the float16 weights, run in float32.
"""
HELD_OUT = 120
BASE = "llava-chat"
TEACHERS = tuple(name.removeprefix(ZOO) for name in SMALL)
FIRST_LAYER = 12  # of those that are trained
QUESTIONS, BATCH = 512, 16
DECAY = CosineDecay(160, 1e-3)
FACT_WEIGHT = 3.0
SHARES = (0.15, 0.0, 0.4, 0.45)  # of prompts with as many answers
_GENERATED = 128


@dataclass(frozen=True)
class Case:
    """A question about a training scene, and what the small models answered."""

    sample: Sample
    answers: tuple[str, ...]


def train(
    entry: Entry, folder: Path, steps: int | None, seed: int, progress: TrainingProgress
) -> dict[str, Any]:
    """Train the upper layers of a target on verdicts."""
    run = TrainingRun(seed, steps, progress)
    family, processor = FAMILIES["llava"], request_processor("llava")
    cases = collect_cases(run.limit_steps(QUESTIONS, BATCH), run)
    model = load_teacher(BASE).train()
    encoder = Encoder(family, processor)
    weights = weight_words(processor.tokenizer, FACT_WEIGHT)
    layers = model.get_decoder().layers[FIRST_LAYER:]
    model.requires_grad_(False)
    layers.requires_grad_(True)
    matrices, others = split_parameters(layers, layers.parameters())
    loss = answer_loss(model, family, weights)

    with save_on_exit(lambda: save(model, processor, folder, sees=True)):
        batches = iterate_verdicts(cases, encoder, seed)
        fit(others, batches, loss, DECAY, "verdicts", run, matrices, floor=0.02)
    return {
        "steps": run.limit_steps(DECAY.steps),
        "questions": len(cases),
        "trained_parameters": sum(one.numel() for one in layers.parameters()),
    }


def collect_cases(count: int, run: TrainingRun, folder: Path | None = None) -> list[Case]:
    """Training questions with the greedy answers of the small models, of the cache if it has them.

    `folder` is that of the cache; None = in the user's.
    """
    folder = default_folder() if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    samples = list(islice(_iterate_questions(run.seed), count))
    answerers = [_Answerer(name) for name in TEACHERS]
    cases = list[Case]()
    for start in range(0, count, _GENERATED):
        part = samples[start : start + _GENERATED]
        name = f"{run.seed}-{start}-{len(part)}"
        answers = [one.answer(part, folder, name) for one in answerers]
        cases += [Case(*both) for both in zip(part, zip(*answers, strict=True), strict=True)]
        run.progress("answers", len(cases), count, float("nan"))
    return cases


def iterate_verdicts(cases: Sequence[Case], encoder: Encoder, seed: int) -> Iterator[Batch]:
    """Iterate over batches of prompts of similar length, without end.

    A prompt has the answers of some of the small models in random order, or none: then it is the
    question alone.
    """
    generator = np.random.default_rng((seed, 15))
    while True:
        samples = []
        for case in cases:
            count = int(generator.choice(len(SHARES), p=SHARES))
            chosen = generator.permutation(len(case.answers))[:count]
            texts = [case.answers[at] for at in chosen]
            prompt = PROMPTS.write_judge(case.sample.prompt, texts) if texts else None
            samples.append(replace(case.sample, prompt=prompt or case.sample.prompt))
        for part in group_by_length(samples, BATCH, generator):
            yield encoder(part)


def measure(entry: Entry, folder: Path, count: int) -> dict[str, float]:
    """Return the shares of facts right on held-out questions, with their standard errors."""
    return measure_accuracy(str(folder), count)


def _iterate_questions(seed: int) -> Iterator[Sample]:
    for ((scene, number),) in iterate_scenes(1, seed + 40):
        prompt, answer, _ = write(scene, number, "question")
        yield Sample(render_pixels(scene), prompt, answer)


class _Answerer:
    """A small model, loaded when it is needed, and the file of its answers."""

    def __init__(self, name: str) -> None:
        family = FAMILIES[TARGETS[name].family]
        self.name = name
        self.model: PreTrainedModel | None = None
        self.encoder = Encoder(family, family.build_processor())
        weights = (path(name) / "model.safetensors").read_bytes()
        self.digest = hashlib.sha256(weights).hexdigest()[:12]

    def answer(self, samples: Sequence[Sample], folder: Path, number: str) -> list[str]:
        """The greedy answers to some questions, from the file if there is one."""
        file = folder / f"verdict-{self.name}-{self.digest}-{number}.json"
        if not file.exists():
            model = self.model = load_teacher(self.name) if self.model is None else self.model
            found = generate_responses(model, self.encoder, samples)
            file.write_text(json.dumps([one.answer for one in found]), encoding="utf-8")
        texts: list[str] = json.loads(file.read_text(encoding="utf-8"))
        return texts
