"""Seconds of a forward from its arithmetic and its memory traffic, and of rounds made of forwards.

Every group of operations takes the longer of its arithmetic and its memory traffic (the roofline
model, Williams et al. 2009), or their sum on a device where they do not overlap. Only the text
decoder counts; images are tokens of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mmspec.bench.planning.devices import Device
from mmspec.bench.studies.shapes import DecoderShape
from mmspec.errors import check_number

FREE = 0.9  # of the memory, for weights and caches


@dataclass(frozen=True)
class ForwardWork:
    """Operations and bytes of a group of operations on one device."""

    flops: float
    bytes: float

    def seconds(self, device: Device) -> float:
        """Arithmetic and memory traffic, at the same time or one after the other."""
        compute = self.flops / (device.flops * device.compute_share)
        memory = self.bytes / (device.bandwidth * device.memory_share)
        return max(compute, memory) if device.overlaps else compute + memory


@dataclass(frozen=True)
class Split:
    """A decoder whose layers are split over `devices` by tensor parallel.

    Raises ValueError where they do not divide the heads.
    """

    shape: DecoderShape
    device: Device
    devices: int = 1

    def __post_init__(self) -> None:
        check_number("devices", self.devices, 1, whole=True, example=8)
        heads, shared = self.shape.heads, self.shape.key_value_heads
        if heads % self.devices or shared % self.devices:
            raise ValueError(
                f"{self.devices} devices do not divide {heads} heads and {shared} key-value heads; "
                "give a divisor of both, and use further devices for replicas"
            )

    @property
    def head_width(self) -> int:
        return self.shape.head_width or self.shape.hidden // self.shape.heads

    @property
    def layer_weights(self) -> float:
        """Weights of one layer."""
        shape = self.shape
        attention = (2 * shape.heads + 2 * shape.key_value_heads) * self.head_width * shape.hidden
        return attention + 3 * shape.hidden * shape.inner

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights on one device; embeddings are read by rows, but stored."""
        shape = self.shape
        tables = shape.vocabulary * shape.hidden * (1 if shape.tied else 2)
        each = self.device.bytes_per_value / self.devices
        return (shape.layers * self.layer_weights + tables) * each

    @property
    def slot_bytes(self) -> float:
        """Bytes of keys and values of one token on one device."""
        shape = self.shape
        values = 2 * shape.layers * shape.key_value_heads * self.head_width
        return values * self.device.bytes_per_value / self.devices

    @property
    def max_slots(self) -> int:
        """Tokens whose keys and values fit beside the weights; 0 if the weights do not."""
        free = FREE * self.device.memory - self.weight_bytes
        return max(int(free / self.slot_bytes), 0)

    def list_work(
        self, rows: int, tokens: int, context: float, scored: int
    ) -> Iterator[ForwardWork]:
        """The work of a forward, on one device: linear layers, attention, output head."""
        shape, each, parts = self.shape, self.device.bytes_per_value, self.devices
        count = rows * tokens
        weights = shape.layers * self.layer_weights / parts
        states = shape.layers * count * (4 * shape.hidden + 2 * shape.inner / parts) * each
        yield ForwardWork(2 * weights * count, weights * each + states)
        width = shape.heads * self.head_width / parts
        seen = context + (tokens + 1) / 2  # slots that a token attends to, in the mean
        pairs = shape.layers * count * seen
        read = rows * (context + tokens) * self.slot_bytes
        yield ForwardWork(4 * pairs * width, read)
        table = shape.vocabulary * shape.hidden / parts
        yield ForwardWork(
            2 * table * rows * scored, (table + rows * scored * shape.vocabulary) * each
        )

    def forward(
        self, rows: int, tokens: int, context: float = 0, scored: int | None = None
    ) -> float:
        """Seconds of a forward of `rows` x `tokens` tokens after `context` cached ones.

        `scored` positions per row pass the output head; default: all.
        """
        device, shape = self.device, self.shape
        work = self.list_work(rows, tokens, context, tokens if scored is None else scored)
        size = rows * tokens * shape.hidden * device.bytes_per_value
        sums = 2 * shape.layers * device.all_reduce(size, self.devices)
        return sum(one.seconds(device) for one in work) + shape.layers * device.layer_seconds + sums


def expected_tokens(length: int, acceptance: float) -> float:
    """Tokens of a round of a draft chain: (1 - a^(k + 1)) / (1 - a) (Leviathan et al. 2023, eq. 1).

    Every draft token is accepted with probability `acceptance` if those before it were, and one
    token of the target follows.
    """
    check_number("length", length, 0, whole=True, example=5)
    check_number("acceptance", acceptance, 0, 1, example=0.8)
    if acceptance == 1:
        return length + 1
    return (1 - acceptance ** (length + 1)) / (1 - acceptance)


def eagle_head(target: DecoderShape, vocabulary: int = 32000) -> DecoderShape:
    """The decoder whose forward costs what one step of an EAGLE-3 head costs.

    One layer of the target's width, whose attention reads embeddings and features, and a draft
    vocabulary.
    """
    width = target.head_width or target.hidden // target.heads
    # two inputs of its attention, and the projection of three features, as further inner weights
    extra = (target.heads + 2 * target.key_value_heads) * width + 3 * target.hidden
    inner = target.inner + extra // 3
    return replace(target, layers=1, inner=inner, vocabulary=min(vocabulary, target.vocabulary))


@dataclass(frozen=True)
class Decoding:
    """Rounds of `rows` requests on a target with a drafter, which is whole on every device."""

    target: Split
    drafter: Split | None = None

    def draft(self, rows: int, length: int, context: float) -> float:
        """Seconds of `length` forwards of the drafter."""
        if not length or self.drafter is None:
            return 0.0
        return length * self.drafter.forward(rows, 1, context)

    def verify(self, rows: int, length: int, context: float) -> float:
        """Seconds of the target's forward over a draft and the token before it."""
        return self.target.forward(rows, length + 1, context)

    def round(self, rows: int, length: int, context: float) -> float:
        """Seconds of a round of all rows."""
        spent = self.draft(rows, length, context) + self.verify(rows, length, context)
        return spent + self.target.device.host(rows)

    def prefill(self, rows: int, tokens: int, context: float = 0) -> float:
        """Seconds until prompts of `tokens` tokens are read, by the drafter, too.

        Those before them, `context` tokens, were read already.
        """
        spent = self.target.forward(rows, tokens, context, scored=1)
        if self.drafter is not None:
            spent += self.drafter.forward(rows, tokens, context, scored=1)
        return spent

    def is_compute_bound(self, rows: int, length: int) -> bool:
        """Whether the linear layers of a verification take longer to compute than to read."""
        device = self.target.device
        linear = next(self.target.list_work(rows, length + 1, 0, 1))
        compute = linear.flops / (device.flops * device.compute_share)
        return compute > linear.bytes / (device.bandwidth * device.memory_share)

    @property
    def max_slots(self) -> int:
        """Tokens whose keys and values fit, those of the drafter included."""
        if self.drafter is None:
            return self.target.max_slots
        free = FREE * self.target.device.memory
        free -= self.target.weight_bytes + self.drafter.weight_bytes
        return max(int(free / (self.target.slot_bytes + self.drafter.slot_bytes)), 0)
