"""The words of the Scene world, one token each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmspec.zoo.language import scenes, words, write

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def vocabulary() -> list[str]:
    """Every word of the Scene world, in alphabetical order."""
    found = {"user", "assistant", "system", ":"}
    for scene, number in scenes(6000, "train", seed=0):
        prompt, answer, _ = write(scene, number)
        found.update(words(prompt), words(answer))
    return sorted(found)


def word_tokenizer(
    special: tuple[str, ...], bos: str | None, eos: str, pad: str, unk: str
) -> PreTrainedTokenizerFast:
    """Lower case, one token per word or mark; decoding joins with spaces but not before marks."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    table = {word: i for i, word in enumerate([*special, *vocabulary()])}
    core = Tokenizer(models.WordLevel(table, unk_token=unk))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    close = [decoders.Replace(" " + mark, mark) for mark in ",.:?!"]
    core.decoder = decoders.Sequence([decoders.WordPiece(prefix="##", cleanup=False), *close])
    core.add_special_tokens(list(special))
    build: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = build(
        tokenizer_object=core,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        unk_token=unk,
        additional_special_tokens=[s for s in special if s not in (bos, eos, pad, unk)],
        padding_side="left",
        model_max_length=512,
    )
    return tokenizer
