"""Training batches of scenes, rendered and described on the fly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import ProcessorMixin

from mmspec.zoo.language import ExampleKind, format_prompt, write
from mmspec.zoo.scene import Scene, add_texture, sample
from mmspec.zoo.scene_tensors import encode_boards, render_pixels
from tools.zoo.vlm.drawings import sample_drawing
from tools.zoo.vlm.families import IMAGE_TOKENS, ZooFamily

IGNORED = -100
Rendered = tuple[np.ndarray, Scene]  # an image (P, P, 3), and its scene
Renderer = Callable[[Scene, np.random.Generator], Rendered]  # renders a scene

_QUESTION_RATE = 0.55  # higher than in evaluation: answers have few tokens
_GROUP = 4  # batches made together and sorted by length, so that little is padding


@dataclass(frozen=True)
class Sample:
    """An image as bytes (P, P, 3), a prompt and the answer to train on."""

    image: np.ndarray
    prompt: str
    answer: str


@dataclass(frozen=True)
class Batch:
    """images: (B, P, P, 3) bytes; ids, labels: (B, L). Labels are IGNORED outside answers."""

    images: np.ndarray
    ids: Tensor
    labels: Tensor


def render_plain(scene: Scene, generator: np.random.Generator) -> Rendered:
    """Render a plain image."""
    return render_pixels(scene), scene


def render_textured(scene: Scene, generator: np.random.Generator) -> Rendered:
    """Render a textured image of the same facts."""
    return render_plain(add_texture(scene, generator), generator)


def render_drawing(scene: Scene, generator: np.random.Generator) -> Rendered:
    """Sample a flat drawing of other things; the scene is ignored."""
    return sample_drawing(generator)


def render_any_style(scene: Scene, generator: np.random.Generator) -> Rendered:
    """Render plain (25 %) or textured (25 %), or sample a flat drawing (50 %)."""
    kinds = (render_plain, render_textured, render_drawing, render_drawing)
    return kinds[generator.integers(len(kinds))](scene, generator)


class Encoder:
    """Encodes samples with the tokenizer and chat template of a processor."""

    def __init__(self, family: ZooFamily, processor: ProcessorMixin) -> None:
        self.tokenizer = processor.tokenizer
        self.family = family
        text = format_prompt(processor, "@")
        self.before, self.after = text.split("@")

    def __call__(self, samples: Sequence[Sample], blind: bool = False) -> Batch:
        """Encode samples; a blind batch has one image token instead of 36."""
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
        """Return ids and attention mask of the prompts, padded on the left: (B, L) each."""
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


def iterate_samples(
    batch: int, seed: int, renderer: Renderer = render_plain
) -> Iterator[list[Sample]]:
    """Iterate over batches of new training samples of similar length, without end."""
    generator = np.random.default_rng((seed, 2))
    for scenes in iterate_scenes(batch * _GROUP, seed):
        samples = []
        for one, number in scenes:
            picture, scene = renderer(one, generator)
            kind: ExampleKind = "question" if generator.random() < _QUESTION_RATE else "caption"
            prompt, answer, _ = write(scene, number, kind)
            samples.append(Sample(picture, prompt, answer))
        yield from group_by_length(samples, batch, generator)


def group_by_length(
    samples: Sequence[Sample], batch: int, generator: np.random.Generator
) -> Iterator[list[Sample]]:
    """Split samples into batches of similar length, in random order."""
    ordered = sorted(samples, key=lambda s: len(s.prompt) + len(s.answer))
    cuts = [ordered[i : i + batch] for i in range(0, len(ordered), batch)]
    yield from (cuts[i] for i in generator.permutation(len(cuts)))


def iterate_board_batches(
    batch: int, seed: int, renderer: Renderer = render_plain
) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Iterate over images (B, P, P, 3) and board labels (B, 9, 3), without end."""
    generator = np.random.default_rng((seed, 9))
    for scenes in iterate_scenes(batch, seed):
        rendered = [renderer(scene, generator) for scene, _ in scenes]
        yield (
            np.stack([picture for picture, _ in rendered]),
            encode_boards([scene for _, scene in rendered]),
        )


def iterate_scenes(n: int, seed: int) -> Iterator[list[tuple[Scene, int]]]:
    """Iterate over lists of `n` new training scenes with their seeds, without end."""
    number = (1 + seed) << 24
    while True:
        found: list[tuple[Scene, int]] = []
        while len(found) < n:
            scene = sample(number)
            if scene.split == "train":
                found.append((scene, number))
            number += 1
        yield found
