"""The benchmark of picture tokens: recipes against plain decoding and the model's own loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

import torch
from PIL import Image

from mmspec.api import Accelerated, accelerate
from mmspec.bench import pool
from mmspec.bench.efficiency import efficiencies
from mmspec.bench.environment import environment, peak_memory_bytes
from mmspec.bench.gallery import Facts, Gallery, error, facts_of, gap, pictures_to_judge, share
from mmspec.bench.likelihood import log_likelihood
from mmspec.bench.players import Answer
from mmspec.bench.progress import Progress, silent
from mmspec.bench.timing import Ratio
from mmspec.bench.turns import Drawn, Laps, Player, race
from mmspec.codes.image_family import pictures
from mmspec.modalities.image.drawing import Drawing, Images
from mmspec.stats import Stats

PLAIN, OWN = "plain", "generate"


@dataclass(frozen=True)
class ImageRow:
    """One recipe. `spread` has the least and most of the repeats, of both speed-ups.

    Errors are standard errors over pictures; `facts_gap` is to plain decoding, on the same prompts.
    """

    recipe: str
    exact: bool  # what the recipe claims
    calls: float  # of the target per request, the prompt's aside
    fewer_calls: float  # those of plain decoding over these
    speedup_over_plain: float
    speedup_over_generate: float | None
    spread: dict[str, list[float]]
    mean_acceptance_length: float
    tokens_per_target_call: float
    draft_share: float
    verify_share: float
    host_share: float
    engine_efficiency: float | None
    over_accepted_mass: float | None
    facts_right: float | None
    facts_gap: float | None
    facts_gap_error: float | None
    log_likelihood: float
    log_likelihood_error: float
    seconds_per_request: float
    fallback: str | None


@dataclass(frozen=True)
class ImageComparison:
    """What `mmspec bench --modality image` reports; the first row is plain decoding."""

    model: str
    drafters: dict[str, str | None]  # of each recipe
    settings: dict[str, Any]
    codes: int  # per picture
    rows: list[ImageRow]
    generate: dict[str, Any]  # the model's own loop, or why it took no part
    requests: int
    repeats: int
    pictures: int  # judged, per recipe
    peak_memory_bytes: int
    environment: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)


def compare_images(
    ways: Mapping[str, Accelerated],
    gallery: Gallery,
    settings: Mapping[str, Any],
    *,
    model: str = "model",
    drafters: Mapping[str, str | None] | None = None,  # names, for the report
    repeats: int = 5,
    seed: int = 0,
    peers: bool = True,
    efficiency: bool = True,
    progress: Progress = silent,
) -> ImageComparison:
    """Measure accelerated models of one target; everybody draws everything in turns.

    `settings` go with every request: guidance, temperature and so on.
    """
    first = next(iter(ways.values()))
    plain = accelerate(first.model, PLAIN, processor=first.session.processor)
    drawing = plain.session.drawing(**gallery.timed[0], **settings)
    players: dict[str, Player] = {
        name: Fast(fast, settings) for name, fast in {PLAIN: plain, **ways}.items()
    }
    if peers:
        players[OWN] = Own(plain, settings)
    device = plain.session.bound.backbone.device
    laps, failed = race(players, gallery.timed, repeats, seed, device, progress, frozenset({OWN}))
    shown = pictures_to_judge(players, laps, gallery, seed, progress)
    facts = {name: facts_of(gallery, drawn) for name, drawn in shown.items()}
    likely = {name: _likely(plain, settings, gallery, drawn) for name, drawn in shown.items()}
    shares = _efficiencies(players, gallery, repeats, seed, progress) if efficiency else {}
    rows = [
        _row(name, players[name], laps, shown[name], facts, likely[name], shares)
        for name in laps
        if name != OWN
    ]
    own: dict[str, Any] = {"skipped": failed.get(OWN, "not asked for")}
    if OWN in laps:
        own = {
            "speedup_over_plain": Ratio.of(laps[PLAIN].seconds, laps[OWN].seconds).median,
            "facts_right": share(facts[OWN]),
            "log_likelihood": fmean(likely[OWN]),
        }
    return ImageComparison(
        model=model,
        drafters=dict(drafters or {}),
        settings=dict(settings),
        codes=drawing.grid.cells,
        rows=rows,
        generate=own,
        requests=len(gallery.timed),
        repeats=repeats,
        pictures=sum(len(one.pictures.images) for one in shown[PLAIN]),
        peak_memory_bytes=peak_memory_bytes(device),
        environment=environment(first.model, len(laps[PLAIN].pictures[0].images)),
    )


@dataclass(frozen=True)
class Made:
    """Pictures and the tokens that they are made of."""

    images: list[Image.Image]
    sequences: torch.Tensor  # (B, L)


@dataclass(frozen=True)
class Fast:
    """Our loop with some recipe."""

    fast: Accelerated
    settings: Mapping[str, Any]
    seed: int = 0

    def draw(self, asked: Mapping[str, Any], seed: int) -> Drawn:
        out = self._draw(asked, seed)
        return Drawn(Made(out.images, out.sequences), out.stats)

    def answer(self, asked: Mapping[str, Any], room: int) -> Answer:
        """The same for whoever counts tokens; a picture is as long as it is, whatever the room."""
        out = self._draw(asked, self.seed)
        return Answer(out.sequences.tolist(), out.stats.target_calls, out.stats)

    def _draw(self, asked: Mapping[str, Any], seed: int) -> Images:
        made: Images = self.fast.generate_images(**asked, **self.settings, seed=seed)
        return made


@dataclass(frozen=True)
class Own:
    """The model's own way to draw; raises ValueError where it has none."""

    plain: Accelerated
    settings: Mapping[str, Any]

    def draw(self, asked: Mapping[str, Any], seed: int) -> Drawn:
        drawing, tokens = self._draw(asked, seed)
        codes = drawing.image_family.codebook.codes[drawing.placed(tokens)]
        return Drawn(Made(pictures(drawing.image_family.decode(codes)), tokens))

    def answer(self, asked: Mapping[str, Any], room: int) -> Answer:
        """The tokens alone; a picture is as long as it is, whatever the room."""
        _, tokens = self._draw(asked, 0)
        return Answer(tokens.tolist(), tokens.shape[1] - 1)

    def _draw(self, asked: Mapping[str, Any], seed: int) -> tuple[Drawing, torch.Tensor]:
        drawing = self.plain.session.drawing(**asked, **self.settings)
        peer = drawing.image_family.peer
        if peer is None:
            raise ValueError(
                f"{drawing.image_family.name} has no loop of its own that draws pictures"
            )
        torch.manual_seed(seed)
        return drawing, peer(drawing.inputs, drawing.sampling)


