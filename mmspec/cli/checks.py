"""What `doctor` looks at, from configurations alone: no weights are loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig

from mmspec import recipes
from mmspec.api import accelerate
from mmspec.cli.inputs import folder
from mmspec.drafters.neural.small_model import check_pair
from mmspec.modalities import families
from mmspec.models.heads.feature_head import FeatureHeadConfig
from mmspec.targets.backbone import Backbone
from mmspec.targets.cache import SlotCache
from mmspec.targets.reader import Reader

Verdict = Literal["ok", "note", "refused"]


@dataclass(frozen=True)
class Finding:
    """One thing looked at: what each model has, and whether that works."""

    check: str
    target: Any
    drafter: Any = None
    verdict: Verdict = "ok"
    remark: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def skeleton(name: str) -> Any:
    """A model without weights, from its configuration."""
    import transformers
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as VISION,
    )

    config = transformers.AutoConfig.from_pretrained(folder(name))
    sees = config.model_type in VISION
    auto: Any = (
        transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    )
    with torch.device("meta"):
        return auto.from_config(config)


def examine(target: str, drafter: str | None) -> list[Finding]:
    """All findings on a target, or on a target and its draft model or feature head."""
    if drafter is not None and _is_head(drafter):
        return _examine_head(target, drafter)
    models = [skeleton(name) for name in (target, drafter) if name is not None]
    names = [name for name in (target, drafter) if name is not None]
    found = [
        _both("weights", names, _weights),
        _both("model", models, lambda model: type(model).__name__),
        _both("family", models, lambda model: families.family(model).name),
        _both("rotary axes", models, lambda model: families.family(model).rope_axes),
        _both("attention", models, _attention),
        _both("cache layers", models, _layers),
        _both("rolls back", models, _rolls_back),
        _both("branches (trees), batch > 1", models, _branches),
    ]
    if any(finding.verdict == "refused" for finding in found):
        return found
    built = [families.backbone(model) for model in models]
    found.append(_both("vocabulary", built, lambda reader: reader.vocabulary))
    found.append(_both("image tokens", built, _image_tokens))
    if len(built) == 2:
        found += _pair(built[0], built[1])
        found.append(tokenizers(names))
    if built[0].family.draws:
        remark = "a model that draws is bound with its codebook, which needs weights; not looked at"
        return [*found, Finding("recipes", None, None, "note", remark)]
    found += _recipes(models)
    return found


def _is_head(name: str) -> bool:
    content, _ = PreTrainedConfig.get_config_dict(folder(name))
    return bool(content.get("model_type") == FeatureHeadConfig.model_type)


def _examine_head(target: str, head: str) -> list[Finding]:
    """A feature head continues states of one width and speaks one vocabulary."""
    model, config = skeleton(target), FeatureHeadConfig.from_pretrained(folder(head))
    reader = families.backbone(model)
    pairs = (
        ("states", int(reader.config.hidden_size), config.hidden_size),
        ("vocabulary", reader.vocabulary, config.vocab_size),
    )
    remark = "a head for another target; train one with mmspec.training.learn_head"
    return [
        _both("weights", [target, head], _weights),
        Finding("model", type(model).__name__, "FeatureHead"),
        *(
            Finding(check, ours, theirs, *(() if ours == theirs else ("refused", remark)))
            for check, ours, theirs in pairs
        ),
    ]


def _both(check: str, things: list[Any], look: Callable[[Any], Any]) -> Finding:
    """The same look at each model; an error refuses the pair."""
    seen: list[Any] = []
    for thing in things:
        try:
            seen.append(look(thing))
        except ValueError as error:
            seen.append("refused")
            return Finding(check, seen[0], (*seen, None)[1], "refused", str(error))
    return Finding(check, seen[0], (*seen, None)[1])


def _weights(name: str) -> str:
    """Raises ValueError for pickled weights."""
    place = Path(folder(name))
    if not place.is_dir():
        return "not local"
    if list(place.glob("*.safetensors")):
        return "safetensors"
    pickled = [path.name for path in place.iterdir() if path.suffix in (".bin", ".pt", ".pth")]
    if pickled:
        raise ValueError(
            f"{name} holds pickled weights ({', '.join(sorted(pickled))}), and unpickling runs "
            "code; convert them with model.save_pretrained(folder)"
        )
    raise ValueError(f"{name} has no weights")


def _attention(model: Any) -> str:
    Backbone(model, families.family(model))
    return str(model.config.get_text_config(decoder=True)._attn_implementation)


def _layers(model: Any) -> str:
    config = model.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return ", ".join(f"{count} {kind}" for kind, count in Counter(types).items())


def _rolls_back(model: Any) -> bool:
    SlotCache(model.config)
    return True


def _branches(model: Any) -> bool:
    return SlotCache(model.config).can_branch


def _image_tokens(reader: Reader) -> str:
    ids = reader.placeholder_ids
    return ", ".join(map(str, ids)) if ids else "none (text)"


def _pair(target: Reader, drafter: Reader) -> Iterator[Finding]:
    """What the draft model can see; refused where it can draft for this target in no way."""
    for sees in ("nothing", "placeholders", "pixels", "target-features"):
        try:
            check_pair(target, drafter, sees)
        except ValueError as error:
            verdict: Verdict = "refused" if sees == "nothing" else "note"
            yield Finding(f"drafter sees {sees}", None, False, verdict, str(error))
        else:
            blind = sees != "nothing" and not target.family.media
            yield Finding(f"drafter sees {sees}", None, not blind)


def tokenizers(names: Sequence[str]) -> Finding:
    """Whether token ids mean the same to both."""
    from transformers import AutoTokenizer

    check, auto = "same tokens behind the ids", AutoTokenizer
    tables = []
    for name in names:
        try:
            tables.append(auto.from_pretrained(folder(name)).get_vocab())
        except (OSError, ValueError, KeyError, ImportError):
            return Finding(check, None, None, "note", f"{name} has no tokenizer to compare")
    ours, theirs = ({number: word for word, number in table.items()} for table in tables)
    shared = ours.keys() & theirs.keys()
    agreed = sum(ours[number] == theirs[number] for number in shared)
    least = min(len(ours), len(theirs))
    if agreed == least:
        return Finding(check, len(ours), len(theirs))
    wrong = next((n for n in sorted(shared) if ours[n] != theirs[n]), None)
    example = "" if wrong is None else f"; id {wrong} is {ours[wrong]!r} and {theirs[wrong]!r}"
    remark = f"only {agreed} of {least} ids stand for the same token{example}"
    refused = agreed < 0.99 * least
    return Finding(check, len(ours), len(theirs), "refused" if refused else "note", remark)


def _recipes(models: list[Any]) -> Iterator[Finding]:
    """Which recipes can be bound to these models, and why the others cannot."""
    small = models[1] if len(models) > 1 else None
    fitting: list[str] = []
    reasons: dict[str, list[str]] = {}
    for name in recipes.names():
        takes = recipes.get(name).takes_drafter
        if takes and small is None:
            continue
        try:
            accelerate(models[0], name, drafter=small if takes else None)
        except ValueError as error:
            reasons.setdefault(str(error), []).append(name)
        else:
            fitting.append(name)
    yield Finding("recipes that fit", fitting)
    for reason, names in reasons.items():
        yield Finding("recipes that do not", names, None, "note", reason)
