"""From training data to tensors: questions with pictures, as a language model is asked them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from mmspec import _hf
from mmspec.api import accelerate
from mmspec.modalities.common import formatting
from mmspec.modalities.common.pictures import open_picture
from mmspec.targets.readers.reader import Reader
from mmspec.training.conversations import Question, Turn
from mmspec.training.reporting import Report


class LanguageTeacher:
    """Asks one model the questions of a data set, and knows how its answers end.

    Raises ValueError at construction for a model that is not asked by its tokens.
    """

    def __init__(self, source: str, model: Any, **options: Any) -> None:
        session: Any = accelerate(model, "plain").session
        if session.model is not session.bound.model:
            raise ValueError(
                f"{type(model).__name__} leaves the words to its "
                f"{type(session.bound.model).__name__}; train a head for that part by itself"
            )
        self.source, self.model = source, model
        self.reader: Reader = session.bound.backbone
        self.sees = "pixel_values" in self.reader.family.media
        self.processor = formatting.processor(source, model, self.sees, **options)
        self.ends = _hf.eos_ids(model.generation_config)
        self.longest = None

    def check(self, questions: Sequence[Question]) -> None:
        """Refuse pictures for a model that reads none. Raises ValueError."""
        shown = next((one for one in questions if one.pictures), None)
        if shown is not None and not self.sees:
            raise ValueError(
                f"{self.source} is a text model and takes no picture, but {shown.place} names "
                f"{shown.pictures[0]}; give text alone, or another target"
            )

    def load_media(self, question: Question) -> list[Image.Image]:
        """The pictures of a question. Raises ValueError naming what cannot be read."""
        return [open_picture(one) for one in question.pictures]

    def inputs(
        self, questions: Sequence[Question], pictures: Sequence[Sequence[Image.Image]]
    ) -> dict[str, Tensor]:
        """What `generate` takes, padded on the left: (B, L) ids and what stands for pictures.

        All questions of a batch have pictures, or none has.
        """
        texts = [self._text(one.turns) for one in questions]
        if self.sees:
            seen = [list(row) for row in pictures] if any(pictures) else None
            made = self.processor(text=texts, images=seen, padding=True, return_tensors="pt")
        else:
            made = self.processor(texts, padding=True, return_tensors="pt")
            made.pop("token_type_ids", None)
        return {name: value.to(self.reader.device) for name, value in made.items()}

    def tokens(self, answer: str) -> list[int]:
        """An answer of the data as the model would have said it, with its end."""
        words = formatting.tokenizer(self.processor)
        ids: list[int] = words(answer, add_special_tokens=False).input_ids
        last = words.eos_token_id if words.eos_token_id in self.ends else None
        return [*ids, *([last] if last is not None else sorted(self.ends)[:1])]

    def _text(self, turns: Sequence[Turn]) -> str:
        """Turns in the model's chat form; one below the other where it has none."""
        words = formatting.tokenizer(self.processor)
        is_tokenizer = words is self.processor
        if not self.processor.chat_template:
            mark = "" if is_tokenizer else vars(self.processor).get("image_token", "<image>")
            lines = (mark if part is None else part for turn in turns for part in turn.parts)
            return "\n".join(filter(None, lines))
        said = []
        for turn in turns:
            parts: Any = [
                {"type": "image"} if part is None else {"type": "text", "text": part}
                for part in turn.parts
            ]
            content = "".join(filter(None, turn.parts)) if is_tokenizer else parts
            said.append({"role": turn.role, "content": content})
        found = self.processor.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
        return str(found)


def names_environment(data: str) -> bool:
    """No data are its own: nobody knows what it will be asked."""
    return False


def record_episodes(
    data: str, teacher: LanguageTeacher, folder: Path, seed: int, progress: Report
) -> Path:
    """There is none to make."""
    raise AssertionError(f"{data} is no data that a language model makes")


skeleton = formatting.skeleton
teacher = LanguageTeacher
