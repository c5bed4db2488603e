"""Drafts for a beam search: a beam search of the draft model from the beams of the target.

The drafted nodes of a level are the best continuations of all beams together (AtSpeed, Lin et al.
2025), by the target's score of a beam plus the draft model's log probabilities. Sampled beams are
drafted with the noise that the target's are drawn with, and all of them with the target's own
logits processors, so constrained beams are drafted among allowed tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmspec._hf_beams import UNSTARTED
from mmspec.distributions.noise import Keys
from mmspec.draft import Drafter
from mmspec.drafters.neural.small_model import Autoregressive, SmallModel
from mmspec.drafters.plain import NoDraft
from mmspec.targets.branches import BeamDraft, Branches, Kept, read_branches
from mmspec.targets.memory import Memory
from mmspec.targets.tokens.context import Context

WIDTH = 3  # drafted nodes of a level per beam


class BeamDrafter(ABC):
    """Drafts for all beams of a request."""

    @abstractmethod
    def begin(self, context: Context) -> None:
        """Read the prompt."""

    @abstractmethod
    def propose(
        self,
        tree: Branches,
        scores: Tensor,
        left: Sequence[int],
        sequences: Sequence[Tensor],
        noise: Keys | None = None,
    ) -> BeamDraft:
        """A draft after the last N nodes of the tree, beams of the `scores` (B, N).

        Of every row, at most `left` tokens after the next one are needed, and `sequences` (N, L)
        are the ids of its beams, prompt included; `noise` (B, N) are the keys of sampled beams.
        """

    @property
    def num_committable(self) -> int | None:
        """Nodes of the last draft that may be committed; None = all."""
        return None

    def keep(self, kept: Kept) -> None:
        """Keep some nodes of the last draft."""
        return


class NoBeamDraft(BeamDrafter):
    """No draft: plain beam search over one copy of the prompt."""

    def begin(self, context: Context) -> None:
        return

    def propose(
        self,
        tree: Branches,
        scores: Tensor,
        left: Sequence[int],
        sequences: Sequence[Tensor],
        noise: Keys | None = None,
    ) -> BeamDraft:
        count = scores.shape[1]
        return BeamDraft(tree, tree.nodes - count, count)


class ModelBeams(BeamDrafter):
    """The beams of a draft model with a cache of its own, `depth` levels of `width` per beam."""

    def __init__(
        self,
        model: SmallModel,
        depth: int,
        width: int,
        eos: Sequence[int],
        vocabulary: int,
        processors: Sequence[Sequence[Any]] = (),
    ) -> None:
        self.model, self.depth, self.width, self.processors = model, depth, width, processors
        self.eos, self.vocabulary = list(eos), vocabulary
        self.memory: Any = None
        self.num_read = 0  # nodes of the last draft that the draft model has read
        self.known = 0  # nodes of the current tree that it has read

    def begin(self, context: Context) -> None:
        self.memory = self.model.begin(context).memory
        if not isinstance(self.memory, Memory) or self.memory.is_stepwise:
            raise ValueError(_unbranched(self.model.backbone, "draft model"))

    def propose(
        self,
        tree: Branches,
        scores: Tensor,
        left: Sequence[int],
        sequences: Sequence[Tensor],
        noise: Keys | None = None,
    ) -> BeamDraft:
        count = scores.shape[1]
        first, width = tree.nodes - count, self.width * count
        depth, front, first_level = 0, count, None
        while depth < min(self.depth, max(left)):
            logits = read_branches(self.model.backbone, self.memory, tree, self.known)
            self.known = tree.nodes
            log_probs = self._log_probs(logits[:, -front:].to(scores.device))
            self._process(log_probs, scores, sequences, [depth < most for most in left])
            log_probs[..., self.eos] = -torch.inf
            total = (scores[..., None] + log_probs).flatten(1)
            first_level = log_probs.flatten(1) if first_level is None else first_level
            noisy = total if noise is None else total + noise.gumbel(self.vocabulary).flatten(1)
            best = noisy.topk(self._count_best(total, width), -1).indices
            if not best.shape[1]:
                break
            scores, above, tokens = (
                total.gather(1, best),
                best // self.vocabulary,
                best % self.vocabulary,
            )
            if noise is not None:
                noise = noise.extend(above, tokens)
            if self.processors:
                sequences = [
                    torch.cat((ids[parents], added[:, None]), 1)
                    for ids, parents, added in zip(sequences, above, tokens, strict=True)
                ]
            tree = tree.extend(tokens, above + (tree.nodes - front))
            front, depth = best.shape[1], depth + 1
        self.num_read = self.known
        return BeamDraft(tree, first, count, front if depth else 0, first_level)

    def _log_probs(self, logits: Tensor) -> Tensor:  # (B, n, V') -> (B, n, V)
        """Over the target's vocabulary."""
        missing = self.vocabulary - logits.shape[-1]  # negative = cut
        padded = functional.pad(logits.float(), (0, missing), value=-torch.inf)
        return padded.log_softmax(-1)

    def _process(
        self,
        log_probs: Tensor,
        scores: Tensor,
        sequences: Sequence[Tensor],
        goes_on: Sequence[bool],
    ) -> None:
        """Apply the processors of each row in place, where a beam (B, n) can be chosen.

        A user's function is not called with a prefix that it excludes, or that is complete: rows
        that need no further token get none.
        """
        for row, processors in enumerate(self.processors):
            if not goes_on[row]:
                log_probs[row] = -torch.inf
                continue
            is_live = scores[row] > UNSTARTED / 2
            found = log_probs[row, is_live]
            for processor in processors if len(found) else ():
                found = processor(sequences[row][is_live], found)
            log_probs[row, is_live] = found

    def _count_best(self, total: Tensor, width: int) -> int:  # (B, n * V)
        """Nodes of a level: `width`, or fewer where processors leave fewer continuations."""
        if not self.processors:
            return min(width, total.shape[1])
        return min(width, int((total > UNSTARTED / 2).sum(1).max()))

    @property
    def num_committable(self) -> int:
        return self.num_read

    def keep(self, kept: Kept) -> None:
        kept.move(self.memory, self.num_read)
        live = zip(kept.live, kept.committed, strict=True)
        self.known = min(sum(node < self.num_read for node in row) for row, _ in live)


