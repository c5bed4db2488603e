"""Check that a draft model fits its target: by output heads (fingerprint) and by vocabularies.

    sign_head(head, reader)         # stores the target's fingerprint in the head's configuration
    check_signature(head, reader)   # refuses a head of another target

A fingerprint holds outputs of the target's output head for fixed states, not weights, so it does
not depend on dtype, device or quantisation. Targets with the same output head, such as those with a
trained LoRA adapter, have the same fingerprint; they are told by some outputs of linear layers of
the decoder. Vocabularies are read from tokenizer files without a tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from huggingface_hub import try_to_load_from_cache
from torch import Tensor, nn
from transformers import PreTrainedModel

from mmspec.errors import parse_json

if TYPE_CHECKING:
    from mmspec.targets.readers.reader import Reader

KEY = "target_fingerprint"
BODY = "target_body"
AFTER_NORM = "last_layer_after_norm"  # of a head that taps it; False = as engines read it
_STATES, _TOKENS, _ROWS = 8, 16, 8  # probes
_SAME = 0.95  # median cosine over tokens; 0 +- 0.4 for another target
_UNCHANGED = 0.999  # the same, in bfloat16 as well (0.9999); below it the weights were trained on
_ROUNDING = 0.005  # relative difference of a linear layer; of bfloat16 weights 0.0011 on average
MIN_SHARED = 0.99  # share of equal ids of two tokenizers
MAX_PADDING = 512  # difference of vocabulary sizes with one tokenizer (Qwen: 128)
MAX_PADDING_SHARE = 0.01  # of the larger one: in a small vocabulary few ids are padding


@runtime_checkable
class TappingHead(Protocol):
    """A head on states of some layers of its target."""

    config: Any

    def taps(self, layers: int) -> Sequence[int] | None: ...


def fingerprint(target: Reader) -> list[list[float]] | None:
    """Return the logits of each probed token for all probe states, centred and of norm 1.

    None for targets on the meta device, and where the logits do not depend on the state.
    """
    if target.device.type == "meta":
        return None
    states = _probe_states(_STATES, int(target.config.hidden_size))
    with torch.no_grad():
        logits = target.head(states.to(target.device, target.model.dtype)).double().cpu()
    size = logits.shape[-1]
    tokens = (2 * torch.arange(_TOKENS) + 1) * size // (2 * _TOKENS)
    values = logits[:, tokens].T.nan_to_num(0.0, 0.0, 0.0)
    values = values - values.mean(-1, keepdim=True)
    norms = values.norm(dim=-1, keepdim=True)
    if not bool((norms > 0).any()):
        return None
    return [[round(one, 4) for one in row] for row in (values / norms.clamp_min(1e-30)).tolist()]


def sign_head(head: Any, target: Reader) -> None:
    """Store the target's fingerprint, and that of its decoder, in a head's configuration.

    Also that it was trained on the last layer's states after the final norm, if it taps them.
    """
    found = fingerprint(target)
    if found is not None:
        setattr(head.config, KEY, found)
        setattr(head.config, BODY, fingerprint_body(target))
    if isinstance(head, TappingHead) and taps_last_layer(head, target):
        setattr(head.config, AFTER_NORM, True)


def taps_last_layer(head: TappingHead, target: Reader) -> bool:
    """Whether a head lists the states of the target's last layer among its features."""
    layers = len(target.layers)
    return layers in (head.taps(layers) or ())


def check_last_layer(head: TappingHead, target: Reader) -> None:
    """Refuse a head of an engine that taps the target's last layer. Raises ValueError.

    Engines give its states before the final norm, and they are read after it here.
    """
    if vars(head.config).get(AFTER_NORM) is False and taps_last_layer(head, target):
        taps = list(head.taps(len(target.layers)) or ())
        raise ValueError(
            f"this head was made for an engine and taps the target's last layer (tapped_layers="
            f"{taps}), whose states engines read before the final norm and this package after it; "
            "train a head without that layer"
        )


def check_exports_taps(config: Any) -> None:
    """Refuse to export a head of the last layer's normed states. Raises ValueError."""
    if vars(config).get(AFTER_NORM):
        raise ValueError(
            f"this head reads the target's last layer after the final norm (tapped_layers="
            f"{list(config.tapped_layers or ())}), and engines read it before that; train a head "
            "without that layer"
        )


def check_signature(head: Any, target: Reader) -> None:
    """Refuse a head with the fingerprint of another target. Raises ValueError.

    Heads without a fingerprint pass.
    """
    stored = vars(head.config).get(KEY) if isinstance(head, PreTrainedModel) else None
    own = None if stored is None else fingerprint(target)
    if stored is None or own is None:
        return
    if not is_same_target(stored, own):
        raise ValueError(
            f"this {type(head).__name__} was made for another target than "
            f"{target.model.config._name_or_path or f'this {type(target.model).__name__}'}: their "
            "output heads differ on the same states; train a head for this target "
            "with `mmspec train`, or give the target it was made for"
        )


