"""Teach a small language model what its target answers: MASSV, and drafters that see no picture.

    mmspec train massv --target llava --drafter small --data questions.jsonl --out drafter

Ganesan et al. 2025, section 3. First the projector alone learns to show pictures of the target's
vision encoder to the small model, then both learn the target's own answers (self-data
distillation). The loss is the cross entropy of the answers' tokens, in both. The share of the
first stage and the rates are reconstructed: the projector's is ten times the other, as LLaVA has
it. A drafter that sees no picture (SPD-MLLM, Gagrani et al. 2024) learns in one stage.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as CAUSAL

from mmspec import _hf
from mmspec.drafters.neural.embed_prompt import unpadded
from mmspec.drafters.neural.massv import (
    WEIGHTS,
    Projector,
    check_widths,
    load_projector,
    save_projector,
    source_width,
)
from mmspec.drafters.neural.sight import TargetFeatures, padded
from mmspec.drafters.neural.small_model import SMALL_MODEL
from mmspec.models.loading import auto_class, model_type
from mmspec.recipe import DraftModelKind
from mmspec.targets.readers.reader import Reader
from mmspec.training.fitting import Descent, Fall
from mmspec.training.heads import Lesson

ALIGNING = 0.2  # of all steps: the projector's alone
FASTER = 10.0  # the rate of that stage over the other's


class TaughtModel(nn.Module):
    """A small language model that is taught, with a projector where it sees pictures."""

    def __init__(self, language_model: Any, projector: Projector | None) -> None:
        super().__init__()
        self.language_model = language_model.requires_grad_(True)
        self.projector = None if projector is None else projector.requires_grad_(True)

    @property
    def config(self) -> Any:
        return self.language_model.config

    def save_pretrained(self, folder: str | Path) -> None:
        """An ordinary language model's folder, with the projector beside it."""
        self.language_model.save_pretrained(folder)
        if self.projector is not None:
            save_projector(folder, self.projector)

    def logits(self, prompt: Mapping[str, Any], tokens: Tensor, reader: Reader) -> Tensor:
        """What is said of each of the tokens (B, T) behind a prompt: (B, T, V).

        The prompt is padded on the left. `reader` is the language model's.
        """
        mask, ids = prompt["attention_mask"], prompt.get("input_ids")
        embeds = prompt["inputs_embeds"] if ids is None else reader.embed(ids)
        embeds = torch.cat((embeds, reader.embed(tokens).to(embeds.dtype)), 1)
        positions = prompt.get("position_ids")
        positions = (mask.cumsum(-1) - 1).clamp_min(0) if positions is None else positions
        steps = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        given: dict[str, Any] = {
            "inputs_embeds": embeds,
            "attention_mask": torch.cat((mask, torch.ones_like(tokens)), 1),
            "position_ids": torch.cat((positions, positions[:, -1:] + steps), 1),
            "use_cache": False,
        }
        names = _hf.forward_names(self.language_model)
        if "logits_to_keep" in names:
            given["logits_to_keep"] = tokens.shape[1] + 1
        given = {name: value for name, value in given.items() if name in names}
        logits: Tensor = self.language_model(**given, return_dict=True).logits
        return reader.divided(logits[:, -tokens.shape[1] - 1 : -1])


def answer_loss(target: Reader, head: TaughtModel, lesson: Lesson) -> Tensor:  # ()
    """Cross entropy of the answers' tokens; the target reads nothing but pictures."""
    reader = target.reader_of(head.language_model)
    tokens, real = lesson.tokens.clamp_min(0), lesson.tokens >= 0
    said = head.logits(_prompt(target, head, lesson.inputs, reader), tokens, reader)
    return functional.cross_entropy(said[real].float(), tokens[real])


def _prompt(
    target: Reader, head: TaughtModel, inputs: Mapping[str, Any], reader: Reader
) -> Mapping[str, Any]:
    """As drafting has it: pictures through the projector, or taken out of the text."""
    if head.projector is not None:
        layout = target.feature_layout(tower=True)
        return TargetFeatures(layout, target, None, head.projector).unthinned(inputs, reader)
    hidden = set(target.visual_ids)
    rows = [[token for token in row if token not in hidden] for row in unpadded(inputs)[0]]
    return padded(rows, target.device)


