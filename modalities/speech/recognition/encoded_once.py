"""One request, one pass of the encoder per piece of sound, however often the library asks for it.

Whisper's own `generate()` encodes a window to detect its language, again to write, and again at
every temperature it falls back to. Rows that were encoded before are handed out again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput


class EncodedOnce:
    """Encoder states of the rows of one request.

    `features` are those that were asked for last: a draft model with an encoder of its own reads
    them, which transformers would hand on encoded only.
    """

    def __init__(self, encoder: Any) -> None:
        self.held = vars(encoder).get("forward")  # what hooks of others put there
        self.forward, self.users = encoder.forward, 0
        self.states: dict[bytes, Tensor] = {}
        self.features: Tensor | None = None

    def __call__(self, input_features: Tensor, *args: Any, **options: Any) -> Any:
        """As the encoder's forward; only unknown rows go through it."""
        if args or any(_asks(value) for name, value in options.items() if name != "return_dict"):
            return self.forward(input_features, *args, **options)
        self.features = input_features
        keys = [_bytes(row) for row in input_features]
        new = {key: row for row, key in enumerate(keys) if key not in self.states}
        if new:
            found = self.forward(input_features[list(new.values())])[0]
            known = {key: state for key, state in self.states.items() if key in keys}
            self.states = {**known, **dict(zip(new, found, strict=True))}  # of this window alone
        return BaseModelOutput(last_hidden_state=torch.stack([self.states[key] for key in keys]))


@contextmanager
def encoded_once(model: Any) -> Iterator[EncodedOnce]:
    """The model's encoder remembers within this block."""
    encoder = model.get_encoder()
    held = vars(encoder).get("forward")  # of a stream that is still being read
    once = held if isinstance(held, EncodedOnce) else EncodedOnce(encoder)
    once.users += 1
    encoder.forward = once
    try:
        yield once
    finally:
        once.users -= 1
        if not once.users:
            del encoder.forward
            if once.held is not None:
                encoder.forward = once.held


def _bytes(row: Tensor) -> bytes:
    return row.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _asks(value: Any) -> bool:
    """Whether an option asks for more than states."""
    return value is not None and value is not False
