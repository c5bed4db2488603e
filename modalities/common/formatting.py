"""What askers share: prompts that are checked, and processors that run no code of a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoProcessor, AutoTokenizer, PreTrainedModel, ProcessorMixin

from mmspec import _hf
from mmspec.modalities.common import doctor_tokens
from mmspec.modalities.common.doctor_tokens import head_class
from mmspec.models.reading import read
from mmspec.registry import ZOO
from mmspec.zoo import path


def checked(prompts: Sequence[str]) -> list[str]:
    """The prompts. Raises ValueError for an empty one."""
    if not prompts or not all(prompt.strip() for prompt in prompts):
        raise ValueError("the prompt is empty; give --prompt some text")
    return list(prompts)


def class_number(prompt: str) -> int:
    """The prompt of a model that draws classes. Raises ValueError for words."""
    if not prompt.strip().isdigit():
        raise ValueError(f"this model draws classes; give --prompt a number, not {prompt!r}")
    return int(prompt)


def processor(source: str, model: Any, sees: bool, trust_remote_code: bool = False) -> Any:
    """The processor, or the tokenizer, beside a model's weights; padding on the left.

    Raises ValueError where there is none, and where it would run code of its own.
    """
    auto: Any = AutoProcessor if sees else AutoTokenizer
    what = "processor" if sees else "tokenizer"
    try:
        found = auto.from_pretrained(origin(source, model), trust_remote_code=trust_remote_code)
    except Exception as error:  # damaged files raise whatever their reader raises
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{source} has no {what} that can be loaded: {reason}") from error
    words = tokenizer(found)
    words.padding_side = "left"
    if words.pad_token is None:
        words.pad_token = words.eos_token
    return found


def tokenizer(found: Any) -> Any:
    """The tokenizer of a processor; itself where it is one."""
    return found.tokenizer if isinstance(found, ProcessorMixin) else found


def origin(source: str, model: Any) -> str:
    """The folder or the name that a model was read from; as it was typed if it does not say."""
    return str(model.config._name_or_path or source)


def load_drafter(model: Any, source: str | Path, load: Callable[..., Any], **options: Any) -> Any:
    """A head of any class for a model of tokens, or what `load` makes of a folder or a name.

    Raises ValueError for what is neither.
    """
    is_folder = (Path(source) / "config.json").exists()
    head = head_class(source) if is_folder else None
    if head is not None:
        return read(head, source, head.__name__)
    small = load(source, **options)
    if not isinstance(_hf.uncompiled(small), PreTrainedModel):
        raise ValueError(
            f"{source} holds a {type(small).__name__}, no model of tokens; give a smaller one with "
            "the target's tokenizer"
        )
    return small


def skeleton(source: str) -> Any:
    """A model of tokens without memory, for what can be said before it is loaded."""
    is_zoo = source.startswith(ZOO)
    return doctor_tokens.skeleton(str(path(source.removeprefix(ZOO))) if is_zoo else source)
