"""Command-line requests and output files of diffusion pipelines."""

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
from mmspec.models.placement import ANYWHERE

UNCHANGED = {"use_resolution_binning": False, "clean_caption": False}  # if a pipeline has them


class DiffusionFormatter(sheets.SheetFormatter):
    """Requests for one pipeline: by text, by class, or unconditional."""

    def __init__(
        self, source: str, model: Any, settings: DiffusionSettings, **options: Any
    ) -> None:
        self.source = source
        self.known = inspect.signature(model.__call__).parameters
        self.sheet = sheets.parse_grid(settings.grid)
        self.sampling = {name: value for name, value in UNCHANGED.items() if name in self.known}
        sampling = {
            "num_inference_steps": settings.steps,
            "guidance_scale": settings.guidance,
            "max_sequence_length": settings.words,
        }
        for name, value in sampling.items():
            if value is not None and name not in self.known:
                raise ValueError(f"{source} ({type(model).__name__}) takes no {name}")
            if value is not None:
                self.sampling[name] = value
        model.set_progress_bar_config(disable=True)

    def request(self, prompts: Sequence[str]) -> dict[str, Any]:
        """A request for a grid of images of each prompt."""
        texts = self.repeat_prompts(prompts)
        if "prompt" in self.known:
            return {"prompt": texts, **self.sampling}
        if "class_labels" in self.known:
            classes = [formatting.parse_class(one) for one in texts]
            return {"class_labels": classes, **self.sampling}
        return {"batch_size": len(texts), **self.sampling}


def load_drafter(model: Any, source: str | Path, **options: Any) -> Any:
    """The draft pipeline of a pipeline; no remote code is run."""
    name, placement = str(source), options.get("placement", ANYWHERE)
    place = zoo.path(name.removeprefix("zoo:")) if name.startswith("zoo:") else name
    return placement.finish(DRAFT_PIPELINE.load(place, Network(model), placement.torch_dtype))


formatter = DiffusionFormatter
examine = doctor.examine
