"""Action spaces of a policy, from the statistics in its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmspec.codes.actions import ActionCodes, ActionSpace
from mmspec.errors import format_value, is_integer
from mmspec.modalities.vla import STATISTICS
from mmspec.targets.readers.reader import Reader

BINS = 256  # default, as in OpenVLA
CHUNK = "num_actions_chunk"  # the configuration entry of chunked policies (OpenVLA-OFT)


def action_codes(config: Any) -> ActionCodes:
    """The action ids of a model: the last of its vocabulary, without padding rows."""
    facts, text = vars(config), config.get_text_config(decoder=True)
    padded = facts.get("pad_to_multiple_of") or 0
    return ActionCodes(text.vocab_size - padded, facts.get("n_action_bins") or BINS)


def chunk_size(config: Any) -> int:
    """The number of actions per request. Raises ValueError for what is no number."""
    chunk = vars(config).get(CHUNK) or 1
    if not is_integer(chunk) or chunk < 1:
        raise ValueError(f"{CHUNK}={chunk!r} in the configuration is not a number of actions")
    return int(chunk)


class ActionSpaces:
    """The action statistics of a policy, one entry per data set; or a given space."""

    def __init__(self, model: Any, actions: Any, key: str | None) -> None:
        """Raises ValueError without statistics and space, or for a space with a key."""
        self.model, self.given, self.key = model, actions, key
        self.statistics: Mapping[str, Any] = vars(model.config).get(STATISTICS) or {}
        if actions is not None:
            _check_space(model, actions, key)
        elif not self.statistics:
            raise ValueError(
                f"{type(model).__name__} has no action statistics: its configuration has no "
                f"{STATISTICS}; give actions=, an ActionSpace of mmspec.codes.actions"
            )
        else:
            for name in [next(iter(self.statistics)), *([] if key is None else [key])]:
                self.space(name)  # raises for damaged statistics and unknown names

    @property
    def default(self) -> str | None:
        """The default key: of several data sets the first."""
        if self.given is None and self.key is None:
            return next(iter(self.statistics))
        return self.key

    def resolve_key(self, key: str | None) -> str | None:
        """The key, or the default. Raises ValueError for one that is missing or not known."""
        self.space(key)
        return self.default if key is None else key

    def space(self, key: str | None) -> ActionSpace:
        """The space of a data set. Raises ValueError for one that is missing or not known."""
        if self.given is not None:
            if key is not None:
                raise ValueError(
                    f"unnorm_key={key!r}: this policy was given its actions= as one ActionSpace; "
                    "drop unnorm_key="
                )
            found: ActionSpace = self.given
            return found
        return ActionSpace.from_norm_stats(
            self.statistics, self.key if key is None else key, action_codes(self.model.config)
        )


def _check_space(model: Any, actions: Any, key: str | None) -> None:
    if not isinstance(actions, ActionSpace):
        raise ValueError(
            f"actions={format_value(actions)} is no ActionSpace; make one with "
            "mmspec.codes.actions.ActionSpace.from_statistics(...)"
        )
    if key is not None:
        raise ValueError("actions= and unnorm_key= both define the action space; give one of them")
    size = model.config.get_text_config(decoder=True).vocab_size
    if actions.codes.vocabulary > size:
        raise ValueError(
            f"actions= has a vocabulary of {actions.codes.vocabulary} tokens, but "
            f"{type(model).__name__} has {size}; give ActionCodes of that size"
        )


def check_drafter(drafter: Any, codes: ActionCodes) -> None:
    """Raises ValueError for a draft policy whose ids encode other actions.

    Draft models without action statistics, such as feature heads, are not checked.
    """
    config = vars(drafter).get("config") if hasattr(drafter, "__dict__") else None
    if config is None or not vars(config).get(STATISTICS):
        return
    other = action_codes(config)
    if other != codes:
        raise ValueError(
            f"the drafter encodes actions in {other.bins} bins up to id {other.vocabulary - 1}, "
            f"the policy in {codes.bins} up to {codes.vocabulary - 1}; give a drafter of the same "
            "action vocabulary"
        )


def check_image_ids(codes: ActionCodes, backbone: Reader) -> None:
    """Raises ValueError if action ids include image tokens.

    The image tokens of LLaVA and PaliGemma are among the last ids, in the padding rows of the
    embedding.
    """
    conflicts = [one for one in backbone.visual_ids if codes.first <= one < codes.vocabulary]
    if conflicts:
        raise ValueError(
            f"{type(backbone.model).__name__} encodes actions by ids {codes.first} to "
            f"{codes.vocabulary - 1}, and {conflicts[0]} is an image token; set the number of "
            "padding rows in its configuration (pad_to_multiple_of), or give actions= with "
            "ActionCodes of other ids"
        )
