"""SMUD: joint greedy decoding of CTC head and decoder, whatever is masked, in fewer forwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec.codes.ctc import PrefixScorer
from tests.covering import covering, exhaustive
from tests.toys import granite

ROOM = 12


def asked(
    request: dict[str, Tensor], labels: int = 128, least: int | None = None, **options: Any
) -> Any:
    options = {"tokenizer": granite.tokenizer(), **options}
    fast = mmspec.accelerate(granite.model(labels), "smud", **options)
    more = {} if least is None else {"min_new_tokens": least}
    return fast.generate(**request, max_new_tokens=ROOM, **more)


def labels_of(token: int, labels: int) -> list[int]:
    if labels != 128:
        return [token + 1]
    return [] if token < 4 else [ord(granite.LETTERS[token - 4])]


@torch.no_grad()
def joint_greedy(request: dict[str, Tensor], labels: int, weight: float, most: int) -> list[int]:
    """Token by token with whole forwards and a scorer made anew: the definition."""
    model, said = granite.model(labels), list[int]()
    encoder = model.model.encoder
    distribution = encoder.out(encoder(request["input_features"]).last_hidden_state)[0].log_softmax(
        -1
    )
    while len(said) < ROOM and granite.END not in said:
        ids = torch.cat((request["input_ids"], torch.tensor([said], dtype=torch.int64)), 1)
        out = model(input_ids=ids, input_features=request["input_features"])
        decoder = (out.logits[0, -1] / granite.SCALING).log_softmax(-1)
        found: dict[int, float] = {}
        for token in [*decoder.topk(min(most, len(decoder))).indices.tolist(), granite.END]:
            scorer, spelled = (
                PrefixScorer(distribution),
                [labels_of(one, labels) for one in (*said, token)],
            )
            for one in spelled if token != granite.END else spelled[:-1]:
                for label in one:
                    scorer.push(label)
            heard = scorer.end() if token == granite.END else scorer.total
            if token != granite.END and not spelled[-1]:
                heard = float("-inf")
            if weight == 0:
                heard = 0.0
            found.setdefault(token, weight * heard + (1 - weight) * float(decoder[token]))
        said.append(max(found, key=lambda token: found[token]))
    return said


LABELS = (128, granite.SIZE + 1)  # characters, tokens
SURE = (2.0, 0.5, 0.0)  # all masked, some, none


@pytest.mark.parametrize("seed", exhaustive((0, 1), (1,)))
@pytest.mark.parametrize(
    ("weight", "sure", "labels"), covering((0.3, 0.8, 1.0), SURE, LABELS, strength=1)
)
def test_it_writes_what_joint_greedy_decoding_writes(
    weight: float, sure: float, labels: int, seed: int
) -> None:
    request = granite.inputs((3,), seed=seed)
    out = asked(request, labels, sure=sure, weight=weight, most=6)
    assert new(out, request) == joint_greedy(request, labels, weight, 6)


def new(out: Any, request: dict[str, Tensor]) -> list[int]:
    row: list[int] = out.sequences[0, request["input_ids"].shape[1] :].tolist()
    return row[: row.index(granite.END) + 1] if granite.END in row else row


@pytest.mark.parametrize("sure", [2.0, 0.999, 0.0])
def test_without_the_head_it_is_greedy_decoding(sure: float) -> None:
    for seed in range(3):
        request = granite.inputs((3, 2), seed=seed)
        wanted = granite.model().generate(**request, max_new_tokens=ROOM, do_sample=False)
        assert torch.equal(asked(request, sure=sure, weight=0.0).sequences, wanted)


def test_the_head_changes_what_is_written_and_the_draft_saves_forwards() -> None:
    request = granite.inputs((3,), seed=1)
    alone, joint = asked(request, weight=0.0), asked(request, weight=1.0, most=granite.SIZE)
    assert new(alone, request) != new(joint, request)
    assert joint.stats.target_calls < len(new(joint, request))
    assert joint.stats.num_accepted_draft_tokens > 0


def test_what_is_ruled_out_is_not_written() -> None:
    request = granite.inputs((1,), seed=0)
    short = new(asked(request, weight=1.0, most=granite.SIZE), request)
    assert short[-1] == granite.END
    assert len(short) < 10
    longer = new(asked(request, weight=1.0, most=granite.SIZE, least=10), request)
    assert len(longer) >= 10
    assert granite.END not in longer[:9]


def test_what_does_not_fit_is_refused() -> None:
    for option, says in (
        ({"weight": 1.5}, "weight=1.5"),
        ({"most": 0}, "most=0"),
        ({"tree": [2, 1]}, "drafts a whole text at once"),
    ):
        with pytest.raises(ValueError, match=says):
            asked(granite.inputs(), **option)
    fast = mmspec.accelerate(granite.model(), "smud", tokenizer=granite.tokenizer())
    with pytest.raises(ValueError, match="decoded greedily"):
        fast.generate(**granite.inputs(), max_new_tokens=4, temperature=0.8)
