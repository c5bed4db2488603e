"""Command-line requests and output files of MAR models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import diffusers

from mmspec.modalities.common import formatting, sheets
from mmspec.modalities.mar import MarSettings, doctor, reader
from mmspec.modalities.mar.reader import class_numbers
from mmspec.models.placement import ANYWHERE

_OUTPUT_SETTINGS = ("grid", "pictures")  # not settings of the sampler


class MarFormatter(sheets.SheetFormatter):
    """Requests for one model, by class name or number; its folder contains the autoencoder."""

    def __init__(self, source: str, model: Any, settings: MarSettings, **options: Any) -> None:
        self.source, self.model = source, model
        self.sheet = sheets.parse_grid(settings.grid)
        given = {n: value for n, value in asdict(settings).items() if n not in _OUTPUT_SETTINGS}
        self.sampling = {name: value for name, value in given.items() if value is not None}
        folder = Path(formatting.get_source(source, model)) / "vae"
        self.vae = autoencoder(folder).to(model.device)

    def request(self, prompts: Sequence[str]) -> dict[str, Any]:
        """A request for a grid of images of each class."""
        names = self.repeat_prompts(prompts)
        return {"class_labels": class_numbers(self.model, names), "vae": self.vae, **self.sampling}


def autoencoder(folder: Path) -> Any:
    """The autoencoder in a folder. Raises ValueError if it cannot be loaded."""
    if not folder.is_dir():
        raise ValueError(f"{folder} does not exist; put the autoencoder of the model there")
    read: Any = diffusers.AutoModel.from_pretrained
    how = {"torch_dtype": "auto", "local_files_only": True, "use_safetensors": True}
    try:
        found = read(str(folder), trust_remote_code=False, **how)
    except Exception as error:  # damaged files raise exceptions of any type
        raise ValueError(f"{folder} holds no autoencoder that can be loaded: {error}") from error
    return found.float().eval()


def load_drafter(model: Any, source: str | Path, **options: Any) -> Any:
    """A smaller MAR model as the draft model."""
    return reader.load(source, options.get("placement", ANYWHERE))


formatter = MarFormatter
examine = doctor.examine
