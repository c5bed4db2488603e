"""Deferred prefill: the prompt is read with its first draft, or not at all.

Prompt and draft are read in one forward if that gives the scores of two. Model classes differ: the
tokens of a prefix may attend to each other, and positions or windows may depend on its end. So the
first draft of a class with its configuration is read both ways and the scores are compared; if
these differ by more than rounding, prompts are read on their own (see
`mmspec.targets.readers.check`, which compares the tokens after a prompt).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from mmspec.draft import Draft
from mmspec.targets.cache import windows_of
from mmspec.targets.memory import Memory, RowMemories
from mmspec.targets.readers.backbone import Backbone
from mmspec.targets.readers.check import configuration_key
from mmspec.targets.readers.encoder_decoder import EncoderDecoder
from mmspec.targets.readers.reader import Reader
from mmspec.targets.readers.rounding import rounding_margin, score_difference
from mmspec.targets.tokens.context import Request, append_tokens

# by class, configuration, library and kind of request; global, as models have shorter lifetimes
_agreed: dict[tuple[Any, ...], bool] = {}


class DeferredPrefill:
    """The memory of a prompt that is read at the first target forward.

    The last token of the prompt stays pending and is read with the first draft, so that the first
    new token can be drafted too. If a gate accepts everything drafted, the prompt is never read.
    """

    saved_state = None  # no state to go back to

    def __init__(
        self,
        slots: int,
        rows: int,
        read: Callable[[], tuple[Memory | RowMemories, Tensor]],
        offer: dict[str, Any],
    ) -> None:
        self.memory: Memory | RowMemories | None = None
        self.logits: Tensor | None = None  # (B, V) after a prompt that was read on its own
        self.offer = offer  # features of the prompt, filled when it is read
        self._kept = [slots - 1] * rows
        self._read = read

    @property
    def lengths(self) -> list[int]:
        return self._kept if self.memory is None else self.memory.lengths

    def run(self) -> Memory | RowMemories:
        """Return the memory; the first call reads the prompt.

        Raises ValueError for recurrent states, which cannot be rolled back by a token.
        """
        if self.memory is None:
            found, self.logits = self._read()
            if found.saved_state is not None:
                raise ValueError(
                    "a draft of the first token needs a cache that can be rolled back, but this "
                    "model has a recurrent state; use another recipe"
                )
            found.advance([-1] * len(self._kept))
            self.memory = found
        return self.memory


def clear_cache() -> None:
    """Clear all results, so that every model is checked again."""
    _agreed.clear()


@dataclass(frozen=True)
class JointPrefill:
    """A prompt that was not read yet, followed by a chain of drafted tokens."""

    reader: Backbone | EncoderDecoder
    request: Request
    draft: Draft

    @classmethod
    def from_request(cls, reader: Reader, request: Request, draft: Draft) -> JointPrefill | None:
        """None if the two can never be read together."""
        inputs = request.inputs
        if not isinstance(reader, Backbone | EncoderDecoder) or not reader.can_branch:
            return None
        if reader.model.training or request.past is not None or inputs.get("sizes") is not None:
            return None
        if not draft.is_chain or not draft.nodes or draft.node_inputs is not None:
            return None
        images = draft.tokens.new_tensor(reader.placeholder_ids)
        if bool(torch.isin(draft.tokens, images).any()):  # without features, in a prompt
            return None
        return cls(reader, request, draft)

    @property
    def is_trusted(self) -> bool | None:
        """Whether both ways give the same scores for such requests; None = not checked yet."""
        return _agreed.get(self._key())

    def read(self) -> tuple[Memory | RowMemories, Tensor]:
        """One forward: the memory, and logits (B, 1 + N, V) after the prompt and every node.

        The last token of the prompt is left pending in the memory.
        """
        longer = append_tokens(self.reader, self.request.inputs, self.draft.tokens)
        places = self.draft.nodes + 1
        out: Any
        memory, _, out = self.reader.prefill(
            longer, self.request.max_new_tokens + 64, scored=places
        )
        memory.advance([-places] * self.draft.batch)
        return memory, self.reader.divide_logits(out.logits[:, -places:])

    def compare(self, logits: Tensor) -> None:  # (B, 1 + N, V) of the prompt read on its own
        """Store whether both ways agree; nothing if the logits are not finite."""
        if not bool(logits.isfinite().any(-1).all()):
            return
        try:
            _, joint = self.read()
        except torch.OutOfMemoryError:
            raise
        except Exception:  # some classes fail on a longer prompt
            _agreed[self._key()] = False
            return
        gap = float(score_difference(joint, logits))
        _agreed[self._key()] = gap <= rounding_margin(self.reader.model.dtype)

    def _key(self) -> tuple[Any, ...]:
        reader, inputs = self.reader, self.request.inputs
        model, given = reader.model, {n for n, value in inputs.items() if value is not None}
        mask, carrier = inputs.get("attention_mask"), self.draft.tokens
        prompt = inputs["input_ids"] if "input_ids" in given else inputs["inputs_embeds"]
        slots = prompt.shape[1] + self.draft.nodes
        return (
            *(type(model), transformers.__version__, configuration_key(reader)),
            *(str(reader.config._attn_implementation), model.dtype, carrier.device.type),
            *(tuple(sorted(given)), len(carrier) > 1, mask is not None and not bool(mask.all())),
            tuple(size for size in windows_of(reader.config) if size < slots),
        )
