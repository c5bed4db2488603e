"""From what is typed to picture tokens, and from those to files: prompts, sheets and maps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmspec.modalities.common import doctor, doctor_tokens, formatting, sheets
from mmspec.modalities.common.animation import save
from mmspec.modalities.image import ImageSettings, drawing
from mmspec.modalities.image.animation import frames
from mmspec.modalities.image.families import image_family, maker, reader
from mmspec.modalities.image.plug import load, session
from mmspec.modalities.image.steps_map import steps_map
from mmspec.modality import Finding
from mmspec.models.loading import model_type


class ImageFormatter(sheets.SheetFormatter):
    """Asks one model that draws with picture tokens; its own size and scale if nothing is said."""

    def __init__(self, source: str, model: Any, settings: ImageSettings, **options: Any) -> None:
        self.family, self.settings = image_family(model), settings  # refuses what draws nothing
        self.sheet = sheets.rows_and_columns(settings.grid)
        codes = settings.codes
        self.size = None if codes is None else sheets.sides("--codes", codes, "24x24")
        said = {"guidance": settings.guidance, "grid": self.size}
        made = {name: value for name, value in said.items() if value is not None}
        self.sampling = {"temperature": settings.temperature, **made}
        self.source, self.processor = source, None
        if self.family.words is not None:
            self.processor = formatting.processor(source, model, sees=True, **options)

    def request(self, prompts: Sequence[str]) -> dict[str, Any]:
        """Pictures of the prompts, a sheet of each.

        Raises ValueError for a model that draws behind something else than words or classes.
        """
        asked = self.sheets_of(prompts)
        if self.family.words is not None:
            grid = drawing.laid_out(self.family, self.size)
            return {**drawing.worded(self.family, self.processor, asked, grid), **self.sampling}
        if self.family.inputs == ("class_ids",):
            return {"class_ids": [formatting.class_number(one) for one in asked], **self.sampling}
        raise ValueError(
            f"{self.family.name} draws behind {', '.join(self.family.inputs)}, which a command "
            "line cannot give; call generate_images() from Python"
        )

    def data(self, output: Any) -> dict[str, Any]:
        """The codes of each picture, and the round each came in."""
        return {
            "codes": output.ids.tolist(),
            "rounds": output.rounds.tolist(),
            "steps_map": self.settings.steps_map,
            "animation": self.settings.animation,
            "settings": self.sampling,
        }

    def render(self, output: Any, path: Path) -> tuple[Path, ...]:
        """A sheet of the pictures; one of their maps, and one that moves, where they are wanted."""
        written, columns = [*super().render(output, path)], self.sheet[1]
        drawn = output.rounds.tolist()
        if self.settings.steps_map is not None:
            written.append(Path(self.settings.steps_map))
            sheets.tiled([steps_map(rounds) for rounds in drawn], columns).save(written[-1])
        if self.settings.animation is not None:
            written.append(Path(self.settings.animation))
            last = int(output.rounds.max())
            each = [frames(*one, last) for one in zip(output.images, drawn, strict=True)]
            save(written[-1], [sheets.tiled(shown, columns) for shown in zip(*each, strict=True)])
        return tuple(written)


def load_drafter(model: Any, source: str | Path, **options: Any) -> Any:
    """A draft model, a head or a model of smaller pictures, for a model."""
    return formatting.load_drafter(model, source, load, **options)


formatter = ImageFormatter


def examine(target: str, drafter: str | None) -> list[Finding]:
    """What can be said of a model, or of a pair, without reading weights."""
    return doctor_tokens.examine(target, drafter, session, reader, _skeleton)


def _skeleton(name: str) -> Any:
    own = maker(model_type(name))
    if own is None:
        return doctor_tokens.skeleton(name)
    config = own.config_class.from_pretrained(name)
    return doctor.skeleton(lambda: own(config))
