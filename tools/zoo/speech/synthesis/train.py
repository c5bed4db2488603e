"""Train the zoo's speech from a seed: a codec, a model that speaks its codes, and what drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from mmspec.api import accelerate
from mmspec.codes.bigrams import Bigrams
from mmspec.modalities.speech.codecs import load_codec
from mmspec.modalities.speech.synthesis import CODEC
from mmspec.modalities.speech.synthesis.checkpoints import load
from mmspec.modalities.speech.synthesis.held_out import SPEAKERS
from mmspec.modality import Entry
from mmspec.models.heads.multi_token import MultiTokenHeads, MultiTokenHeadsConfig
from mmspec.training.fitting import Course, Fall, shuffled
from mmspec.training.heads import Lesson
from mmspec.training.multi_token import MULTI_TOKEN
from mmspec.training.reporting import Report
from mmspec.training.trainable import learn
from mmspec.zoo.training import kept, teacher, written
from tools.zoo.speech.synthesis import models
from tools.zoo.speech.synthesis.codec import codec
from tools.zoo.speech.synthesis.codec_training import (
    CodecInput,
    crops,
    heard,
    learn_codec,
)
from tools.zoo.speech.synthesis.corpus import (
    SENTENCES,
    CorpusUtterance,
    corpus,
)
from tools.zoo.speech.synthesis.evaluate import (
    acceptance,
    speech_right,
    through_codec,
    word_error_rate,
)
from tools.zoo.speech.synthesis.speaking import (
    SpokenRow,
    batches,
    coded,
    learn_to_speak,
    rows,
)

ABOUT = """\
Speaks sentences of the Scene world of the `mmspec` zoo in two voices, `paul` and `ada`. What it
learned from was spoken by espeak-ng. The folder `codec` of the target, an X-codec 2 of 16 kHz,
makes sound of its codes, 50 a second out of 1024; `speech_codes` in `config.json` says which ids
they are. Text is read word by word; words outside the Scene world are `<unk>`.
"""
TEMPERATURE, CHAIN = 0.8, 4  # at which it speaks if nothing is said, and where it is measured
HELD_OUT = 40
NOTES = f"""\
`word error rate` is that of the zoo's recogniser `whisper`, which never heard the codec, on
{HELD_OUT} different held-out sentences, spoken at temperature {TEMPERATURE} with seed 0 (0.083 with
seed 1); `espeak word error rate` is that of espeak-ng's own speech, `codec word error rate` of the
same through the codec, and `codec log mel` how far that is from the original, in nats. As sentences
are drawn some come again: four of the first 40 are one that the recogniser mishears from espeak-ng
already, and 0.124 of their words are wrong. `acceptance length` is tokens per round of coupled
chains of {CHAIN} at the same temperature. All are measured on the float16 weights, run in float32.
"""
BATCH, CROPS, HEADS, HEADS_BATCH = 16, 8, 4, 4
CODEC_FALL, HEADS_FALL = Fall(2600, 1.5e-3), Fall(800, 4e-3)


@dataclass(frozen=True)
class SpeakerPlan:
    """How a model is trained, and how strongly it is also asked which word it says."""

    shape: models.SpeakerShape
    falls: tuple[Fall, ...]
    named: float = 1.0


PLANS = {
    "codec-lm": SpeakerPlan(models.TARGET, (Fall(3600, 2.5e-3), Fall(1600, 1.2e-3))),
    "codec-lm-drafter": SpeakerPlan(models.DRAFTER, (Fall(1200, 3e-3),), 0.0),
}


def train(
    entry: Entry, folder: Path, steps: int | None, seed: int, progress: Report
) -> dict[str, Any]:
    """Teach a codec and a model to speak its codes; or a drafter, or heads, for such a model."""
    course = Course(seed, steps, progress)
    spoken = corpus(course.cut(SENTENCES, BATCH), progress=progress)
    listened = heard([one.waveform for one in spoken])
    if entry.target is None:
        made: Any = learnt_codec(listened, course)
    else:
        made = load_codec(written(entry.target) / CODEC).model
    taught = rows(spoken, [coded(made, one) for one in listened])
    if entry.name not in PLANS:
        return train_heads(entry, folder, taught, course)
    plan = PLANS[entry.name]
    model: Any = models.speaker(plan.shape)

    def save() -> None:
        model.generation_config.update(do_sample=True, temperature=TEMPERATURE)
        model.half().save_pretrained(folder)
        models.tokenizer().save_pretrained(folder)
        if entry.target is None:
            made.half().save_pretrained(folder / CODEC)

    with kept(save):
        for number, fall in enumerate(plan.falls):
            learn_to_speak(model, batches(taught, BATCH, seed + number), fall, course, plan.named)
    return {
        "steps": sum(course.cut(fall.steps) for fall in plan.falls),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def learnt_codec(listened: Sequence[CodecInput], course: Course) -> Any:
    """A codec that has learnt to give back what it hears."""
    made = codec()
    learn_codec(made, crops(listened, CROPS, course.seed), CODEC_FALL, course)
    return made


def train_heads(
    entry: Entry, folder: Path, taught: Sequence[SpokenRow], course: Course
) -> dict[str, Any]:
    """Teach multi-token heads, and count which code follows which."""
    assert entry.target is not None
    reader: Any = accelerate(teacher(entry.target), "plain").session.bound.backbone
    counts = frequent(Bigrams.counted([row.speech for row in taught]))
    config = MultiTokenHeadsConfig.of(
        reader.config, reader.vocabulary, num_heads=HEADS, num_layers=2, num_bigrams=len(counts)
    )
    heads: Any = MultiTokenHeads(config)
    heads.bigrams.copy_(counts)
    steps = course.cut(HEADS_FALL.steps)
    with kept(lambda: heads.half().save_pretrained(folder)):
        learn(
            MULTI_TOKEN,
            reader,
            heads,
            lessons(taught, HEADS_BATCH, course.seed),
            steps,
            HEADS_FALL.rate,
            course.progress,
        )
    return {"steps": steps, "parameters": sum(p.numel() for p in heads.parameters())}


def frequent(table: torch.Tensor, least: int = 2) -> torch.Tensor:  # (P, 3) -> (P', 3)
    """Pairs that were met so often; the others are as good as not seen."""
    return table[table[:, 2] >= least]


def lessons(taught: Sequence[SpokenRow], batch: int, seed: int) -> Iterator[Lesson]:
    """Batches without end: prompts padded on the left, and what is said to them."""
    pad = int(models.layout().begin)
    count = len(taught) // batch * batch
    for numbers in shuffled(count, batch, np.random.default_rng(seed)):
        group = [taught[number] for number in numbers]
        width = max(len(row.prompt) for row in group)
        ids = [[pad] * (width - len(row.prompt)) + row.prompt for row in group]
        mask = [[0] * (width - len(row.prompt)) + [1] * len(row.prompt) for row in group]
        tokens = pad_sequence(
            [torch.tensor(row.speech) for row in group], batch_first=True, padding_value=-1
        )
        inputs = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
        yield Lesson(inputs, tokens)


def measure(entry: Entry, folder: Path, count: int) -> dict[str, float]:
    """Words heard right (a target), or tokens per round (what drafts)."""
    how = {"temperature": TEMPERATURE}
    if entry.target is not None:
        pair = teacher(entry.target), load(entry, folder)
        return {"acceptance_length": acceptance(*pair, CHAIN, count, **how)}
    said: list[CorpusUtterance] = corpus(max(count // len(SPEAKERS), 1), "held-out")
    texts, spoken = [one.text for one in said], [one.waveform for one in said]
    made, apart = through_codec(folder, spoken)
    found = speech_right(load(entry, folder), count, **how)
    for name, waveforms in {"codec": made, "espeak": spoken}.items():
        errors = word_error_rate(texts, waveforms)
        found |= {f"{name}_{key}": value for key, value in errors.items()}
    return {**found, "codec_log_mel": round(apart, 4)}
