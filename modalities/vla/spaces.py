"""What the tokens of a policy mean to a robot, as its configuration says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmspec.codes.actions import ActionCodes, ActionSpace
from mmspec.errors import described, is_whole
from mmspec.modalities.vla import STATISTICS
from mmspec.targets.readers.reader import Reader

BINS = 256  # where a configuration does not say; so OpenVLA
CHUNK = "num_actions_chunk"  # actions of one answer, where there are several (OpenVLA-OFT)


def codes_of(config: Any) -> ActionCodes:
    """The action ids of a model: the last of its vocabulary, padding of the table left out."""
    facts, text = vars(config), config.get_text_config(decoder=True)
    padded = facts.get("pad_to_multiple_of") or 0
    return ActionCodes(text.vocab_size - padded, facts.get("n_action_bins") or BINS)


def chunk_of(config: Any) -> int:
    """How many actions the model says at a time. Raises ValueError for what is no number."""
    chunk = vars(config).get(CHUNK) or 1
    if not is_whole(chunk) or chunk < 1:
        raise ValueError(f"{CHUNK}={chunk!r} in the configuration is no number of actions")
    return int(chunk)


class ActionSpaces:
    """The action statistics of a policy, one entry per data set; or a space that was given."""

    def __init__(self, model: Any, actions: Any, key: str | None) -> None:
        """Raises ValueError where the model says nothing and no space was given, or both are."""
        self.model, self.given, self.key = model, actions, key
        self.statistics: Mapping[str, Any] = vars(model.config).get(STATISTICS) or {}
        if actions is not None:
            _check_space(model, actions, key)
        elif not self.statistics:
            raise ValueError(
                f"{type(model).__name__} does not say what its tokens mean to a robot: its "
                f"configuration has no {STATISTICS}; give actions=, an ActionSpace of "
                "mmspec.codes.actions"
            )
        else:
            for name in [next(iter(self.statistics)), *([] if key is None else [key])]:
                self.space(name)  # refuses what is damaged, and names that are not known

    @property
    def default(self) -> str | None:
        """What is bound where nothing is said: of several data sets the first."""
        if self.given is None and self.key is None:
            return next(iter(self.statistics))
        return self.key

    def checked(self, key: str | None) -> str | None:
        """A name as it was asked for. Raises ValueError for one that is missing, or not known."""
        self.space(key)
        return self.default if key is None else key

    def space(self, key: str | None) -> ActionSpace:
        """By the name of a data set. Raises ValueError for one that is missing, or not known."""
        if self.given is not None:
            if key is not None:
                raise ValueError(
                    f"unnorm_key={key!r}: this policy was given its actions= as one ActionSpace; "
                    "drop unnorm_key="
                )
            found: ActionSpace = self.given
            return found
        return ActionSpace.keyed(self.statistics, key or self.key, codes_of(self.model.config))


def _check_space(model: Any, actions: Any, key: str | None) -> None:
    if not isinstance(actions, ActionSpace):
        raise ValueError(
            f"actions={described(actions)} is no ActionSpace; make one with ActionSpace.of(...) of "
            "mmspec.codes.actions"
        )
    if key is not None:
        raise ValueError("actions= and unnorm_key= both say what tokens mean; give one of them")
    size = model.config.get_text_config(decoder=True).vocab_size
    if actions.codes.vocabulary > size:
        raise ValueError(
            f"actions= speaks of a vocabulary of {actions.codes.vocabulary} tokens, but "
            f"{type(model).__name__} has {size}; give ActionCodes of its own"
        )


def check_drafter(drafter: Any, codes: ActionCodes) -> None:
    """Refuse a smaller policy whose ids stand for other actions. Raises ValueError.

    One that does not say so, such as a head on the target's features, is taken at its word.
    """
    config = vars(drafter).get("config") if hasattr(drafter, "__dict__") else None
    if config is None or not vars(config).get(STATISTICS):
        return
    other = codes_of(config)
    if other != codes:
        raise ValueError(
            f"the drafter says actions in {other.bins} bins up to id {other.vocabulary - 1}, the "
            f"policy in {codes.bins} up to {codes.vocabulary - 1}; give a drafter of the same "
            "action vocabulary"
        )


def check_free(codes: ActionCodes, backbone: Reader) -> None:
    """Refuse action ids among which are those of pictures. Raises ValueError.

    The last ids of a vocabulary often are: LLaVA's and PaliGemma's image token lies behind the
    words, in the rows that fill their table up.
    """
    taken = [one for one in backbone.visual_ids if codes.first <= one < codes.vocabulary]
    if taken:
        raise ValueError(
            f"{type(backbone.model).__name__} says actions by ids {codes.first} to "
            f"{codes.vocabulary - 1}, and {taken[0]} of them stands for a picture; say in its "
            "configuration how many rows behind the words fill the table up (pad_to_multiple_of), "
            "or give actions= with ActionCodes of other ids"
        )