def new_model(target: Reader, **changes: Any) -> Any:
    """An untrained language model of the target's sort, two layers deep if `changes` say nothing.

    Raises ValueError where the target's decoder is no language model by itself.
    """
    config = copy.deepcopy(target.config)
    if type(config) not in CAUSAL:
        raise ValueError(
            f"no small language model can be made of a {type(config).__name__}; give --drafter the "
            "folder of one that has the target's tokenizer"
        )
    unknown = sorted(name for name in changes if name not in config.to_dict())
    if unknown:
        raise ValueError(f"{unknown[0]} is no part of a {type(config).__name__}; drop that --set")
    layers = int(changes.get("num_hidden_layers", 2))
    kinds = vars(config).get("layer_types")
    for name, value in {**changes, "num_hidden_layers": layers}.items():
        setattr(config, name, value)
    if kinds and "layer_types" not in changes:
        config.layer_types = kinds[-layers:]
    with torch.device(target.device.type if target.device.type == "meta" else "cpu"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _beginning(target: Reader, model: Any, projector: Projector | None) -> Projector:
    """The projector there is, or a new one from the target's vision features."""
    target.check_features()
    source, width = source_width(target), int(target.reader_of(model).config.hidden_size)
    found = Projector(source, width).to(target.device) if projector is None else projector
    check_widths(found, source, width)
    return found


@dataclass(frozen=True)
class SmallModelTraining:
    """The training of a small model: AdamW, warm-up and cosine in each of its stages.

    `sees` as in a recipe: "target-features" is through a projector, "nothing" is text alone.
    """

    sees: str
    rate: float = 2e-4
    aligning: float = ALIGNING
    loss: Callable[[Reader, Any, Lesson], Tensor] = answer_loss
    reads_states: ClassVar[bool] = False

    def begin(self, target: Reader, counts: Tensor, **changes: Any) -> TaughtModel:
        """A small model from nothing; `changes` are of the configuration of the target's text."""
        return self._with(new_model(target, **changes), None, target)

    def opened(
        self, folder: Path, kinds: Sequence[DraftModelKind], target: Reader, **changes: Any
    ) -> TaughtModel:
        """The model in a folder, with the projector there or a new one.

        Raises ValueError for what is no language model of the target's tokens, and for `changes`.
        """
        if changes:
            raise ValueError(
                f"--set {next(iter(changes))} is of a new model; drop it, or --drafter"
            )
        if target.device.type == "meta":  # what a training takes can be told without weights
            model_type(folder)  # refuses what is no model's
            config = AutoConfig.from_pretrained(folder)
            with torch.device("meta"):
                model: Any = auto_class(config).from_config(config)
        else:
            model = SMALL_MODEL.load(folder, target, torch.float32)
        has_projector = self.sees != "nothing" and (folder / WEIGHTS).is_file()
        return self._with(model, load_projector(folder) if has_projector else None, target)

    def _with(self, model: Any, projector: Projector | None, target: Reader) -> TaughtModel:
        SMALL_MODEL.read(model, target, self.sees)
        if target.reader_of(model).family.media:
            raise ValueError(
                f"a {type(model).__name__} has a vision encoder of its own; give --drafter a "
                "language model that reads text only"
            )
        if self.sees == "nothing":
            return TaughtModel(model, None)
        return TaughtModel(model, _beginning(target, model, projector))

    def check(self, head: TaughtModel, target: Reader) -> None:
        """Refuse a model of other tokens, or a projector of other widths. Raises ValueError."""
        SMALL_MODEL.read(head.language_model, target, self.sees)
        if head.projector is not None:
            _beginning(target, head.language_model, head.projector)

    def stages(
        self, head: TaughtModel, steps: int, rate: float, muon: bool = False
    ) -> list[Descent]:
        """The projector alone, where there is one and time for it; then everything."""
        if muon:
            raise ValueError("small models are taught by AdamW alone; drop --muon")
        first = 0 if head.projector is None else int(self.aligning * steps)
        both = Descent(list(head.parameters()), Fall(steps - first, rate), floor=0.0)
        if head.projector is None or not first:
            return [both]
        return [Descent([*head.projector.parameters()], Fall(first, FASTER * rate)), both]

    def parts(self, head: TaughtModel) -> Mapping[str, Any]:
        """The language model, and its projector."""
        own = {} if head.projector is None else {"projector": head.projector}
        return {"drafter": head.language_model, **own}


MASSV = SmallModelTraining("target-features")
TEXT_ONLY = SmallModelTraining("nothing")
