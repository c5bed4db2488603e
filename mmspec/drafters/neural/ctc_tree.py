"""Drafting the likeliest texts of a CTC head's slots (CTC-drafter)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mmspec.codes.ctc import search_prefixes
from mmspec.draft import Draft, Drafter, Kind, Round, Scores
from mmspec.drafters.draft_model import DraftUpdate, ModelDrafter
from mmspec.drafters.lengths.length import max_useful_length
from mmspec.drafters.lookup.retrieved_tree import merge_branches, pad_trees
from mmspec.drafters.neural.feature_head import HeadState
from mmspec.drafters.neural.parallel_slots import ParallelSlots, SlotsState
from mmspec.drafters.neural.target_heads import HeadKind, guided_logits
from mmspec.errors import check_number
from mmspec.models.heads.ctc_head import CtcHead
from mmspec.recipe import TREE, Kit
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True)
class CollapsedTree:
    """A tree of the likeliest texts of the slots, of `nodes` tokens, where that is an option."""

    description: ClassVar[str] = "tree of collapsed paths"
    walk: ClassVar[str] = TREE


@dataclass(frozen=True, eq=False)
class CtcSlots(ParallelSlots):
    """A CTC head's draft slots after the committed tokens (Wen et al. 2024).

    Raises ValueError at construction for a head of another target.
    """

    head: CtcHead

    @property
    def max_depth_ahead(self) -> int:
        return self.head.reach

    def read_ahead(self, context: Context, state: HeadState) -> Tensor:
        return self.head.predict_slots(self.slots.read_committed(context, state)[:, -1])

    def slot_probs(self, context: Context, state: SlotsState) -> Tensor:  # (B, K, V + 1)
        """Probabilities of all tokens, then of the blank, in each slot."""
        states = self.read_ahead(context, state.slots)
        logits = self.head.logits(states, self.backbone.head)
        return guided_logits(context, logits).float().softmax(-1)


@dataclass(frozen=True, eq=False)
class CtcTree(ModelDrafter):
    """A tree of the likeliest texts that paths through the slots collapse to.

    Prefix beam search keeps `beam` texts, from the `width` likeliest tokens of each slot. The tree
    has the `nodes` first ones of their tokens, the likeliest text first. Deterministic proposals:
    exact with every lossless verifier.
    """

    model: CtcSlots
    nodes: int = 32
    beam: int = 16
    width: int = 8
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET,)
    uses_trees: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, example in (("nodes", 32), ("beam", 16), ("width", 8)):
            check_number(name, getattr(self, name), 1, whole=True, example=example)

    def begin(self, context: Context) -> SlotsState:
        return self.model.begin(context)

    def propose(self, context: Context, state: SlotsState) -> Draft:
        room = max_useful_length(context)
        if not room:
            return context.empty_draft()
        probs = self.model.slot_probs(context, state)
        best = probs[..., :-1].topk(min(self.width, probs.shape[-1] - 1), -1)
        rows = zip(
            best.indices.tolist(),
            best.values.tolist(),
            probs[..., -1].tolist(),
            context.finished,
            strict=True,
        )
        found = []
        for tokens, values, blanks, done in rows:
            slots = [dict(zip(*pair, strict=True)) for pair in zip(tokens, values, strict=True)]
            texts = [] if done else search_prefixes(slots, blanks, self.beam)
            found.append(merge_branches((text for text, _ in texts), self.nodes, room))
        return pad_trees(context, found, min(room, self.nodes))

    def observe(
        self, context: Context, state: SlotsState, draft: Draft, scores: Scores, round_: Round
    ) -> SlotsState:
        news = DraftUpdate(draft, scores, round_, ((),) * draft.batch, 0, ())
        return self.model.keep(context, state, news)


CTC_HEAD = HeadKind(CtcHead, CtcSlots, "CTC head")


def ctc_tree(kit: Kit) -> Drafter:
    """A CTC head's draft slots, collapsed to a tree. Raises ValueError for other shapes."""
    if not isinstance(kit.shape, CollapsedTree):
        raise ValueError(
            "the paths of a CTC head decide the branches of its tree, and the option nodes= sets "
            "its size; do not give length= or tree="
        )
    if kit.compressor is not None:
        raise ValueError(
            f"a CTC head reads the target's states, so there is nothing for compressor="
            f"{kit.compressor!r} to compress; drop it"
        )
    assert isinstance(kit.drafter, CtcSlots)
    return CtcTree(kit.drafter, *(kit.options[name] for name in ("nodes", "beam", "width")))
