"""Requests from command-line settings, and animations and maps from rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmspec.modalities.common import doctor_tokens, formatting
from mmspec.modalities.common.families import make_reader
from mmspec.modalities.common.sheets import save_animation
from mmspec.modalities.vla import PolicySettings
from mmspec.modalities.vla.plug import load, session
from mmspec.modalities.vla.rendering import draw_acceptance_map, render_frames
from mmspec.modalities.vla.rollout import Rollout
from mmspec.modalities.vla.worlds import make_held_out_world
from mmspec.modality import Finding

ROLLOUT_SETTINGS = ("unnorm_key", "deadline_ms", "steps")  # arguments of `rollout`


class PolicyFormatter:
    """Requests rollouts of a policy in an environment."""

    def __init__(self, source: str, model: Any, settings: PolicySettings, **options: Any) -> None:
        self.source, self.settings = source, settings
        self.processor = formatting.load_processor(source, model, sees=True, **options)
        self.world = make_held_out_world(settings.world)
        given = {name: getattr(settings, name) for name in ROLLOUT_SETTINGS}
        self.call_arguments = {name: value for name, value in given.items() if value is not None}
        if settings.temperature > 0:
            self.call_arguments["temperature"] = settings.temperature

    def request(self, prompts: Sequence[str]) -> dict[str, Any]:
        """Arguments of `rollout`; a prompt is an instruction, by default that of the environment.

        Raises ValueError if both a prompt and --instruction are given.
        """
        given = [one for one in prompts if one.strip()]
        setting = self.settings.instruction
        if len(prompts) > 1 or (given and setting is not None):
            raise ValueError(
                "an episode has one instruction; give it once, by --instruction or by --prompt"
            )
        instruction = given[0] if given else setting
        made = {"environment": self.world, **self.call_arguments}
        return made if instruction is None else {**made, "instruction": instruction}

    def text(self, output: Rollout) -> None:
        """None: the output is an animation."""

    def data(self, output: Rollout) -> dict[str, Any]:
        """Success, actions, and statistics of each request."""
        return {
            "instruction": output.instructions[0],
            "success": output.is_success,
            "actions": output.actions.tolist(),
            "tokens": output.tokens,
            "latency_ms": [one.latency_ms for one in output.steps],
            "acceptance": [one.acceptance_length for one in output.steps],
            "world": self.settings.world,
            "settings": self.call_arguments,
        }

    def render(self, output: Rollout, path: Path) -> tuple[Path, ...]:
        """An animation of the camera images, and an acceptance map if the settings name a file."""
        name = "policy" if output.stats is None else output.stats.recipe
        save_animation(path, *render_frames({name: output}))
        if self.settings.acceptance is None:
            return (path,)
        plot = Path(self.settings.acceptance)
        draw_acceptance_map({name: output}).save(plot)
        return path, plot


formatter = PolicyFormatter


def load_drafter(model: Any, source: str | Path, **options: Any) -> Any:
    """Load a head or a smaller policy as drafter."""
    return formatting.load_drafter(model, source, load, make_reader, **options)


def examine(target: str, drafter: str | None) -> list[Finding]:
    """Findings about a policy, or a pair, without reading weights."""
    return doctor_tokens.examine(target, drafter, session, make_reader)
