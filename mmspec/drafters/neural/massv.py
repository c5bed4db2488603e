"""MASSV: a small language model that reads the features of the target's vision encoder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmspec.draft import Drafter
from mmspec.drafters.neural.draft_inputs import (
    TargetFeatureInputs,
    resolve_compressor,
    target_features,
)
from mmspec.drafters.neural.small_model import SmallModel, SmallModelKind, build_autoregressive
from mmspec.errors import explain_load_errors, format_value
from mmspec.models.folder import read_json
from mmspec.recipe import Kit
from mmspec.targets.readers.reader import Reader

WEIGHTS, CONFIG = "projector.safetensors", "projector.json"


@dataclass(frozen=True)
class Widths:
    """Sizes of a projector."""

    source: int  # width of the target's vision features
    drafter: int  # width of the draft model
    hidden: int


class Projector(nn.Module):
    """Projects the target's vision features to draft embeddings: linear, GELU, linear.

    It reads the features of the target's vision *tower* if there is one per image token (LLaVA,
    PaliGemma), else those after the target's own projector; see `source_width`.
    """

    def __init__(self, source: int, drafter: int, hidden: int | None = None) -> None:
        super().__init__()
        self.widths = Widths(source, drafter, drafter if hidden is None else hidden)
        self.up = nn.Linear(source, self.widths.hidden)
        self.act = nn.GELU()
        self.down = nn.Linear(self.widths.hidden, drafter)

    def forward(self, features: Tensor) -> Tensor:  # (..., source) -> (..., drafter)
        projected: Tensor = self.down(self.act(self.up(features)))
        return projected


def save(folder: str | Path, model: Any, projector: Projector) -> None:
    """Save a draft model: the folder of a language model, with the projector."""
    model.save_pretrained(folder)
    save_projector(folder, projector)


def save_projector(folder: str | Path, projector: Projector) -> None:
    """Write the projector into a folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.contiguous() for name, weight in projector.state_dict().items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(asdict(projector.widths), indent=2) + "\n")


def load_projector(folder: str | Path) -> Projector:
    """Load a projector. Raises ValueError where the folder has none."""
    folder = Path(folder)
    if not (folder / WEIGHTS).exists() or not (folder / CONFIG).exists():
        raise ValueError(
            f"{folder} has no {WEIGHTS} and {CONFIG}; train them with `mmspec train massv "
            f"--drafter {folder}`, or give projector="
        )
    widths = read_json(folder / CONFIG)
    with explain_load_errors(folder, "projector"):
        projector = Projector(**widths)
        projector.load_state_dict(load_file(folder / WEIGHTS))
    return projector.eval().requires_grad_(False)


def projector_of(model: Any, given: Any) -> Projector:
    """The projector given: an object, a folder, or None for the folder of `model`."""
    if isinstance(given, Projector):
        return given
    if given is not None and not isinstance(given, str | Path):
        raise ValueError(
            f"projector={format_value(given)} is neither a projector nor a path; give one of them"
        )
    if given is None and not model.config._name_or_path:
        raise ValueError(
            "a MASSV draft model needs its projector; load it from a folder that `mmspec train "
            "massv` wrote, or give projector="
        )
    projector = load_projector(model.config._name_or_path if given is None else given)
    return projector.to(model.device, model.dtype)


def check_widths(projector: Projector, source: int, drafter: int) -> None:
    """Refuse a projector made for other models. Raises ValueError naming the widths."""
    widths = projector.widths
    if (widths.source, widths.drafter) != (source, drafter):
        raise ValueError(
            f"the projector maps {widths.source} to {widths.drafter}, but the target's vision "
            f"features are {source} wide and the draft model {drafter}; train one for this pair"
        )


def source_width(target: Reader) -> int:
    """Width of the vision features that a projector reads."""
    width = target.tower_width
    return int(target.config.hidden_size if width is None else width)


def massv_model(kit: Kit) -> Drafter:
    """A small language model on the target's vision tower, with its own projector (MASSV).

    A draft model with a vision encoder, as wide as the target, needs no projector: it reads the
    target's projected features directly.
    """
    assert kit.drafter is not None
    if kit.sees != "target-features":
        raise ValueError(f"MASSV reads the target's features, not {kit.sees!r}; drop sees=")
    if kit.options["projector"] is None and kit.drafter.family.media:
        return build_autoregressive(kit, SmallModel(kit.drafter, target_features(kit)))
    projector = projector_of(kit.drafter.model, kit.options["projector"])
    source = source_width(kit.target)
    check_widths(projector, source, kit.drafter.config.hidden_size)
    layout = kit.target.feature_layout(tower=True)
    thinning = (
        None if kit.compressor is None else resolve_compressor(kit.compressor, kit.target, source)
    )
    view = TargetFeatureInputs(layout, kit.target, thinning, projector)
    return build_autoregressive(kit, SmallModel(kit.drafter, view))


def _save_extra(drafter: Any, folder: Path) -> None:
    """Save the projector of a drafter that has one."""
    if drafter.model.inputs.projector is not None:
        save_projector(folder, drafter.model.inputs.projector)


PROJECTED = SmallModelKind(save_extra=_save_extra)
