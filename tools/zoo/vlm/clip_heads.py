"""Train the head of the clip model, which attends to text tokens only."""

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

from mmspec.drafters.neural.head_prompt import TargetPrompt
from mmspec.modalities.common.families import make_reader
from mmspec.modalities.vlm.checkpoints import load
from mmspec.modality import Entry
from mmspec.targets.readers.hooks import LayerStatesHook
from mmspec.targets.readers.reader import Reader
from mmspec.training.feature_cache import FeatureCache
from mmspec.training.fitting import CosineDecay, TrainingProgress, TrainingRun, iterate_chunks
from mmspec.training.heads import TargetOutputs, TrainingExample
from mmspec.zoo.clip_questions import clip_examples, write_clip_text
from mmspec.zoo.motion import sample_moving_scenes
from mmspec.zoo.training import load_teacher
from tools.zoo.vlm.clips import (
    GENERATION_BATCH,
    MAX_NEW_TOKENS,
    ClipResponses,
    Clips,
    generate_for_questions,
    make_requests,
)
from tools.zoo.vlm.heads import FEATURE, measure_lengths, train_head
from tools.zoo.vlm.processors import clip_processor

ABOUT = """\
Predicts the next tokens from its target's states; knows only moving scenes of the `mmspec` zoo,
and fits no other target. Visual tokens are left out, so its cache does not grow with the clip: it
knows the clip only through the target's states of the text.

Trained on its target's answers about training clips.
"""
NOTES = """\
`acceptance length` is tokens per round of greedy chain speculation (`sparrow`) with five drafted
tokens, and `deep acceptance length` with the number that the head is trained for (`drafted`), on
held-out clips, captions and answers to questions as they come. Measured by decoding with the
float16 weights, run in float32.
"""
HELD_OUT = 48
BATCH, QUESTIONS = 16, 3  # answers in a batch, questions per clip
PLAN = replace(
    FEATURE,
    recipe="sparrow",
    decay=CosineDecay(900, 2e-3),
    pool=900,
    changes={**FEATURE.changes, "visual_slots": "hidden"},
)


def train(
    entry: Entry, folder: Path, steps: int | None, seed: int, progress: TrainingProgress
) -> dict[str, Any]:
    """Generate answers of the target about sampled clips, and train a head on them."""
    assert entry.target is not None
    course, reader = TrainingRun(seed, steps, progress), make_reader(load_teacher(entry.target))
    clips = sample_moving_scenes(course.limit_steps(PLAN.pool, BATCH) // QUESTIONS, seed=seed)
    with TemporaryDirectory() as scratch:
        cache = FeatureCache(Path(scratch), {}, None)
        answers = collect_responses(reader, clip_processor(), clips, cache, course)
        made = train_head(
            PLAN, reader, iterate_batches(answers, cache, BATCH, seed), folder, course
        )
    return {"clips": len(clips), "answers": len(answers), **made}


def measure(entry: Entry, folder: Path, count: int) -> dict[str, float]:
    """Return acceptance lengths at five draft tokens, and at the number of the plan."""
    assert entry.target is not None
    target, head = load_teacher(entry.target), load(entry, folder)
    return measure_lengths(
        PLAN, target, head, list(iterate_requests(clip_processor(), count)), MAX_NEW_TOKENS
    )


def iterate_requests(processor: Any, count: int) -> Iterator[dict[str, Any]]:
    """Iterate over requests about held-out clips, one at a time."""
    for one in clip_examples(count, seed=1):
        yield make_requests(processor, [one.frames], [one.prompt])


@dataclass(frozen=True)
class TargetResponse:
    """Ids of a prompt (L,), and of the target's answer without the end token (T,)."""

    prompt: Tensor
    tokens: Tensor


def collect_responses(
    reader: Reader, processor: Any, clips: Clips, cache: FeatureCache, course: TrainingRun
) -> list[TargetResponse]:
    """Generate answers to questions about all clips, and cache the target's features.

    The index of an answer is its row in the cache. Questions with reference answers of similar
    length are batched.
    """
    questions = [
        (clip, number + late) for clip, (_, number) in enumerate(clips) for late in range(QUESTIONS)
    ]
    questions.sort(key=lambda one: len(write_clip_text(clips[one[0]][0], one[1])[1]))
    answers: list[TargetResponse] = []
    for some in iterate_chunks(questions, GENERATION_BATCH, "listen", course.progress):
        with LayerStatesHook(reader, (0, len(reader.layers))) as noted:
            made = generate_for_questions(reader.model, processor, clips, some)
        read = make_training_example(noted, made, processor.tokenizer.eos_token_id)
        cache.add(range(len(answers), len(answers) + len(some)), read, "hidden")
        ids, mask = made.inputs["input_ids"], made.inputs["attention_mask"].bool()
        answers += [
            TargetResponse(prompt[is_token], new[: len(own)][own])
            for prompt, is_token, new, own in zip(ids, mask, made.new, read.real, strict=True)
        ]
    return answers


def make_training_example(noted: LayerStatesHook, made: ClipResponses, end: int) -> TargetOutputs:
    """Return the features of the target for these answers, recorded during generation.

    The last token was not read by the target, and nothing is drafted after `end`:

        prompt  a  b  end     the target reads prompt a b; a and b are training tokens
        prompt  c  end pad    the target reads prompt c end; c is a training token
    """
    first, last = noted.layers
    embeds, states = (torch.cat(noted.noted[layer], 1) for layer in (first, last))
    new = made.new[:, :-1]
    padding = (made.inputs["attention_mask"] == 0).sum(1).tolist()
    ids = torch.cat((made.inputs["input_ids"], new), 1)
    prompt = TargetPrompt(embeds, states, padding, ids, response_length=new.shape[1])
    real = (new == end).cumsum(1) == 0
    return TargetOutputs(prompt, states[:, states.shape[1] - new.shape[1] :], real)


def iterate_batches(
    answers: Sequence[TargetResponse], cache: FeatureCache, batch: int, seed: int
) -> Iterator[TrainingExample]:
    """Iterate over batches of answers of similar length, epoch after epoch.

    The target is not run: its features are in the cache.
    """
    generator = np.random.default_rng((seed, 4))
    ordered = sorted(range(len(answers)), key=lambda at: len(answers[at].tokens))
    cuts = list(iterate_chunks(ordered, batch))
    while True:
        for which in generator.permutation(len(cuts)):
            rows = cuts[which]
            ids = pad_sequence([answers[row].prompt for row in rows], True, padding_side="left")
            tokens = pad_sequence([answers[row].tokens for row in rows], True, -1)
            yield TrainingExample({"input_ids": ids}, tokens, cache, rows)
