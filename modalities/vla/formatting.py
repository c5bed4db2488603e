"""From what is typed to an episode, and from that to files: rollouts that move, and maps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmspec.modalities.common import doctor_tokens, formatting
from mmspec.modalities.common.animation import save
from mmspec.modalities.common.families import reader
from mmspec.modalities.vla import PolicySettings
from mmspec.modalities.vla.acceptance import acceptance_map
from mmspec.modalities.vla.animation import frames
from mmspec.modalities.vla.plug import load, session
from mmspec.modalities.vla.rollout import Rollout
from mmspec.modalities.vla.worlds import make_world
from mmspec.modality import Finding

CALLS = ("unnorm_key", "deadline_ms", "steps")  # settings that a rollout takes as they are


class PolicyFormatter:
    """Lets one policy act in a world."""

    def __init__(self, source: str, model: Any, settings: PolicySettings, **options: Any) -> None:
        self.source, self.settings = source, settings
        self.processor = formatting.processor(source, model, sees=True, **options)
        self.world = held_out(settings.world)
        said = {name: getattr(settings, name) for name in CALLS}
        self.said = {name: value for name, value in said.items() if value is not None}
        if settings.temperature > 0:
            self.said["temperature"] = settings.temperature

    def request(self, prompts: Sequence[str]) -> dict[str, Any]:
        """An episode; a prompt is an instruction, and without one the world says it.

        Raises ValueError where both the prompt and --instruction say something.
        """
        words = [one for one in prompts if one.strip()]
        said = self.settings.instruction
        if len(prompts) > 1 or (words and said is not None):
            raise ValueError(
                "an episode has one instruction; give it once, by --instruction or by --prompt"
            )
        told = words[0] if words else said
        made = {"environment": self.world, **self.said}
        return made if told is None else {**made, "instruction": told}

    def text(self, output: Rollout) -> None:
        """Nothing is printed: what comes out is a picture that moves."""

    def data(self, output: Rollout) -> dict[str, Any]:
        """How it went: success, the actions, and what each answer took."""
        return {
            "instruction": output.instructions[0],
            "success": output.is_success,
            "actions": output.actions.tolist(),
            "tokens": output.tokens,
            "latency_ms": [one.latency_ms for one in output.steps],
            "acceptance": [one.acceptance_length for one in output.steps],
            "world": self.settings.world,
            "settings": self.said,
        }

    def render(self, output: Rollout, path: Path) -> tuple[Path, ...]:
        """What the camera saw, and a map of acceptance where it is wanted."""
        name = "policy" if output.stats is None else output.stats.recipe
        save(path, frames({name: output}))
        if self.settings.acceptance is None:
            return (path,)
        plot = Path(self.settings.acceptance)
        acceptance_map({name: output}).save(plot)
        return path, plot


formatter = PolicyFormatter


def load_drafter(model: Any, source: str | Path, **options: Any) -> Any:
    """A head, or a smaller policy, for a policy."""
    return formatting.load_drafter(model, source, load, **options)


def examine(target: str, drafter: str | None) -> list[Finding]:
    """What can be said of a policy, or of a pair, without reading weights."""
    return doctor_tokens.examine(target, drafter, session, reader)


def held_out(world: str) -> Any:
    """A world, with goals that the zoo's policy has not seen where it knows a difference."""
    return make_world(world, **({"split": "held-out"} if world == "table" else {}))
