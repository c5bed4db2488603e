"""What `mmspec doctor` says of models of token ids, of their draft models and heads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import transformers

from mmspec.drafters.neural.elastic_head import ElasticHead
from mmspec.drafters.neural.small_model import check_pair
from mmspec.errors import reading
from mmspec.modalities.common import doctor
from mmspec.modalities.common.doctor import Bind, both
from mmspec.modality import Finding, Outcome
from mmspec.models.heads.aasd import AasdHead
from mmspec.models.heads.action_slots import ActionSlots
from mmspec.models.heads.dream import DreamHead
from mmspec.models.heads.eagle3 import Eagle3Head
from mmspec.models.heads.feature_head import FeatureHead
from mmspec.models.heads.hydra import HydraHeads
from mmspec.models.heads.kangaroo import KangarooAdapter
from mmspec.models.heads.medusa import MedusaHeads
from mmspec.models.heads.multi_token import MultiTokenHeads
from mmspec.models.loading import auto_class, introduce, model_type
from mmspec.models.words import check_sizes
from mmspec.targets.cache import SlotCache
from mmspec.targets.readers.reader import Reader

HEADS: tuple[Any, ...] = (  # on the states of a target
    *(FeatureHead, Eagle3Head, MultiTokenHeads, MedusaHeads, HydraHeads, KangarooAdapter),
    *(DreamHead, ElasticHead, AasdHead, ActionSlots),
)


def head_class(name: str | Path) -> Any:
    """The class of the head that a folder holds; None for another model."""
    found = model_type(name)
    return next((one for one in HEADS if one.config_class.model_type == found), None)


def skeleton(name: str) -> Any:
    """A model, or heads for one, without memory. Raises ValueError for one that is not known."""
    head = head_class(name)
    with reading(name):
        if head is not None:
            config = head.config_class.from_pretrained(name)
            return doctor.skeleton(lambda: head(config))
        introduce(name)
        known = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        auto = auto_class(known)
        return doctor.skeleton(lambda: auto.from_config(known, trust_remote_code=False))


def examine(
    target: str,
    drafter: str | None,
    session: Bind,
    reader: Callable[[Any], Reader],
    build: Callable[[str], Any] = skeleton,
) -> list[Finding]:
    """All findings on a target, or on a target and its draft model or feature head."""
    names = [name for name in (target, drafter) if name is not None]
    models = [build(name) for name in names]
    found = [
        both("weights", list(zip(names, models, strict=True)), lambda one: doctor.weights(*one)),
        both("model", models, lambda model: type(model).__name__),
    ]
    if isinstance(models[-1], HEADS) and drafter is not None:
        return [*found, *_head(reader(models[0]), models[1])]
    found.append(both("family", models, lambda model: reader(model).family.name))
    if doctor.is_refused(found[-1:]):
        return found
    found += [
        both("cache layers", models, _layers),
        both("branches (trees), batch > 1", models, _branches),
    ]
    if doctor.is_refused(found):
        return found
    readers = [reader(model) for model in models]
    found.append(_vocabulary(readers))
    if len(readers) == 2:
        found += [*_pair(*readers), doctor.tokenizers(names)]
    if doctor.is_refused(found):
        return found
    if readers[0].family.draws:
        remark = "a model that draws is bound with its codebook, which needs weights; not looked at"
        return [*found, Finding("recipes", None, None, "note", remark)]
    small = models[1] if drafter is not None else None
    return [*found, *doctor.fitting("tokens", session, models[0], small)]


def _head(reader: Reader, head: Any) -> Iterator[Finding]:
    """Heads read states of one width and speak one vocabulary."""
    pairs = (
        ("states", int(reader.config.hidden_size), head.feature_size),
        ("vocabulary", reader.vocabulary, head.config.vocab_size),
    )
    remark = "made for another target; train one for this with mmspec.training"
    for check, ours, theirs in pairs:
        yield Finding(check, ours, theirs, *(() if ours == theirs else ("refused", remark)))


def _layers(model: Any) -> str:
    config = model.config.get_text_config(decoder=True)
    types = vars(config).get("layer_types") or ["full_attention"] * config.num_hidden_layers
    return ", ".join(f"{count} {kind}" for kind, count in Counter(types).items())


def _branches(model: Any) -> bool:
    return SlotCache(model.config).can_branch


def _vocabulary(readers: Sequence[Reader]) -> Finding:
    """One that is shared; what draws a smaller picture may have codes of its own."""
    sizes = [reader.vocabulary for reader in readers]
    ours, theirs = [*sizes, None][:2]
    try:
        check_sizes(sizes[0], sizes[-1])
    except ValueError as error:
        if not all(reader.family.draws for reader in readers):
            return Finding("vocabulary", ours, theirs, "refused", str(error))
        remark = "for recipes that turn codes of one codebook into others, such as mulo-sd"
        return Finding("vocabulary", ours, theirs, "note", remark)
    return Finding("vocabulary", ours, theirs)


def _pair(target: Reader, drafter: Reader) -> Iterator[Finding]:
    """What the draft model can see; refused where it can draft for this target in no way."""
    least = "prompt" if target.family.draws else "nothing"
    for sees in (least, "pixels"):
        if sees == "pixels" and not target.family.media:
            continue
        try:
            check_pair(target, drafter, sees)
        except ValueError as error:
            verdict: Outcome = "refused" if sees == least else "note"
            yield Finding(f"drafter sees {sees}", None, False, verdict, str(error))
        else:
            yield Finding(f"drafter sees {sees}", None, True)