def make_beam_drafter(
    drafter: Drafter,
    eos: Sequence[int],
    vocabulary: int,
    recipe: str,
    num_beams: int,
    processors: Sequence[Sequence[Any]] = (),
) -> BeamDrafter:
    """The drafts that a recipe's drafter can make for beams. Raises ValueError for none.

    `processors` are the target's for each row: constraints and penalties, and temperature, top-k
    and the like of sampled beams; none = log probabilities are used as they are.
    """
    if isinstance(drafter, NoDraft):
        return NoBeamDraft()
    model = drafter.model if isinstance(drafter, Autoregressive) else None
    if not isinstance(drafter, Autoregressive) or not isinstance(model, SmallModel):
        raise ValueError(
            f"num_beams={num_beams} is not supported by recipe {recipe!r}: its "
            f"{type(drafter).__name__} follows one path, not beams; choose a recipe with a draft "
            "model, such as coupled, or plain, or pass num_beams=1"
        )
    if not model.backbone.can_branch:
        raise ValueError(_unbranched(model.backbone, "draft model"))
    return ModelBeams(model, drafter.shape.max_depth, WIDTH, eos, vocabulary, processors)


def _unbranched(reader: Any, role: str) -> str:
    reason = reader.obstacle or "is read in its own steps here"
    return (
        f"num_beams above 1: the {role} {type(reader.model).__name__} {reason}, so its cache "
        "cannot hold several beams; pass num_beams=1"
    )
