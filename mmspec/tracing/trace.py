"""The trace of a request: `fast.generate(..., trace=trace)`, then `trace.save("run.html")`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from mmspec import registry
from mmspec.compressors.contract import KEPT
from mmspec.draft import Draft, Round
from mmspec.modality import Call, Modality
from mmspec.stats import Stats
from mmspec.targets.tokens.context import Request
from mmspec.tracing.jsonl import FORMAT, VERSION, read_jsonl, write_jsonl
from mmspec.tracing.page import make_frame, make_page, write_page
from mmspec.tracing.recorder import RoundRecorder, round_digits
from mmspec.tracing.words import add_text

Json = dict[str, Any]
ENDINGS = (".html", ".jsonl")
PROMPTS = ("prompt", "text", "instruction")  # arguments that hold the prompt as text
LONGEST_LIST = 16  # of a setting that is written


class Trace:
    """A record of every round of one request, for any call of any modality.

    Pass a new one as `trace=`; it holds one request. Tensors stay on the device until the trace is
    saved or read, so that a traced request reads nothing from it beside what every round reads.

    Args:
        processor: The processor or tokenizer of the model, to show words; without it tokens are
            shown by their ids.
        prompt: What was asked, to be shown. Default: the prompt in the arguments, as far as it is
            text or the processor decodes it.

    Example:
        >>> trace = mmspec.Trace(processor)
        >>> fast.generate(**inputs, max_new_tokens=128, trace=trace)
        >>> trace.save("run.html")  # opens in any browser; run.jsonl holds the data
    """

    def __init__(self, processor: Any = None, prompt: str | Sequence[str] | None = None) -> None:
        if processor is not None and not callable(getattr(processor, "decode", None)):
            raise ValueError(
                f"processor={processor!r} cannot decode tokens; give the model's processor or "
                "tokenizer, or None"
            )
        self.processor, self.prompt = processor, prompt
        self.recorder = RoundRecorder()
        self.about: Json | None = None  # the header, but for what the rounds hold
        self.known_rounds: list[Json] | None = None
        self.call: Call | None = None  # the latest one of the loop
        self.states: Any = None  # what decodes the states of a denoising chain
        self.depict: Callable[[], Json] | None = None  # makes the views, once
        self.kept: list[Any] = []  # images of draft models, and what compressors left of them

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a JSONL file. Raises ValueError for what is no trace, or one of another version."""
        trace = cls()
        trace.about, trace.known_rounds = read_jsonl(Path(path))
        return trace

    def save(self, path: str | Path) -> Path:
        """Write the trace: a page for ".html", its data for ".jsonl". Raises ValueError."""
        if not isinstance(path, str | Path) or Path(path).suffix.lower() not in ENDINGS:
            raise ValueError(f"path={path!r} must end in .html (a page) or .jsonl (its data)")
        file = Path(path)
        if file.suffix.lower() == ".html":
            write_page(file, self.header, self.rounds)
        else:
            write_jsonl(file, self.header, self.rounds)
        return file

    def _repr_html_(self) -> str:
        """The page in a notebook, which shows the value of a cell's last line."""
        return make_frame(make_page(self.header, self.rounds))

    @property
    def header(self) -> Json:
        """What the request was: the first line of the file. Raises ValueError if there is none."""
        if self.about is None:
            raise ValueError("the trace is empty; pass it to a call, as in generate(trace=trace)")
        if "rounds" in self.about:  # it was read from a file
            return self.about
        if self.depict is not None:
            depict, self.depict = self.depict, None
            self.about["views"] = depict()
        batch = self._batch()
        return {
            **self.about,
            "rounds": len(self.rounds),
            "batch": batch,
            "tokens": self.recorder.kind,
        }

    @property
    def rounds(self) -> list[Json]:
        """All rounds as plain data: the other lines of the file."""
        if self.known_rounds is None:
            self.known_rounds = self.recorder.read()
            if self.processor is not None and self.recorder.kind == "ids":
                add_text(self.known_rounds, self.processor)
        return self.known_rounds

    def race(self, plain: Trace) -> None:
        """Show this trace beside that of plain decoding of the same request, in the same clock."""
        clock, seconds, ends = [], 0.0, dict[int, float]()
        counts = [0] * plain._batch()
        for round_ in plain.rounds:
            seconds += sum(value or 0.0 for value in round_["seconds"].values())
            for row, new in enumerate(round_["rows"]):
                counts[row] += len(new["tokens"])
            clock.append([round_digits(seconds), *counts])
            ends[round_["part"]] = round(seconds, 6)
        is_same = plain.list_tokens() == self.list_tokens()
        measured = {
            "clock": clock,
            "calls": sum(one["calls"] for one in plain.rounds),
            "parts": list(ends.values()),
            "frames": plain.header["views"].get("actions", {}).get("frames", []),
        }
        self.about = {**self.header, "plain": {**measured, "is_same": is_same}}

    def list_tokens(self) -> list[list[Any]]:
        """All tokens of every row."""
        rows: list[list[Any]] = [[] for _ in range(self._batch())]
        for round_ in self.rounds:
            for row, new in zip(rows, round_["rows"], strict=True):
                row.extend(new["tokens"])
        return rows

    def begin(
        self,
        modality: Modality,
        about: Json,
        args: Sequence[Any],
        arguments: Mapping[str, Any],
    ) -> None:
        """Start the one request of this trace. Raises ValueError for a second one."""
        if self.about is not None:
            raise ValueError("this trace already holds a request; give trace= a new mmspec.Trace()")
        settings = {name: value for name, value in arguments.items() if _is_plain(value)}
        texts = [one for one in args if isinstance(one, str)]  # by position
        texts += [arguments[one] for one in PROMPTS if one in settings]
        prompt = self.prompt or next(iter(texts), None)
        self.about = {
            "format": FORMAT,
            "version": VERSION,
            "mmspec": import_module("mmspec").__version__,
            "modality": modality.name,
            "decodes": modality.decodes,
            **about,
            "prompt": self._decode_prompt(arguments) if prompt is None else _as_list(prompt),
            "settings": {name: settings[name] for name in settings if name not in PROMPTS},
            "stats": None,
            "plain": None,
            "views": {},
            "notes": [],
        }

    def follow(self, call: Call) -> Call:
        """The call with its rounds watched; a request may be several."""
        self.recorder.begin_part()
        self.call, self.states, request = call, call.states, call.request
        if isinstance(request, Request):
            request = replace(request, shared={**request.shared, KEPT: self.kept})
        parts = replace(call.parts, watch=self.recorder.watch)
        return replace(call, parts=parts, request=request)

    def show(self, round_: Round, draft: Draft, states: Any) -> None:
        """Record a round of a run without the loop; `states` decodes its states."""
        self.states = states
        self.recorder.watch(draft, None, round_, lambda: None)
        self.recorder.add(round_)

    def add(self, round_: Round) -> None:
        """Record a round that has ended."""
        self.recorder.add(round_)

    def finish(self, session: Any, modality: Modality, output: Any, stats: Stats) -> None:
        """Add the statistics; what the modality shows of the output is made when it is read."""
        assert self.about is not None
        counted = json.loads(json.dumps(stats.to_dict()))  # as a file holds it
        self.about = {**self.about, "stats": counted}
        tracing = registry.tracing(modality)
        if tracing is not None:
            self.depict = partial(tracing.depict, session, output, self)

    def _batch(self) -> int:
        return len(self.rounds[0]["rows"]) if self.rounds else 0

    def _decode_prompt(self, arguments: Mapping[str, Any]) -> list[str] | None:
        """The prompts of `input_ids`, without padding and other special tokens."""
        ids = arguments.get("input_ids")
        if self.processor is None or not isinstance(ids, Tensor) or ids.dim() != 2:
            return None
        mask = arguments.get("attention_mask")
        kept = ids.new_ones(ids.shape).bool() if mask is None else mask.bool()
        rows = [row[own].tolist() for row, own in zip(ids, kept, strict=True)]
        texts = [self.processor.decode(row, skip_special_tokens=True) for row in rows]
        return [text.strip() for text in texts]


def check_trace(trace: Any) -> Trace:
    """The argument `trace=` of a call. Raises ValueError for anything but a trace."""
    if not isinstance(trace, Trace):
        raise ValueError(f"trace={trace!r} is not a trace; give trace=mmspec.Trace()")
    return trace


def _is_plain(value: Any) -> bool:
    """Whether a setting can be written as it is."""
    if isinstance(value, list | tuple):
        return len(value) <= LONGEST_LIST and all(map(_is_plain, value))
    return isinstance(value, str | int | float | bool)


def _as_list(prompt: str | Sequence[str]) -> list[str]:
    return [prompt] if isinstance(prompt, str) else list(prompt)
