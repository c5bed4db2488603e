"""Answers to the rows of a data set on many machines, by Ray Data.

    rows = ray.data.read_json("questions.jsonl")  # {"id": 7, "prompt": "...", "image": "a.png"}
    answers = rows.map_batches(
        mmspec.ray.Generate, fn_constructor_args=("zoo:llava",), concurrency=2, batch_size=16
    )

Each actor holds one accelerated model and decodes the rows of a batch as they come
(`mmspec.serving.engine.Engine`). Ray runs the batches of a lost actor again. Needs the extra
`[ray]`; nothing of Ray is imported here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmspec import registry
from mmspec.accelerated import Accelerated
from mmspec.api import accelerate
from mmspec.errors import first_line
from mmspec.serving.chat import Part, Turn
from mmspec.serving.engine import Engine

MAX_QUEUE = 1 << 20  # a batch is submitted as a whole


class Generate:
    """A callable class for `ray.data.Dataset.map_batches`: text and vision-language models.

    Args:
        model: A folder, a hub name or "zoo:NAME"; or a function that returns what
            `mmspec.accelerate` returned, called in the actor: for a placement of one's own.
        recipe: As for `mmspec.accelerate`; `drafter` and `parts` likewise.
        prompt: The column of the texts.
        image: The column of the images, paths or encoded bytes; rows without one have None. The
            column may be missing.
        key: The column that identifies a row, of unique values; where it is missing, prompt and
            image do. Noise depends on `seed` and the key alone: not on batches, actors or retries.
        settings: Generation settings of all rows, as of `generate`.
        max_rows: Rows that are decoded at a time.
        threads: Processor threads of an actor; default: torch's own.

    Returns the columns of the batch and "text", "num_tokens" and "error". A row that fails has an
    empty text and the reason as its error, others None; the rest of the batch is not affected.

    Raises:
        ValueError: A model that writes no text, or a recipe that cannot decode rows together.
    """

    def __init__(
        self,
        model: str | Callable[[], Accelerated],
        recipe: str | None = None,
        drafter: str | None = None,
        *,
        prompt: str = "prompt",
        image: str = "image",
        key: str = "id",
        seed: int = 0,
        settings: Mapping[str, Any] | None = None,
        max_rows: int = 8,
        threads: int | None = None,
        **parts: Any,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        fast = model() if callable(model) else accelerate(model, recipe, drafter=drafter, **parts)
        whole = fast.session.model
        name = model if isinstance(model, str) else str(whole.config._name_or_path)
        self.chat = registry.chat_model(fast.modality, name, whole)
        if self.chat is None:
            raise ValueError(
                f"models of modality {fast.modality.name} write no text; give a text or "
                "vision-language model"
            )
        self.engine = Engine(fast, max_rows=max_rows, max_queue=MAX_QUEUE)
        self.prompt, self.image, self.key, self.seed = prompt, image, key, seed
        self.settings = {"max_new_tokens": 128, **(settings or {})}

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Answer the rows of a batch, columns of equal length."""
        if self.prompt not in batch:
            raise ValueError(
                f"the data has no column {self.prompt!r}, but {', '.join(batch)}; give prompt= one"
            )
        columns = {name: list(values) for name, values in batch.items()}
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        answers = [self._finish(one) for one in [self._submit(row) for row in rows]]
        texts, counts, errors = zip(*answers, strict=True) if answers else ((), (), ())
        found = {"text": texts, "num_tokens": counts, "error": errors}
        return {**batch, **{name: np.array(one, dtype=object) for name, one in found.items()}}

    def _submit(self, row: Mapping[str, Any]) -> Future[Any] | Exception:
        """Queue a row, or return why it cannot be read."""
        try:
            parts = [Part("text", str(row[self.prompt]))]
            picture = row.get(self.image)
            if picture is not None:
                data = picture if isinstance(picture, bytes) else Path(str(picture)).read_bytes()
                parts.insert(0, Part("image", data=data))
            inputs = self.chat.make_inputs([Turn("user", tuple(parts))])
            return self.engine.submit({**inputs, **self.settings, "seed": self._row_seed(row)})
        except (ValueError, OSError) as error:
            return error

    def _row_seed(self, row: Mapping[str, Any]) -> int:
        """The seed of a row, by its key."""
        key = row[self.key] if self.key in row else (row[self.prompt], row.get(self.image))
        digest = hashlib.sha256(repr((self.seed, key)).encode()).digest()
        return int.from_bytes(digest[:7], "big")

    def _finish(self, one: Future[Any] | Exception) -> tuple[str, int, str | None]:
        """Text, number of new tokens, and the error of a row."""
        error = one if isinstance(one, Exception) else one.exception()
        if error is not None:
            assert isinstance(error, Exception)
            return "", 0, first_line(error)
        assert isinstance(one, Future)
        tokens = one.result().tokens
        return self.chat.tokenizer.decode(tokens, skip_special_tokens=True), len(tokens), None
