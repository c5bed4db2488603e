"""A policy drafts for itself, on a picture thinned by what it looked at before (SpecPrune-VLA)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from mmspec.codes.actions import ActionSpace
from mmspec.codes.episodes import EarlierLooks, Episode, episodes_of
from mmspec.declared import answered_by
from mmspec.distributions.categorical import Categorical
from mmspec.draft import Drafter
from mmspec.drafters.growth import DraftModel, News, Nodes
from mmspec.drafters.neural.sight import TargetFeatures, target_features
from mmspec.drafters.neural.small_model import Autoregressive, SmallModel
from mmspec.recipe import Kit
from mmspec.targets.tokens.context import Context

COLD = 10  # steps before which a robot counts as moving coarsely
REMEMBERED = 6  # frames


@dataclass(frozen=True)
class PrunedPolicy(DraftModel):
    """The policy itself as its own draft model, on the tokens that a compressor leaves.

    After each prompt it notes in the row's episode what the compressor is told at the next step:
    the question's attention, the features of the frames, and whether the robot works finely. It
    reads the prompt a second time and drafts at the price of plain steps.
    """

    model: SmallModel
    sight: TargetFeatures
    space: ActionSpace
    reads: ClassVar[bool] = True

    sees = answered_by("model.sees")

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({*self.model.wants, "question-attention"})

    def begin(self, context: Context) -> Any:
        episodes = episodes_of(context)
        for episode in episodes:
            looks = looks_of(episode)
            looks.is_fine = works_finely(self.space, episode, looks.is_fine)
            looks.back = frames_back(self.space, episode)
        state = self.model.begin(context)
        seen = replace(self.sight, compressor=None).seen(context)
        attention = context.shared["question-attention"]
        for row, episode in enumerate(episodes):
            own = attention[row][context.padding[row] :]
            width = seen[row][0].features.shape[-1] if seen[row] else 1
            frame = own.new_zeros(len(own), width)
            for picture in seen[row]:
                frame[picture.positions] = picture.features.to(frame)
            looks = looks_of(episode)
            looks.attention, looks.frames = own, [*looks.frames, frame][-REMEMBERED:]
        return state

    def predict_first(self, context: Context, state: Any) -> Categorical:
        return self.model.predict_first(context, state)

    def predict(self, context: Context, state: Any, nodes: Nodes) -> Categorical:
        return self.model.predict(context, state, nodes)

    def keep(self, context: Context, state: Any, news: News) -> Any:
        return self.model.keep(context, state, news)


def looks_of(episode: Episode) -> EarlierLooks:
    """What is remembered of an episode's pictures; made when it is first asked for."""
    found: EarlierLooks = episode.memory.setdefault(EarlierLooks.NAME, EarlierLooks())
    return found


def works_finely(space: ActionSpace, episode: Episode, before: bool) -> bool:
    """The controller of SpecPrune-VLA, after the last action.

    Fine work begins where v < 0.4, or v_xy < 0.1, dz < 0.1 and w < 0.2; it ends where dz > 0.2 or
    w > 0.3: v the length of the translation, w that of the rotation, normalised as for the robots
    of the paper.
    """
    if episode.step < COLD:
        return False
    move, turn = _motion(space, episode.actions[-1])
    v, v_xy, dz, w = (float(one) for one in (move.norm(), move[:2].norm(), move[2:].norm(), turn))
    if before:
        return not (dz > 0.2 or w > 0.3)
    return v < 0.4 or (v_xy < 0.1 and dz < 0.1 and w < 0.2)


def frames_back(space: ActionSpace, episode: Episode) -> int:
    """How many frames ago the frame was that the present one is compared with: fewer if quick."""
    if not episode.actions:
        return 1
    v = float(_motion(space, episode.actions[-1])[0].norm())
    return max(min(int(-16 / 3 * v / 6 + 22 / 3) + 3, REMEMBERED), 1)


def _motion(space: ActionSpace, action: Tensor) -> tuple[Tensor, Tensor]:
    """The translation (k,), and the length of the rotation."""
    groups = space.groups
    moving = groups.get("position", groups.get("motion", ()))
    return action[list(moving)], action[list(groups.get("rotation", ()))].norm()


def pruned_policy(kit: Kit) -> Drafter:
    """The policy itself, on a thinned picture. Raises ValueError for one that reads none."""
    if not kit.target.placeholder_ids:
        raise ValueError(
            f"{type(kit.target.model).__name__} reads no pictures, and this recipe drafts on a "
            "pruned one; use a recipe that looks at none, such as openvla-ar"
        )
    sight = target_features(replace(kit, drafter=kit.target), remembers=True)
    own = PrunedPolicy(SmallModel(kit.target, sight), sight, kit.space)
    return Autoregressive(own, kit.shape)
