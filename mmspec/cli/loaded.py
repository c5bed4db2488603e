"""Models that were chosen, read into memory, and who asks them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mmspec import registry
from mmspec.api import Accelerated, accelerate
from mmspec.cli.choosing import Chosen, choose
from mmspec.cli.inputs import quiet
from mmspec.cli.options import Choice
from mmspec.cli.output import working
from mmspec.modality import Formatter
from mmspec.registry import ZOO


@dataclass(frozen=True)
class Loaded:
    """A target with who asks it, and the draft models of the chosen recipes."""

    chosen: Chosen
    model: Any
    formatter: Formatter
    drafters: Mapping[str, Any]  # by name

    def fast(self, recipe: str, **parts: Any) -> Accelerated:
        """The model under a recipe; `parts` beside those that were typed."""
        name, owner = self.chosen.drafters.get(recipe), self.chosen.owner
        small = None if name is None else self.drafters[name]
        own = self.chosen.own_options.get(recipe, {})
        given = {**self.chosen.options, **own, **parts}
        return accelerate(self.model, recipe, drafter=small, modality=owner.name, **given)

    def plain(self) -> Accelerated:
        """The model as it is, whatever was typed of recipes."""
        recipe, parts = self.chosen.owner.plain
        return accelerate(self.model, recipe, modality=self.chosen.owner.name, **parts)

    def ask(self, fast: Accelerated, request: Mapping[str, Any], seed: int) -> Any:
        """The output of the customary call, or of the one that the modality names for commands."""
        call = self.chosen.owner.command_call or fast.session.calls[0]
        return getattr(fast, call)(**request, seed=seed)


def load(choice: Choice, chosen: Chosen) -> Loaded:
    """Read the target and its draft models. Raises ValueError for what cannot be read."""
    set_threads(choice.threads, chosen.model)
    how = {"trust_remote_code": choice.trust_remote_code}
    plug, formatting = registry.plug(chosen.owner), registry.formatting(chosen.owner)
    quiet()
    with working(f"loading {chosen.model}", choice.json):
        model = plug.load(chosen.model, **how)
        formatter = formatting.formatter(chosen.model, model, chosen.settings, **how)
    drafters: dict[str, Any] = {}
    for name in filter(None, dict.fromkeys(chosen.drafters.values())):
        with working(f"loading {name}", choice.json):
            drafters[name] = formatting.load_drafter(model, name, **how)
    return Loaded(chosen, model, formatter, drafters)


def opened(
    model: str | None,
    modality: str,
    drafter: str | None,
    recipes: Sequence[str],
    seed: int = 0,
    knobs: list[str] | None = None,
    **settings: Any,
) -> Loaded:
    """What a script asks for; settings that are None are not said. Raises ValueError as `load`."""
    given = {name: value for name, value in settings.items() if value is not None}
    said = list(recipes)
    choice = Choice(model, modality, drafter, said, knobs=knobs, seed=seed, settings=given)
    return load(choice, choose(choice))


def set_threads(count: int | None, model: str = "") -> None:
    """Use so many processor threads; by default one for the zoo, and torch's own choice else.

    Zoo models are too small to share out: threads would only wait for each other.
    """
    if count is None and model.startswith(ZOO):
        count = 1
    if count is not None:
        torch.set_num_threads(count)
