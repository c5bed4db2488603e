"""Small networks that predict whether a drafted token is accepted, and their files."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmspec.errors import check_is_file


class AcceptanceHead(nn.Module):
    """Two layers from `features` numbers to a logit; subclasses define these."""

    features: ClassVar[int]
    noun: ClassVar[str]  # in messages
    command: ClassVar[str]  # that trains one

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(self.features, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, features: Tensor) -> Tensor:  # (..., F) -> (...)
        logits: Tensor = self.net(features)
        return logits[..., 0]

    def save(self, file: str | Path) -> None:
        """Write a safetensors file."""
        save_file({name: one.contiguous() for name, one in self.state_dict().items()}, str(file))

    @classmethod
    def load(cls, file: str | Path) -> Self:
        """Read a file of `save`. Raises ValueError for other files."""
        check_is_file(Path(file))
        try:
            weights = load_file(str(file))
            head = cls(len(weights["net.0.bias"]))
            head.load_state_dict(weights)
        except (SafetensorError, OSError, KeyError, RuntimeError) as error:
            reason = " ".join(str(error).split())  # torch's own has several lines
            raise ValueError(
                f"{file} holds no {cls.noun} ({reason}); make one with `{cls.command}`"
            ) from error
        return head.eval()

    @classmethod
    def read(cls, given: AcceptanceHead | str | Path) -> Self:
        """A head, or that of a file. Raises ValueError for anything else."""
        if isinstance(given, str | Path):
            return cls.load(given)
        if not isinstance(given, cls):
            raise ValueError(f"head is {given!r}; give a {cls.__name__}, or the file of one")
        return given
