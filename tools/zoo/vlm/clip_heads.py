"""Train the heads of targets that answer questions about clips: they read the text alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmspec.drafters.neural.head_prompt import ReadPrompt
from mmspec.modalities.common.families import reader as reader_of
from mmspec.modalities.vlm.checkpoints import load
from mmspec.modality import Entry
from mmspec.targets.readers.hooks import LayerStatesHook
from mmspec.targets.readers.reader import Reader
from mmspec.training.feature_cache import FeatureCache
from mmspec.training.fitting import Course, Fall, chunks
from mmspec.training.heads import Lesson, ReadLesson
from mmspec.training.reporting import Report
from mmspec.zoo.happenings import clip_examples, tell
from mmspec.zoo.moving import moving_scenes
from mmspec.zoo.training import teacher
from tools.zoo.vlm.clips import (
    ASKED,
    MAX_NEW_TOKENS,
    AnsweredClips,
    Clips,
    requests,
    told_of,
)
from tools.zoo.vlm.heads import FEATURE, lengths, teach
from tools.zoo.vlm.processors import clip_processor

ABOUT = """\
Continues what its target has read; knows only moving scenes of the `mmspec` zoo, and fits no other
target. Slots of frames are left out, so its memory does not grow with the clip: what it knows of
that is in its target's states of the text.

Learned from what its target says about drawn clips.
"""
NOTES = """\
`acceptance length` is tokens per round of greedy chain speculation (`sparrow`) with five drafted
tokens, and `deep acceptance length` with as many as the head is meant for (`drafted`), on held-out
clips, captions and answers to questions as they come. Measured by decoding with the float16
weights, run in float32.
"""
HELD_OUT = 48
BATCH, QUESTIONS = 16, 3  # answers in a batch, questions to each clip
PLAN = replace(
    FEATURE,
    recipe="sparrow",
    fall=Fall(900, 2e-3),
    pool=900,
    changes={**FEATURE.changes, "visual_slots": "hidden"},
)


def train(
    entry: Entry, folder: Path, steps: int | None, seed: int, progress: Report
) -> dict[str, Any]:
    """Let the target talk about drawn clips, and teach a head to say the same."""
    assert entry.target is not None
    course, reader = Course(seed, steps, progress), reader_of(teacher(entry.target))
    clips = moving_scenes(course.cut(PLAN.pool, BATCH) // QUESTIONS, seed=seed)
    with TemporaryDirectory() as scratch:
        cache = FeatureCache(Path(scratch), {}, None)
        said = heard(reader, clip_processor(), clips, cache, course)
        made = teach(PLAN, reader, lessons(said, cache, BATCH, seed), folder, course)
    return {"clips": len(clips), "answers": len(said), **made}


def measure(entry: Entry, folder: Path, count: int) -> dict[str, float]:
    """Tokens per round at five drafted tokens, and at as many as the head is meant for."""
    assert entry.target is not None
    target, head = teacher(entry.target), load(entry, folder)
    return lengths(PLAN, target, head, list(held_out(clip_processor(), count)), MAX_NEW_TOKENS)


def held_out(processor: Any, count: int) -> Iterator[dict[str, Any]]:
    """Requests about held-out clips, one at a time."""
    for one in clip_examples(count, seed=1):
        yield requests(processor, [one.frames], [one.prompt])


@dataclass(frozen=True)
class HeardAnswer:
    """Ids of a prompt (L,), and of what the target said to it, without its end (T,)."""

    prompt: Tensor
    tokens: Tensor


def heard(
    reader: Reader, processor: Any, clips: Clips, cache: FeatureCache, course: Course
) -> list[HeardAnswer]:
    """Answers of the target to questions about all clips; the cache holds what it made of them.

    The row of an answer in the cache is its place in the list. Questions whose right answers are
    of similar length are asked together.
    """
    asked = [
        (clip, number + late) for clip, (_, number) in enumerate(clips) for late in range(QUESTIONS)
    ]
    asked.sort(key=lambda one: len(tell(clips[one[0]][0], one[1])[1]))
    said: list[HeardAnswer] = []
    for some in chunks(asked, ASKED, "listen", course.progress):
        with LayerStatesHook(reader, (0, len(reader.layers))) as noted:
            made = told_of(reader.model, processor, clips, some)
        read = as_read(noted, made, processor.tokenizer.eos_token_id)
        cache.keep(range(len(said), len(said) + len(some)), read, "hidden")
        ids, seen = made.inputs["input_ids"], made.inputs["attention_mask"].bool()
        said += [
            HeardAnswer(prompt[shown], new[: len(own)][own])
            for prompt, shown, new, own in zip(ids, seen, made.new, read.real, strict=True)
        ]
    return said


def as_read(noted: LayerStatesHook, made: AnsweredClips, end: int) -> ReadLesson:
    """The lesson that these answers are, as the target read it while it gave them.

    What it said last it did not read, and nothing is drafted behind an `end`:

        prompt  a  b  end     the target reads prompt a b; a and b are the lesson
        prompt  c  end pad    .. prompt c end; c is
    """
    first, last = noted.layers
    embeds, states = (torch.cat(noted.noted[layer], 1) for layer in (first, last))
    new = made.new[:, :-1]
    padding = (made.inputs["attention_mask"] == 0).sum(1).tolist()
    ids = torch.cat((made.inputs["input_ids"], new), 1)
    prompt = ReadPrompt(embeds, states, padding, ids, answered=new.shape[1])
    real = (new == end).cumsum(1) == 0
    return ReadLesson(prompt, states[:, states.shape[1] - new.shape[1] :], real)


def lessons(
    said: Sequence[HeardAnswer], cache: FeatureCache, batch: int, seed: int
) -> Iterator[Lesson]:
    """Answers in batches of similar length without end, all before any comes again.

    The target is not asked: all rows are in the cache.
    """
    generator = np.random.default_rng((seed, 4))
    ordered = sorted(range(len(said)), key=lambda at: len(said[at].tokens))
    cuts = list(chunks(ordered, batch))
    while True:
        for which in generator.permutation(len(cuts)):
            rows = cuts[which]
            ids = pad_sequence([said[row].prompt for row in rows], True, padding_side="left")
            tokens = pad_sequence([said[row].tokens for row in rows], True, -1)
            yield Lesson({"input_ids": ids}, tokens, cache, rows)
