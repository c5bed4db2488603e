"""Train the recognisers of the zoo from a seed, in under an hour each on one CPU core."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mmspec.modalities.speech.recognition.checkpoints import load, processor
from mmspec.modalities.speech.utterances import Room, utterance
from mmspec.modality import Entry
from mmspec.training.fitting import Course, Fall, chunks
from mmspec.training.reporting import Report
from mmspec.zoo.training import kept, teacher
from tools.zoo.speech.recognition import granite, granite_learning, whisper, whisper_learning
from tools.zoo.speech.recognition.evaluate import acceptance, word_errors

ABOUT = """\
Hears sentences of the Scene world of the `mmspec` zoo, up to four seconds long, as espeak-ng
says them in several voices; writes them in lower case without marks, letter by letter.
"""
NOTES = """\
`word error rate` is of greedy transcripts of held-out sentences, all words together, and
`clean` of the same without the noise that half of the recordings have; `of ctc` is of the letters
that the CTC head hears. `acceptance length` is tokens per round of greedy chain speculation on
held-out sentences with five drafted tokens. Measured on the float16 weights, run in float32.
"""
HELD_OUT = 256
BATCH = 16
DRAFTED = 5  # tokens, where acceptance is measured
_AT_ONCE, FOLLOWED = 32, 48  # recordings: in a batch, and where acceptance is measured

Hear = Callable[[Any, Any, Sequence[Tensor]], list[str]]


@dataclass(frozen=True)
class HearingPlan:
    """How a recogniser is trained: `hearing` of its encoder, then `writing` on what that hears.

    Whisper learns both from a pool of windows, and `together` from another one. Granite learns
    all from two, and to write first with few layers, then with all of them.
    """

    pool: int
    writing: tuple[Fall, ...]
    hearing: tuple[Fall, ...] = ()  # a drafter has its target's encoder
    together: tuple[Fall, ...] = ()

    @property
    def falls(self) -> tuple[Fall, ...]:
        return (*self.hearing, *self.writing, *self.together)


PLANS = {
    "whisper": HearingPlan(
        6000, (Fall(700, 1.5e-3),), (Fall(1000, 2e-3),), together=(Fall(1800, 1e-3),)
    ),
    "whisper-drafter": HearingPlan(3000, (Fall(900, 3e-3),)),
    "granite-speech": HearingPlan(
        5000, (Fall(1000, 2e-3), Fall(600, 1e-3)), (Fall(600, 2e-3), Fall(600, 1e-3))
    ),
}


def train(
    entry: Entry, folder: Path, steps: int | None, seed: int, progress: Report
) -> dict[str, Any]:
    """Teach an encoder to hear, then a decoder to write; a drafter, to write as its target does."""
    course, plan = Course(seed, steps, progress), PLANS[entry.name]
    model = _TRAINERS[entry.name](entry, folder, plan, course)
    return {
        "steps": sum(course.cut(fall.steps) for fall in plan.falls),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def measure(entry: Entry, folder: Path, count: int) -> dict[str, float]:
    """Words wrong (a target), or tokens per round at five drafted tokens (a drafter)."""
    model, reader = load(entry, folder), processor(entry, folder)
    if entry.target is not None:
        sounds = [utterance(seed, "held-out").waveform for seed in range(min(count, FOLLOWED))]
        asked = [whisper.inputs(reader, [sound]) for sound in sounds]
        target = teacher(entry.target)
        return {"acceptance_length": acceptance(target, "whisper-assisted", model, asked, DRAFTED)}
    ways: dict[str, Hear] = {"word_error_rate": _HEARERS[entry.name]}
    if entry.name == "granite-speech":
        ways["word_error_rate_of_ctc"] = granite.spell
    report = {}
    for name, hear in ways.items():
        report[name] = _rate(hear, model, reader, count, None)
        report[f"clean_{name}"] = _rate(hear, model, reader, count, Room())
    return report


def _rate(hear: Hear, model: Any, reader: Any, count: int, room: Room | None) -> float:
    said = [utterance(seed, "held-out", room=room) for seed in range(count)]
    found: list[str] = []
    for part in chunks(said, _AT_ONCE):
        found += hear(model, reader, [one.waveform for one in part])
    return round(word_errors([one.text for one in said], found).rate, 4)


def _whisper(entry: Entry, folder: Path, plan: HearingPlan, course: Course) -> Any:
    [hearing], [writing], [together] = plan.hearing, plan.writing, plan.together
    reader = whisper.build_processor()
    model = whisper.build(reader.tokenizer).train()
    taught = whisper_learning.lesson(reader, plan.pool, course)

    with _kept(model, reader, whisper, folder):
        whisper_learning.learn_to_hear(model, taught, BATCH, hearing, course)
        states = whisper_learning.heard(model, taught)
        whisper_learning.learn_to_write(model, states, taught, BATCH, writing, course)
        later = course.later(1)
        others = whisper_learning.lesson(reader, plan.pool, later)
        whisper_learning.learn_together(model, others, BATCH, together, later)
    return model


def _drafter(entry: Entry, folder: Path, plan: HearingPlan, course: Course) -> Any:
    """A decoder of one layer on its target's encoder."""
    assert entry.target is not None
    [writing] = plan.writing
    target, reader = teacher(entry.target), whisper.build_processor()
    taught = whisper_learning.lesson(reader, plan.pool, course)
    states = whisper_learning.heard(target, taught)
    model = whisper.build_drafter(reader.tokenizer, target).train()
    with _kept(model, reader, whisper, folder):
        whisper_learning.learn_to_follow(model, target, states, taught, BATCH, writing, course)
    return model


def _granite(entry: Entry, folder: Path, plan: HearingPlan, course: Course) -> Any:
    reader = granite.build_processor()
    tokenizer = reader.tokenizer
    model = granite.build(tokenizer, granite.SHALLOW).train()
    first, second = (granite_learning.lesson(reader, plan.pool, course.later(i)) for i in range(2))
    taught = granite_learning.together(first, second)
    few, many = plan.writing
    with _kept(model, reader, granite, folder):
        for number, hearing in enumerate(plan.hearing):
            later = course.later(2 * number)
            granite_learning.learn_to_hear(model, taught, BATCH, hearing, later)
        pool = granite_learning.heard(model, taught)
        growing = few.steps // 2
        granite_learning.learn_to_write(model, reader, pool, growing, few, course)
    model = granite.grown(model, tokenizer).train()
    with _kept(model, reader, granite, folder):
        granite_learning.learn_to_write(model, reader, pool, 0, many, course.later(1))
    return model


@contextmanager
def _kept(model: Any, reader: Any, family: Any, folder: Path) -> Iterator[None]:
    """Save a model of a family, with what reads for it."""

    def save() -> None:
        model.generation_config = family.generation_config(reader.tokenizer)
        model.half().save_pretrained(folder)
        reader.save_pretrained(folder)

    with kept(save):
        yield


_TRAINERS = {
    "whisper": _whisper,
    "whisper-drafter": _drafter,
    "granite-speech": _granite,
}
_HEARERS: dict[str, Hear] = {"whisper": whisper.transcribe, "granite-speech": granite.transcribe}
