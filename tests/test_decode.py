"""The loop when parts fail, and when a gate spares the target."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from transformers.generation.streamers import BaseStreamer

import mmspec
from mmspec.decode import BrokenLogits, make_round
from mmspec.distributions.categorical import Categorical
from mmspec.draft import Draft, Drafter, Gate, Kind, Round, Scores, Verdict
from mmspec.drafters.oracle import Oracle, RandomDrafter
from mmspec.targets.stop import Stop
from mmspec.targets.tokens.context import Context
from mmspec.trees import Tree
from mmspec.verifiers.coupled import Coupled
from mmspec.verifiers.walk import one_hot
from tests import toys
from tests.covering import covering
from tests.drafters.driving import context
from tests.partners import noisy, skip_checks

ROOM = 18
STEPS = ("begin", "propose", "observe")
FAILURES: list[BaseException] = [
    RuntimeError("CUDA out of memory"),
    MemoryError(),
    torch.OutOfMemoryError("tried to allocate 2.00 GiB"),
    ValueError("shapes differ"),
    AttributeError("'NoneType' object has no attribute 'shape'"),
    ZeroDivisionError("division by zero"),
    OSError("the draft server hung up"),
]


class Failing(Drafter):
    """A good drafter until it fails at its n-th `step`."""

    kinds = (Kind.DET,)

    def __init__(self, inner: Oracle, step: str, error: BaseException, after: int = 2) -> None:
        self.inner, self.step, self.error = inner, step, error
        self.left = 0 if step == "begin" else after
        self.calls = 0

    def begin(self, context: Context) -> Any:
        self._maybe("begin")
        return self.inner.begin(context)

    def propose(self, context: Context, state: Any) -> Draft:
        self._maybe("propose")
        return self.inner.propose(context, state)

    def observe(
        self, context: Context, state: Any, draft: Draft, scores: Scores, kept: Round
    ) -> Any:
        self._maybe("observe")
        return self.inner.observe(context, state, draft, scores, kept)

    def _maybe(self, step: str) -> None:
        self.calls += 1
        if step == self.step:
            if not self.left:
                raise self.error
            self.left -= 1


def greedy(model: Any, request: dict[str, Tensor]) -> Tensor:
    tokens: Tensor = model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    return tokens


def failing(
    request: dict[str, Tensor], expected: Tensor, step: str, error: BaseException
) -> Failing:
    rows = expected[:, request["input_ids"].shape[1] :].tolist()
    return Failing(Oracle(rows, tree=3), step, error)


class OneRow(Drafter):
    """Proposes a single chain, whatever the number of rows."""

    kinds = (Kind.DET,)

    def propose(self, context: Any, state: None) -> Draft:
        return Draft.chain(torch.ones(1, 2, dtype=torch.int64), Kind.DET)


def test_a_draft_of_other_rows_is_retired_and_changes_nothing() -> None:
    model, request = toys.model("llama"), toys.inputs("llama", batch=2, ragged=True)
    fast = mmspec.accelerate(model, "coupled", drafter=OneRow())
    out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert torch.equal(out.sequences, greedy(model, request))
    assert out.stats.fallback is not None
    assert "the draft has 1 rows, the context 2" in out.stats.fallback


@pytest.mark.parametrize("token", [-1, toys.model("llama").config.vocab_size])
@pytest.mark.parametrize("batch", [1, 2])
def test_tokens_that_the_target_does_not_have_are_one_error(token: int, batch: int) -> None:
    class Beyond(Drafter):
        kinds = (Kind.DET,)

        def propose(self, context: Any, state: None) -> Draft:
            return Draft.chain(torch.tensor([[1, token]] * context.batch), Kind.DET)

    model, request = toys.model("llama"), toys.inputs("llama", batch=batch)
    fast = mmspec.accelerate(model, "coupled", drafter=Beyond())
    with pytest.raises(ValueError, match=f"proposed token {token}, but the target has "):
        fast.generate(**request, max_new_tokens=ROOM, do_sample=False)


@pytest.mark.parametrize(("error", "step"), covering(FAILURES, STEPS, strength=1))
def test_a_drafter_that_fails_is_retired_with_one_warning(
    step: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    model, request = toys.model("llama"), toys.inputs("llama", batch=2, ragged=True)
    expected = greedy(model, request)
    drafter = failing(request, expected, step, error)
    fast = mmspec.accelerate(model, "coupled", drafter=drafter)
    with caplog.at_level(logging.WARNING, logger="mmspec"):
        out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert torch.equal(out.sequences, expected)
    assert out.stats.fallback == f"Failing: {type(error).__name__}: {error}"
    assert out.stats.speculation_off_steps > 0
    assert out.stats.num_accepted_draft_tokens > 0 or step == "begin"
    warnings = [record for record in caplog.records if record.name == "mmspec"]
    assert len(warnings) == 1
    assert "plain decoding finishes this request" in warnings[0].getMessage()
    assert type(error).__name__ in warnings[0].getMessage()
    calls = drafter.calls
    assert calls <= 8  # nobody asked it again
    drafter.step = "never"
    again = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert again.stats.fallback is None  # the next request starts with it again


def test_the_round_of_the_failure_says_so() -> None:
    model, request = toys.model("llama"), toys.inputs("llama")
    drafter = failing(request, greedy(model, request), "propose", RuntimeError("broken"))
    fast = mmspec.accelerate(model, "coupled", drafter=drafter)
    rounds = list(fast.stream(**request, max_new_tokens=ROOM, do_sample=False))
    assert [turn.index for turn in rounds if turn.fallback] == [3]  # 0 is the prefill's
    assert all(turn.drafted == (0,) for turn in rounds[3:])


def test_an_interrupt_is_not_swallowed() -> None:
    model, request = toys.model("llama"), toys.inputs("llama")
    drafter = failing(request, greedy(model, request), "propose", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        mmspec.accelerate(model, "coupled", drafter=drafter).generate(
            **request, max_new_tokens=ROOM
        )


class Breaking(nn.Module):
    """An LM head whose answers are NaN, or all -inf, from its n-th call on."""

    def __init__(self, inner: nn.Module, calls: int, value: float, row: int) -> None:
        super().__init__()
        self.inner, self.left, self.value, self.row = inner, calls, value, row

    def forward(self, states: Tensor) -> Tensor:
        logits: Tensor = self.inner(states)
        if self.left > 0:
            self.left -= 1
            return logits
        logits[self.row] = self.value
        return logits


class FailingHead(nn.Module):
    """An LM head that raises at its n-th call."""

    def __init__(self, inner: nn.Module, calls: int, error: BaseException) -> None:
        super().__init__()
        self.inner, self.left, self.error = inner, calls, error

    def forward(self, states: Tensor) -> Tensor:
        if self.left == 0:
            raise self.error
        self.left -= 1
        logits: Tensor = self.inner(states)
        return logits


class Heard(BaseStreamer):
    """A streamer that notes what it got, and its end."""

    def __init__(self) -> None:
        self.got: list[Tensor] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.got.append(value.flatten())

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize("error", [KeyboardInterrupt(), torch.OutOfMemoryError("tried to")])
@pytest.mark.parametrize("name", ["plain", "coupled"])
def test_a_target_that_fails_loses_no_verified_token(name: str, error: BaseException) -> None:
    request, heard = toys.inputs("llama"), Heard()
    width = request["input_ids"].shape[1]
    expected = greedy(toys.model("llama"), request)[0].tolist()
    model = toys.model("llama")
    model.lm_head = FailingHead(model.lm_head, 3, error)
    drafter = noisy("llama") if name == "coupled" else None
    fast = skip_checks(mmspec.accelerate(model, name, drafter=drafter))
    with pytest.raises(type(error)) as caught:
        fast.generate(**request, max_new_tokens=ROOM, do_sample=False, streamer=heard)
    (kept,) = caught.value.tokens  # type: ignore[attr-defined]
    assert len(kept) >= 3
    assert kept == expected[width : width + len(kept)]
    assert torch.cat(heard.got).tolist() == expected[: width + len(kept)]
    assert heard.ended


@pytest.mark.parametrize(
    ("value", "calls", "name"),
    covering(
        [float("nan"), -float("inf"), float("inf")], [0, 1, 3], ["plain", "coupled"], strength=1
    ),
)
def test_broken_logits_name_their_round_and_lose_nothing(
    name: str, calls: int, value: float
) -> None:
    request = toys.inputs("llama", batch=2)
    expected = greedy(toys.model("llama"), request)[:, request["input_ids"].shape[1] :].tolist()
    model = toys.model("llama")
    model.lm_head = Breaking(model.lm_head, calls, value, row=1)
    drafter = noisy("llama") if name == "coupled" else None
    fast = skip_checks(mmspec.accelerate(model, name, drafter=drafter))
    with pytest.raises(BrokenLogits, match=rf"NaN or .*round {calls} \(row 1") as caught:
        fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert caught.value.round_index == calls
    assert len(caught.value.tokens) == 2
    for saved, row in zip(caught.value.tokens, expected, strict=True):
        assert saved == row[: len(saved)]
        assert len(saved) >= calls
    assert ".tokens" in str(caught.value)
    assert "dtype" in str(caught.value)  # what to do
    assert isinstance(caught.value, ValueError)


def test_broken_logits_of_a_finished_row_hurt_nobody() -> None:
    request = toys.inputs("llama", batch=2)
    model = toys.model("llama")
    rows = greedy(model, request)[:, request["input_ids"].shape[1] :].tolist()
    end = next(token for token in rows[1] if token not in rows[0])
    model.generation_config.eos_token_id = end
    expected = greedy(model, request)
    model.lm_head = Breaking(model.lm_head, rows[1].index(end) + 1, float("nan"), row=1)
    fast = skip_checks(mmspec.accelerate(model, "plain"))
    out = fast.generate(**request, max_new_tokens=ROOM)
    assert torch.equal(out.sequences, expected)


class Watching(RandomDrafter):
    """A drafter that notes, each round, which rows have ended and what the target has kept."""

    seen: ClassVar[list[tuple[tuple[bool, ...], list[int]]]] = []

    def propose(self, context: Context, state: Any) -> Draft:
        self.seen.append((context.finished, list(context.memory.lengths)))
        return super().propose(context, state)


def test_a_row_that_has_ended_keeps_nothing_more() -> None:
    model, request = toys.model("llama"), toys.inputs("llama", batch=2)
    rows = greedy(model, request)[:, request["input_ids"].shape[1] :].tolist()
    model.generation_config.eos_token_id = next(one for one in rows[1] if one not in rows[0])
    drafter = Watching(vocabulary=toys.WORDS.stop, tree=3)
    drafter.seen.clear()
    mmspec.accelerate(model, "coupled", drafter=drafter).generate(**request, max_new_tokens=ROOM)
    after = [kept[1] for finished, kept in drafter.seen if finished[1]]
    assert len(after) > 3
    assert len(set(after)) == 1


def settled(draft: Draft, scores: Scores, stop: Stop) -> Round:
    """The round that a greedy verdict on a draft makes, in a fresh context."""
    now = context(*[[1]] * draft.batch)
    verdict = Coupled().verify(draft, scores, now.noise)
    return make_round(1, now, draft, scores, verdict, stop)


def said(*tokens: int, size: int = 8) -> Scores:
    """A greedy target that says the same in two rows, whatever was drafted."""
    distribution = one_hot(torch.tensor([tokens] * 2), torch.zeros(size))
    return Scores(
        Categorical(distribution, hard=True), torch.arange(1, 1 + len(tokens)).expand(2, -1)
    )


def test_a_path_is_cut_where_its_tokens_are() -> None:
    """By a token that ends the sequence, and by the limit of the length."""
    tokens = torch.tensor([[3, 4, 5], [3, 2, 5]])
    kept = settled(Draft.chain(tokens, Kind.DET), said(3, 4, 5, 6), Stop(9, frozenset([4])))
    assert kept.tokens == ((3, 4), (3, 4))
    assert (kept.path, kept.accepted, kept.takes_next) == (((0, 1), (0,)), (2, 1), (False, True))
    kept = settled(Draft.chain(tokens, Kind.DET), said(3, 4, 5, 6), Stop(1))
    assert (kept.path, kept.tokens, kept.takes_next) == (((0,), (0,)), ((3,), (3,)), (False,) * 2)


@pytest.mark.parametrize("tree", [Tree.chain(3), Tree((-1, 0, 0))], ids=["chain", "tree"])
def test_padding_is_neither_proposed_nor_kept_nor_broken(tree: Tree) -> None:
    """Its tokens are what the target says, and its scores are NaN."""
    mask = torch.tensor([[True, True, True], [True, False, False]])
    drafted = torch.tensor([[3, 4, 5]] * 2) if tree.is_chain else torch.tensor([[3, 7, 4]] * 2)
    scores = said(3, 4, 5, 6)
    assert isinstance(scores.distribution, Categorical)
    scores.distribution.scores[1, 2:] = torch.nan
    draft = Draft.from_tree(tree, drafted, Kind.DET, mask=mask)
    kept = settled(draft, scores, Stop(9))
    whole = (3, 4, 5, 6) if tree.is_chain else (3, 4, 6)
    assert kept.tokens == (whole, (3, 4))
    assert (kept.drafted, kept.accepted) == ((3, 1), (len(whole) - 1, 1))
    scores.distribution.scores[1, 1] = torch.nan  # behind the one real node
    with pytest.raises(BrokenLogits, match="row 1"):
        settled(draft, scores, Stop(9))


@dataclass
class EverySecond(Gate):
    """A gate that takes every second draft as it is; lossy, to see what becomes of the cache."""

    turns: int = 0
    taken: list[Tensor] = field(default_factory=list)
    pending: list[tuple[int, ...]] = field(default_factory=list)

    def skip(self, context: Context, draft: Draft) -> Verdict | None:
        self.pending.append(context.pending)
        self.turns += 1
        if self.turns % 2 or not draft.nodes:
            return None
        self.taken.append(draft.tokens)
        path = torch.arange(draft.nodes).expand(draft.batch, -1)
        length = torch.full((draft.batch,), draft.nodes)
        return Verdict(path, length, None)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl", "gemma3", "qwen3_5"])
def test_a_gate_leaves_tokens_pending_and_the_cache_right(family: str, batch: int) -> None:
    model = toys.model(family)
    request = toys.inputs(family, batch=batch, ragged=batch > 1)
    gate = EverySecond()
    recipe = replace(mmspec.recipes.get("coupled"), gate=gate)
    assert not recipe.exact
    fast = mmspec.accelerate(
        model, recipe, drafter=RandomDrafter(vocabulary=toys.WORDS.stop, tree=3)
    )
    rounds = list(fast.stream(**request, max_new_tokens=ROOM, do_sample=False))
    skipped = [turn for turn in rounds[1:] if not turn.calls]
    assert len(skipped) == len(gate.taken) >= 3
    for turn, tokens in zip(skipped, gate.taken, strict=True):
        assert not any(turn.takes_next)
        for row, kept in enumerate(turn.tokens):
            assert list(kept) == tokens[row, : len(kept)].tolist()
    if family != "qwen3_5":  # a recurrent model has more pending, for its own reasons
        assert {max(counts) for counts in gate.pending} == {1, 4}
    text = [[token for turn in rounds for token in turn.tokens[row]] for row in range(batch)]
    for row in range(batch):
        best = forced(model, toys.alone(request, row), text[row])
        place = 0
        for turn in rounds:  # wherever the target was asked, it said what a fresh prefill says
            count = len(turn.tokens[row])
            if turn.calls or turn.index == 0:
                assert text[row][place : place + count] == best[place : place + count]
            place += count


@torch.no_grad()
def forced(model: Any, request: dict[str, Tensor], tokens: list[int]) -> list[int]:
    """The best token at every place of a text, by one forward without any cache."""
    more = torch.tensor([tokens])
    ids = torch.cat((request["input_ids"], more), 1)
    whole = {**request, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in request:
            whole[name] = torch.cat((request[name], torch.zeros_like(more)), 1)
    logits = model(**whole).logits[0, -len(tokens) - 1 : -1]
    best: list[int] = logits.argmax(-1).tolist()
    return best
