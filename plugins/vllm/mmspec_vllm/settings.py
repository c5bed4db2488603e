"""What a proposer reads from vLLM's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "mmspec"  # key of `additional_config`
LONGEST_DRAFT = 128  # tokens; MAX_SPEC_LEN of vLLM's rejection sampler

# fields of a model's configuration that hold ids of placeholders
_PLACEHOLDERS = (
    *("image_token_id", "image_token_index", "video_token_id", "video_token_index"),
    *("audio_token_id", "audio_token_index"),
)


@dataclass(frozen=True)
class Limits:
    """Limits of an engine."""

    draft_length: int
    text_length: int
    num_rows: int
    vocabulary: int
    placeholders: frozenset[int]  # ids that stand for pictures, clips or sound in a prompt


def read_limits(config: VllmConfig) -> Limits:
    """Read the limits. Raises ValueError for settings that no proposer could follow."""
    speculative = config.speculative_config
    if speculative is None:
        raise ValueError("speculative_config is None; give method, model and a number of tokens")
    length = speculative.num_speculative_tokens
    if not length or not 1 <= length <= LONGEST_DRAFT:
        raise ValueError(
            f"num_speculative_tokens={length} must be within 1..{LONGEST_DRAFT}, the limit of "
            "vLLM's rejection sampler; give fewer"
        )
    schedule = getattr(speculative, "num_speculative_tokens_per_batch_size", None)
    if schedule is not None:
        raise ValueError(
            f"num_speculative_tokens_per_batch_size={schedule} is not passed on to proposers of "
            "method custom_class; leave it out"
        )
    model = config.model_config
    named = [getattr(model.hf_config, name, None) for name in _PLACEHOLDERS]
    return Limits(
        length,
        model.max_model_len,
        config.scheduler_config.max_num_seqs,
        model.get_vocab_size(),
        frozenset(one for one in named if isinstance(one, int)),
    )


def read_options(config: VllmConfig, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`additional_config["mmspec"]` over `defaults`. Raises ValueError for unknown options."""
    additional = config.additional_config
    given = additional.get(KEY, {}) if isinstance(additional, Mapping) else {}
    if not isinstance(given, Mapping):
        raise ValueError(f"additional_config[{KEY!r}]={given!r} must be options; give a mapping")
    unknown = sorted(set(given) - set(defaults))
    if unknown:
        raise ValueError(
            f"additional_config[{KEY!r}] has {', '.join(unknown)}, which this proposer does not "
            f"know; it has {', '.join(defaults)}"
        )
    return {**defaults, **given}


def check_count(name: str, value: Any) -> int:
    """Return a whole number from 1 on. Raises ValueError for anything else."""
    if type(value) is not int or value < 1:
        raise ValueError(
            f"{name}={value!r} must be a whole number of at least 1; set it in "
            f"additional_config={{{KEY!r}: {{{name!r}: ...}}}}"
        )
    return value


def check_flag(name: str, value: Any) -> bool:
    """Return True or False. Raises ValueError for anything else."""
    if type(value) is not bool:
        raise ValueError(
            f"{name}={value!r} must be true or false; set it in "
            f"additional_config={{{KEY!r}: {{{name!r}: true}}}}"
        )
    return value
