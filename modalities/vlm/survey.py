"""What works among all generative classes of the installed transformers: measured, not listed.

Every class is built small and at random from its own configuration class, asked by its own
`generate()`, and then by ours: a chain, a tree, a ragged batch, each with a drafter that is often
wrong. Either the tokens are the same, or the request is refused with an error. A chain is sampled,
too, and is then compared with plain decoding under the same seed; a drafter that is always right
tells how many target calls a chain needs.
"""

from __future__ import annotations

import math
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
from mmspec.targets.readers.reader import USES
from mmspec.trees import Tree

LISTS = (
    *("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"),
    *("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"),
)
NEW, DEEP, NEVER = 24, 4, -1e4
FEWEST = math.ceil((NEW - 1) / (DEEP + 1))  # calls of a chain that is always right
LARGEST = 20_000_000  # parameters; what cannot be made smaller is not built
STEPS = "own steps"
ASKED: dict[str, tuple[int, Any]] = {
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
    seeded: str = ""  # a chain, sampled
    read: str = ""  # how a chain is: "placed" by positions and a mask, or in its "own steps"
    calls: int = 0  # of a chain that is always right
    reason: str = ""

    @property
    def total(self) -> int:
        """How many lines there are in all."""
        return len(classes())

    @property
    def uses(self) -> tuple[str, ...]:
        return self.chain, self.tree, self.ragged, self.seeded

    @property
    def verdict(self) -> str:
        if not self.chain:
            return "not asked"
        for bad in ("wrong", "crash"):
            if bad in self.uses:
                return bad
        if self.chain == "refused":
            return "refused"
        if self.ragged == "refused":
            return "one row"
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
    taken, single = count["accepted"] + count["chain only"], count["one row"]
    wide = [line.name for line in lines if line.calls > FEWEST]
    rows = [
        f"transformers {transformers.__version__}: {len(lines)} generative classes, of which "
        f"`generate()` itself runs {asked} on a small random configuration. Of these {taken} work "
        f"({taken / max(asked, 1):.1%}; {count['accepted']} with trees, {count['chain only']} with "
        f"chains only), {single} do one row at a time, {count['refused']} are refused with an "
        f"error, {count['crash']} crash, and {count['wrong']} gave a wrong token. "
        f"{sum(line.read == STEPS for line in lines)} of those that work are read in their own "
        f"steps. A drafter that is always right, of {DEEP} tokens, needs {FEWEST} target calls for "
        f"{NEW} tokens {'in all of them' if not wide else 'but in ' + ', '.join(wide)}.",
        "",
        "| class | asked with | verdict | read | calls | why |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for line in lines:
        if line.verdict != "not asked":
            why = "" if line.verdict == "accepted" else _brief(line.reason)
            told = (line.name, line.asked, line.verdict, line.read, line.calls or "", why)
            rows.append(f"| {' | '.join(map(str, told))} |")
    left = [line for line in lines if line.verdict == "not asked"]
    rows += [
        "",
        "Not asked, since no small model or request was found that `generate()` takes:",
        "",
    ]
    rows += [f"- {line.name}: {_brief(line.reason)}" for line in left]
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
        verdicts: dict[str, Any] = {}
        reasons: list[str] = []
        for use, (rows, shape) in ASKED.items():
            given = one if rows == 1 else request
            verdicts[use], why = _compared(model, given, expected[rows], shape)
            reasons += [why] if why else []
        why = "; ".join(dict.fromkeys(reasons))
        if verdicts["chain"] != "exact":
            return Line(name, kind, asked, **verdicts, reason=why)
        read, calls = _copied(model, one, expected[1])
        seeded = _seeded(model, one)
        return Line(
            name, kind, asked, **verdicts, seeded=seeded, read=read, calls=calls, reason=why
        )
    return Line(name, kind, reason=reason or "no request was found")


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


def _copied(model: Any, request: Request, expected: list[list[int]]) -> tuple[str, int]:
    """How a chain is read, and the target calls of one that is always right."""
    fast = api.accelerate(model, "coupled", drafter=Oracle(expected, tree=DEEP))
    calls = fast.generate(**request, max_new_tokens=NEW, do_sample=False).stats.target_calls
    session: Any = fast.session
    return STEPS if USES[0] in session.bound.backbone.stepwise else "placed", calls


def _seeded(model: Any, request: Request) -> str:
    """Whether a sampled chain says what plain decoding says under its seed."""
    drawn: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": True, "seed": 7}
    rows = api.decode_plain(model, **request, **drawn).sequences[:, -NEW:].tolist()
    fast = api.accelerate(model, "coupled", drafter=Oracle(rows, 0.3, tree=DEEP, seed=1))
    ours = fast.generate(**request, **drawn).sequences[:, -NEW:].tolist()
    return "exact" if ours == rows else "wrong"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    whole = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return whole[:400]
