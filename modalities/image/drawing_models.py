"""Where drawing models of other packages are found; imports neither them nor torch."""

from importlib.metadata import EntryPoint, entry_points

GROUP = "mmspec.drawing_models"


def points() -> tuple[EntryPoint, ...]:
    """By `model_type`; each leads to a `mmspec.modalities.image.families.DrawingModel`."""
    return tuple(entry_points(group=GROUP))
