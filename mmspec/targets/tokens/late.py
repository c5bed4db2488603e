"""A prompt that is read with its first draft, or never.

Both are read in one forward where a model reads them so as one after the other. Classes differ in
that: the tokens of a prefix may see each other, and positions or windows may go by its end. So the
first draft of a class with its configuration is read both ways and the scores are compared; where
these differ by more than rounding, prompts are read by themselves (see
`mmspec.targets.readers.check`, which asks the same about what stands behind a prompt).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from mmspec.draft import Draft
from mmspec.targets.memory import Memory, RowMemories
from mmspec.targets.readers.backbone import Backbone, windows_of
from mmspec.targets.readers.check import configured, difference, margin
from mmspec.targets.readers.encoder_decoder import EncoderDecoder
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.context import Request
from mmspec.targets.tokens.inputs import lengthened

# by class, configuration, library and kind of request: a global, because models come and go
_agreed: dict[tuple[Any, ...], bool] = {}


class Unread:
    """Stands for the memory of a prompt until somebody asks the target.

    The last token of the prompt waits to be read with the first draft, so that the first new token
    can be drafted, too. Where a gate keeps all that was drafted, nothing is ever read.
    """

    saved = None  # no state to go back to

    def __init__(
        self,
        slots: int,
        rows: int,
        read: Callable[[], tuple[Memory | RowMemories, Tensor]],
        offer: dict[str, Any],
    ) -> None:
        self.found: Memory | RowMemories | None = None
        self.logits: Tensor | None = None  # (B, V) behind a prompt that was read by itself
        self.offer = offer  # what becomes known of the prompt once it is read
        self._kept = [slots - 1] * rows
        self._read = read

    @property
    def kept(self) -> list[int]:
        return self._kept if self.found is None else self.found.kept

    def opened(self) -> Memory | RowMemories:
        """The memory itself; the first call reads the prompt.

        Raises ValueError for states of recurrent layers, which do not go back by a token.
        """
        if self.found is None:
            found, self.logits = self._read()
            if found.saved is not None:
                raise ValueError(
                    "a draft of the first token needs a memory that goes back by a token, and this "
                    "model keeps a recurrent state; use another recipe"
                )
            found.advance([-1] * len(self._kept))
            self.found = found
        return self.found


def forget() -> None:
    """Have every model asked again."""
    _agreed.clear()


@dataclass(frozen=True)
class Opening:
    """A prompt that nobody has read yet, and a chain of drafted tokens right behind it."""

    reader: Backbone | EncoderDecoder
    request: Request
    draft: Draft

    @classmethod
    def of(cls, reader: Reader, request: Request, draft: Draft) -> Opening | None:
        """None where the two cannot be read together, whatever the class does with them."""
        inputs = request.inputs
        if not isinstance(reader, Backbone | EncoderDecoder) or not reader.can_branch:
            return None
        if reader.model.training or request.past is not None or inputs.get("sizes") is not None:
            return None
        if not draft.is_chain or not draft.nodes or draft.reading is not None:
            return None
        return cls(reader, request, draft)

    @property
    def is_trusted(self) -> bool | None:
        """Whether such requests are known to be read alike both ways; None = not asked yet."""
        return _agreed.get(self._key())

    def read(self) -> tuple[Memory | RowMemories, Tensor]:
        """One forward: logits (B, 1 + N, V) behind the prompt and every node, and the memory.

        The memory stands before the last token of the prompt, as if that waited for its draft.
        """
        longer = lengthened(self.reader, self.request.inputs, self.draft.tokens)
        places = self.draft.nodes + 1
        out: Any
        memory, _, out = self.reader.prefill(longer, self.request.room + 64, scored=places)
        memory.advance([-places] * self.draft.batch)
        return memory, self.reader.divided(out.logits[:, -places:])

    def compare(self, logits: Tensor) -> None:  # (B, 1 + N, V) of the prompt read by itself
        """Note whether both ways agree; nothing where there are no scores to compare."""
        if not bool(logits.isfinite().any(-1).all()):
            return
        try:
            _, together = self.read()
        except torch.OutOfMemoryError:
            raise
        except Exception:  # whatever a class does with a prompt that is longer than it should be
            _agreed[self._key()] = False
            return
        apart = float(difference(together, logits))
        _agreed[self._key()] = apart <= margin(self.reader.model.dtype)

    def _key(self) -> tuple[Any, ...]:
        reader, inputs = self.reader, self.request.inputs
        model, given = reader.model, {n for n, value in inputs.items() if value is not None}
        mask, carrier = inputs.get("attention_mask"), self.draft.tokens
        prompt = inputs["input_ids"] if "input_ids" in given else inputs["inputs_embeds"]
        slots = prompt.shape[1] + self.draft.nodes
        return (
            *(type(model), transformers.__version__, configured(reader)),
            *(str(reader.config._attn_implementation), model.dtype, carrier.device.type),
            *(tuple(sorted(given)), len(carrier) > 1, mask is not None and not bool(mask.all())),
            tuple(size for size in windows_of(reader.config) if size < slots),
        )
