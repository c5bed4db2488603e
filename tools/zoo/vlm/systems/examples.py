"""Batches of training examples from a pool: with pictures, as text alone, or reference captions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmspec.models.compatibility import fingerprint
from mmspec.targets.readers.reader import Reader
from mmspec.training.feature_cache import FeatureCache
from mmspec.training.fitting import TrainingProgress, iterate_chunks, silent
from mmspec.training.heads import TrainingExample, cache_outputs
from tools.zoo.vlm.systems.pool import AnswerPool, TargetAnswer

BATCH = 16
PICTURES, TEXT, CAPTIONS = "pictures", "text", "captions"
Source = Callable[[float], TrainingExample]  # the next batch, given the share of a stage done


@dataclass
class ExampleSource:
    """Endless batches of a pool by kind, from a seed.

    - "pictures": the target's answers, with pictures;
    - "text": the same without pictures: the text tokens alone are read;
    - "captions": the reference answers to first turns of the category "caption" (of all, without).

    `caches` are those of the target's states by kind, for losses that read nothing else of it.
    """

    pool: AnswerPool
    reader: Reader
    seed: int
    batch: int = BATCH
    caches: Mapping[str, FeatureCache] = field(default_factory=dict)
    iterators: dict[str, Iterator[TrainingExample]] = field(default_factory=dict)

    def next(self, kind: str) -> TrainingExample:
        if kind not in self.iterators:
            self.iterators[kind] = self._iterate(kind)
        return next(self.iterators[kind])

    def from_text_to_pictures(self, done: float) -> TrainingExample:
        """Text first; the share of pictures rises from 0 to 1 as a stage goes on (MSD)."""
        drawn = float(torch.rand(()))
        return self.next(PICTURES if drawn < done else TEXT)

    def _iterate(self, kind: str) -> Iterator[TrainingExample]:
        generator = np.random.default_rng((self.seed, len(kind)))
        rows = [*range(len(self.pool.answers))]
        if kind == CAPTIONS:
            answers = self.pool.answers
            first = [at for at in rows if answers[at].turn == 0]
            rows = [at for at in first if answers[at].category == "caption"] or first
        cuts = split_rows(self.pool.answers, rows, self.batch)
        while True:
            for index in generator.permutation(len(cuts)):
                yield self.make(kind, cuts[index])

    def make(self, kind: str, rows: Sequence[int]) -> TrainingExample:
        """The example of some answers."""
        answers = [self.pool.answers[row] for row in rows]
        hidden = torch.tensor(sorted(self.reader.visual_ids))
        prompts = [one.prompt for one in answers]
        if kind == TEXT:
            prompts = [one[~torch.isin(one, hidden)] for one in prompts]
        ids, mask = pad_left(prompts)
        inputs = {"input_ids": ids, "attention_mask": mask}
        if kind != TEXT:
            inputs |= self.pool.media(answers, ids)
        rows_of = [one.reference if kind == CAPTIONS else one.tokens for one in answers]
        tokens = pad_sequence(rows_of, True, -1)
        return TrainingExample(inputs, tokens, self.caches.get(kind), tuple(rows))


def split_rows(answers: Sequence[TargetAnswer], rows: Sequence[int], batch: int) -> list[list[int]]:
    """Split rows into batches of similar length."""
    ordered = sorted(rows, key=lambda at: (answers[at].length, at))
    return [ordered[at : at + batch] for at in range(0, len(ordered), batch)]


def pad_left(prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:  # (B, L) each
    """Ids and attention mask of prompts."""
    ids = pad_sequence(list(prompts), True, padding_side="left")
    mask = pad_sequence([torch.ones_like(one) for one in prompts], True, padding_side="left")
    return ids, mask


def cache_states(
    pool: AnswerPool, reader: Reader, progress: TrainingProgress = silent
) -> dict[str, FeatureCache]:
    """The target's last states of a pool, with pictures and as text; computed once, on disk."""
    target, found = fingerprint(reader), {}
    for kind in (PICTURES, TEXT):
        folder = folder_of(pool, kind)
        found[kind] = fill_cache(pool, reader, FeatureCache(folder, {}, target), kind, progress)
    return found


def fill_cache(
    pool: AnswerPool,
    reader: Reader,
    cache: FeatureCache,
    kind: str,
    progress: TrainingProgress = silent,
) -> FeatureCache:
    """Add what a cache lacks of the target's last states."""
    source = ExampleSource(pool, reader, 0, caches={kind: cache})
    missing = [at for at in range(len(pool.answers)) if not cache.contains("hidden", at)]
    cuts = split_rows(pool.answers, missing, BATCH)
    for part in iterate_chunks(cuts, 1, "states", progress):
        cache_outputs(reader, source.make(kind, part[0]), "hidden")
    cache.flush()
    return cache


def folder_of(pool: AnswerPool, kind: str) -> Path:
    """The folder of a cache of states."""
    return pool.folder.with_name(f"{pool.folder.name}-{kind}")
