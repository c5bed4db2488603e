"""Jacobi windows that begin as noise: slots are denoised into token embeddings, round by round.

Three levels, 2 = pure noise; the letters are what a slot will be read as in the next pass.

    level      0  0  1  2          only the clean slots in front are proposals
    verdict    x  y  .  .          x kept, y drawn by the target where its clean slot was rejected
    left             1  2          each slot draws a token from its new distribution and goes on
    towards it next             0  1  2  2    the first slot is a token now, noise fills up behind

Letters: B batch rows, N window slots, M slots that are left, V vocabulary, D embedding width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.declared import answered_by
from mmspec.distributions.noise import Lane, Noise
from mmspec.draft import Draft, Drafter, Reading, Round, Scores
from mmspec.drafters.jacobi.carry_over import Jacobi, JacobiWindow, window_length
from mmspec.drafters.jacobi.initial import initialiser
from mmspec.errors import described
from mmspec.recipe import Kit
from mmspec.targets.readers.encoder_decoder import EncoderDecoder
from mmspec.targets.tokens.context import Context

NOISE = Lane.OTHER + 3  # the lane of the draws made here


@dataclass(frozen=True, eq=False)
class Levels:
    """How much signal and noise a slot holds at every level; level 0 is clean, the last is new."""

    signal: tuple[float, ...] = (1.0,)
    noise: tuple[float, ...] = (0.0,)

    def __post_init__(self) -> None:
        pairs = list(zip(self.signal, self.noise, strict=True))
        if not pairs or pairs[0] != (1, 0):
            raise ValueError(f"level 0 is {pairs[:1]}, but a clean slot has signal 1 and noise 0")
        if sorted(set(self.noise)) != list(self.noise):
            raise ValueError(f"noise={self.noise} must grow from level to level")

    @classmethod
    def karras(
        cls, steps: int, least: float = 0.002, most: float = 80.0, bend: float = 7.0
    ) -> Levels:
        """The grid of Karras et al. 2022, eq. 5, with unit variance at every level.

        `steps` passes of the target make a token out of noise; 0 is a clean window (SJD).
        """
        if steps < 0 or not 0 < least < most:
            raise ValueError(
                f"steps={steps}, least={least}, most={most}: give 0 steps or more, and noise with "
                "0 < least < most"
            )
        low, high = least ** (1 / bend), most ** (1 / bend)
        shares = [step / max(steps - 1, 1) for step in range(steps)] if steps > 1 else [1.0] * steps
        ratios = [0.0, *((low + share * (high - low)) ** bend for share in shares)]
        scale = [(1 + ratio**2) ** -0.5 for ratio in ratios]
        return cls(tuple(scale), tuple(r * s for r, s in zip(ratios, scale, strict=True)))

    @property
    def last(self) -> int:
        return len(self.signal) - 1

    def noised(self, clean: Tensor, noise: Tensor) -> Tensor:  # (..., D) x2 -> (..., D)
        """A new slot: next to nothing of `clean` where the last level is pure noise."""
        return self.signal[-1] * clean + self.noise[-1] * noise

    def denoise(self, slots: Tensor, level: Tensor, clean: Tensor) -> Tensor:
        """One step towards `clean`: e_l of (..., D) at levels l (...) becomes e_(l-1).

        Deterministic DDIM (Song et al. 2021): if e_l = a_l clean + s_l noise, then e_(l-1) is the
        same clean and the same noise at the next level. A clean slot becomes the new `clean`.
        """
        kept, added = (torch.tensor(share, device=slots.device)[level] for share in self._shares)
        return kept[..., None] * slots + added[..., None] * clean

    @cached_property
    def _shares(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """By level, how much of the slot and of the clean token is left one step below."""
        kept = (0.0, *(below / above for below, above in pairwise(self.noise)))
        steps = zip(pairwise(self.signal), kept[1:], strict=True)
        return kept, (1.0, *(below - above * share for (below, above), share in steps))


@dataclass(frozen=True, eq=False)
class Space:
    """Token embeddings as denoising sees them: mean 0 and variance 1 in every channel.

    Without that, noise of one size would drown some channels and leave others as they are.
    """

    embed: Callable[[Tensor], Tensor]  # tokens (B, n) -> what a decoder reads for them (B, n, D)
    mean: Tensor  # (D,) float32
    std: Tensor  # (D,) float32

    @classmethod
    def of(cls, embed: Callable[[Tensor], Tensor], tokens: Tensor) -> Space:
        """The space of some tokens (C,), those that may be drawn."""
        std, mean = torch.std_mean(embed(tokens[None])[0].detach().float(), 0, correction=0)
        return cls(embed, mean, std.clamp_min(torch.finfo(std.dtype).eps))

    def clean(self, tokens: Tensor) -> Tensor:  # (B, n) -> (B, n, D)
        return (self.embed(tokens).float() - self.mean) / self.std

    def readable(self, slots: Tensor) -> Tensor:  # (B, n, D) -> (B, n, D)
        """Back to what the decoder reads."""
        return slots * self.std + self.mean


@dataclass(frozen=True, eq=False)
class Denoised(Drafter):
    """A Jacobi window whose new slots are noise (SJD2, Teng et al. 2025, section 3).

    Every pass reads the noisy slots as they are; each of them then draws a token from its new
    distribution and takes one step towards its embedding. Once a slot is clean it is an ordinary
    slot of
    `window`. Only the clean slots in front of the first noisy one are proposals, so every token is
    kept behind tokens alone: its memory is that of the text, and the output is as exact as the
    window's suffix policy, for the distribution of the very model that decodes. Noise decides about
    speed only, and a model that was not taught to read it gains nothing.

    `encoding` (levels, D) is added to what noisy slots read, for a model that is told the level.
    With one level it is `window`. Reconstructed: which distribution goes with a token when its slot
    becomes clean (the one it was drawn from), the ends of the noise schedule, the form of the
    encoding.
    """

    window: Jacobi
    space: Space
    levels: Levels
    encoding: Tensor | None = None
    sees: ClassVar[str] = "target-memory"

    def __post_init__(self) -> None:
        if self.window.trees:
            raise ValueError("noisy slots have no siblings; drop proactive= of the window")
        wanted = (len(self.levels.signal), *self.space.mean.shape)
        if self.encoding is not None and tuple(self.encoding.shape) != wanted:
            raise ValueError(
                f"encoding has shape {tuple(self.encoding.shape)}, but {wanted} are needed; give "
                "one row per level, the clean one first"
            )

    kinds = answered_by("window.kinds")
    records_distribution = answered_by("window.records_distribution")
    carries = answered_by("window.carries")

    def begin(self, context: Context) -> Noisy:
        window = self.window.begin(context)
        slots = self.space.mean.new_zeros(context.batch, 0, len(self.space.mean))
        return Noisy(window, slots, window.tokens)

    def propose(self, context: Context, state: Noisy) -> Draft:
        draft = self.window.propose(context, state.window)
        if not draft.nodes:
            return draft
        width, place = draft.nodes, torch.arange(draft.nodes, device=context.device)
        missing = max(width - state.level.shape[1], 0)
        new = place >= state.window.known[:, None]
        fresh = self._fresh(draft.tokens, context.noise, context.position() + place)
        slots = functional.pad(state.slots[:, :width], (0, 0, 0, missing))
        level = functional.pad(state.level[:, :width], (0, missing))
        state.slots = torch.where(new[..., None], fresh, slots)
        state.level = torch.where(new, self.levels.last, level)
        noisy = self.space.readable(state.slots)
        if self.encoding is not None:
            noisy = noisy + self.encoding[state.level]
        words = self.space.embed(draft.tokens)
        embeds = torch.where((state.level > 0)[..., None], noisy.to(words), words)
        clean = (state.level == 0).cumprod(-1).bool()
        return replace(draft, mask=clean, padded=True, reading=Reading(embeds=embeds))

    def observe(
        self, context: Context, state: Noisy, draft: Draft, scores: Scores, kept: Round
    ) -> Noisy:
        """Redraw every slot that is left, and take a step towards the new tokens."""
        window = self.window.observe(context, state.window, draft, scores, kept)
        left, width = window.tokens.shape[1], draft.nodes
        if not left:
            return Noisy(window, state.slots[:, :0], window.tokens)
        rows = torch.arange(draft.batch, device=context.device)[:, None]
        slot = kept.verdict.length[:, None] + 1 + torch.arange(left, device=context.device)
        there, old = slot < width, slot.clamp_max(width - 1)
        fresh = self._fresh(window.tokens, context.noise, scores.position[:, :1] + slot)
        slots = torch.where(there[..., None], state.slots[rows, old], fresh)
        level = torch.where(there, state.level[rows, old], self.levels.last)
        slots = self.levels.denoise(slots, level, self.space.clean(window.tokens))
        return Noisy(window, slots, (level - 1).clamp_min(0))

    def _fresh(self, tokens: Tensor, noise: Noise, position: Tensor) -> Tensor:  # (B, n, D)
        normal = noise.fresh(NOISE, position).normal(len(self.space.mean))
        return self.levels.noised(self.space.clean(tokens), normal)


@dataclass
class Noisy:
    """What is carried from round to round."""

    window: JacobiWindow
    slots: Tensor  # (B, M, D) float32 in `Space`
    level: Tensor  # (B, M) int64


def denoised_window(kit: Kit) -> Drafter:
    """A window whose new slots are noise."""
    if isinstance(kit.target, EncoderDecoder):
        raise ValueError(
            f"{type(kit.target.model).__name__} reads its decoder's tokens behind an encoder and "
            "takes no embeddings in their place; use recipe='sjd'"
        )
    window = Jacobi(window_length(kit), initial=initialiser(kit))
    return Denoised(window, space(kit), Levels.karras(kit.options["steps"]), encoding(kit))


def space(kit: Kit) -> Space:
    """The embeddings of picture tokens, or of all tokens where the model draws none."""
    ids = torch.arange(kit.target.vocabulary, device=kit.target.device)
    if kit.target.image_family is not None:
        ids = kit.target.image_family.codebook.ids
    with torch.no_grad():
        return Space.of(kit.target.embed, ids)


def encoding(kit: Kit) -> torch.Tensor | None:
    """The option as a tensor on the model's device."""
    given = kit.options["encoding"]
    try:
        return None if given is None else torch.as_tensor(given, device=kit.target.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"encoding={described(given)} is no table ({error}); give a tensor (levels, width)"
        ) from error
