"""A real vLLM with our proposers: output as without them, and the acceptance of our recipes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

import mmspec
from mmspec import zoo
from mmspec.drafters.lookup.automaton import Automaton
from mmspec.drafters.lookup.datastore import Datastore
from mmspec.drafters.lookup.text_index import NGramIndex, copy_tokens
from mmspec.zoo.language import examples
from mmspec_vllm.successors import Successors

ROOT = Path(__file__).resolve().parents[3]
PYTHON = os.environ.get("MMSPEC_VLLM_PYTHON")
LENGTH = 6  # tokens of a draft
ROOM = 48  # tokens of an output

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON, reason="MMSPEC_VLLM_PYTHON names no Python with vLLM (plugins/vllm/README.md)"
    ),
]

Draft = Callable[[Sequence[int]], list[int]]


@dataclass(frozen=True)
class Served:
    """The text decoder of zoo:llava, beginnings of captions, and how it goes on with them."""

    folder: Path
    model: Any
    prompts: list[list[int]]
    plain: list[list[int]]  # more than ROOM tokens each
    store: Path  # a datastore of every second output


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("llama")
    llava = zoo.load("llava")
    model = LlamaForCausalLM(llava.config.text_config).eval()
    model.model.load_state_dict(llava.model.language_model.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "mmspec/zoo/checkpoints/llava")
    captions = [one.answer.split() for one in examples(8, "held-out", seed=5, kind="caption")]
    prompts = [
        tokenizer(" ".join(words[: 3 + 3 * n])).input_ids for n, words in enumerate(captions)
    ]
    plain = [decode(model, ids, "plain", ROOM + LENGTH + 1)[0] for ids in prompts]
    Datastore.of(plain[::2]).save(folder / "store.npz")
    return Served(folder, model, prompts, plain, folder / "store.npz")


def decode(model: Any, ids: list[int], recipe: str, room: int, **options: Any) -> Any:
    """New tokens and statistics of one request."""
    out = mmspec.accelerate(model, recipe, **options).generate(
        torch.tensor([ids]), max_new_tokens=room, do_sample=False, eos_token_id=None
    )
    return out.sequences[0, len(ids) :].tolist(), out.stats


def use(proposer: str, **options: Any) -> dict[str, Any]:
    """Arguments of an engine that drafts with one of our proposers."""
    speculative = {"method": "custom_class", "model": f"mmspec_vllm.{proposer}"}
    return {
        "speculative_config": {**speculative, "num_speculative_tokens": LENGTH},
        "additional_config": {"mmspec": options},
    }


def serve(served: Served, folder: Path, **engine: Any) -> Any:
    """Tokens and counters of a real engine."""
    job = {
        "model": str(served.folder),
        "prompts": served.prompts,
        "sampling": {"temperature": 0, "max_tokens": ROOM},
        "engine": {"max_model_len": 128, "max_num_seqs": 8, **engine},
    }
    (folder / "job.json").write_text(json.dumps(job))
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'plugins' / 'vllm'}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
    }
    program = ROOT / "tests" / "plugins" / "vllm" / "serve.py"
    command = [str(PYTHON), str(program), str(folder / "job.json"), str(folder / "result.json")]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "result.json").read_text())


def look_up(text: Sequence[int], served: Served) -> list[int]:
    index = NGramIndex(3)
    index.read(text)
    return copy_tokens(text, index.find(text), LENGTH, ())


def follow_automaton(text: Sequence[int], served: Served) -> list[int]:
    automaton = Automaton((), 2)
    automaton.read(text)
    return copy_tokens(text, automaton.find(text), LENGTH, ())


def retrieve(text: Sequence[int], served: Served) -> list[int]:
    return Datastore.load(served.store).continuation(text, LENGTH)


def replay(prompt: list[int], plain: list[int], draft: Draft, is_cut: bool) -> list[int]:
    """Accepted tokens of every draft, where the output is known.

    `is_cut`: drafts end before the last token of the output, as ours do; vLLM verifies whole ones.
    """
    accepted, place = list[int](), 1
    while place < ROOM:
        tokens = draft([*prompt, *plain[:place]])[: ROOM - place - 1 if is_cut else LENGTH]
        right = 0
        while right < len(tokens) and tokens[right] == plain[place + right]:
            right += 1
        if tokens:
            accepted.append(right)
        place += right + 1
    return accepted


@pytest.mark.parametrize(
    ("proposer", "recipe", "draft"),
    [
        ("PromptLookupProposer", "prompt-lookup", look_up),
        ("SuffixAutomatonProposer", "suffix", follow_automaton),
        ("RetrievalProposer", "rest", retrieve),
    ],
)
def test_acceptance_is_that_of_our_recipe_draft_for_draft(
    served: Served, tmp_path: Path, proposer: str, recipe: str, draft: Callable[..., list[int]]
) -> None:
    options = {"datastore": str(served.store)} if recipe == "rest" else {}
    result = serve(served, tmp_path, **use(proposer, **options))
    assert result["tokens"] == [row[:ROOM] for row in served.plain]
    theirs: list[int] = []
    for prompt, plain in zip(served.prompts, served.plain, strict=True):
        tokens, stats = decode(served.model, prompt, recipe, ROOM, length=LENGTH, **options)
        assert tokens == plain[:ROOM]
        assert stats.per_step_accepted == replay(prompt, plain, partial(draft, served=served), True)
        theirs += replay(prompt, plain, partial(draft, served=served), False)
    counters = result["counters"]
    assert counters["spec_decode_num_drafts"] == len(theirs)
    assert counters["spec_decode_num_accepted_tokens_per_pos"] == [
        sum(one > place for one in theirs) for place in range(LENGTH)
    ]
    assert sum(theirs) > len(theirs) / 2


def test_recycling_is_accepted_as_its_table_predicts(served: Served, tmp_path: Path) -> None:
    result = serve(served, tmp_path, **use("TokenRecyclingProposer", fresh=True))
    assert result["tokens"] == [row[:ROOM] for row in served.plain]
    accepted: list[int] = []
    for prompt, plain in zip(served.prompts, served.plain, strict=True):
        successors = Successors({})
        successors.read([*prompt, plain[0]])

        def follow(text: Sequence[int], known: Successors = successors) -> list[int]:
            known.read(text)
            return known.follow(text[-1], LENGTH)

        accepted += replay(prompt, plain, follow, False)
    assert result["counters"]["spec_decode_num_drafts"] == len(accepted)
    assert result["counters"]["spec_decode_num_accepted_tokens"] == sum(accepted) > 0


@pytest.mark.parametrize(
    "proposer", ["PromptLookupProposer", "SuffixAutomatonProposer", "TokenRecyclingProposer"]
)
def test_output_is_unchanged_in_a_crowded_engine(
    served: Served, tmp_path: Path, proposer: str
) -> None:
    """Prompts in parts, requests that wait for a row, and too little room in the cache for all."""
    crowded = {"max_num_seqs": 5, "max_num_batched_tokens": 40, "num_gpu_blocks_override": 8}
    limits = {**crowded, "block_size": 32, "max_model_len": 96}
    result = serve(served, tmp_path, **use(proposer), **limits)
    assert result["tokens"] == [row[:ROOM] for row in served.plain]
    assert result["counters"]["num_preemptions"] > 0
    assert result["counters"]["spec_decode_num_accepted_tokens"] > 0


def test_prompt_lookup_has_more_accepted_than_vllms_ngrams(served: Served, tmp_path: Path) -> None:
    """The same lengths of matches; ours copies from the last place, and past the text's end."""
    speculative = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    limits = {**speculative, "num_speculative_tokens": LENGTH}
    result = serve(served, tmp_path, speculative_config=limits)
    assert result["tokens"] == [row[:ROOM] for row in served.plain]
    ours = [
        accepted
        for prompt, plain in zip(served.prompts, served.plain, strict=True)
        for accepted in replay(prompt, plain, partial(look_up, served=served), False)
    ]
    counters = result["counters"]
    assert sum(ours) > counters["spec_decode_num_accepted_tokens"] > 0
    assert len(ours) < counters["spec_decode_num_drafts"]
