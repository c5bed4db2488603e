"""Examples: a picture, a prompt and an answer, with the facts that the answer must get right."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from PIL import Image

from mmspec.zoo.captions import caption
from mmspec.zoo.facts import score_answer, score_caption
from mmspec.zoo.questions import Facts, question
from mmspec.zoo.scene import Scene, Split, Style, sample

if TYPE_CHECKING:
    from transformers import ProcessorMixin

ExampleKind = Literal["caption", "question"]

_CAPTION_RATE = 0.65
_HELD_OUT_SEEDS = 1 << 40  # held-out scenes also come from seeds of their own


@dataclass(frozen=True)
class Example:
    """A picture, what is asked about it, and a right answer. Questions list the facts they ask."""

    image: Image.Image
    prompt: str
    answer: str
    scene: Scene
    facts: Facts | None = None

    @property
    def kind(self) -> ExampleKind:
        return "caption" if self.facts is None else "question"


def examples(
    n: int,
    split: Split = "train",
    seed: int = 0,
    kind: ExampleKind | None = None,
    size: int = 192,
    style: Style = "plain",
) -> list[Example]:
    """`n` examples with pictures of `size` pixels. No scene is on both sides of the split."""
    found: list[Example] = []
    for scene, number in scenes(n, split, seed):
        prompt, answer, facts = write(scene, number, kind)
        picture = sample(number, style).render(size)
        found.append(Example(picture, prompt, answer, scene, facts))
    return found


def scenes(n: int, split: Split = "train", seed: int = 0) -> list[tuple[Scene, int]]:
    """`n` scenes of one side of the split, each with the number it was drawn from."""
    if split not in ("train", "held-out"):
        raise ValueError(f"split is {split!r}; it must be 'train' or 'held-out'")
    found: list[tuple[Scene, int]] = []
    number = (seed << 24) + (_HELD_OUT_SEEDS if split == "held-out" else 0)
    while len(found) < n:
        scene = sample(number)
        if scene.split == split:
            found.append((scene, number))
        number += 1
    return found


def write(
    scene: Scene, seed: int, kind: ExampleKind | None = None
) -> tuple[str, str, Facts | None]:
    """A prompt, an answer and, for a question, the facts asked. `seed` picks the wording."""
    generator = np.random.default_rng((seed, 1))
    is_caption = generator.random() < _CAPTION_RATE if kind is None else kind == "caption"
    facts: Facts | None = None
    if is_caption:
        prompt, answer = caption(scene, generator)
    else:
        prompt, answer, facts = question(scene, generator)
    return _loosen(spell(prompt), generator), spell(answer), facts


def score(example: Example, text: str) -> tuple[int, int]:
    """Facts right and facts asked, whatever the wording of `text`."""
    if example.facts is None:
        return score_caption(example.scene, text)
    return score_answer(example.facts, text)


def format_prompt(processor: ProcessorMixin, prompt: str) -> str:
    """The chat text of a question about one picture, ready for the processor."""
    content = [{"type": "image"}, {"type": "text", "text": prompt}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert isinstance(text, str)
    return text


def spell(text: str) -> str:
    return re.sub(r"\ba(?= orange)", "an", text)


def _loosen(prompt: str, generator: np.random.Generator) -> str:
    """People write "image" for "picture" and leave out the last mark; nothing else changes."""
    if generator.random() < 0.3:
        prompt = prompt.replace("picture", "image")
    return prompt.rstrip(".?") if generator.random() < 0.3 else prompt


def words(text: str) -> list[str]:
    """Split text the way the tokenizer does: words and punctuation marks."""
    return re.findall(r"\w+|[^\w\s]", text)
