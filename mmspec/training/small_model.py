"""Train a small language model on its target's responses: MASSV, and text-only drafters.

    mmspec train massv --target llava --drafter small --data questions.jsonl --out drafter

Ganesan et al. 2025, section 3. In stage 1 only the projector from the target's vision features is
trained, in stage 2 also the model, on the target's own responses (self-data distillation). The loss
is the cross entropy of response tokens in both. Reconstructed: the share of stage 1, and the rates,
the projector's being ten times the other, as in LLaVA. Text-only drafters (SPD-MLLM, Gagrani et al.
2024) are trained in one stage.
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
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as CAUSAL

from mmspec import _hf
from mmspec.drafters.neural.draft_inputs import TargetFeatureInputs, pad_rows
from mmspec.drafters.neural.embed_prompt import remove_padding
from mmspec.drafters.neural.massv import (
    WEIGHTS,
    Projector,
    check_widths,
    load_projector,
    save_projector,
    source_width,
)
from mmspec.drafters.neural.small_model import SMALL_MODEL
from mmspec.models.loading import auto_class, model_type
from mmspec.recipe import DraftModelKind
from mmspec.targets.readers.reader import Reader
from mmspec.training.fitting import CosineDecay, ScheduledOptimizer
from mmspec.training.heads import TrainingExample

# text decoders of vision-language classes whose layers, on text, are those of a language model
LANGUAGE_MODELS = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
ALIGNMENT_SHARE = 0.2  # share of the steps that train the projector alone
PROJECTOR_RATE_FACTOR = 10.0  # learning rate of that stage over the other's


class TrainableSmallModel(nn.Module):
    """A small language model in training, with a projector if it reads images."""

    def __init__(self, language_model: Any, projector: Projector | None) -> None:
        super().__init__()
        self.language_model = language_model.requires_grad_(True)
        self.projector = None if projector is None else projector.requires_grad_(True)

    @property
    def config(self) -> Any:
        return self.language_model.config

    def save_pretrained(self, folder: str | Path) -> None:
        """Save a language model's folder, with the projector in it."""
        self.language_model.save_pretrained(folder)
        if self.projector is not None:
            save_projector(folder, self.projector)

    def logits(self, prompt: Mapping[str, Any], tokens: Tensor, reader: Reader) -> Tensor:
        """Logits (B, T, V) of the tokens (B, T) after a prompt.

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
        return reader.divide_logits(logits[:, -tokens.shape[1] - 1 : -1])


def small_model_loss(
    target: Reader, head: TrainableSmallModel, example: TrainingExample
) -> Tensor:  # ()
    """Cross entropy of response tokens; the target only encodes images."""
    reader = target.make_reader(head.language_model)
    tokens, real = example.tokens.clamp_min(0), example.tokens >= 0
    logits = head.logits(draft_prompt(target, head, example.inputs, reader), tokens, reader)
    return functional.cross_entropy(logits[real].float(), tokens[real])


def draft_prompt(
    target: Reader, head: TrainableSmallModel, inputs: Mapping[str, Any], reader: Reader
) -> Mapping[str, Any]:
    """Prepare the prompt as in drafting: images through the projector, or removed."""
    if head.projector is not None:
        layout = target.feature_layout(tower=True)
        return TargetFeatureInputs(layout, target, None, head.projector).build_uncompressed(
            inputs, reader
        )
    hidden = set(target.visual_ids)
    rows = [[token for token in row if token not in hidden] for row in remove_padding(inputs)[0]]
    return pad_rows(rows, target.device)


def new_model(target: Reader, **changes: Any) -> Any:
    """Make an untrained language model of the class of the target's decoder; default: two layers.

    Raises ValueError where no language model has such layers.
    """
    config = _text_config(target.config)
    if type(config) not in CAUSAL:
        raise ValueError(
            f"no small language model can be made of a {type(config).__name__}; give --drafter the "
            "folder of one that has the target's tokenizer"
        )
    unknown = sorted(name for name in changes if name not in config.to_dict())
    if unknown:
        raise ValueError(f"{unknown[0]} is not a field of {type(config).__name__}; drop that --set")
    layers = int(changes.get("num_hidden_layers", 2))
    kinds = vars(config).get("layer_types")
    for name, value in {**changes, "num_hidden_layers": layers}.items():
        setattr(config, name, value)
    if kinds and "layer_types" not in changes:
        config.layer_types = kinds[-layers:]
    with torch.device(target.device.type if target.device.type == "meta" else "cpu"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _text_config(config: Any) -> Any:
    """A copy of a decoder's config, as that of a language model where that is another class."""
    kind = LANGUAGE_MODELS.get(config.model_type)
    if kind is None:
        return copy.deepcopy(config)
    made = CONFIG_MAPPING[kind]()
    known = copy.deepcopy(config.to_dict())
    for name in made.to_dict().keys() & known.keys() - {"model_type", "architectures"}:
        setattr(made, name, known[name])
    made.rope_parameters.pop("mrope_section", None)  # text has one position per token
    return made


