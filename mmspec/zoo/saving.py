"""Write a checkpoint: an ordinary Hugging Face folder in float16, with a model card."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmspec.modality import Entry

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def save(model: PreTrainedModel, processor: Any, folder: Path, sees: bool) -> None:
    """Save weights, configs and the processor, or only the tokenizer of a text model."""
    from transformers import GenerationConfig

    configure: Any = GenerationConfig
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = processor.tokenizer
    model.generation_config = configure(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    cast: Any = model.half
    cast().save_pretrained(folder)
    if sees:
        processor.save_pretrained(folder)
    else:
        tokenizer.chat_template = processor.chat_template
        tokenizer.save_pretrained(folder)


def write_card(folder: Path, entry: Entry, report: dict[str, Any]) -> None:
    """Say in README.md what the checkpoint is, how it was made and how good it is."""
    if entry.target is None:
        learned = "Learned from fresh scenes, first to name what is in each cell, then to answer."
    else:
        learned = f"Learned from what `{entry.target}` says about training scenes."
    about = (
        "Knows only the Scene world of the `mmspec` zoo: coloured shapes and written digits on a\n"
        "board of nine places, one picture and one question at a time.\n\n"
        f"{learned}"
    )
    notes = (
        "`facts` is the share of facts right in what it says greedily of held-out scenes,\n"
        "captions "
        "and answers to questions as they come; a caption states many more facts than an answer;\n"
        "`acceptance length` is tokens per round of greedy chain speculation with five drafted\n"
        "tokens, on held-out scenes. Both are measured on the float16 weights, run in float32.\n"
    )
    card(folder, entry, about, report, notes)


def card(folder: Path, entry: Entry, about: str, report: dict[str, Any], notes: str) -> None:
    """Write README.md: what a checkpoint is, how it was made, its figures and what they mean."""
    figures = "".join(f"| {key.replace('_', ' ')} | {value} |\n" for key, value in report.items())
    (folder / "README.md").write_text(
        f"# {entry.name}\n\n{entry.description}\n\n{about}\n\n"
        f"Made by:\n\n```\nmmspec zoo train {entry.name}\n```\n\n"
        f"| | |\n|---|---|\n{figures}\n{notes}"
    )
