"""Training batches, made on the fly: fresh scenes, rendered and described as they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import ProcessorMixin

from mmspec.zoo.boards import boards, pixels
from mmspec.zoo.language import ExampleKind, format_prompt, write
from mmspec.zoo.scene import Scene, sample, textured
from tools.zoo.vlm.drawings import drawing
from tools.zoo.vlm.families import IMAGE_TOKENS, ZooFamily

IGNORED = -100
Look = tuple[np.ndarray, Scene]  # a picture (P, P, 3), and what is on it
Looks = Callable[[Scene, np.random.Generator], Look]  # what a scene is made into

_QUESTION_RATE = 0.55  # more than are asked later: an answer is short and teaches few words
_GROUP = 4  # batches made together and sorted by length, so that little is padding


@dataclass(frozen=True)
class Sample:
    """A picture as bytes (P, P, 3), a prompt and the answer to learn."""

    image: np.ndarray
    prompt: str
    answer: str


@dataclass(frozen=True)
class Batch:
    """images: (B, P, P, 3) bytes; ids, labels: (B, L). Labels are IGNORED outside answers."""

    images: np.ndarray
    ids: Tensor
    labels: Tensor


def plainly(scene: Scene, generator: np.random.Generator) -> Look:
    """A plain picture."""
    return pixels(scene), scene


def on_materials(scene: Scene, generator: np.random.Generator) -> Look:
    """A picture of the same facts, things at free places."""
    return plainly(textured(scene, generator), generator)


def as_drawing(scene: Scene, generator: np.random.Generator) -> Look:
    """A flat drawing of other things."""
    return drawing(generator)


def on_any_ground(scene: Scene, generator: np.random.Generator) -> Look:
    """Plain or on materials, as often one as the other, or as often as both a flat drawing."""
    kinds = (plainly, on_materials, as_drawing, as_drawing)
    return kinds[generator.integers(len(kinds))](scene, generator)


class Encoder:
    """Turns samples into batches with the tokenizer and chat template of a processor."""

    def __init__(self, family: ZooFamily, processor: ProcessorMixin) -> None:
        self.tokenizer = processor.tokenizer
        self.family = family
        text = format_prompt(processor, "@")
        self.before, self.after = text.split("@")

    def __call__(self, samples: Sequence[Sample], blind: bool = False) -> Batch:
        """Encode samples; a blind batch has one image token where there would be 36."""
        prompts = self._prompts(samples, 1 if blind else IMAGE_TOKENS)
        answers = self.tokenizer([s.answer for s in samples]).input_ids
        end = self.tokenizer.eos_token_id
        rows = [p + a + [end] for p, a in zip(prompts, answers, strict=True)]
        ids = torch.full((len(rows), max(map(len, rows))), self.tokenizer.pad_token_id)
        labels = torch.full_like(ids, IGNORED)
        for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
            ids[i, : len(row)] = torch.tensor(row)
            labels[i, len(prompt) : len(row)] = ids[i, len(prompt) : len(row)]
        return Batch(np.stack([s.image for s in samples]), ids, labels)

    def prompts(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        """Ids and attention mask of the prompts alone, padded on the left: (B, L) each."""
        rows = self._prompts(samples, IMAGE_TOKENS)
        longest = max(map(len, rows))
        pad = self.tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows])
        mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
        return ids, torch.tensor(mask)

    def _prompts(self, samples: Sequence[Sample], image_tokens: int) -> list[list[int]]:
        token = self.family.image_token
        before = self.before.replace(token, token * image_tokens)
        ids: list[list[int]] = self.tokenizer(
            [before + s.prompt + self.after for s in samples]
        ).input_ids
        return ids


def fresh(batch: int, seed: int, looks: Looks = plainly) -> Iterator[list[Sample]]:
    """Batches of new training samples without end, of similar length within a batch."""
    generator = np.random.default_rng((seed, 2))
    for scenes in training_scenes(batch * _GROUP, seed):
        samples = []
        for one, number in scenes:
            picture, scene = looks(one, generator)
            kind: ExampleKind = "question" if generator.random() < _QUESTION_RATE else "caption"
            prompt, answer, _ = write(scene, number, kind)
            samples.append(Sample(picture, prompt, answer))
        yield from grouped(samples, batch, generator)


def grouped(
    samples: Sequence[Sample], batch: int, generator: np.random.Generator
) -> Iterator[list[Sample]]:
    """Cut samples into batches of similar length, in random order."""
    ordered = sorted(samples, key=lambda s: len(s.prompt) + len(s.answer))
    cuts = [ordered[i : i + batch] for i in range(0, len(ordered), batch)]
    yield from (cuts[i] for i in generator.permutation(len(cuts)))


def seen(batch: int, seed: int, looks: Looks = plainly) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Pictures (B, P, P, 3) and what is in each place, (B, 9, 3), without end."""
    generator = np.random.default_rng((seed, 9))
    for scenes in training_scenes(batch, seed):
        shown = [looks(scene, generator) for scene, _ in scenes]
        yield np.stack([picture for picture, _ in shown]), boards([scene for _, scene in shown])


def training_scenes(n: int, seed: int) -> Iterator[list[tuple[Scene, int]]]:
    """Lists of `n` new training scenes without end, each with the number it was drawn from."""
    number = (1 + seed) << 24
    while True:
        found: list[tuple[Scene, int]] = []
        while len(found) < n:
            scene = sample(number)
            if scene.split == "train":
                found.append((scene, number))
            number += 1
        yield found
