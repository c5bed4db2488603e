"""A policy drafts for itself on an image pruned by its earlier attention (SpecPrune-VLA)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from mmspec._attributes import delegate_to
from mmspec.codes.actions import ActionSpace
from mmspec.codes.episodes import Episode, VisualHistory, get_episodes
from mmspec.distributions.categorical import Categorical
from mmspec.draft import Drafter
from mmspec.drafters.draft_model import DraftModel, DraftNodes, DraftUpdate
from mmspec.drafters.neural.draft_inputs import TargetFeatureInputs, target_features
from mmspec.drafters.neural.small_model import Autoregressive, SmallModel
from mmspec.recipe import Kit
from mmspec.targets.tokens.context import Context

COARSE_STEPS = 10  # first steps, always treated as coarse motion
MAX_FRAMES = 6  # frames


@dataclass(frozen=True)
class PrunedPolicy(DraftModel):
    """The policy as its own draft model, on the image tokens that a compressor keeps.

    After each prompt it records in the row's episode the inputs of the compressor at the next step:
    the question's attention, the features of the frames, and whether the motion is fine. It reads
    the prompt a second time, and a draft token costs as much as a plain step.
    """

    model: SmallModel
    inputs: TargetFeatureInputs
    space: ActionSpace
    reads_prompt: ClassVar[bool] = True

    sees = delegate_to("model.sees")

    @property
    def required_features(self) -> frozenset[str]:
        return frozenset({*self.model.required_features, "question-attention"})

    def begin(self, context: Context) -> Any:
        episodes = get_episodes(context)
        for episode in episodes:
            history = visual_history(episode)
            history.is_fine = works_finely(self.space, episode, history.is_fine)
            history.back = frames_back(self.space, episode)
        state = self.model.begin(context)
        images = replace(self.inputs, compressor=None).compressed_images(context)
        attention_rows = context.shared["question-attention"]
        for row, episode in enumerate(episodes):
            attention = attention_rows[row][context.padding[row] :]
            width = images[row][0].features.shape[-1] if images[row] else 1
            frame = attention.new_zeros(len(attention), width)
            for image in images[row]:
                frame[image.positions] = image.features.to(frame)
            history = visual_history(episode)
            history.attention, history.frames = attention, [*history.frames, frame][-MAX_FRAMES:]
        return state

    def predict_first(self, context: Context, state: Any) -> Categorical:
        return self.model.predict_first(context, state)

    def predict(self, context: Context, state: Any, nodes: DraftNodes) -> Categorical:
        return self.model.predict(context, state, nodes)

    def keep(self, context: Context, state: Any, update: DraftUpdate) -> Any:
        return self.model.keep(context, state, update)


def visual_history(episode: Episode) -> VisualHistory:
    """The record of an episode's images; created on first use."""
    found: VisualHistory = episode.memory.setdefault(VisualHistory.NAME, VisualHistory())
    return found


def works_finely(space: ActionSpace, episode: Episode, was_fine: bool) -> bool:
    """The controller of SpecPrune-VLA: whether the motion after the last action is fine.

    Fine motion begins where v < 0.4, or v_xy < 0.1, dz < 0.1 and w < 0.2; it ends where dz > 0.2 or
    w > 0.3: v is the norm of the translation, w that of the rotation, normalised as for the robots
    of the paper.
    """
    if episode.step < COARSE_STEPS:
        return False
    move, turn = _motion(space, episode.actions[-1])
    v, v_xy, dz, w = (float(one) for one in (move.norm(), move[:2].norm(), move[2:].norm(), turn))
    if was_fine:
        return not (dz > 0.2 or w > 0.3)
    return v < 0.4 or (v_xy < 0.1 and dz < 0.1 and w < 0.2)


def frames_back(space: ActionSpace, episode: Episode) -> int:
    """Number of frames between the current frame and the one it is compared with: fewer if fast."""
    if not episode.actions:
        return 1
    v = float(_motion(space, episode.actions[-1])[0].norm())
    return max(min(int(-16 / 3 * v / 6 + 22 / 3) + 3, MAX_FRAMES), 1)


def _motion(space: ActionSpace, action: Tensor) -> tuple[Tensor, Tensor]:
    """The translation (k,), and the norm of the rotation."""
    groups = space.groups
    moving = groups.get("position", groups.get("motion", ()))
    return action[list(moving)], action[list(groups.get("rotation", ()))].norm()


def pruned_policy(kit: Kit) -> Drafter:
    """The policy itself, on a pruned image. Raises ValueError for one without images."""
    if not kit.target.placeholder_ids:
        raise ValueError(
            f"{type(kit.target.model).__name__} reads no images, and this recipe drafts on a "
            "pruned image; use a recipe without images, such as openvla-ar"
        )
    inputs = target_features(replace(kit, drafter=kit.target), remembers=True)
    attention = PrunedPolicy(SmallModel(kit.target, inputs), inputs, kit.space)
    return Autoregressive(attention, kit.shape)
