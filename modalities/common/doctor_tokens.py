"""`mmspec doctor` for models of token ids, their draft models and heads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from transformers.utils.hub import cached_file

from mmspec import recipes
from mmspec.draft_models import find_kinds, find_owners
from mmspec.drafters.neural.shared_tokens import MIN_SHARE
from mmspec.drafters.neural.small_model import SMALL_MODEL
from mmspec.errors import explain_load_errors
from mmspec.modalities.common import doctor
from mmspec.modalities.common.doctor import Bind, check_models
from mmspec.modality import Finding, Outcome
from mmspec.models.compatibility import check_pair, check_vocabulary_sizes
from mmspec.models.loading import auto_class, register_own_model
from mmspec.models.translation import Translation, find_tokenizers
from mmspec.recipe import DraftModelKind
from mmspec.targets.cache import SlotCache
from mmspec.targets.readers.forked import can_fork, find_mixers
from mmspec.targets.readers.reader import Reader


def find_head_kind(name: str | Path) -> DraftModelKind | None:
    """The kind of head that a folder or a hub name holds; None for a whole model.

    Heads are found through the recipes of models of tokens (`Recipe.draft_model`).
    """
    folder = Path(name)
    if not folder.is_dir():
        with explain_load_errors(name):
            folder = Path(str(cached_file(str(name), "config.json"))).parent
    if SMALL_MODEL.owns(folder):
        return None
    owners = find_owners(find_kinds("tokens", "actions"), folder)
    return owners[0] if owners else None


def skeleton(name: str) -> Any:
    """Build a model on the meta device. Raises ValueError for a head or an unknown type."""
    kind = find_head_kind(name)
    if kind is not None:
        raise ValueError(
            f"{name} holds a {kind.description} and cannot generate alone; name its target "
            "here and give it as drafter="
        )
    return skeleton_of_config(name)


def skeleton_of_config(name: str) -> Any:
    """Build a model on the meta device, of a folder that may hold no weights."""
    with explain_load_errors(name):
        register_own_model(name)
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
    """Return all findings on a target, or on a target and its draft model or head."""
    names = [name for name in (target, drafter) if name is not None]
    kind = None if drafter is None else find_head_kind(drafter)
    models = [build(name) for name in (names if kind is None else (target,))]
    if drafter is not None and kind is not None:
        with explain_load_errors(drafter, kind.description):
            models.append(kind.skeleton(drafter, reader(models[0])))
    found = [
        check_models(
            "weights", list(zip(names, models, strict=True)), lambda one: doctor.check_weights(*one)
        ),
        check_models("model", models, lambda model: type(model).__name__),
    ]
    if kind is not None:
        found += _head(kind, reader(models[0]), models[1])
        if doctor.is_refused(found):
            return found
        if reader(models[0]).family.draws_images:
            return [*found, doctor.fit_modality(models[0], has_drafter=True)]
        return [*found, *doctor.find_fitting_recipes(session, *models)]
    found.append(check_models("family", models, lambda model: reader(model).family.name))
    if doctor.is_refused(found[-1:]):
        return found
    found += [
        check_models("cache layers", models, _layers),
        check_models("branches (trees), batch > 1", models, _branches),
    ]
    if doctor.is_refused(found):
        return found
    readers = [reader(model) for model in models]
    if drafter is None:
        found += _own_heads(target)
    found += _tokens(names, readers)
    if len(readers) == 2:
        found += _pair(*readers)
    if doctor.is_refused(found):
        return found
    if readers[0].family.draws_images:
        return [*found, doctor.fit_modality(models[0], drafter is not None)]
    small = models[1] if drafter is not None else None
    return [*found, *doctor.find_fitting_recipes(session, models[0], small)]


def _head(kind: DraftModelKind, reader: Reader, head: Any) -> Iterator[Finding]:
    """Whether a head can draft for the target: widths, vocabulary, and what its kind checks."""
    config = vars(head).get("config")
    pairs = (
        ("states", int(reader.config.hidden_size), getattr(head, "feature_size", None)),
        ("vocabulary", reader.vocabulary, getattr(config, "vocab_size", None)),
    )
    remark = "made for another target; train one for this with mmspec.training"
    known = [(check, ours, theirs) for check, ours, theirs in pairs if theirs is not None]
    for check, ours, theirs in known:
        yield Finding(check, ours, theirs, *(() if ours == theirs else ("refused", remark)))
    if all(ours == theirs for _, ours, theirs in known):
        try:
            kind.read(head, reader, kind.default_sees(head, reader, "auto"))
        except ValueError as error:
            yield Finding(kind.description, None, None, "refused", str(error))


def _own_heads(target: str) -> Iterator[Finding]:
    """The draft heads that the target's checkpoint contains."""
    for name in recipes.names("tokens"):
        for kind in recipes.get(name).draft_model:
            if kind.is_in_checkpoint(target):
                remark = f"recipe {name} drafts with it"
                yield Finding("draft head", kind.description, None, "note", remark)


def _layers(model: Any) -> str:
    config = model.config.get_text_config(decoder=True)
    types = vars(config).get("layer_types") or ["full_attention"] * config.num_hidden_layers
    return ", ".join(f"{count} {kind}" for kind, count in Counter(types).items())


def _branches(model: Any) -> bool:
    cache = SlotCache(model.config)
    return cache.can_branch or can_fork(find_mixers(model.get_decoder()), cache)


def _tokens(names: Sequence[str], readers: Sequence[Reader]) -> list[Finding]:
    """Compare vocabularies and tokenizers; text may be drafted by a model of another tokenizer."""
    found = [_vocabulary(readers)]
    if len(readers) < 2:
        return found
    found.append(doctor.compare_tokenizers(names))
    if not doctor.is_refused(found) or not readers[0].family.writes_text:
        return found
    pair = find_tokenizers(*(one.model for one in readers))
    if pair is None or not pair.differs:
        return found
    share = Translation.of(pair, readers[0].visual_ids).share
    if share < MIN_SHARE:
        return found
    remark = (
        f"the tokenizers differ; recipes draft from the {share:.0%} of the draft model's tokens "
        "that the target has"
    )
    as_note = partial(replace, verdict="note", remark=remark)
    return [as_note(one) if one.verdict == "refused" else one for one in found]


def _vocabulary(readers: Sequence[Reader]) -> Finding:
    """Compare vocabularies; two image models may have different codes."""
    sizes = [reader.vocabulary for reader in readers]
    ours, theirs = [*sizes, None][:2]
    try:
        check_vocabulary_sizes(sizes[0], sizes[-1])
    except ValueError as error:
        if not all(reader.family.draws_images for reader in readers):
            return Finding("vocabulary", ours, theirs, "refused", str(error))
        remark = "for recipes that convert codes between codebooks, such as mulo-sd"
        return Finding("vocabulary", ours, theirs, "note", remark)
    return Finding("vocabulary", ours, theirs)


def _pair(target: Reader, drafter: Reader) -> Iterator[Finding]:
    """Check which `sees` the draft model supports; refused if it supports none."""
    minimum = "prompt" if target.family.draws_images else "nothing"
    for sees in (minimum, "pixels"):
        if sees == "pixels" and not target.family.media:
            continue
        try:
            check_pair(target, drafter, sees)
        except ValueError as error:
            verdict: Outcome = "refused" if sees == minimum else "note"
            yield Finding(f"drafter sees {sees}", None, False, verdict, str(error))
        else:
            yield Finding(f"drafter sees {sees}", None, True)
