"""From what is typed to a call of a pipeline, and from its output to a file."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmspec import zoo
from mmspec.drafters.denoising.small_denoiser import DRAFT_PIPELINE
from mmspec.modalities.common import formatting, sheets
from mmspec.modalities.diffusion import DiffusionSettings, doctor
from mmspec.modalities.diffusion.network import Network

AS_TYPED = {"use_resolution_binning": False, "clean_caption": False}  # where a pipeline has them


class DiffusionFormatter(sheets.SheetFormatter):
    """Asks one pipeline: in words, by class, or for anything where it takes neither."""

    def __init__(
        self, source: str, model: Any, settings: DiffusionSettings, **options: Any
    ) -> None:
        self.source = source
        self.known = inspect.signature(model.__call__).parameters
        self.sheet = sheets.rows_and_columns(settings.grid)
        self.sampling = {name: value for name, value in AS_TYPED.items() if name in self.known}
        said = {
            "num_inference_steps": settings.steps,
            "guidance_scale": settings.guidance,
            "max_sequence_length": settings.words,
        }
        for name, value in said.items():
            if value is not None and name not in self.known:
                raise ValueError(f"{source} ({type(model).__name__}) takes no {name}")
            if value is not None:
                self.sampling[name] = value
        model.set_progress_bar_config(disable=True)

    def request(self, prompts: Sequence[str]) -> dict[str, Any]:
        """Pictures of the prompts, a sheet of each."""
        asked = self.sheets_of(prompts)
        if "prompt" in self.known:
            return {"prompt": asked, **self.sampling}
        if "class_labels" in self.known:
            classes = [formatting.class_number(one) for one in asked]
            return {"class_labels": classes, **self.sampling}
        return {"batch_size": len(asked), **self.sampling}


def load_drafter(model: Any, source: str | Path, **options: Any) -> Any:
    """A draft pipeline for a pipeline; `options` are not needed: no code of its folder runs."""
    name = str(source)
    place = zoo.path(name.removeprefix("zoo:")) if name.startswith("zoo:") else name
    return DRAFT_PIPELINE.load(place, Network(model))


formatter = DiffusionFormatter
examine = doctor.examine
