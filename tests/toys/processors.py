"""Processors of the toys that draw: one word per token, of the real classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.toys import image_models

WORDS = ("a", "large", "small", "red", "blue", "circle", "square", "user", "assistant", ":", "*")
NUMBERS = tuple("0123456789")


def tokenizer(**named: str) -> Any:
    """Special tokens where the toys' configurations have them, then words; `<bos>` in front."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    table = {
        "<pad>": 0,
        "<bos>": 1,
        "<eos>": image_models.EOS,
        "<unk>": 3,
        "<sep>": 4,
        "<image>": 10,
    }
    table |= {"<boi>": image_models.BOI, "<eoi>": 14, "<wrap>": 15, "<eof>": 13}
    table |= {word: image_models.WORDS.start + i for i, word in enumerate((*WORDS, *NUMBERS))}
    core = Tokenizer(models.WordLevel(table, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    core.add_special_tokens([word for word in table if word.startswith("<")])
    build: Any = PreTrainedTokenizerFast
    return build(
        tokenizer_object=core,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        sep_token="<sep>",
        extra_special_tokens={
            "image_token": "<image>",
            "boi_token": "<boi>",
            "eoi_token": "<eoi>",
            **named,
        },
        padding_side="right",  # the adapters pad on the left whatever a tokenizer prefers
    )


def byte_tokenizer() -> Any:
    """A tokenizer of bytes, and the pieces `st` and `op`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "st", "op"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    core = Tokenizer(models.BPE(vocab, [("s", "t"), ("o", "p")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    build: Any = PreTrainedTokenizerFast
    return build(tokenizer_object=core)


def janus() -> Any:
    from transformers import JanusImageProcessor, JanusProcessor

    build: Any = JanusProcessor
    size = {"height": 64, "width": 64}
    pixels: Any = JanusImageProcessor
    return build(pixels(size=size, min_size=64), tokenizer(), num_image_tokens=image_models.SIDE**2)


def emu3() -> Any:
    from transformers import Emu3ImageProcessor, Emu3Processor

    build: Any = Emu3Processor
    return build(Emu3ImageProcessor(), tokenizer(image_wrapper_token="<wrap>", eof_token="<eof>"))


def chameleon() -> Any:
    from transformers import ChameleonImageProcessor, ChameleonProcessor

    build: Any = ChameleonProcessor
    return build(ChameleonImageProcessor(), tokenizer())


def save_pair(folder: Path) -> dict[str, str]:
    """A Janus with its processor and a noisy copy that drafts for it, as folders."""
    from tests.modalities.drawing import noisy

    for name, model in (("janus", image_models.janus()), ("janus-drafter", noisy("janus"))):
        model.save_pretrained(folder / name)
        janus().save_pretrained(folder / name)
    return {name: str(folder / name) for name in ("janus", "janus-drafter")}