def find_change(head: Any, target: Reader) -> float | None:
    """The agreement of a head's fingerprint with its target's, where the weights were changed.

    The median cosine over tokens, from 1 (the same output head, in any dtype) down; None where it
    is above `_UNCHANGED`, and for heads without a fingerprint.
    """
    stored = vars(head.config).get(KEY) if isinstance(head, PreTrainedModel) else None
    own = None if stored is None else fingerprint(target)
    if stored is None or own is None:
        return None
    found = float(_agree(stored, own))
    return None if found > _UNCHANGED else found


@torch.no_grad()
def fingerprint_body(target: Reader) -> dict[str, list[float]]:
    """Outputs of linear layers of the first, middle and last decoder layer, by their names.

    A few rows of each for two fixed inputs, adapters of PEFT included. Layers whose weights are not
    plain floats of 16 bits or more are left out: quantised, sharded and offloaded ones.
    """
    try:
        layers = target.layers
    except ValueError:
        return {}
    if getattr(target.model.config, "quantization_config", None) is not None:
        return {}  # or weights that were quantised
    found = {}
    for index in sorted({0, len(layers) // 2, len(layers) - 1}):
        for name, module in layers[index].named_modules():
            own = name.removesuffix(".base_layer")  # of a layer with an adapter
            if isinstance(module, nn.Linear) and _is_plain(module.weight) and ".lora_" not in own:
                outputs = _probe_linear(module, layers[index].get_submodule(own))
                found[f"{index}.{own}"] = [float(f"{one:.5g}") for one in outputs]
    return found


def find_body_change(head: Any, target: Reader) -> float | None:
    """The largest relative difference of a linear layer from that of the head's target.

    None within the rounding of weights, and for heads and targets without such a fingerprint.
    """
    stored = vars(head.config).get(BODY) if isinstance(head, PreTrainedModel) else None
    if not stored or target.device.type == "meta":
        return None
    own, differences = fingerprint_body(target), [0.0]
    for name in stored.keys() & own.keys():
        one, other = torch.tensor(stored[name]), torch.tensor(own[name])
        differences.append(float((one - other).norm() / one.norm().clamp_min(1e-30)))
    return max(differences) if max(differences) > _ROUNDING else None


def _is_plain(weight: Tensor) -> bool:
    is_plain = type(weight.data) is Tensor and weight.device.type != "meta"
    return is_plain and weight.is_floating_point() and weight.itemsize >= 2


def _probe_linear(linear: nn.Linear, adapted: nn.Module) -> list[float]:
    """Some outputs of a linear layer without its bias, as an adapter changes them."""
    states = _probe_states(2, linear.in_features)
    inputs = torch.cat((states, torch.zeros_like(states[:1]))).to(linear.weight.device)
    rows = (2 * torch.arange(_ROWS) + 1) * linear.out_features // (2 * _ROWS)
    if adapted is not linear:
        made = adapted(inputs.to(linear.weight.dtype))[:, rows.to(inputs.device)].float()
        made = made[:2] - made[2]  # without a bias
    else:
        made = inputs[:2] @ linear.weight[rows.to(inputs.device)].float().T
    found: list[float] = made.flatten().tolist()
    return found


def is_same_target(one: list[list[float]], other: list[list[float]]) -> bool:
    """Whether two fingerprints are of one target."""
    return bool(_agree(one, other) > _SAME)


def _agree(one: list[list[float]], other: list[list[float]]) -> Tensor:
    """The median cosine over tokens."""
    return (torch.tensor(one) * torch.tensor(other)).sum(-1).median()


def _probe_states(
    rows: int, columns: int
) -> Tensor:  # (rows, columns) of -1 and 1, the same on all platforms
    place = torch.arange(rows * columns, dtype=torch.int64).reshape(rows, columns)
    mixed = (place * 6_364_136_223_846_793_005 + 1_442_695_040_888_963_407) >> 33
    mixed = (mixed ^ (mixed >> 15)) * 2_246_822_519
    return torch.where((mixed >> 13) & 1 == 0, 1.0, -1.0)


@dataclass(frozen=True)
class VocabularyComparison:
    """Agreement of two tokenizers; `remark` describes the difference."""

    ours: int
    theirs: int
    remark: str
    differs: bool  # in more than a few ids


def compare_vocabularies(
    ours: Mapping[str, int], theirs: Mapping[str, int]
) -> VocabularyComparison:
    """Compare two tables of tokens and their ids."""
    own, other = ({number: word for word, number in table.items()} for table in (ours, theirs))
    shared = own.keys() & other.keys()
    agreed = sum(own[number] == other[number] for number in shared)
    size = min(len(own), len(other))
    if agreed == size:
        return VocabularyComparison(len(own), len(other), "", False)
    wrong = next((n for n in sorted(shared) if own[n] != other[n]), None)
    example = "" if wrong is None else f"; id {wrong} is {own[wrong]!r} and {other[wrong]!r}"
    remark = f"only {agreed} of {size} ids stand for the same token{example}"
    return VocabularyComparison(len(own), len(other), remark, agreed < MIN_SHARED * size)


def check_vocabulary_sizes(target: int, drafter: int) -> None:
    """Refuse a draft model whose vocabulary differs by more than padding. Raises ValueError."""
    if abs(target - drafter) > min(MAX_PADDING, MAX_PADDING_SHARE * max(target, drafter)):
        raise ValueError(
            f"the draft model has a vocabulary of {drafter} tokens, the target one of {target}: "
            "their token ids do not mean the same; choose a draft model with the target's "
            "tokenizer, or for text recipe 'coupled' or 'uad' with both tokenizers: "
            "mmspec.models.translation.OtherVocabulary"
        )


def check_vocabularies(target: str, drafter: str) -> None:
    """Refuse a draft model whose ids mean other tokens than the target's. Raises ValueError.

    Both are folders or cached hub names; skipped unless both have a tokenizer.json.
    """
    if target == drafter:
        return
    files = [find_tokenizer(name) for name in (target, drafter)]
    contents = [file.read_bytes() for file in files if file is not None]
    if len(contents) < 2 or contents[0] == contents[1]:
        return
    ours, theirs = map(_table, contents)
    if not ours or not theirs:
        return
    found = compare_vocabularies(ours, theirs)
    if found.differs:
        raise ValueError(
            f"{drafter} cannot draft for {target}: {found.remark}; choose a draft model with the "
            "target's tokenizer"
        )


def find_tokenizer(name: str) -> Path | None:
    """Find the tokenizer.json of a folder or a cached hub name; None if there is none."""
    if not name:
        return None
    if Path(name).is_dir():
        file = Path(name) / "tokenizer.json"
        return file if file.is_file() else None
    found = try_to_load_from_cache(name, "tokenizer.json") if name.count("/") == 1 else None
    return Path(found) if isinstance(found, str) else None


def _table(content: bytes) -> dict[str, int]:
    """Return tokens and their ids; empty for damaged files and other kinds."""
    try:
        made = parse_json(content)
        words, added = made["model"]["vocab"], made.get("added_tokens", [])
        table = words if isinstance(words, dict) else {w: n for n, (w, _) in enumerate(words)}
        return table | {one["content"]: one["id"] for one in added}
    except (ValueError, TypeError, KeyError):
        return {}


def check_same_device(target: Any, drafter: Any) -> None:
    """Refuse the reader of a draft model on another device than the target's. Raises ValueError."""
    if target.device != drafter.device:
        raise ValueError(
            f"the target computes on {target.device} and the draft model on {drafter.device}; this "
            f"recipe needs both on one, so load the draft model on {target.device}, or use recipe "
            "'coupled'"
        )


def check_pair(target: Reader, drafter: Reader, sees: str) -> None:
    """Refuse a draft model that cannot read this target's prompts.

    Raises ValueError: an image for a draft model without an encoder, another image token, a prompt
    outside of its vocabulary.
    """
    if (
        sees in ("nothing", "placeholders")
        and target.family.draws_images
        and not target.family.writes_text
    ):
        raise ValueError(
            f"sees={sees!r} reads the prompt as tokens, but {type(target.model).__name__} draws "
            "behind a prompt that is not of the vocabulary of its codes; give sees='prompt', or a "
            "recipe for models that draw, such as 'coupled'"
        )
    if sees == "pixels" and not drafter.family.media:
        raise ValueError(
            "sees='pixels' needs a draft model with a vision encoder, but "
            f"{type(drafter.model).__name__} reads text only; give sees='nothing' or a "
            "vision-language draft model"
        )
    if sees == "pixels":
        own, other = target.placeholder_ids[:1], drafter.placeholder_ids[:1]
        if own != other:
            raise ValueError(
                f"the image token is {own} for the target but {other} for the draft "
                "model; choose a pair that shares its processor"
            )
    if sees == "target-features":
        target.check_features()
        drafter.check_embeddable()
        frame, theirs = max(target.visual_ids, default=0), drafter.vocabulary
        if not drafter.family.media and frame >= theirs:
            raise ValueError(
                f"the prompt encloses images with token {frame}, but the draft model knows "
                f"{theirs} tokens only; give sees='nothing' or resize its embeddings"
            )


def check_same_size(target: Reader, drafter: Reader) -> None:
    """Refuse a draft model that generates images of another size only. Raises ValueError."""
    size = drafter.family.fixed_size
    if not target.family.draws_images or size is None:
        return
    theirs, sizes = size(drafter.model.config), target.family.fixed_size
    ours = None if sizes is None else sizes(target.model.config)
    if ours != theirs:
        raise ValueError(
            f"the draft model generates images of {theirs[0]} x {theirs[1]} codes, the target "
            f"{'any size' if ours is None else f'{ours[0]} x {ours[1]}'}, so its codes stand "
            "elsewhere; use recipe='mulo-sd', which enlarges smaller pictures, or a draft model of "
            "the target's size"
        )
