"""From what a user types to a model that draws with picture tokens: models, prompts, settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmspec.cli import inputs as given
from mmspec.cli.modality import IMAGE

if TYPE_CHECKING:
    from mmspec.recipe import Partner

MODEL = "zoo:image"
RECIPE = "mc-sjd-gumbel"
MOST = 64  # pictures of a sheet


@dataclass(frozen=True)
class Studio:
    """A model that draws, its processor where it reads words, and its draft models."""

    name: str  # as typed
    model: Any
    processor: Any | None
    drafters: Mapping[Partner, tuple[str, Any]]  # name and model of each sort

    @property
    def is_zoo(self) -> bool:
        return self.name.startswith("zoo:")

    def drafter(self, recipe: str) -> tuple[str | None, Any]:
        """The name and the draft model of a recipe, if it takes one."""
        from mmspec import recipes

        plan = recipes.get(recipe)
        return (None, None) if plan.partner is None else self.drafters[plan.partner]

    def fast(self, recipe: str, **parts: Any) -> Any:
        """The model under a recipe."""
        from mmspec.api import accelerate

        small = self.drafter(recipe)[1]
        return accelerate(self.model, recipe, drafter=small, processor=self.processor, **parts)

    def asked(self, prompts: Sequence[str]) -> dict[str, Any]:
        """Arguments of a call that draws these; class numbers where the model takes no words.

        Raises ValueError for a model that draws behind something else.
        """
        from mmspec.modalities.image import families as image

        painter = image.image_family(self.model)
        if painter.words is not None:
            return {"prompt": list(prompts)}
        if painter.inputs == ("class_ids",):
            return {"class_ids": [given.class_number(prompt) for prompt in prompts]}
        raise ValueError(
            f"{painter.name} draws behind {', '.join(painter.inputs)}, which a command line cannot "
            "give; call generate_images() from Python"
        )


def load(model: str, drafter: str | None, chosen: Sequence[str]) -> Studio:
    """Load a target, and the draft models that the chosen recipes take.

    Raises ValueError for recipes of the other sort, and for a model that draws nothing.
    """
    from mmspec import recipes

    model = MODEL if model == given.MODEL else model
    plans = [recipes.get(name) for name in chosen]
    for plan in plans:
        if plan.decodes != "tokens":
            raise ValueError(
                f"recipe {plan.name!r} decodes {plan.decodes}; for picture tokens there are "
                f"{', '.join(recipes.names('tokens'))}"
            )
    needed = {plan.partner: plan.name for plan in plans if plan.partner is not None}
    if drafter is not None and not needed:
        raise ValueError(f"{', '.join(chosen)}: no draft model is taken; drop --drafter")
    if drafter is not None and len(needed) > 1:
        raise ValueError(
            f"{' and '.join(needed.values())} take draft models of different kinds; measure them "
            "one at a time, or without --drafter"
        )
    target = _loaded(model)
    from mmspec.modalities.image import families as image

    words = image.image_family(target).words  # refuses a model that draws nothing
    processor = None if words is None else given.load_processor(model, sees=True)
    names = {sort: drafter or _default(model, sort, recipe) for sort, recipe in needed.items()}
    small = {sort: (name, _loaded(name)) for sort, name in names.items()}
    return Studio(model, target, processor, small)


def _default(model: str, sort: Partner, recipe: str) -> str:
    """The zoo's own draft model of a target."""
    from mmspec import zoo

    name = given.default_drafter(model) if sort == "drafter" else f"{model}-{sort}"
    if name is None or not name.startswith("zoo:") or name[4:] not in zoo.names():
        raise ValueError(f"recipe {recipe!r} needs a draft model; give --drafter DIR or zoo:NAME")
    return name


def settings(
    model: str, guidance: float | None, temperature: float | None, codes: str | None
) -> dict[str, Any]:
    """What goes with every call: temperature 1 and the model's own scale if nothing is said."""
    found: dict[str, Any] = {"temperature": 1.0 if temperature is None else temperature}
    if guidance is None and model.startswith("zoo:"):
        from mmspec.modalities.image.zoo.models import GUIDANCE

        guidance = GUIDANCE
    if guidance is not None:
        found["guidance"] = guidance
    if codes is not None:
        found["grid"] = _sides("--codes", codes, "24x24")
    return found


def sheet(grid: str | None) -> tuple[int, int]:
    """Rows and columns of a sheet of pictures, one if nothing is said."""
    if grid is None:
        return 1, 1
    rows, columns = _sides("--grid", grid, "4x4")
    if rows * columns > MOST:
        raise ValueError(
            f"--grid {grid} is a sheet of {rows * columns} pictures, drawn as one batch; {MOST} "
            f"are the most. For the size of one picture in codes give --codes {grid}"
        )
    return rows, columns


def _sides(option: str, typed: str, example: str) -> tuple[int, int]:
    sides = typed.lower().split("x")
    if len(sides) != 2 or not all(side.isdigit() and int(side) for side in sides):
        raise ValueError(f"{option} {typed} is no size; give rows and columns, such as {example}")
    return int(sides[0]), int(sides[1])


def _loaded(name: str) -> Any:
    """A model; of a class that draws where transformers' own does not."""
    from mmspec.loading import load_model

    given.present(name)
    if name.startswith("zoo:"):
        from mmspec import zoo

        if zoo.modality(name.removeprefix("zoo:")).name != IMAGE:
            raise ValueError(f"{name} draws nothing; give {MODEL}, or a folder of a model")
        return load_model(name)
    from transformers import PretrainedConfig

    from mmspec.modalities.image.families import CLASSES

    read: Any = PretrainedConfig.get_config_dict
    own = CLASSES.get(read(name)[0].get("model_type"))
    if own is None:
        return load_model(name)
    return own.from_pretrained(name, use_safetensors=True).eval()
