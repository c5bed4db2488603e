"""Robot policies: pictures and an instruction in, actions out, one token per component."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mmspec.modality import PICTURE_FILES, Entry, Modality, Source, setting
from mmspec.models.folder import configuration

STATISTICS = "norm_stats"  # the entry of a policy's configuration: see `codes.actions.ActionSpace`


def owns(source: Source) -> bool:
    """A model whose configuration says what its tokens mean to a robot."""
    if isinstance(source.given, str | Path):
        file = Path(source.given) / "config.json"
        return file.is_file() and bool(configuration(file).get(STATISTICS))
    config = vars(source.given).get("config") if hasattr(source.given, "__dict__") else None
    return bool(getattr(config, "__dict__", {}).get(STATISTICS))


@dataclass(frozen=True)
class PolicySettings:
    """Which world a policy acts in, what it is told, and how quick it must be."""

    world: str = setting("table", "A world of mmspec.modalities.vla.worlds.")
    instruction: str | None = setting(None, "What the robot shall do; the world's own if not said.")
    steps: int | None = setting(None, "Steps of an episode at most; the world's own limit.", min=1)
    episodes: int | None = setting(
        None, "Paired episodes to measure; in the place of --prompts.", min=1, only="bench"
    )
    unnorm_key: str | None = setting(None, "Whose action statistics, where there are several.")
    deadline_ms: float | None = setting(None, "Milliseconds that an action may take.", min=0.001)
    temperature: float = setting(0.0, "0 is greedy.", min=0)
    acceptance: str | None = setting(
        None,
        "A map of where every component came from, along the episode.",
        only="generate",
        writes=PICTURE_FILES,
    )


MODALITY = Modality(
    name="vla",
    decodes="actions",
    recipe="hold-last",
    recipe_with_drafter="eagle-2",
    settings=PolicySettings,
    package=__name__,
    owns=owns,
    zoo=Entry.read_entries(__name__),
    files=(".gif", ".webp", ".png"),
    parts=(
        *("processor", "actions", "unnorm_key", "deadline_ms"),
        *("compressor", "kv", "tree", "length", "sees", "check"),
    ),
    also_decodes=("tokens",),  # a policy is a language model, too
    unsupported_options=("codebook",),
    command_call="rollout",
    training_data="mmspec.modalities.vla.training_data",
)