def _prepare_projector(target: Reader, model: Any, projector: Projector | None) -> Projector:
    """Check the given projector, or make a new one from the target's vision features."""
    target.check_features()
    source, width = source_width(target), int(target.make_reader(model).config.hidden_size)
    found = Projector(source, width).to(target.device) if projector is None else projector
    check_widths(found, source, width)
    return found


@dataclass(frozen=True)
class SmallModelTraining:
    """The training of a small model: AdamW with warm-up and cosine decay in each stage.

    `sees` as in a recipe: "target-features" uses a projector, "nothing" is text-only.
    """

    sees: str
    rate: float = 2e-4
    alignment_share: float = ALIGNMENT_SHARE
    loss: Callable[[Reader, Any, TrainingExample], Tensor] = small_model_loss
    reads_states: ClassVar[bool] = False
    is_packable: ClassVar[bool] = False

    def begin(self, target: Reader, counts: Tensor, **changes: Any) -> TrainableSmallModel:
        """Make an untrained small model; `changes` modify the target's text configuration."""
        return self._with(new_model(target, **changes), None, target)

    def load(
        self, folder: Path, kinds: Sequence[DraftModelKind], target: Reader, **changes: Any
    ) -> TrainableSmallModel:
        """Load the model in a folder, with its projector or a new one.

        Raises ValueError for other models and vocabularies, and for `changes`.
        """
        if changes:
            raise ValueError(
                f"--set {next(iter(changes))} is of a new model; drop it, or --drafter"
            )
        if target.device.type == "meta":  # a dry run needs no weights
            model_type(folder)  # raises for other folders
            config = AutoConfig.from_pretrained(folder)
            with torch.device("meta"):
                model: Any = auto_class(config).from_config(config)
        else:
            model = SMALL_MODEL.load(folder, target, torch.float32)
        has_projector = self.sees != "nothing" and (folder / WEIGHTS).is_file()
        return self._with(model, load_projector(folder) if has_projector else None, target)

    def _with(self, model: Any, projector: Projector | None, target: Reader) -> TrainableSmallModel:
        SMALL_MODEL.read(model, target, self.sees)
        if target.make_reader(model).family.media:
            raise ValueError(
                f"a {type(model).__name__} has a vision encoder of its own; give --drafter a "
                "language model that reads text only"
            )
        if self.sees == "nothing":
            return TrainableSmallModel(model, None)
        return TrainableSmallModel(model, _prepare_projector(target, model, projector))

    def check(self, head: TrainableSmallModel, target: Reader) -> None:
        """Refuse another vocabulary, or a projector of other widths. Raises ValueError."""
        SMALL_MODEL.read(head.language_model, target, self.sees)
        if head.projector is not None:
            _prepare_projector(target, head.language_model, head.projector)

    def stages(
        self, head: TrainableSmallModel, steps: int, rate: float, muon: bool = False
    ) -> list[ScheduledOptimizer]:
        """Train the projector alone, if there is one and steps suffice; then everything."""
        if muon:
            raise ValueError("small models are trained with AdamW only; drop --muon")
        first = 0 if head.projector is None else int(self.alignment_share * steps)
        both = ScheduledOptimizer(
            list(head.parameters()), CosineDecay(steps - first, rate), floor=0.0
        )
        if head.projector is None or not first:
            return [both]
        return [
            ScheduledOptimizer(
                [*head.projector.parameters()], CosineDecay(first, PROJECTOR_RATE_FACTOR * rate)
            ),
            both,
        ]

    def parts(self, head: TrainableSmallModel) -> Mapping[str, Any]:
        """Return the language model, and its projector."""
        own = {} if head.projector is None else {"projector": head.projector}
        return {"drafter": head.language_model, **own}


MASSV = SmallModelTraining("target-features")
TEXT_ONLY = SmallModelTraining("nothing")
