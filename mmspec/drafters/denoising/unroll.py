"""Drafting a denoising chain state by state, from distributions of the next state to a `Draft`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from mmspec.distributions.gaussian import DrivingNoise, Gaussian
from mmspec.distributions.noise import Lane
from mmspec.draft import Draft, Drafter, Kind, Round, Scores
from mmspec.drafters.denoising.window import Window
from mmspec.targets.continuous.denoising import Trajectory
from mmspec.trees import Tree


@dataclass(frozen=True)
class WindowDrafter(Drafter):
    """Drafts a window of states; its state is that of the window, or contains it.

    Chains may use either noise, trees that of the step (see `draw_driving_noise`).
    """

    window: Window = field(default_factory=Window)
    _: KW_ONLY
    kind: Kind = Kind.RACE

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return (Kind.RACE,) if self.window.branching else (Kind.RACE, Kind.IID)

    @property
    def uses_trees(self) -> bool:
        return bool(self.window.branching)

    def with_kind(self, kind: Kind) -> Drafter:
        return replace(self, kind=kind)

    def begin(self, context: Trajectory) -> Any:
        return self.window.begin(context)

    def observe(
        self, context: Trajectory, state: Any, draft: Draft, scores: Scores, round_: Round
    ) -> Any:
        return self.window.observe(state, context, draft, scores, round_)


class UnrolledStep(Protocol):
    """A draft's distribution of the state after each of W states, all at the same depth.

    It must not depend on the noise of that state or of later ones: it may use rejected states only
    at this step or before it.
    """

    def __call__(
        self, depth: int, x: Tensor, step: Tensor
    ) -> tuple[Tensor, Tensor]: ...  # (B, W, *E), (B, W) -> mean (B, W, *E), std broadcasting


def draw_driving_noise(context: Trajectory, tree: Tree, kind: Kind) -> Tensor:  # (B, N, *E)
    """The standard normal noise of every node.

    RACE: that of the step, as in plain sampling, so that a state accepted with certainty equals
    plain sampling's bit for bit; siblings after the first get fresh noise. For verifiers that
    decide step by step: after a rejection the noise is used again, so no decision may depend on it.
    IID: new noise in every round, for verifiers that look ahead.
    """
    index = torch.arange(tree.nodes, device=context.device)
    fresh = context.noise.fresh_keys(Lane.DRAFT, index)
    if kind is not Kind.RACE:
        return fresh.normal(*context.event)
    depth = torch.arange(tree.depth, device=context.device)
    shared = context.noise.shared_keys(context.position() + depth).normal(*context.event)
    if tree.is_chain:
        return shared
    firsts = {kids[0] for kids in tree.children if kids}
    first = torch.tensor([node in firsts for node in range(tree.nodes)], device=context.device)
    first = first.reshape(-1, *(1,) * len(context.event))
    return torch.where(first, shared[:, list(tree.depths)], fresh.normal(*context.event))


def unroll(
    context: Trajectory,
    tree: Tree,
    levels: Sequence[int],
    distribution: UnrolledStep,
    kind: Kind,
) -> Draft:
    """Draft `levels[b]` states deep in row b, along `tree`, whose depth is the largest of them.

    Deeper nodes of a row are masked; they repeat their parent's state. `kind` selects the noise,
    see `draw_driving_noise`.
    """
    if not tree.nodes:
        return context.empty_draft()
    noise = draw_driving_noise(context, tree, kind)
    level_tensor = torch.tensor(levels, device=context.device)
    ragged = min(levels) < tree.depth
    last = context.kernel.num_steps - 1
    states: dict[int, Tensor] = {-1: context.state}
    means: dict[int, Tensor] = {}
    deviations: dict[int, Tensor] = {}
    for depth, nodes in enumerate(tree.levels):
        x = torch.stack([states[tree.parents[node]] for node in nodes], 1)  # (B, W, *E)
        step = (context.position() - 1 + depth).clamp_max(last).expand(-1, len(nodes))
        mean, std = distribution(depth, x, step)
        if ragged:
            is_active = (level_tensor > depth).reshape(-1, *(1,) * (x.dim() - 1))
            mean = torch.where(is_active, mean, x)
            new = torch.where(is_active, mean + std * noise[:, nodes], x)
        else:
            new = mean + std * noise[:, nodes]
        std = std.expand(-1, len(nodes), *std.shape[2:])
        for place, node in enumerate(nodes):
            states[node], means[node] = new[:, place], mean[:, place]
            deviations[node] = std[:, place]
    order = range(tree.nodes)
    made = Gaussian(
        torch.stack([means[node] for node in order], 1),
        torch.stack([deviations[node] for node in order], 1),
        len(context.event),
    )
    tokens = torch.stack([states[node] for node in order], 1)
    mask = None
    if ragged:
        mask = torch.tensor(tree.depths, device=level_tensor.device) < level_tensor[:, None]
    return Draft.from_tree(tree, tokens, kind, made, mask, DrivingNoise(noise))
