"""Draft architectures of recipes that decode latents: from a kit of parts to a drafter."""

from __future__ import annotations

from mmspec.draft import Drafter
from mmspec.drafters.denoising.extrapolated import Extrapolated, axis_named, forecast_named
from mmspec.drafters.denoising.freeze import Clean, freeze_named
from mmspec.drafters.denoising.frozen import Frozen, root_named
from mmspec.drafters.denoising.picard import Picard
from mmspec.drafters.denoising.small_denoiser import Independent, check_grids
from mmspec.drafters.denoising.window import Window
from mmspec.recipe import Kit


def small_denoiser(kit: Kit) -> Drafter:
    """An independent denoiser on the target's grid, one call per drafted state."""
    assert kit.drafter is not None
    check_grids(kit.drafter.denoiser.kernel, kit.target.denoiser.kernel)
    return Independent(kit.drafter.denoiser, _window(kit))


def frozen_prediction(kit: Kit) -> Drafter:
    """What the target predicted last."""
    freeze, root = freeze_named(kit.options["freeze"]), root_named(kit.options["root"])
    return Frozen(_window(kit), freeze, root)


def frozen_clean_sample(kit: Kit) -> Drafter:
    """The clean sample that the target predicted last: exchangeable increments."""
    return Frozen(_window(kit), Clean(), root_named(kit.options["root"]))


def extrapolated_prediction(kit: Kit) -> Drafter:
    """The target's last predictions, continued."""
    return Extrapolated(
        _window(kit),
        freeze_named(kit.options["freeze"]),
        forecast_named(kit.options["forecast"], kit.options["order"]),
        axis_named(kit.options["axis"]),
        root_named(kit.options["root"]),
    )


def carried_window(kit: Kit) -> Drafter:
    """The window of the last call, every state moved by what was seen at its step."""
    freeze, root = freeze_named(kit.options["freeze"]), root_named(kit.options["root"])
    return Picard(_window(kit), freeze, root)


def _window(kit: Kit) -> Window:
    """The window of the recipe, which has to fit the chain."""
    if not isinstance(kit.shape, Window):
        raise ValueError(
            f"denoising chains are drafted in windows, not in {kit.shape!r}; give window= or tree="
        )
    kit.shape.check(kit.target.denoiser.kernel.steps)
    return kit.shape
