"""Engine efficiency at published model sizes, for a drafter with a given acceptance rate.

Beside each figure stands what the memory of the device allows: a target forward reads all weights
but the input embeddings, and the keys and values of the context, once. Forwards of several tokens
may be bound by arithmetic before that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from statistics import median
from typing import Any, ClassVar

import torch

from mmspec import recipes
from mmspec.api import accelerate
from mmspec.bench.efficiency import run_and_replay
from mmspec.bench.forwards import Replay
from mmspec.bench.reporting import (
    Progress,
    Report,
    describe_environment,
    dtype_name,
    read_clock,
    silent,
)
from mmspec.bench.row import tokens_per_target_call
from mmspec.bench.studies.shapes import (
    FixedLength,
    build_model,
    parse_device,
    random_prompt,
)
from mmspec.bench.timing import Ratio, time_run
from mmspec.drafters.oracle import Oracle
from mmspec.errors import check_number
from mmspec.models.placement import check_kernels, parse_dtype
from mmspec.trees import Tree

NOTE = (
    "text decoder of that shape with random weights; the drafter is an oracle without cost, whose "
    "tokens are correct with the given probability"
)

EAGER_MODE, COMPILED_MODE = "eager", "compiled"
BANDWIDTH_BYTES = 1 << 28  # read to measure the bandwidth: more than fits in a cache


@dataclass(frozen=True)
class ScalePoint:
    """One context length at one acceptance rate; plain decoding has none."""

    context: int
    acceptance: float | None
    engine_efficiency: float | None  # None = compiled: forwards in graphs are not replayed alone
    tokens_per_target_call: float
    speedup_end_to_end: float  # over generate()
    speedup_decode: float | None  # over plain decoding in this loop, without prefill
    ideal_speedup: float | None  # forwards of plain decoding over these, without prefill
    milliseconds_per_token: float
    host_milliseconds_per_round: float | None
    mode: str = EAGER_MODE
    draft: str | None = None  # chain or tree
    milliseconds_per_call: float | None = None  # without prefill
    memory_milliseconds_per_call: float | None = None  # bytes of a target forward over bandwidth
    bandwidth_share: float | None = None  # of the second in the first


@dataclass(frozen=True)
class Scale(Report):
    """The report of `mmspec bench scale`."""

    shape: str
    parameters: int
    length: int
    points: list[ScalePoint]
    note: str = NOTE
    environment: dict[str, Any] = field(default_factory=dict)
    columns: ClassVar[tuple[str, ...]] = tuple(ScalePoint.__dataclass_fields__)


def scale(
    shape: str,
    *,
    contexts: tuple[int, ...] = (512, 2048),
    rates: tuple[float, ...] = (0.6, 0.8, 0.9),
    length: int = 5,
    max_new_tokens: int = 128,
    batch: int = 1,
    repeats: int = 3,
    tree: Tree | None = None,
    compile: bool | str = False,
    device: str | None = None,
    dtype: str | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> Scale:
    """Build a model of a shape and measure it; the oracle's tokens come from plain decoding.

    With a `tree` every rate is measured with it, too; with `compile` (as for `accelerate`) every
    point is measured eager and compiled.
    """
    for context in contexts:
        check_number("context", context, 1, whole=True, example=512)
    for rate in rates:
        check_number("acceptance", rate, 0, 1, example=0.8)
    place = parse_device(device)
    kind = _dtype(dtype, place)
    model = build_model(shape, place, kind, max(contexts) + max_new_tokens + 64, seed)
    drafts = {"chain": Tree.chain(length), **({} if tree is None else {"tree": tree})}
    modes: dict[str, dict[str, Any]] = {EAGER_MODE: {}}
    if compile:
        modes[COMPILED_MODE] = {"compile": compile}
    points: list[ScalePoint] = []
    total = len(contexts) * len(modes) * (len(rates) * len(drafts) + 1)
    bandwidth = measure_bandwidth(place)
    for context in contexts:
        inputs = random_prompt(model.config.vocab_size, context, place, batch, seed)
        run = _Run(model, inputs, max_new_tokens, place, repeats)
        tokens, base = run.plain_tokens(), run.library_seconds()
        memory = count_forward_bytes(model, batch, context + max_new_tokens // 2) / bandwidth
        bare = None
        for mode, option in modes.items():
            plain = run.measure(accelerate(model, "plain", **option), mode)
            bare = plain if bare is None else bare
            points.append(_point(context, None, plain, bare, base, tokens, memory, mode, None))
            progress("measure", len(points), total)
            for rate, (name, topology) in product(rates, drafts.items()):
                oracle = Oracle(tokens, 1 - rate, topology, seed)
                fast = accelerate(model, recipes.get("plain"), drafter=oracle, **option)
                found = run.measure(fast, mode)
                points.append(_point(context, rate, found, bare, base, tokens, memory, mode, name))
                progress("measure", len(points), total)
    where = {
        **describe_environment(place, batch),
        "dtype": dtype_name(kind),
        "gigabytes per second": round(bandwidth / 1e9, 1),
    }
    parameters = sum(weight.numel() for weight in model.parameters())
    return Scale(shape, parameters, length, points, environment=where)


def measure_bandwidth(device: torch.device) -> float:
    """Bytes per second at which this device, with torch's threads, reads its memory; the best."""
    block = torch.ones(BANDWIDTH_BYTES // 4, device=device)
    seconds = []
    for _ in range(5):
        start = read_clock(device)
        block.sum()
        seconds.append(read_clock(device) - start)
    return BANDWIDTH_BYTES / min(seconds)


def count_forward_bytes(model: Any, batch: int, context: int) -> int:
    """Bytes that a forward after `context` tokens reads: weights, keys and values.

    Input embeddings are read row by row, unless the output head shares them.
    """
    embeddings, head = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    read = [one for one in model.parameters() if one is not embeddings or one is head]
    config = model.config
    heads = config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cached = 2 * config.num_hidden_layers * heads * width * context * batch
    weights: int = sum(one.numel() * one.element_size() for one in read)
    return weights + int(cached) * int(head.element_size())


@dataclass(frozen=True)
class _Run:
    """One context on one model."""

    model: Any
    inputs: Mapping[str, Any]
    max_new_tokens: int
    device: torch.device
    repeats: int

    def plain_tokens(self) -> list[list[int]]:
        found: list[list[int]] = (
            self._runner(accelerate(self.model, "plain")).run(self.inputs).values
        )
        return found

    def library_seconds(self) -> float:
        stock = self._runner(self.model)
        timed = range(self.repeats + 1)
        return median(time_run(stock, self.inputs, 0, self.device)[0] for _ in timed)

    def measure(self, fast: Any, mode: str) -> _Measured:
        runner, one_token = self._runner(fast), FixedLength(fast, 1)
        stats = runner.run(self.inputs).stats  # compiles
        assert stats is not None
        pairs: list[tuple[float, Replay | None]]
        if mode == EAGER_MODE:
            (timed,) = run_and_replay([runner], self.inputs, self.repeats, 0, self.device)
            pairs = list(timed)
        else:
            pairs = [
                (time_run(runner, self.inputs, 0, self.device)[0], None)
                for _ in range(self.repeats)
            ]
        first = median(
            time_run(one_token, self.inputs, 0, self.device)[0] for _ in range(self.repeats)
        )
        alone = [one for _, one in pairs if one is not None]
        return _Measured(
            median(wall for wall, _ in pairs),
            median(one.prefill for one in alone) if alone else None,
            median(one.decode for one in alone) if alone else None,
            first,
            stats.target_calls,
            tokens_per_target_call([stats]),
        )

    def _runner(self, model: Any) -> FixedLength:
        return FixedLength(model, self.max_new_tokens)


@dataclass(frozen=True)
class _Measured:
    wall: float
    prefill: float | None  # of the forwards alone, as `decode`; None = not replayed
    decode: float | None
    first: float  # wall seconds of a one-token call
    calls: int
    tokens_per_call: float

    @property
    def decode_wall(self) -> float:
        return self.wall - self.first

    @property
    def alone(self) -> float | None:
        return None if self.prefill is None or self.decode is None else self.prefill + self.decode


def _point(
    context: int,
    rate: float | None,
    found: _Measured,
    bare: _Measured,
    base: float,
    tokens: list[list[int]],
    memory: float,
    mode: str,
    draft: str | None,
) -> ScalePoint:
    alone, calls = found.alone, max(found.calls, 1)
    count = sum(map(len, tokens))
    faster = Ratio.of([bare.decode_wall], [found.decode_wall]) if bare.decode_wall > 0 else None
    per_call = found.decode_wall / calls if found.decode_wall > 0 else None
    return ScalePoint(
        context,
        rate,
        None if alone is None else alone / found.wall,
        found.tokens_per_call,
        base / found.wall,
        None if faster is None else faster.median,
        None if bare.decode is None or not found.decode else bare.decode / found.decode,
        1e3 * found.wall / count,
        None if alone is None else 1e3 * (found.wall - alone) / calls,
        mode,
        draft,
        None if per_call is None else 1e3 * per_call,
        1e3 * memory,
        None if per_call is None else memory / per_call,
    )


def _dtype(name: str | None, device: torch.device) -> torch.dtype:
    if name is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    found = parse_dtype(name)
    check_kernels(found, device)
    return found
