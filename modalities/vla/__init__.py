"""Vision-language-action policies: images and an instruction to actions, a token per component."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mmspec.modalities.common import TOKEN_PLACEMENT
from mmspec.modality import PICTURE_FILES, Entry, Modality, Source, setting
from mmspec.models.folder import read_json

STATISTICS = "norm_stats"  # the entry of a policy's configuration: see `codes.actions.ActionSpace`


def owns(source: Source) -> bool:
    """Whether a configuration has action statistics."""
    if isinstance(source.given, str | Path):
        file = Path(source.given) / "config.json"
        return file.is_file() and bool(read_json(file).get(STATISTICS))
    config = vars(source.given).get("config") if hasattr(source.given, "__dict__") else None
    return bool(getattr(config, "__dict__", {}).get(STATISTICS))


@dataclass(frozen=True)
class PolicySettings:
    """Environment, instruction, time limit and sampling of a policy."""

    world: str = setting("table", "An environment of mmspec.modalities.vla.worlds.")
    instruction: str | None = setting(
        None, "The instruction; default: of the environment.", replaces_prompt=True
    )
    steps: int | None = setting(
        None, "Maximum steps of an episode; default: of the environment.", min=1, max=100_000
    )
    episodes: int | None = setting(
        None, "Number of paired episodes, in place of --prompts.", min=1, max=100_000, only="bench"
    )
    unnorm_key: str | None = setting(None, "The data set whose action statistics are used.")
    deadline_ms: float | None = setting(None, "Time limit per action in milliseconds.", min=0.001)
    temperature: float = setting(0.0, "0 is greedy.", min=0)
    acceptance: str | None = setting(
        None,
        "A picture file for a map of the source of each action component.",
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
    placement=TOKEN_PLACEMENT,
    parts=(
        *("processor", "actions", "unnorm_key", "deadline_ms"),
        *("compressor", "kv", "tree", "length", "sees", "check"),
    ),
    also_decodes=("tokens",),  # a policy is also a language model
    offers=("image input", "action space"),
    unsupported_options=("codebook",),
    command_call="rollout",
    training_data="mmspec.modalities.vla.training_data",
)
