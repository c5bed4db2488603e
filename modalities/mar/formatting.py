"""From what is typed to classes, and from latents to files: models that draw continuous tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import diffusers

from mmspec.modalities.common import formatting, sheets
from mmspec.modalities.mar import MarSettings, doctor, reader
from mmspec.modalities.mar.reader import numbers

_SHOWN = ("grid", "pictures")  # settings that are not the sampler's


class MarFormatter(sheets.SheetFormatter):
    """Asks one model for classes, by name or by number; the autoencoder lies beside the model."""

    def __init__(self, source: str, model: Any, settings: MarSettings, **options: Any) -> None:
        self.source, self.model = source, model
        self.sheet = sheets.rows_and_columns(settings.grid)
        said = {name: value for name, value in asdict(settings).items() if name not in _SHOWN}
        self.sampling = {name: value for name, value in said.items() if value is not None}
        self.vae = autoencoder(Path(formatting.origin(source, model)) / "vae")

    def request(self, prompts: Sequence[str]) -> dict[str, Any]:
        """Pictures of classes, a sheet of each."""
        asked = self.sheets_of(prompts)
        return {"class_labels": numbers(self.model, asked), "vae": self.vae, **self.sampling}


def autoencoder(folder: Path) -> Any:
    """What makes pixels, from a folder. Raises ValueError where there is none."""
    if not folder.is_dir():
        raise ValueError(f"there is no {folder}; put the autoencoder of the model there")
    read: Any = diffusers.AutoModel.from_pretrained
    how = {"torch_dtype": "auto", "local_files_only": True, "use_safetensors": True}
    try:
        found = read(str(folder), trust_remote_code=False, **how)
    except Exception as error:  # damaged files raise whatever their reader raises
        raise ValueError(f"{folder} holds no autoencoder that can be loaded: {error}") from error
    return found.float().eval()


def load_drafter(model: Any, source: str | Path, **options: Any) -> Any:
    """A smaller model for a model."""
    return reader.load(source)


formatter = MarFormatter
examine = doctor.examine
