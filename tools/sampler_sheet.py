"""The same prompts by every recipe on one sheet, and the distance between two samplers.

    python -m tools.sampler_sheet sheet.webp --model zoo:diffusion-textured --steps 28

A row of images per recipe, a column per prompt, one image per call. Printed are, as JSON, the calls
of the network and processor seconds per image, the facts that a reader finds, and the distance on
ink to the row that a recipe is to reproduce: the deterministic sampler for lossy recipes, its
counterpart with noise for exact ones. Then energy distances between the sets of images that two
samplers generate for one prompt, beside that by chance (`sampler_distance`).
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
from diffusers import DPMSolverMultistepScheduler
from PIL import Image, ImageDraw, ImageFont

import mmspec
from mmspec.modalities.common.measures import held_out_prompts, score_images
from mmspec.modalities.diffusion.image_distance import (
    compare_images,
    generate_reference,
    output_images,
)
from mmspec.modalities.diffusion.sampler_distance import compare_sets
from mmspec.models.loading import load_pipeline
from mmspec.zoo import catalogue

PLAIN, NOISY = "pipeline", "pipeline, with noise"
EXACT = (
    *("accelerated-diffusion-carried", "accelerated-diffusion-secant"),
    *("accelerated-diffusion-frozen", "accelerated-diffusion-corrected"),
    *("asd", "asd-tree", "block-diffusion"),
)
LOSSY: Mapping[str, Mapping[str, Any]] = {
    "taylorseer": {"interval": 2},
    "taylorseer, lite": {"interval": 2, "lite": True},  # where the row above does not fit
    "speca": {},
    "first-block-cache": {"threshold": 0.1},
    "sea-cache": {"threshold": 0.2},
    "tea-cache": {"threshold": 0.2},
    "mag-cache": {"threshold": 0.1},
    "pab": {},
    "deep-cache": {"interval": 2},
    "paradigms": {},
}
OTHER_NOISE = ("paradigms",)  # than that of the pipeline, from the same seed
LABEL, FONT = 190, 13  # pixels: width of the labels, size of their letters
FEW = 4  # steps of a control
SCALE, GAP = 2, 5  # of images on the sheet; pixels between them

Way = Callable[..., tuple[np.ndarray, float]]  # (request, seed) -> images (B, H, W, 3), calls


@dataclass(frozen=True)
class Sampled:
    """What one way has generated for all prompts."""

    images: np.ndarray  # (B, H, W, 3)
    calls: float  # per image
    seconds: float  # of the processor, per image


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the sheet, and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sheet", type=Path)
    parser.add_argument("--model", default="zoo:diffusion", help="a bundled pipeline or a folder")
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--recipe", action="append", help="default: all")
    parser.add_argument("--images", type=int, default=48, help="per sampler, for the distance")
    given = parser.parse_args(arguments)
    logging.getLogger("mmspec").setLevel(logging.ERROR)
    pipe = load_solver_pipeline(given.model)
    request = {"num_inference_steps": given.steps, "guidance_scale": given.guidance}
    (prompts,), scenes = held_out_prompts(given.prompts, given.prompts, seed=0)
    ways = make_ways(pipe, given.recipe or [*EXACT, *LOSSY])
    sampled = sample_all(ways, request, prompts)
    draw_sheet(sampled).save(given.sheet, quality=85)
    figures: dict[str, Any] = {"rows": describe(sampled, scenes)}
    if given.images:
        figures["distances"] = measure_distances(ways, request, prompts[0], given.images)
    json.dump(figures, sys.stdout, indent=1)


def load_solver_pipeline(model: str) -> Any:
    """A pipeline with DPM-Solver++, the sampler that PixArt ships with."""
    name = model.removeprefix("zoo:")
    pipe = catalogue.load(name) if name != model else load_pipeline(model)
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler = DPMSolverMultistepScheduler.from_config(pipe.scheduler.config)
    return pipe


def make_ways(pipe: Any, recipes: Sequence[str]) -> dict[str, Way]:
    """The pipeline, the pipeline with noise, the recipes, and the pipeline in half the steps."""

    def by_pipeline(request: Mapping[str, Any], seed: int) -> tuple[np.ndarray, float]:
        return generate_reference(pipe, request, seed), len(pipe.scheduler.timesteps)

    def half(request: Mapping[str, Any], seed: int) -> tuple[np.ndarray, float]:
        return by_pipeline({**request, "num_inference_steps": steps_of(request) // 2}, seed)

    def by_recipe(name: str, **options: Any) -> Way:
        fast: Any = mmspec.accelerate(pipe, name, **options)

        def run(request: Mapping[str, Any], seed: int) -> tuple[np.ndarray, float]:
            output = fast(**request, seed=seed, output_type="np")
            return output_images(output), output.stats.target_calls

        return run

    ways: dict[str, Way] = {PLAIN: by_pipeline, f"{PLAIN}, half the steps": half}
    for name in (name for name in recipes if name in LOSSY):
        ways[name] = by_recipe(name.partition(",")[0], **LOSSY[name])
    ways[NOISY] = by_recipe(EXACT[0], window=1, sampler="stochastic")
    exact = [name for name in recipes if name not in LOSSY]
    return ways | {name: by_recipe(name, sampler="stochastic") for name in exact}


def steps_of(request: Mapping[str, Any]) -> int:
    """The steps that a request asks for."""
    return int(request["num_inference_steps"])


def sample_all(
    ways: Mapping[str, Way], request: Mapping[str, Any], prompts: Sequence[str]
) -> dict[str, Sampled]:
    """All ways that fit the pipeline; the reasons of the others go to standard error."""
    sampled: dict[str, Sampled] = {}
    for name, way in ways.items():
        if name.partition(", lite")[0] in sampled:
            continue
        try:
            sampled[name] = sample(way, request, prompts)
        except ValueError as error:
            print(f"without {name}: {error}", file=sys.stderr)
    return sampled


def sample(way: Way, request: Mapping[str, Any], prompts: Sequence[str]) -> Sampled:
    """One image per prompt and call; an unmeasured call before, in which caches measure."""
    way({**request, "prompt": prompts[0]}, seed=0)
    start = process_time()
    found = [way({**request, "prompt": one}, seed=seed) for seed, one in enumerate(prompts)]
    seconds = (process_time() - start) / len(prompts)
    calls = sum(count for _, count in found) / len(prompts)
    return Sampled(np.concatenate([images for images, _ in found]), calls, seconds)


def describe(sampled: Mapping[str, Sampled], scenes: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Calls, processor seconds, facts and distance of every row."""
    rows = {}
    for name, one in sampled.items():
        right, total = map(sum, zip(*score_images(scenes, list(one.images)), strict=True))
        rows[name] = {
            "calls": round(one.calls, 1),
            "seconds": round(one.seconds, 3),
            "facts": f"{right} of {total}",
        }
        if name not in OTHER_NOISE:
            reference = NOISY if name == NOISY or name in EXACT else PLAIN
            found = compare_images(sampled[reference].images, one.images).psnr_on_ink
            rows[name] |= {"psnr_on_ink": found and round(found, 1), "of": reference}
    return rows


