"""For which target a head was made: what that target's output head says of a few fixed states.

    sign(head, reader)           # notes it in the head's configuration, which is saved with it
    check_signed(head, reader)   # refuses a head of another target

Not weights are compared but what they do, so targets are told apart whatever their dtype, device or
quantisation. Targets that share an output head, such as fine-tuned ones, pass for each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from mmspec.targets.readers.reader import Reader

KEY = "target_fingerprint"
_STATES, _TOKENS = 8, 16  # probed
_SAME = 0.95  # cosine of what is said of a token, in the median: 0 +- 0.4 for another target


def fingerprint(target: Reader) -> list[list[float]] | None:
    """Per token, its logit behind each state, centred and of norm 1.

    None for a target without weights in memory, or that says the same of all states.
    """
    if target.device.type == "meta":
        return None
    states = _signs(_STATES, int(target.config.hidden_size))
    with torch.no_grad():
        logits = target.head(states.to(target.device, target.model.dtype)).double().cpu()
    size = logits.shape[-1]
    tokens = (2 * torch.arange(_TOKENS) + 1) * size // (2 * _TOKENS)
    said = logits[:, tokens].T.nan_to_num(0.0, 0.0, 0.0)
    said = said - said.mean(-1, keepdim=True)
    norms = said.norm(dim=-1, keepdim=True)
    if not bool((norms > 0).any()):
        return None
    return [[round(one, 4) for one in row] for row in (said / norms.clamp_min(1e-30)).tolist()]


def sign(head: Any, target: Reader) -> None:
    """Note in a head's configuration which target it was made for."""
    found = fingerprint(target)
    if found is not None:
        setattr(head.config, KEY, found)


def check_signed(head: Any, target: Reader) -> None:
    """Refuse a head that was signed for another target; heads without a note pass.

    Raises ValueError.
    """
    noted = vars(head.config).get(KEY) if isinstance(head, PreTrainedModel) else None
    ours = None if noted is None else fingerprint(target)
    if noted is None or ours is None:
        return
    if not agree(noted, ours):
        raise ValueError(
            f"this {type(head).__name__} was made for another target than "
            f"{target.model.config._name_or_path or f'this {type(target.model).__name__}'}: their "
            "output heads say different things of the same states; train a head for this target "
            "with `mmspec train`, or give the target it was made for"
        )


def agree(one: list[list[float]], other: list[list[float]]) -> bool:
    """Whether two fingerprints are of one target."""
    return bool((torch.tensor(one) * torch.tensor(other)).sum(-1).median() > _SAME)


def _signs(rows: int, columns: int) -> Tensor:  # (rows, columns) of -1 and 1, alike everywhere
    place = torch.arange(rows * columns, dtype=torch.int64).reshape(rows, columns)
    mixed = (place * 6_364_136_223_846_793_005 + 1_442_695_040_888_963_407) >> 33
    mixed = (mixed ^ (mixed >> 15)) * 2_246_822_519
    return torch.where((mixed >> 13) & 1 == 0, 1.0, -1.0)
