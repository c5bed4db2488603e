"""From what is typed to walks and back, and what `mmspec doctor` says of chains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markov_modality.loading import chain
from markov_modality.model import MarkovChain
from markov_modality.session import Walked, session
from markov_modality.settings import MarkovSettings
from mmspec.modalities.common.doctor import both, fitting, is_refused
from mmspec.modality import Finding


class MarkovAsker:
    """Prompts are the numbers of the states to begin with."""

    def __init__(self, source: str, model: MarkovChain, settings: MarkovSettings) -> None:
        self.source, self.model, self.settings = source, model, settings

    def request(self, prompts: Sequence[str]) -> dict[str, Any]:
        settings = self.settings
        start = [self._state(prompt) for prompt in prompts]
        return {"start": start, "days": settings.days, "temperature": settings.temperature}

    def text(self, output: Walked) -> str:
        return "\n".join(" ".join(map(str, row)) for row in output.states.tolist())

    def data(self, output: Walked) -> dict[str, Any]:
        return {"states": output.states.tolist()}

    def render(self, output: Walked, path: Path) -> tuple[Path, ...]:
        raise ValueError(f"a walk is text; drop --out {path}")

    def _state(self, prompt: str) -> int:
        if not prompt.strip().isdigit() or int(prompt) >= self.model.states:
            most = self.model.states - 1
            raise ValueError(f"--prompt {prompt!r} is no state of this chain; give 0 to {most}")
        return int(prompt)


def formatter(
    source: str, model: MarkovChain, settings: MarkovSettings, **options: Any
) -> MarkovAsker:
    """Asks a chain where it goes from a state."""
    return MarkovAsker(source, model, settings)


def load_drafter(model: MarkovChain, source: str | Path, **options: Any) -> MarkovChain:
    """A draft chain for a chain."""
    return chain(source)


def examine(target: str, drafter: str | None) -> list[Finding]:
    """What can be said of a chain, or of a pair; a table is read, it is small."""
    names = [name for name in (target, drafter) if name is not None]
    states = both("states", names, lambda name: chain(name).states)
    if is_refused([states]):
        return [states]
    models = [chain(name) for name in names]
    small = models[1] if len(models) == 2 else None
    return [states, *fitting("states", session, models[0], small)]
