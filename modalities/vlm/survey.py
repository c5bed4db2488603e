"""What works among all generative classes of the installed transformers: measured, not listed.

Every class is built small and at random from its own configuration class, asked by its own
`generate()`, and then by ours: a chain, a tree, a ragged batch, each with a drafter that is often
wrong. Either the tokens are the same, or the request is refused with an error.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

from mmspec import api
from mmspec.drafters.oracle import Oracle
from mmspec.modalities.vlm.tiny_configs import VOCAB, tiny
from mmspec.modalities.vlm.tiny_requests import WORDS, Request, requests
from mmspec.trees import Tree

LISTS = (
    *("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"),
    *("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"),
)
NEW, DEEP, NEVER = 24, 4, -1e4
LARGEST = 20_000_000  # parameters; what cannot be made smaller is not built
USES: dict[str, tuple[int, Any]] = {
    "chain": (1, DEEP),
    "tree": (1, Tree.branching([2, 2, 1])),
    "ragged": (2, DEEP),
}


@dataclass(frozen=True)
class Line:
    """One class: how it was asked, what each use came to, and why."""

    name: str
    kind: str  # the list it stands on
    asked: str = ""  # "text", or what stood beside it
    chain: str = ""  # "exact", "refused", "wrong" or "crash"; empty = `generate()` cannot
    tree: str = ""
    ragged: str = ""
    reason: str = ""

    @property
    def total(self) -> int:
        """How many lines there are in all."""
        return len(classes())

    @property
    def uses(self) -> tuple[str, ...]:
        return self.chain, self.tree, self.ragged

    @property
    def verdict(self) -> str:
        if not self.chain:
            return "not asked"
        for bad in ("wrong", "crash"):
            if bad in self.uses:
                return bad
        if self.chain == "refused":
            return "refused"
        return "accepted" if self.tree == "exact" else "chain only"


def classes() -> dict[str, str]:
    """Names of the generative classes, with the list each stands on."""
    found: dict[str, str] = {}
    for kind in LISTS:
        for names in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES").values():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(name, kind)
    return found


def survey(only: frozenset[str] | None = None) -> Iterator[Line]:
    """One line per class."""
    for name, kind in sorted(classes().items()):
        if only is None or name in only:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield look(name, kind)


def markdown(lines: Sequence[Line]) -> str:
    """The table of the guide: what works, and below it what does not and why."""
    count = Counter(line.verdict for line in lines)
    asked = len(lines) - count["not asked"]
    taken = count["accepted"] + count["chain only"]
    rows = [
        f"transformers {transformers.__version__}: {len(lines)} generative classes, of which "
        f"`generate()` itself runs {asked} on a small random configuration. Of these {taken} work "
        f"({count['accepted']} with trees, {count['chain only']} with chains only), "
        f"{asked - taken - count['wrong'] - count['crash']} are refused with an error, "
        f"{count['crash']} crash, and {count['wrong']} gave a wrong token.",
        "",
        "| class | asked with | verdict | why |",
        "| --- | --- | --- | --- |",
    ]
    for line in lines:
        if line.verdict != "not asked":
            why = "" if line.verdict == "accepted" else _brief(line.reason)
            rows.append(f"| {line.name} | {line.asked} | {line.verdict} | {why} |")
    left = sorted(line.name for line in lines if line.verdict == "not asked")
    rows += ["", f"Not asked, no small model or request was found: {', '.join(left)}."]
    return "\n".join(rows)


def _brief(reason: str) -> str:
    """The first cause of a refusal, without numbers that differ between machines."""
    cause = re.sub(r" \(by [^)]*\)", "", reason.split("; ")[0]).replace("|", "/")
    return re.sub(r", so wrong tokens would be accepted", "", cause)


def look(name: str, kind: str) -> Line:
    """What one class does."""
    try:
        model = build(name)
    except Exception as error:
        return Line(name, kind, reason=f"not built: {_first_line(error)}")
    reason = ""
    for request in requests(model, 2):
        one = _alone(request)
        try:
            expected = {rows: _own(model, one if rows == 1 else request) for rows in (1, 2)}
        except Exception as error:
            reason = reason or f"generate(): {_first_line(error)}"
            continue
        asked = ", ".join(n for n in request if n not in ("input_ids", "attention_mask")) or "text"
        verdicts, reasons = {}, []
        for use, (rows, shape) in USES.items():
            given = one if rows == 1 else request
            verdicts[use], why = _compared(model, given, expected[rows], shape)
            reasons += [why] if why else []
        return Line(name, kind, asked, **verdicts, reason="; ".join(dict.fromkeys(reasons)))
    return Line(name, kind, reason=reason)


def build(name: str) -> Any:
    """A small model of a class, weights wide enough that greedy text varies."""
    cls = getattr(transformers, name)
    config = tiny(cls.config_class)
    with torch.device("meta"):
        size = sum(weight.numel() for weight in cls(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size} parameters are too many")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = cls(config).float().eval()
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2 and weight.is_floating_point():
                weight.normal_(0.0, 1.4 / weight[0].numel() ** 0.5, generator=noise)
        words = next(model.get_input_embeddings().parameters())
        words.normal_(0.0, 1.0, generator=noise)
        _silence(model)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0, bos_token_id=1)
    if model.config.is_encoder_decoder:
        model.generation_config.decoder_start_token_id = 1
    return model


def _silence(model: Any) -> None:
    """Rule special ids out, so that no placeholder is generated."""
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear) and head.out_features == VOCAB:
        bias = head.weight.new_full((VOCAB,), NEVER)
        bias[WORDS.start : WORDS.stop] = 0.0
        head.bias = nn.Parameter(bias)


def _alone(request: Request) -> Request:
    """The first row of a request of two."""
    return {name: value[: len(value) // 2] for name, value in request.items()}


def _own(model: Any, request: Request) -> list[list[int]]:
    with torch.no_grad():
        out = model.generate(**request, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    rows: list[list[int]] = out[:, -NEW:].tolist()
    return rows


def _compared(
    model: Any, request: Request, expected: list[list[int]], shape: Any
) -> tuple[str, str]:
    """Whether our tokens are the same, and why not."""
    try:
        fast = api.accelerate(model, "coupled", drafter=Oracle(expected, 0.3, tree=shape, seed=1))
        out = fast.generate(**request, max_new_tokens=NEW, do_sample=False)
    except ValueError as error:
        return "refused", _first_line(error)
    except Exception as error:
        return "crash", f"{type(error).__name__}: {_first_line(error)}"
    return ("exact" if out.sequences[:, -NEW:].tolist() == expected else "wrong"), ""


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:400] if lines else type(error).__name__