def _likely(
    plain: Accelerated, settings: Mapping[str, Any], gallery: Gallery, drawn: Sequence[Drawn]
) -> list[float]:
    found: list[float] = []
    for asked, one in zip(gallery.shown, drawn, strict=True):
        drawing = plain.session.drawing(**asked, **settings)
        found += log_likelihood(plain, drawing, one.pictures.sequences).tolist()
    return found


def _efficiencies(
    players: Mapping[str, Player], gallery: Gallery, repeats: int, seed: int, progress: Progress
) -> dict[str, float]:
    ours = {
        name: Fast(one.fast, one.settings, seed)
        for name, one in players.items()
        if isinstance(one, Fast)
    }
    found = efficiencies(list(ours.values()), gallery.timed[:2], 0, min(repeats, 3), progress)
    return {name: one.share for name, one in zip(ours, found, strict=True)}


def _row(
    name: str,
    player: Player,
    laps: Mapping[str, Laps],
    shown: Sequence[Drawn],
    facts: Mapping[str, Facts],
    likely: Sequence[float],
    shares: Mapping[str, float],
) -> ImageRow:
    assert isinstance(player, Fast)
    lap, stats, recipe = laps[name], laps[name].stats, player.fast.recipe
    calls, base = (_calls(one.stats) for one in (lap, laps[PLAIN]))
    over = {"plain": Ratio.of(laps[PLAIN].seconds, lap.seconds)}
    if OWN in laps:
        over["generate"] = Ratio.of(laps[OWN].seconds, lap.seconds)
    apart, uncertain = gap(facts[name], facts[PLAIN])
    spent = pool.shares(stats)
    everything = [*stats, *(one.stats for one in shown)]
    return ImageRow(
        recipe=name,
        exact=recipe.exact,
        calls=calls,
        fewer_calls=base / max(calls, 1e-9),
        speedup_over_plain=over["plain"].median,
        speedup_over_generate=over["generate"].median if "generate" in over else None,
        spread={key: ratio.spread for key, ratio in over.items()},
        mean_acceptance_length=pool.mean_acceptance_length(stats),
        tokens_per_target_call=pool.tokens_per_target_call(stats),
        draft_share=spent["draft"],
        verify_share=spent["verify"],
        host_share=spent["host"],
        engine_efficiency=shares.get(name),
        over_accepted_mass=pool.over_accepted_mass(everything),
        facts_right=share(facts[name]),
        facts_gap=apart,
        facts_gap_error=uncertain,
        log_likelihood=fmean(likely),
        log_likelihood_error=error(likely),
        seconds_per_request=min(lap.seconds) / len(lap.drawn),
        fallback=next((one.fallback for one in everything if one.fallback), None),
    )


def _calls(stats: Sequence[Stats]) -> float:
    return fmean(one.target_calls for one in stats)
