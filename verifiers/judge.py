"""Judges: a head on the target's states accepts drafted tokens that the answer does not need."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.errors import check_is_file, check_number
from mmspec.recipe import Deferred, Kit
from mmspec.verifiers.exact import Exact
from mmspec.verifiers.recursive import Recursive


class JudgeHead(nn.Module):
    """P(a drafted token is acceptable) from the target's last state at it, by one linear layer."""

    def __init__(self, size: int, threshold: float = 0.5) -> None:
        super().__init__()
        self.linear = nn.Linear(size, 1)
        self.threshold = threshold  # above it a token is accepted; chosen when it is trained

    def forward(self, states: Tensor) -> Tensor:  # (..., H) -> (...) in [0, 1]
        weight = self.linear.weight.to(states.device)
        bias = self.linear.bias.to(states.device)
        chance: Tensor = nn.functional.linear(states.float(), weight, bias)[..., 0].sigmoid()
        return chance

    @property
    def size(self) -> int:
        """Width of the target's states."""
        return int(self.linear.in_features)

    def save(self, file: str | Path) -> None:
        """Write a safetensors file."""
        weights = {"weight": self.linear.weight.data, "bias": self.linear.bias.data}
        save_file({**weights, "threshold": torch.tensor(self.threshold)}, str(file))

    @classmethod
    def load(cls, file: str | Path) -> JudgeHead:
        """Read a file of `save`. Raises ValueError for other files."""
        check_is_file(Path(file))
        try:
            weights = load_file(str(file))
            head = cls(weights["weight"].shape[1], float(weights.pop("threshold")))
            head.linear.load_state_dict(weights)
        except (SafetensorError, OSError, KeyError, IndexError, RuntimeError) as error:
            raise ValueError(
                f"{file} holds no judge ({error}); make one with `mmspec train judge`"
            ) from error
        return head.eval()


@dataclass(frozen=True, eq=False)
class JudgedTokens:
    """Speculative sampling, but the tokens in `accepted` (B, N) are accepted whatever p is."""

    accepted: Tensor
    lossless: ClassVar[bool] = False

    def accept(self, p: Categorical, q: Categorical, x: Tensor) -> Tensor:  # (B, N) -> (B, N)
        chance = Exact().accept(p, q, x)
        return torch.where(self.accepted, torch.ones_like(chance), chance)

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        return Exact().residual(p, q, x)


@dataclass(frozen=True)
class Judge(Verifier):
    """Accept what a head accepts, and what speculative sampling does (judge decoding, AutoJudge).

    Bachmann et al. 2025; Garipov et al. 2025. A token is accepted if the head gives it more than
    `threshold` (default: the head's own), whatever its probability; corrections are those of
    speculative sampling. Chains only: the state is that of the token itself, in its own path. The
    decision depends on a token's state, which other tokens do not have, so the bias has no closed
    form over the vocabulary: runs report its unbiased estimate, |a(x) - min(1, p(x) / q(x))|.
    Lossy; a threshold of 1 is exact.
    """

    head: JudgeHead
    threshold: float | None = None
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.WOR, Kind.IID, Kind.DET)
    lossless: ClassVar[bool] = False
    uses_trees: ClassVar[bool] = False
    required_features: ClassVar[frozenset[str]] = frozenset({"hidden"})

    def __post_init__(self) -> None:
        if self.threshold is not None:
            check_number("threshold", self.threshold, 0, 1, example=0.5)

    @torch.no_grad()
    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        if not draft.nodes:
            return Recursive().verify(draft, scores, noise)
        states = scores.features["hidden"][: draft.batch, 1:]  # with guidance of both branches
        limit = self.head.threshold if self.threshold is None else self.threshold
        accepted = self.head(states).to(draft.tokens.device) > limit
        return Recursive(JudgedTokens(accepted)).verify(draft, scores, noise)


def build_judge(kit: Kit) -> Verifier:
    """The judge of a kit, exact without one. Raises ValueError for one of another target."""
    head: JudgeHead | None = kit.load_option("judge", JudgeHead)
    if head is None:
        return Recursive()
    size = int(kit.target.config.hidden_size)
    if head.size != size:
        raise ValueError(
            f"judge reads states of width {head.size}, but those of the target have {size}; train "
            "one for this target with `mmspec train judge`"
        )
    return Judge(head, kit.options["threshold"])


JUDGED: Deferred[Verifier] = Deferred(build_judge, "Recursive, and what a trained judge accepts")
