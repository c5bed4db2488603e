"""Jacobi windows that start from noise: slots are denoised into token embeddings, round by round.

Three levels, 2 = pure noise; letters are tokens.

    level      0  0  1  2          only the leading clean slots are proposals
    verdict    x  y  .  .          x accepted, y drawn by the target where a clean slot was rejected
    left             1  2          each slot samples a token from its new distribution and takes one
    next             0  1  2  2    step towards it; the first slot is a token now, noise is appended

Letters: B batch rows, N window slots, M remaining slots, V vocabulary, D embedding width.
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

from mmspec._attributes import delegate_to
from mmspec.distributions.noise import Lane, Noise
from mmspec.draft import Draft, Drafter, NodeInputs, Round, Scores
from mmspec.drafters.jacobi.initial import initialiser
from mmspec.drafters.jacobi.window import Jacobi, JacobiWindow, window_length
from mmspec.errors import format_value
from mmspec.recipe import Kit
from mmspec.targets.readers.encoder_decoder import EncoderDecoder
from mmspec.targets.tokens.context import Context

NOISE = Lane.OTHER + 3  # the lane of the draws made here


@dataclass(frozen=True, eq=False)
class Levels:
    """Signal and noise scale of a slot at every level; level 0 is clean, the last is new."""

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
        cls, steps: int, sigma_min: float = 0.002, sigma_max: float = 80.0, rho: float = 7.0
    ) -> Levels:
        """The grid of Karras et al. 2022, eq. 5, with unit variance at every level.

        `steps` passes of the target turn noise into a token; 0 is a clean window (SJD).
        """
        if steps < 0 or not 0 < sigma_min < sigma_max:
            raise ValueError(
                f"steps={steps}, sigma_min={sigma_min}, sigma_max={sigma_max}: give 0 steps or "
                "more, and 0 < sigma_min < sigma_max"
            )
        low, high = sigma_min ** (1 / rho), sigma_max ** (1 / rho)
        shares = [step / max(steps - 1, 1) for step in range(steps)] if steps > 1 else [1.0] * steps
        ratios = [0.0, *((low + share * (high - low)) ** rho for share in shares)]
        scale = [(1 + ratio**2) ** -0.5 for ratio in ratios]
        return cls(tuple(scale), tuple(r * s for r, s in zip(ratios, scale, strict=True)))

    @property
    def last(self) -> int:
        return len(self.signal) - 1

    def add_noise(self, clean: Tensor, noise: Tensor) -> Tensor:  # (..., D) x2 -> (..., D)
        """A new slot: nearly pure noise where the last level has almost no signal."""
        return self.signal[-1] * clean + self.noise[-1] * noise

    def denoise(self, slots: Tensor, level: Tensor, clean: Tensor) -> Tensor:
        """One step towards `clean`: e_l of (..., D) at levels l (...) becomes e_(l-1).

        Deterministic DDIM (Song et al. 2021): if e_l = a_l clean + s_l noise, then e_(l-1) is the
        same clean and the same noise at the next level. A clean slot becomes the new `clean`.
        """
        keep_share, added = (
            torch.tensor(share, device=slots.device)[level] for share in self._shares
        )
        return keep_share[..., None] * slots + added[..., None] * clean

    @cached_property
    def _shares(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """By level, the weights of the slot and of the clean token one level below."""
        keep_share = (0.0, *(below / above for below, above in pairwise(self.noise)))
        steps = zip(pairwise(self.signal), keep_share[1:], strict=True)
        return keep_share, (1.0, *(below - above * share for (below, above), share in steps))


@dataclass(frozen=True, eq=False)
class EmbeddingSpace:
    """Token embeddings normalised to mean 0 and variance 1 per channel.

    Without normalisation, noise of one scale would dominate some channels and barely change others.
    """

    embed: Callable[[Tensor], Tensor]  # tokens (B, n) -> input embeddings (B, n, D)
    mean: Tensor  # (D,) float32
    std: Tensor  # (D,) float32

    @classmethod
    def of(cls, embed: Callable[[Tensor], Tensor], tokens: Tensor) -> EmbeddingSpace:
        """The space of the tokens (C,) that may be drawn."""
        std, mean = torch.std_mean(embed(tokens[None])[0].detach().float(), 0, correction=0)
        return cls(embed, mean, std.clamp_min(torch.finfo(std.dtype).eps))

    def clean(self, tokens: Tensor) -> Tensor:  # (B, n) -> (B, n, D)
        return (self.embed(tokens).float() - self.mean) / self.std

    def to_embeddings(self, slots: Tensor) -> Tensor:  # (B, n, D) -> (B, n, D)
        """Undo the normalisation."""
        return slots * self.std + self.mean


@dataclass(frozen=True, eq=False)
class DenoisedWindow(Drafter):
    """A Jacobi window whose new slots are noise (SJD2, Teng et al. 2025, section 3).

    Every pass reads the noisy slots as they are; each then samples a token from its new
    distribution and takes one step towards its embedding. A clean slot is an ordinary slot of
    `window`. Only the clean slots before the first noisy one are proposals, so every accepted token
    is conditioned on tokens only: the cache is that of the text, and the output is as exact as the
    window's suffix policy, for the distribution of the model that decodes. Noise affects speed
    only; a model that was not trained on noisy slots gains nothing.

    `encoding` (levels, D) is added to the embeddings of noisy slots, for a model conditioned on the
    level. With one level this is `window`. Reconstructed: which distribution goes with a token when
    its slot becomes clean (the one it was drawn from), the ends of the noise schedule, the form of
    the encoding.
    """

    window: Jacobi
    space: EmbeddingSpace
    levels: Levels
    encoding: Tensor | None = None
    sees: ClassVar[str] = "target-memory"

    def __post_init__(self) -> None:
        if self.window.uses_trees:
            raise ValueError("noisy slots have no siblings; give a window without proactive=")
        expected = (len(self.levels.signal), *self.space.mean.shape)
        if self.encoding is not None and tuple(self.encoding.shape) != expected:
            raise ValueError(
                f"encoding has shape {tuple(self.encoding.shape)}, but {expected} are needed; give "
                "one row per level, the clean one first"
            )

    kinds = delegate_to("window.kinds")
    records_distribution = delegate_to("window.records_distribution")
    carries_tokens = delegate_to("window.carries_tokens")

    def begin(self, context: Context) -> NoisyWindow:
        window = self.window.begin(context)
        slots = self.space.mean.new_zeros(context.batch, 0, len(self.space.mean))
        return NoisyWindow(window, slots, window.tokens)

    def propose(self, context: Context, state: NoisyWindow) -> Draft:
        draft = self.window.propose(context, state.window)
        if not draft.nodes:
            return draft
        width, place = draft.nodes, torch.arange(draft.nodes, device=context.device)
        missing = max(width - state.level.shape[1], 0)
        new = place >= state.window.num_known[:, None]
        fresh = self._new_slots(draft.tokens, context.noise, context.position() + place)
        slots = functional.pad(state.slots[:, :width], (0, 0, 0, missing))
        level = functional.pad(state.level[:, :width], (0, missing))
        state.slots = torch.where(new[..., None], fresh, slots)
        state.level = torch.where(new, self.levels.last, level)
        noisy = self.space.to_embeddings(state.slots)
        if self.encoding is not None:
            noisy = noisy + self.encoding[state.level]
        token_embeds = self.space.embed(draft.tokens)
        embeds = torch.where((state.level > 0)[..., None], noisy.to(token_embeds), token_embeds)
        clean = (state.level == 0).cumprod(-1).bool()
        return replace(draft, mask=clean, padded=True, node_inputs=NodeInputs(embeds=embeds))

    def observe(
        self, context: Context, state: NoisyWindow, draft: Draft, scores: Scores, round_: Round
    ) -> NoisyWindow:
        """Redraw every remaining slot, and take a step towards the new tokens."""
        window = self.window.observe(context, state.window, draft, scores, round_)
        left, width = window.tokens.shape[1], draft.nodes
        if not left:
            return NoisyWindow(window, state.slots[:, :0], window.tokens)
        rows = torch.arange(draft.batch, device=context.device)[:, None]
        slot = round_.verdict.length[:, None] + 1 + torch.arange(left, device=context.device)
        is_old, old = slot < width, slot.clamp_max(width - 1)
        fresh = self._new_slots(window.tokens, context.noise, scores.position[:, :1] + slot)
        slots = torch.where(is_old[..., None], state.slots[rows, old], fresh)
        level = torch.where(is_old, state.level[rows, old], self.levels.last)
        slots = self.levels.denoise(slots, level, self.space.clean(window.tokens))
        return NoisyWindow(window, slots, (level - 1).clamp_min(0))

    def _new_slots(self, tokens: Tensor, noise: Noise, position: Tensor) -> Tensor:  # (B, n, D)
        normal = noise.fresh_keys(NOISE, position).normal(len(self.space.mean))
        return self.levels.add_noise(self.space.clean(tokens), normal)


@dataclass
class NoisyWindow:
    """The state between rounds."""

    window: JacobiWindow
    slots: Tensor  # (B, M, D) float32 in `EmbeddingSpace`
    level: Tensor  # (B, M) int64


def denoised_window(kit: Kit) -> Drafter:
    """A window whose new slots are noise."""
    if isinstance(kit.target, EncoderDecoder):
        raise ValueError(
            f"{type(kit.target.model).__name__} is an encoder-decoder and takes no decoder "
            "embeddings; use recipe='sjd'"
        )
    window = Jacobi(window_length(kit), initial=initialiser(kit))
    return DenoisedWindow(window, space(kit), Levels.karras(kit.options["steps"]), encoding(kit))


def space(kit: Kit) -> EmbeddingSpace:
    """The embeddings of image tokens, or of all tokens if the model generates no images."""
    ids = torch.arange(kit.target.vocabulary, device=kit.target.device)
    if kit.target.image_family is not None:
        ids = kit.target.image_family.codebook.ids
    with torch.no_grad():
        return EmbeddingSpace.of(kit.target.embed, ids)


def encoding(kit: Kit) -> torch.Tensor | None:
    """The option as a tensor on the model's device."""
    value = kit.options["encoding"]
    try:
        return None if value is None else torch.as_tensor(value, device=kit.target.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"encoding={format_value(value)} is not a table ({error}); give a tensor (levels, "
            "width)"
        ) from error
