"""Survey of all generative classes of the installed transformers.

Every class is built small and at random from its configuration class, and run by its own
`generate()` and by ours: a chain, a tree and a ragged batch, each with a drafter that is often
wrong. Either the tokens are equal, or the request is refused with an error. A sampled chain is
compared with plain decoding under the same seed; a drafter that is always right measures the number
of target calls of a chain.
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
from mmspec.modalities.vlm.tiny_configs import VOCAB, tiny_config
from mmspec.modalities.vlm.tiny_requests import WORDS, Request, requests
from mmspec.targets.readers.reader import USES
from mmspec.trees import Tree

LISTS = (
    *("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"),
    *("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"),
)
OF_FRAMES = ("DiaForConditionalGeneration",)  # listed there, but of another modality
NEW, DEEP, NEVER = 24, 4, -1e4
MIN_CALLS = math.ceil((NEW - 1) / (DEEP + 1))  # of a chain that is always right
MAX_PARAMETERS = 20_000_000  # of a model
STEPS = "own steps"
USES_TESTED: dict[str, tuple[int, Any]] = {
    "chain": (1, DEEP),
    "tree": (1, Tree.branching([2, 2, 1])),
    "ragged": (2, DEEP),
}


@dataclass(frozen=True)
class Line:
    """The result of one class: inputs, outcome of each use, and reason."""

    name: str
    kind: str  # the list that contains it
    asked: str = ""  # inputs of the request: "text", or names of media
    chain: str = ""  # "exact", "refused", "wrong" or "crash"; empty = `generate()` cannot
    tree: str = ""
    ragged: str = ""
    seeded: str = ""  # a chain, sampled
    read: str = ""  # a chain: "placed" by position ids and a mask, or in the model's "own steps"
    calls: int = 0  # of a chain that is always right
    reason: str = ""

    @property
    def total(self) -> int:
        """The number of classes."""
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
    """Return the names of the classes that generate tokens, with the list of each."""
    found: dict[str, str] = {}
    for kind in LISTS:
        for names in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES").values():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(name, kind)
    return {name: kind for name, kind in found.items() if name not in OF_FRAMES}


def survey(only: frozenset[str] | None = None) -> Iterator[Line]:
    """Measure the classes, one line per class; default: all."""
    for name, kind in sorted(classes().items()):
        if only is None or name in only:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield measure_class(name, kind)


def markdown(lines: Sequence[Line]) -> str:
    """Return the table of the guide: supported classes, and the others with the reason."""
    count = Counter(line.verdict for line in lines)
    asked = len(lines) - count["not asked"]
    taken, single = count["accepted"] + count["chain only"], count["one row"]
    wide = [line.name for line in lines if line.calls > MIN_CALLS]
    rows = [
        f"transformers {transformers.__version__}: {len(lines)} generative classes, of which "
        f"`generate()` itself runs {asked} on a small random configuration. Of these {taken} work "
        f"({taken / max(asked, 1):.1%}; {count['accepted']} with trees, {count['chain only']} with "
        f"chains only), {single} do one row at a time, {count['refused']} are refused with an "
        f"error, {count['crash']} crash, and {count['wrong']} gave a wrong token. "
        f"{sum(line.read == STEPS for line in lines)} of those that work are read in their own "
        f"steps. A drafter that is always right, of {DEEP} tokens, needs {MIN_CALLS} target calls "
        f"for {NEW} tokens {'in all of them' if not wide else 'but in ' + ', '.join(wide)}.",
        "",
        "| class | asked with | verdict | read | calls | why |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for line in lines:
        if line.verdict != "not asked":
            why = "" if line.verdict == "accepted" else _brief(line.reason)
            cells = (line.name, line.asked, line.verdict, line.read, line.calls or "", why)
            rows.append(f"| {' | '.join(map(str, cells))} |")
    left = [line for line in lines if line.verdict == "not asked"]
    rows += [
        "",
        "Not asked, since no small model or request was found that `generate()` takes:",
        "",
    ]
    rows += [f"- {line.name}: {_brief(line.reason)}" for line in left]
    return "\n".join(rows)


def _brief(reason: str) -> str:
    """Return the first cause of a refusal, without numbers that differ between machines."""
    cause = re.sub(r" \(by [^)]*\)", "", reason.split("; ")[0]).replace("|", "/")
    return re.sub(r", so wrong tokens would be accepted", "", cause)


def measure_class(name: str, kind: str) -> Line:
    """Build one class and run all uses."""
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
        for use, (rows, shape) in USES_TESTED.items():
            given = one if rows == 1 else request
            verdicts[use], why = _compare_tokens(model, given, expected[rows], shape)
            reasons += [why] if why else []
        why = "; ".join(dict.fromkeys(reasons))
        if verdicts["chain"] != "exact":
            return Line(name, kind, asked, **verdicts, reason=why)
        read, calls = _measure_perfect_chain(model, one, expected[1])
        seeded = _compare_sampled(model, one)
        return Line(
            name, kind, asked, **verdicts, seeded=seeded, read=read, calls=calls, reason=why
        )
    return Line(name, kind, reason=reason or "no request was found")


def build(name: str) -> Any:
    """Build a small model of a class, with weights large enough that greedy text varies."""
    cls = getattr(transformers, name)
    config = tiny_config(cls.config_class)
    with torch.device("meta"):
        size = sum(weight.numel() for weight in cls(config).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"{size} parameters are too many")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = cls(config).float().eval()
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2 and weight.is_floating_point():
                weight.normal_(0.0, 1.4 / weight[0].numel() ** 0.5, generator=noise)
        embeddings = next(model.get_input_embeddings().parameters())
        embeddings.normal_(0.0, 1.0, generator=noise)
        _suppress_special_ids(model)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0, bos_token_id=1)
    if model.config.is_encoder_decoder:
        model.generation_config.decoder_start_token_id = 1
    return model


def _suppress_special_ids(model: Any) -> None:
    """Add a bias that suppresses special ids, so that no placeholder is generated."""
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear) and head.out_features == VOCAB:
        bias = head.weight.new_full((VOCAB,), NEVER)
        bias[WORDS.start : WORDS.stop] = 0.0
        head.bias = nn.Parameter(bias)


def _alone(request: Request) -> Request:
    """Return the first row of a request of two."""
    return {name: value[: len(value) // 2] for name, value in request.items()}


def _own(model: Any, request: Request) -> list[list[int]]:
    with torch.no_grad():
        out = model.generate(**request, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    rows: list[list[int]] = out[:, -NEW:].tolist()
    return rows


def _compare_tokens(
    model: Any, request: Request, expected: list[list[int]], shape: Any
) -> tuple[str, str]:
    """Compare our tokens with the expected ones; returns the outcome and a reason."""
    try:
        fast = api.accelerate(model, "coupled", drafter=Oracle(expected, 0.3, tree=shape, seed=1))
        if "generate" not in fast.calls:
            return "refused", f"{type(model).__name__} has no generate() here"
        out = fast.generate(**request, max_new_tokens=NEW, do_sample=False)
    except ValueError as error:
        return "refused", _first_line(error)
    except Exception as error:
        return "crash", f"{type(error).__name__}: {_first_line(error)}"
    return ("exact" if out.sequences[:, -NEW:].tolist() == expected else "wrong"), ""


def _measure_perfect_chain(
    model: Any, request: Request, expected: list[list[int]]
) -> tuple[str, int]:
    """Return how a chain is read, and the target calls of one that is always right."""
    fast = api.accelerate(model, "coupled", drafter=Oracle(expected, tree=DEEP))
    calls = fast.generate(**request, max_new_tokens=NEW, do_sample=False).stats.target_calls
    session: Any = fast.session
    return STEPS if USES[0] in session.bound.backbone.stepwise else "placed", calls


def _compare_sampled(model: Any, request: Request) -> str:
    """Compare a sampled chain with plain decoding under the same seed."""
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": True, "seed": 7}
    rows = api.decode_plain(model, **request, **settings).sequences[:, -NEW:].tolist()
    fast = api.accelerate(model, "coupled", drafter=Oracle(rows, 0.3, tree=DEEP, seed=1))
    ours = fast.generate(**request, **settings).sequences[:, -NEW:].tolist()
    return "exact" if ours == rows else "wrong"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    whole = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return whole[:400]