def measure_distances(
    ways: Mapping[str, Way], request: Mapping[str, Any], prompt: str, count: int
) -> dict[str, Any]:
    """Distances of `count` images each, of different seeds.

    Controls: a second set of the pipeline's own, and sets in few steps and with more guidance,
    whose distributions differ.
    """
    batch = {**request, "prompt": [prompt] * count}
    exact = next((name for name in EXACT if name in ways), NOISY)
    few = {**batch, "num_inference_steps": FEW}
    strong = {**batch, "guidance_scale": 2 * batch["guidance_scale"]}
    noisy = ways[NOISY](batch, seed=102)[0]
    pairs = {
        f"{PLAIN} | {NOISY}": noisy,
        f"{NOISY} | {exact}": ways[exact](batch, seed=103)[0],
        f"{PLAIN} | {PLAIN}, other seeds": ways[PLAIN](batch, seed=104)[0],
        f"{PLAIN} | {PLAIN}, {FEW} steps": ways[PLAIN](few, seed=105)[0],
        f"{PLAIN} | {PLAIN}, twice the guidance": ways[PLAIN](strong, seed=106)[0],
    }
    firsts = {PLAIN: ways[PLAIN](batch, seed=101)[0], NOISY: noisy}
    return {
        name: vars(compare_sets(firsts[name.partition(" | ")[0]], other))
        for name, other in pairs.items()
    }


def draw_sheet(sampled: Mapping[str, Sampled]) -> Image.Image:
    """A labelled row of images per way."""
    rows = []
    for name, one in sampled.items():
        side = SCALE * one.images.shape[1]
        row = Image.new("RGB", (LABEL + len(one.images) * (side + GAP), side + GAP), "white")
        for index, pixels in enumerate(one.images):
            image = Image.fromarray((255 * pixels).round().astype(np.uint8))
            image = image.resize((side, side), Image.Resampling.BICUBIC)
            row.paste(image, (LABEL + index * (side + GAP), 0))
        text = f"{name.replace('accelerated-diffusion', 'a.-d.')}\n{one.calls:.1f} calls"
        place = (6, side // 2)
        ImageDraw.Draw(row).text(place, text, "black", ImageFont.load_default(FONT), anchor="lm")
        rows.append(np.array(row))
    return Image.fromarray(np.concatenate(rows, 0))


if __name__ == "__main__":
    main()
