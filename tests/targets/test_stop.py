"""A row ends at the first token at which `generate()` would have ended it."""

import math
import time
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers.generation import ConfidenceCriteria  # type: ignore[attr-defined]

import mmspec
from mmspec.targets.stop import Stop
from tests import toys
from tests.toys.processors import byte_tokenizer

CONFIG = hf.GenerationConfig(max_length=20, eos_token_id=[3, 4])


class _Sum(hf.StoppingCriteria):
    """True once the tokens of a row, prompt included, sum up to a limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        assert scores is None
        return input_ids.sum(1) >= self.limit


def prompt(row: int) -> Tensor:
    return torch.tensor([[0, 10], [10, 10]][row])


@pytest.mark.parametrize(
    ("before", "tokens", "want"),
    [
        (0, [5, 6, 7], (3, False)),
        (0, [5, 3, 7, 4], (2, True)),  # end of sequence inside an accepted run
        (0, [4, 3], (1, True)),  # several ids end it
        (0, [5, 6, 3], (3, True)),
        (0, [], (0, False)),
        (6, [5, 6, 7], (2, True)),  # surplus of the last round
        (6, [5, 6], (2, True)),
        (6, [5], (1, False)),
        (6, [3, 6, 7], (1, True)),
        (6, [5, 6, 3], (2, True)),  # an end behind the limit does not count
        (8, [5], (0, True)),
    ],
)
def test_tokens_are_kept_through_the_first_that_ends_the_row(
    before: Any, tokens: Any, want: Any
) -> None:
    assert Stop(max_new_tokens=8, eos=frozenset([3, 4])).cut(0, before, tokens) == want


def test_criteria_are_asked_token_by_token_about_their_row() -> None:
    stop = Stop(max_new_tokens=8, eos=frozenset([3]), criteria=(_Sum(99), _Sum(25)))
    assert stop.cut(0, 0, [6, 6, 6, 6], prompt) == (3, True)
    assert stop.cut(1, 0, [6, 6, 6, 6], prompt) == (1, True)
    assert stop.cut(0, 0, [6, 6], prompt) == (2, False)
    assert stop.cut(0, 0, [6, 3, 6, 6], prompt) == (2, True)
    assert stop.cut(0, 6, [6, 6, 6, 6], prompt) == (2, True)
    assert stop.cut(0, 0, [], prompt) == (0, False)
    with pytest.raises(ValueError, match="_Sum read the tokens before"):
        stop.cut(0, 0, [6])


def test_a_criterion_may_answer_with_a_plain_bool_but_not_for_other_rows() -> Any:
    class _Plain(hf.StoppingCriteria):
        answer: Any = True

        def __call__(self, *_: Any, **__: Any) -> Any:
            return self.answer

    plain = _Plain()
    assert Stop(9, criteria=(plain,)).cut(0, 0, [5, 6], prompt) == (1, True)
    plain.answer = torch.tensor([True, False])
    with pytest.raises(ValueError, match="_Plain returned 2 values for row 1"):
        Stop(9, criteria=(plain,)).cut(1, 0, [5, 6], prompt)


def test_the_clock_lets_the_round_finish() -> None:
    late = Stop(max_new_tokens=8, eos=frozenset([3]), max_time=5.0, started=time.time() - 9)
    assert late.cut(0, 0, [5, 6, 7]) == (3, True)
    assert late.cut(0, 0, [5, 3, 7]) == (2, True)
    assert Stop(max_new_tokens=8, max_time=60.0).cut(0, 0, [5, 6, 7]) == (3, False)


@pytest.fixture(scope="module")
def tokenizer() -> hf.PreTrainedTokenizerFast:
    return byte_tokenizer()  # type: ignore[no-any-return]


def test_stop_strings_do_not_overshoot(tokenizer: Any) -> Any:
    criterion = hf.StopStringCriteria(tokenizer, ["stop", "!?"])
    stop = Stop.from_config(CONFIG, [hf.MaxLengthCriteria(200), criterion], 4)

    def cut(before: str, new: str) -> str:
        ids = tokenizer(new).input_ids
        committed = torch.tensor(tokenizer(before).input_ids)
        kept, done = stop.cut(0, 0, ids, lambda _: committed)
        return tokenizer.decode(ids[:kept]) + ("|" if done else "")  # type: ignore[no-any-return]

    assert cut("a dog", " stops here") == " stop|"
    assert cut("a dog", " sits there") == " sits there"
    assert cut("do not st", "op now") == "op|"  # begun before this round
    assert cut("stop me", " go!? stop") == " go!?|"
    assert cut("stop", "s") == "s"


def test_the_list_of_generate_is_read() -> None:
    own = _Sum(9)
    clock = hf.MaxTimeCriteria(3.0, initial_timestamp=100.0)
    criteria = hf.StoppingCriteriaList(
        [hf.MaxLengthCriteria(17), hf.EosTokenCriteria([5, 6]), clock, own]
    )
    want = Stop(12, frozenset([5, 6]), 3.0, (own,), started=100.0)
    assert Stop.from_config(CONFIG, criteria, 5) == want


def test_of_several_limits_the_first_to_be_met_counts() -> None:
    lengths = [hf.MaxLengthCriteria(limit) for limit in (17, 9, 12)]
    assert Stop.from_config(CONFIG, lengths, 5).max_new_tokens == 4
    clocks = [hf.MaxTimeCriteria(*clock) for clock in ((9.0, 100.0), (3.0, 105.0), (8.0, 102.0))]
    stop = Stop.from_config(CONFIG, clocks, 5)
    assert (stop.max_time, stop.started) == (3.0, 105.0)
    ends = [hf.EosTokenCriteria([5]), hf.EosTokenCriteria([6])]
    assert Stop.from_config(CONFIG, ends, 5).eos == {5, 6}


def test_the_config_answers_for_what_the_list_lacks() -> None:
    for criteria in (None, []):  # type: ignore[var-annotated]
        stop = Stop.from_config(CONFIG, criteria, 5)
        assert (stop.max_new_tokens, stop.eos) == (15, {3, 4})  # type: ignore[comparison-overlap]
        assert stop.max_time is None
    timed = hf.GenerationConfig(max_length=20, max_time=2.0)
    stop = Stop.from_config(timed, None, 5)
    assert (stop.max_time, stop.eos) == (2.0, frozenset())
    with pytest.raises(ValueError, match="nothing limits the length"):
        Stop.from_config(hf.GenerationConfig(), None, 5)


def test_impossible_conditions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"max_new_tokens=0 .* at least 1"):
        Stop(0)
    with pytest.raises(ValueError, match="max_new_tokens=-5"):
        Stop.from_config(CONFIG, None, 25)
    with pytest.raises(ValueError, match="max_time=0"):
        Stop(1, max_time=0)
    with pytest.raises(ValueError, match="ConfidenceCriteria reads scores"):
        Stop(1, criteria=(ConfidenceCriteria(0.5),))


def test_a_row_that_has_ended_is_padded_though_no_token_ends_it() -> None:
    """Up to there the row is that of `generate()`, which lets it speak on until all have ended."""
    model, request = toys.model("llama"), toys.inputs("llama", batch=2)
    ends = Odd(request["input_ids"].shape[1])
    settings: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    expected = model.generate(**request, **settings, stopping_criteria=[ends])
    fast = mmspec.accelerate(model, "prompt-lookup")
    found = fast.generate(**request, **settings, stopping_criteria=[ends]).sequences
    assert found.shape == expected.shape
    said = found != toys.PAD
    assert torch.equal(found[said], expected[said])
    assert not bool(said.all())


class Odd(hf.StoppingCriteria):
    """Ends the first row behind three new tokens, the others behind nine."""

    def __init__(self, prompt: int) -> None:
        self.prompt = prompt
        self.first: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if self.first is None:
            self.first = input_ids[0, : self.prompt].clone()
        is_first = (input_ids[:, : self.prompt] == self.first).all(-1)
        limit = torch.where(is_first, 3, 9)
        return input_ids.shape[1] - self.prompt >= limit


@pytest.mark.parametrize("given", [math.inf, math.nan, 1.5, True])
def test_a_length_that_is_no_count_is_refused(given: Any) -> None:
    """Also of a user's own GenerationConfig: infinite requests did not end."""
    with pytest.raises(ValueError, match=f"max_new_tokens={given} must be a whole number"):
        Stop(given)


@pytest.mark.parametrize("given", [0, -1.0, math.nan, "x"])
def test_a_time_that_has_no_length_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=f"max_time={given!r} must be"):
        Stop(4, max_time=given)
