"""The benchmark of continuous tokens: recipes against plain decoding, and against wider steps.

A target may draw a picture in fewer, wider steps and so with fewer calls, at another law. A lossy
recipe has to beat that, so every recipe is put beside the target in as many steps as it made calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from PIL import Image

from mmspec.api import Accelerated
from mmspec.bench import pool
from mmspec.bench.environment import device_name, peak_memory_bytes
from mmspec.bench.gallery import Facts, Gallery, facts_of, gap, pictures_to_judge, share
from mmspec.bench.images import PLAIN
from mmspec.bench.progress import Progress, silent
from mmspec.bench.timing import Ratio
from mmspec.bench.turns import Drawn, Laps, Player, race
from mmspec.modalities.mar.plug import decoded, settings_of
from mmspec.modalities.mar.reader import labels
from mmspec.targets.patches import Plan


@dataclass(frozen=True)
class ContinuousRow:
    """One recipe, or the target in other steps. `spread` has the least and most of the repeats.

    Errors are standard errors over pictures; `facts_gap` is to plain decoding, on the same classes.
    Rows "plain, N steps" are the target by itself in fewer, wider steps.
    """

    recipe: str
    exact: bool  # what the recipe claims; wider steps have another law
    calls: float  # of the target per request
    speedup_over_plain: float
    spread: list[float]
    facts_right: float | None
    facts_gap: float | None
    facts_gap_error: float | None
    seconds_per_request: float
    mean_acceptance_length: float | None = None
    draft_acceptance_rate: float | None = None
    draft_share: float | None = None
    verify_share: float | None = None
    host_share: float | None = None


@dataclass(frozen=True)
class ContinuousComparison:
    """What `mmspec bench` reports of a MAR model; the first row is plain decoding."""

    model: str
    drafter: str | None
    settings: dict[str, Any]
    steps: int
    rows: list[ContinuousRow]
    requests: int
    repeats: int
    pictures: int  # judged, per row
    peak_memory_bytes: int
    environment: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)


@torch.no_grad()
def compare_continuous(
    ways: Mapping[str, Accelerated],
    gallery: Gallery,
    settings: Mapping[str, Any],
    vae: Any = None,
    *,
    names: tuple[str, str | None] = ("model", None),
    repeats: int = 5,
    seed: int = 0,
    progress: Progress = silent,
) -> ContinuousComparison:
    """Measure accelerated models of one target; everybody draws everything in turns.

    `settings` go with every request: steps, guidance and so on. Requests have `class_labels`.
    """
    model = next(iter(ways.values())).model
    plan = Plan(**settings_of(settings))
    fast = {name: Fast(one, settings, vae) for name, one in ways.items()}
    wider = {}
    for player in fast.values():
        calls = [player.draw(one, seed).stats.target_calls for one in gallery.timed[:3]]
        steps = min(max(round(sum(calls) / len(calls)), 1), plan.steps - 1)
        wider[f"{PLAIN}, {steps} steps"] = steps
        progress("count calls", len(wider), len(fast))
    alone = {PLAIN: plan.steps, **wider}
    players: dict[str, Player] = {
        name: Plain(model, replace(plan, steps=steps), vae) for name, steps in alone.items()
    }
    players |= fast
    device = model.device
    laps, _ = race(players, gallery.timed, repeats, seed, device, progress)
    shown = pictures_to_judge(players, laps, gallery, seed, progress)
    facts = {name: facts_of(gallery, drawn) for name, drawn in shown.items()}
    return ContinuousComparison(
        model=names[0],
        drafter=names[1],
        settings=dict(settings),
        steps=plan.steps,
        rows=[
            *(_plain(name, steps, laps, facts) for name, steps in alone.items()),
            *(_row(name, one.fast, laps, facts) for name, one in fast.items()),
        ],
        requests=len(gallery.timed),
        repeats=repeats,
        pictures=sum(len(one.pictures.latents) for one in shown[PLAIN]),
        peak_memory_bytes=peak_memory_bytes(device),
        environment={
            "torch": torch.__version__,
            "device": device_name(device),
            "threads": torch.get_num_threads(),
            "dtype": str(model.dtype).removeprefix("torch."),
            "batch": len(laps[PLAIN].pictures[0].latents),
        },
    )


@dataclass(frozen=True)
class Painted:
    """Latents and, where there is an autoencoder, their pictures."""

    latents: torch.Tensor
    images: list[Image.Image] | None


@dataclass(frozen=True)
class Fast:
    """Our loop with some recipe."""

    fast: Accelerated
    settings: Mapping[str, Any]
    vae: Any

    def draw(self, asked: Mapping[str, Any], seed: int) -> Drawn:
        out = self.fast.generate_images(**asked, **self.settings, seed=seed, vae=self.vae)
        return Drawn(Painted(out.latents, out.images), out.stats)


@dataclass(frozen=True)
class Plain:
    """The model's own sampling."""

    model: Any
    plan: Plan
    vae: Any

    def draw(self, asked: Mapping[str, Any], seed: int) -> Drawn:
        latents = self.model.sample(labels(self.model, asked["class_labels"]), self.plan, seed)
        images = decoded(self.vae, latents, self.model.config.latent_scale)
        return Drawn(Painted(latents, images))


def _plain(
    name: str, steps: int, laps: Mapping[str, Laps], facts: Mapping[str, Facts]
) -> ContinuousRow:
    return ContinuousRow(
        recipe=name, exact=name == PLAIN, calls=float(steps), **_measured(name, laps, facts)
    )


def _row(
    name: str,
    fast: Accelerated,
    laps: Mapping[str, Laps],
    facts: Mapping[str, Facts],
) -> ContinuousRow:
    stats = laps[name].stats
    drafted = sum(one.num_draft_tokens for one in stats)
    accepted = sum(one.num_accepted_draft_tokens for one in stats)
    spent = pool.shares(stats)
    return ContinuousRow(
        recipe=name,
        exact=fast.recipe.exact,
        calls=sum(one.target_calls for one in stats) / len(stats),
        mean_acceptance_length=pool.mean_acceptance_length(stats),
        draft_acceptance_rate=accepted / drafted if drafted else 0.0,
        draft_share=spent["draft"],
        verify_share=spent["verify"],
        host_share=spent["host"],
        **_measured(name, laps, facts),
    )


def _measured(name: str, laps: Mapping[str, Laps], facts: Mapping[str, Facts]) -> dict[str, Any]:
    """What rows of both kinds have: seconds and facts."""
    over = Ratio.of(laps[PLAIN].seconds, laps[name].seconds)
    apart, uncertain = gap(facts[name], facts[PLAIN])
    return {
        "speedup_over_plain": over.median,
        "spread": over.spread,
        "facts_right": share(facts[name]),
        "facts_gap": apart,
        "facts_gap_error": uncertain,
        "seconds_per_request": min(laps[name].seconds) / len(laps[name].drawn),
    }
