"""Command-line requests and output files of image-token models: prompts, grids and maps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmspec.modalities.common import doctor, doctor_tokens, formatting, sheets
from mmspec.modalities.common.sheets import save_animation
from mmspec.modalities.image import ImageSettings
from mmspec.modalities.image.families import image_family, maker, reader
from mmspec.modalities.image.generation import build_grid, tokenize_texts
from mmspec.modalities.image.plug import load, session
from mmspec.modalities.image.round_maps import render_frames, render_steps_map
from mmspec.modality import Finding
from mmspec.models.loading import model_type


class ImageFormatter(sheets.SheetFormatter):
    """Requests for one image-token model; size and scale default to the model's."""

    def __init__(self, source: str, model: Any, settings: ImageSettings, **options: Any) -> None:
        self.family, self.settings = image_family(model), settings  # raises for other models
        self.sheet = sheets.parse_grid(settings.grid)
        codes = settings.codes
        self.size = None if codes is None else sheets.parse_size("--codes", codes, "24x24")
        sampling = {"guidance": settings.guidance, "grid": self.size}
        given = {name: value for name, value in sampling.items() if value is not None}
        self.sampling = {"temperature": settings.temperature, **given}
        self.source, self.processor = source, None
        if self.family.tokenize_prompts is not None:
            self.processor = formatting.load_processor(source, model, sees=True, **options)

    def request(self, prompts: Sequence[str]) -> dict[str, Any]:
        """A request for a grid of images of each prompt.

        Raises ValueError for a model that is conditioned on neither text nor classes.
        """
        texts = self.repeat_prompts(prompts)
        if self.family.tokenize_prompts is not None:
            grid = build_grid(self.family, self.size)
            return {**tokenize_texts(self.family, self.processor, texts, grid), **self.sampling}
        if self.family.inputs == ("class_ids",):
            return {"class_ids": [formatting.parse_class(one) for one in texts], **self.sampling}
        raise ValueError(
            f"{self.family.name} is conditioned on {', '.join(self.family.inputs)}, which the "
            "command line cannot pass; call generate_images() from Python"
        )

    def data(self, output: Any) -> dict[str, Any]:
        """The codes of each image, and the round that accepted each."""
        return {
            "codes": output.ids.tolist(),
            "rounds": output.rounds.tolist(),
            "steps_map": self.settings.steps_map,
            "animation": self.settings.animation,
            "settings": self.sampling,
        }

    def render(self, output: Any, path: Path) -> tuple[Path, ...]:
        """Write a grid of the images, and on request grids of their maps and animations."""
        written, columns = [*super().render(output, path)], self.sheet[1]
        rounds = output.rounds.tolist()
        if self.settings.steps_map is not None:
            written.append(Path(self.settings.steps_map))
            maps = [render_steps_map(one, output.stats.recipe) for one in rounds]
            sheets.tile_images(maps, columns).save(written[-1])
        if self.settings.animation is not None:
            written.append(Path(self.settings.animation))
            last = int(output.rounds.max())
            each = [render_frames(*one, last) for one in zip(output.images, rounds, strict=True)]
            save_animation(
                written[-1],
                [
                    sheets.enlarge(sheets.tile_images(shown, columns))
                    for shown in zip(*each, strict=True)
                ],
            )
        return tuple(written)


def load_drafter(model: Any, source: str | Path, **options: Any) -> Any:
    """A draft model, a head, or a model of smaller images."""
    return formatting.load_drafter(model, source, load, reader, **options)


formatter = ImageFormatter


def examine(target: str, drafter: str | None) -> list[Finding]:
    """Findings on a model, or on a target and its draft model, without reading weights."""
    return doctor_tokens.examine(target, drafter, session, reader, _skeleton)


def _skeleton(name: str) -> Any:
    own = maker(model_type(name))
    if own is None:
        return doctor_tokens.skeleton(name)
    config = own.config_class.from_pretrained(name)
    return doctor.skeleton(lambda: own(config))
