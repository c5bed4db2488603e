"""Word-level tokenizer of the Scene world."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from mmspec.zoo.language import scenes, words, write

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@cache  # describes 6000 scenes
def vocabulary() -> tuple[str, ...]:
    """Return every word of the Scene world, in alphabetical order."""
    found = {"user", "assistant", "system", ":"}
    for scene, number in scenes(6000, "train", seed=0):
        prompt, answer, _ = write(scene, number)
        found.update(words(prompt), words(answer))
    return tuple(sorted(found))


def word_tokenizer(
    special: tuple[str, ...],
    template: str | None = None,
    more: tuple[str, ...] = (),
    **settings: Any,
) -> PreTrainedTokenizerFast:
    """Build a lower-case tokenizer with one token per word or punctuation mark.

    `template` adds special tokens around a text, as in "<bos> $A"; `more` are further words, with
    ids after those of the Scene world. `settings` are arguments of `PreTrainedTokenizerFast`, the
    bos, eos, pad and unk tokens among them.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    table = {word: i for i, word in enumerate([*special, *vocabulary(), *more])}
    core = Tokenizer(models.WordLevel(table, unk_token=settings["unk_token"]))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    close = [decoders.Replace(" " + mark, mark) for mark in ",.:?!"]
    core.decoder = decoders.Sequence([decoders.WordPiece(prefix="##", cleanup=False), *close])
    core.add_special_tokens(list(special))
    if template is not None:
        around = [(word, table[word]) for word in template.split() if word in table]
        core.post_processor = TemplateProcessing(single=template, special_tokens=around)
    others = [word for word in special if word not in settings.values()]
    usual = {
        "bos_token": None,
        "additional_special_tokens": others,
        "padding_side": "left",
        "model_max_length": 512,
    }
    build: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = build(tokenizer_object=core, **usual | settings)
    return tokenizer
