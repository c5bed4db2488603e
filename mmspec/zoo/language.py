"""Image-text examples: an image, a prompt, an answer, and the facts that an answer must state."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from PIL import Image

from mmspec.zoo.captions import write_caption
from mmspec.zoo.facts import score_caption, score_facts
from mmspec.zoo.questions import Facts, write_question
from mmspec.zoo.scene import Scene, Split, Style, sample

if TYPE_CHECKING:
    from transformers import ProcessorMixin

ExampleKind = Literal["caption", "question"]

_CAPTION_RATE = 0.65
_HELD_OUT_SEEDS = 1 << 40  # held-out scenes also come from seeds of their own


@dataclass(frozen=True)
class Example:
    """An image, a prompt and a correct answer; `facts` for questions only."""

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
    """Return `n` examples with images of `size` pixels; the two splits share no scene."""
    found: list[Example] = []
    for scene, number in scenes(n, split, seed):
        prompt, answer, facts = write(scene, number, kind)
        picture = sample(number, style).render(size)
        found.append(Example(picture, prompt, answer, scene, facts))
    return found


def scenes(n: int, split: Split = "train", seed: int = 0) -> list[tuple[Scene, int]]:
    """Return `n` scenes of a split, each with its seed."""
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
    """Return a prompt, an answer and, for a question, its facts; `seed` selects the wording."""
    generator = np.random.default_rng((seed, 1))
    is_caption = generator.random() < _CAPTION_RATE if kind is None else kind == "caption"
    facts: Facts | None = None
    if is_caption:
        prompt, answer = write_caption(scene, generator)
    else:
        prompt, answer, facts = write_question(scene, generator)
    return _vary_wording(spell(prompt), generator), spell(answer), facts


def score(example: Example, text: str) -> tuple[int, int]:
    """Return (facts right, facts required) of a text in any wording."""
    if example.facts is None:
        return score_caption(example.scene, text)
    return score_facts(example.facts, text)


def format_prompt(processor: ProcessorMixin, prompt: str) -> str:
    """Return the chat text of a prompt about one image, ready for the processor."""
    content = [{"type": "image"}, {"type": "text", "text": prompt}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert isinstance(text, str)
    return text


def spell(text: str) -> str:
    return re.sub(r"\ba(?= orange)", "an", text)


def _vary_wording(prompt: str, generator: np.random.Generator) -> str:
    """Randomly replace "picture" by "image" and drop the last punctuation mark."""
    if generator.random() < 0.3:
        prompt = prompt.replace("picture", "image")
    return prompt.rstrip(".?") if generator.random() < 0.3 else prompt


def words(text: str) -> list[str]:
    """Split text into words and punctuation marks, as the tokenizer does."""
    return re.findall(r"\w+|[^\w\s]", text)
