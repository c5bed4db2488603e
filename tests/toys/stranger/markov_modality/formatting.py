"""From what is typed to walks and back, and what `mmspec doctor` says of chains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markov_modality.loading import chain
from markov_modality.model import MarkovChain
from markov_modality.session import WalkOutput, session
from markov_modality.settings import MarkovSettings
from mmspec.modalities.common.doctor import check_models, find_fitting_recipes, is_refused
from mmspec.modality import Finding


class MarkovFormatter:
    """Prompts are the numbers of the states to begin with."""

    def __init__(self, source: str, model: MarkovChain, settings: MarkovSettings) -> None:
        self.source, self.model, self.settings = source, model, settings

    def request(self, prompts: Sequence[str]) -> dict[str, Any]:
        settings = self.settings
        start = [self._state(prompt) for prompt in prompts]
        return {"start": start, "days": settings.days, "temperature": settings.temperature}

    def text(self, output: WalkOutput) -> str:
        return "\n".join(" ".join(map(str, row)) for row in output.states.tolist())

    def data(self, output: WalkOutput) -> dict[str, Any]:
        return {"states": output.states.tolist()}

    def render(self, output: WalkOutput, path: Path) -> tuple[Path, ...]:
        raise ValueError(f"a walk is text; drop --out {path}")

    def _state(self, prompt: str) -> int:
        if not prompt.strip().isdigit() or int(prompt) >= self.model.states:
            last = self.model.states - 1
            raise ValueError(f"--prompt {prompt!r} is not a state of this chain; give 0 to {last}")
        return int(prompt)


def formatter(
    source: str, model: MarkovChain, settings: MarkovSettings, **options: Any
) -> MarkovFormatter:
    """Build the formatter of a chain."""
    return MarkovFormatter(source, model, settings)


def load_drafter(model: MarkovChain, source: str | Path, **options: Any) -> MarkovChain:
    """A draft chain for a chain."""
    return chain(source)


def examine(target: str, drafter: str | None) -> list[Finding]:
    """What can be said of a chain, or of a pair; a table is read, it is small."""
    names = [name for name in (target, drafter) if name is not None]
    states = check_models("states", names, lambda name: chain(name).states)
    if is_refused([states]):
        return [states]
    models = [chain(name) for name in names]
    small = models[1] if len(models) == 2 else None
    return [states, *find_fitting_recipes(session, models[0], small)]
