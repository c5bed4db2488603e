"""Grammars on drafts: every output is a text of its grammar, and that of constrained decoding."""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from itertools import product
from pathlib import Path
from time import process_time
from typing import Any

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    PreTrainedTokenizerFast,
)

import mmspec
from mmspec import Grammar
from mmspec.bench.frequency import LENGTH, Subject, measure_frequencies
from mmspec.distributions import grammar as grammars
from mmspec.distributions.call_state import StateTrees
from mmspec.distributions.vocabulary import read_vocabulary
from mmspec.modalities.common.measures import Generate
from mmspec.modalities.common.tiny_models import tiny_llama
from mmspec.modalities.vlm import LanguageSettings
from mmspec.modalities.vlm.formatting import LanguageFormatter
from mmspec.trees import NodePrefix
from tests.covering import covering, limited
from tests.toys.tokenizers import byte_tokenizer

llguidance = pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 9999},
        "s": {"type": "string", "maxLength": 6},
        "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "k": {"enum": ["red", "blue"]},
    },
    "required": ["n", "s", "b", "k"],
    "additionalProperties": False,
}
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 30, "seed": 3}


@cache
def tokenizer() -> Any:
    return byte_tokenizer()


@cache
def schema_grammar() -> Grammar:
    return Grammar.json_schema(SCHEMA, whitespace=False, tokenizer=tokenizer())


@cache
def llama(layers: int, seed: int) -> Any:
    torch.manual_seed(seed)
    own = tokenizer()
    config = LlamaConfig(
        vocab_size=272,  # wider than the tokenizer, as published ones are
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        eos_token_id=own.eos_token_id,
        pad_token_id=own.pad_token_id,
        bos_token_id=None,
        initializer_range=0.4,
    )
    return LlamaForCausalLM(config).eval()


@cache
def fast(recipe: str, **options: Any) -> Any:
    takes = mmspec.recipes.get(recipe).takes_drafter
    drafter = {"drafter": llama(1, 1)} if takes else {}
    return mmspec.accelerate(llama(2, 0), recipe, **drafter, **options)


@cache
def request() -> dict[str, Tensor]:
    made = tokenizer()(["Give me JSON: ", "xx"], return_tensors="pt", padding=True)
    return {**made, "max_new_tokens": 90}


def texts(sequences: Tensor) -> list[str]:
    start = request()["input_ids"].shape[1]
    return [tokenizer().decode(row[start:], skip_special_tokens=True) for row in sequences]


def follows_schema(text: str) -> bool:
    found = json.loads(text)
    flags = found["b"]
    return (
        list(found) == ["n", "s", "b", "k"]
        and type(found["n"]) is int
        and 0 <= found["n"] <= 9999
        and len(found["s"]) <= 6
        and len(flags) <= 3
        and all(type(one) is bool for one in flags)
        and found["k"] in ("red", "blue")
    )


class Oracle(LogitsProcessor):
    """Constrained decoding for `model.generate()`: each step matches the whole text anew."""

    def __init__(self, source: str) -> None:
        from llguidance.hf import from_tokenizer

        ends = [tokenizer().eos_token_id]
        self.tokens = from_tokenizer(tokenizer(), n_vocab=272, eos_token=ends)
        self.source, self.start = source, request()["input_ids"].shape[1]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        for row, ids in enumerate(input_ids.tolist()):
            new = ids[self.start :]
            if tokenizer().eos_token_id in new:
                continue
            matcher = llguidance.LLMatcher(self.tokens, self.source)
            assert matcher.try_consume_tokens(new) == len(new)
            bits = matcher.compute_bitmask()
            for token in range(272):
                if not bits[token // 8] >> token % 8 & 1:
                    scores[row, token] = -torch.inf
        return scores


@cache
def expected(how: str) -> Tensor:
    """Constrained decoding of transformers, or with a seed that of the plain recipe."""
    if how == "greedy":
        steps = [Oracle(schema_grammar().source)]
        found: Tensor = llama(2, 0).generate(**request(), **GREEDY, logits_processor=steps)
        return found
    found = fast("plain").generate(**request(), **SAMPLED, grammar=schema_grammar()).sequences
    return found


@pytest.mark.parametrize(
    ("how", "recipe"),
    covering(
        ["greedy", "sampled"],
        ["coupled", "dynamic-tree", "recursive-rejection", "prompt-lookup"],
        strength=1,
    ),
)
def test_outputs_are_those_of_constrained_decoding(recipe: str, how: str) -> None:
    settings = GREEDY if how == "greedy" else SAMPLED
    out = fast(recipe).generate(**request(), **settings, grammar=schema_grammar())
    for text in texts(out.sequences):
        assert follows_schema(text)
    assert out.stats.fallback is None
    if how == "greedy" or fast(recipe).recipe.verifier.couples:
        assert torch.equal(out.sequences, expected(how))
    if recipe == "dynamic-tree":
        assert out.stats.mean_acceptance_length > 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", mmspec.recipes.names("tokens"))
def test_no_recipe_leaves_the_grammar(recipe: str) -> None:
    """Lossy ones as well; those that need a head, a codebook or an image are refused before."""
    try:
        made = fast(recipe)
    except ValueError:
        pytest.skip("needs other parts")
    for settings in (GREEDY, {**SAMPLED, "temperature": 2.0, "top_k": 0, "seed": 5}):
        if made.session.bound.gate is not None:
            with pytest.raises(ValueError, match="gate of recipe"):
                made.generate(**request(), **settings, grammar=schema_grammar())
            continue
        out = made.generate(**request(), **settings, grammar=schema_grammar())
        for text in texts(out.sequences):
            assert follows_schema(text)
        if made.recipe.exact and (settings is GREEDY or made.recipe.verifier.couples):
            plain = fast("plain").generate(**request(), **settings, grammar=schema_grammar())
            assert torch.equal(out.sequences, plain.sequences)


def test_the_mask_of_the_root_for_all_nodes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a wrong mask lets tokens through, and what would be committed is refused."""
    monkeypatch.setattr(NodePrefix, "drafted", lambda self, row, node: ())
    with pytest.raises(ValueError, match="where the grammar does not allow it"):
        fast("coupled").generate(**request(), **GREEDY, grammar=schema_grammar())


LETTERS = {"": "abc", "a": "bc", "b": "ac", "c": "b"}  # what may follow; then "a" or "c"


def constrained_joint(model: Any, prompt: list[int]) -> Tensor:  # (V,) * LENGTH
    size, own = int(model.config.vocab_size), "abc"
    found = torch.zeros((size,) * LENGTH, dtype=torch.float64)

    def allowed(text: str) -> list[int]:
        return [own.index(letter) for letter in LETTERS.get(text, "ac")]

    for path in product(range(3), repeat=LENGTH):
        mass = 1.0
        for depth, token in enumerate(path):
            keep = allowed("".join(own[one] for one in path[:depth]))
            ids = torch.tensor([[*prompt, *path[:depth]]])
            logits = model(input_ids=ids).logits[0, -1].double()
            mass *= float(logits[keep].softmax(0)[keep.index(token)]) if token in keep else 0.0
        found[path] = mass
    return found


@pytest.mark.parametrize(
    "recipe", ["recursive-rejection", pytest.param("traversal", marks=pytest.mark.exhaustive)]
)
@torch.no_grad()
def test_rejection_trees_emit_the_constrained_distribution(recipe: str) -> None:
    assert LENGTH == 3
    own = byte_tokenizer(["a", "b", "c"])
    model = tiny_llama(5, seed=4)
    model.generation_config.eos_token_id = own.eos_token_id
    made = mmspec.accelerate(model, recipe, drafter=tiny_llama(5, 1, seed=5))
    grammar = Grammar.regex("(a[bc]|b[ac]|cb)(a|c)", tokenizer=own)
    prompt = [0, 1, 2, 0, 1]

    def sample(batch: int, first: int, seed: int) -> Tensor:
        ids = torch.tensor([prompt]).expand(batch, -1).contiguous()
        how: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "seed": seed}
        how["row_ids"] = list(range(first, first + batch))
        mask = torch.ones_like(ids)
        inputs = {"input_ids": ids, "attention_mask": mask}
        out = made.generate(**inputs, **how, max_new_tokens=LENGTH + 2, grammar=grammar)
        found: Tensor = out.sequences[:, len(prompt) : len(prompt) + LENGTH]
        return found

    found = measure_frequencies(
        Subject(constrained_joint(model, prompt), sample), samples=1500, batch=750
    )
    assert found.p_value > 1e-4


def test_rows_have_grammars_of_their_own() -> None:
    other = Grammar.regex("(yes|no)!", tokenizer=tokenizer())
    made = fast("coupled")
    alone = [expected("greedy"), made.generate(**request(), **GREEDY, grammar=other).sequences]
    both = made.generate(**request(), **GREEDY, grammar=[schema_grammar(), other]).sequences
    first, second = texts(both)
    assert first == texts(alone[0])[0]
    assert second == texts(alone[1])[1]
    assert second in ("yes!", "no!")
    few = {**request(), **GREEDY, "max_new_tokens": 12}
    free = made.generate(**few, grammar=[None, other]).sequences
    assert texts(free)[0] == texts(llama(2, 0).generate(**few))[0]


def test_every_entry_point_takes_a_grammar(tmp_path: Any) -> None:
    made, wanted = fast("coupled"), texts(expected("greedy"))
    hook = llama(2, 0).generate(
        **request(), **GREEDY, custom_generate=made, grammar=schema_grammar()
    )
    assert texts(hook) == wanted
    rows: list[list[int]] = [[], []]
    for round_ in made.stream(**request(), **GREEDY, grammar=schema_grammar()):
        for row, tokens in zip(rows, round_.tokens, strict=True):
            row += tokens
    assert [tokenizer().decode(row, skip_special_tokens=True) for row in rows] == wanted
    made.save_pretrained(tmp_path)
    loaded = mmspec.load(tmp_path, llama(2, 0))
    bare = Grammar.json_schema(json.dumps(SCHEMA), whitespace=False)
    out = loaded.generate(**request(), **GREEDY, grammar=bare, tokenizer=tokenizer())
    assert texts(out.sequences) == wanted


def test_an_engine_holds_a_grammar_for_each_request() -> None:
    other = Grammar.regex("(yes|no)!", tokenizer=tokenizer())
    prompt: dict[str, Any] = {"input_ids": request()["input_ids"][:1], "max_new_tokens": 30}
    cases = [schema_grammar(), None, other, schema_grammar()]
    made = fast("coupled")
    with mmspec.Engine(made, max_rows=4) as engine:
        how = [{**prompt, **GREEDY, "grammar": one} for one in cases]
        done = [future.result() for future in [engine.submit(one) for one in how]]
    for one, given in zip(done, how, strict=True):
        alone = made.generate(**given).sequences[0, prompt["input_ids"].shape[1] :]
        assert list(one.tokens) == alone[: len(one.tokens)].tolist()


def test_drafts_may_stay_as_they_are() -> None:
    loose = Grammar.json_schema(
        SCHEMA, whitespace=False, tokenizer=tokenizer(), constrains_drafts=False
    )
    made = fast("coupled")
    strict = made.generate(**request(), **GREEDY, grammar=schema_grammar())
    out = made.generate(**request(), **GREEDY, grammar=loose)
    assert torch.equal(out.sequences, strict.sequences)
    assert out.stats.target_calls > strict.stats.target_calls


@pytest.mark.parametrize("recipe", limited(["coupled", "dynamic-tree", "prompt-lookup"], 2))
def test_drafted_tokens_are_read_from_the_device_once_a_round(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One read for the masks and one of the verdict, where drafts stay as they are."""
    loose = Grammar.json_schema(
        SCHEMA, whitespace=False, tokenizer=tokenizer(), constrains_drafts=False
    )
    reads, rounds = [0], list[int]()
    for name in ("tolist", "item", "cpu", "numpy"):
        own = getattr(Tensor, name)

        def noted(self: Any, *args: Any, own: Any = own, **how: Any) -> Any:
            reads[0] += 1
            return own(self, *args, **how)

        monkeypatch.setattr(Tensor, name, noted)

    def count(_: Any) -> None:
        rounds.append(reads[0])
        reads[0] = 0

    made = fast(recipe)
    made.generate(**request(), **GREEDY, grammar=loose)
    reads[0] = 0
    made.generate(**request(), **GREEDY, grammar=loose, on_round=count)
    assert max(rounds[2:]) <= 2, rounds


def test_words_join_with_spaces() -> None:
    """A tokenizer of words drops the first space of a text."""
    model, processor = mmspec.zoo.load("llava"), mmspec.zoo.processor("llava")
    pattern = "(the|one) (small|large) (red|blue) (circle|square)\\."
    inputs = processor.tokenizer(["describe the"], return_tensors="pt")
    out = mmspec.accelerate(model, "prompt-lookup").generate(
        **inputs, max_new_tokens=20, grammar=Grammar.regex(pattern), tokenizer=processor
    )
    new = out.sequences[0, inputs["input_ids"].shape[1] :]
    assert re.fullmatch(pattern, processor.tokenizer.decode(new, skip_special_tokens=True))
    known = read_vocabulary(processor, 135, frozenset([2]))
    assert known.has_words
    assert known.drops_space
    assert not read_vocabulary(tokenizer(), 272, frozenset([261])).has_words


def test_the_command_line_reads_grammars_from_files(tmp_path: Path) -> None:
    """Its comparison with `generate()` is one with the same grammar."""
    file = tmp_path / "sentence.lark"
    file.write_text('start: ("the" | "a") " " ("red" | "blue") " " ("circle" | "star") "."')
    model = mmspec.zoo.load("llava")
    formatter = LanguageFormatter("zoo:llava", model, LanguageSettings(grammar=str(file)))
    request = formatter.request(["describe the picture"])
    own = Generate(model).run(request, 0)
    out = mmspec.accelerate(model, "prompt-lookup").generate(**request)
    text = formatter.text(out)
    assert re.fullmatch(r"(the|a) (red|blue) (circle|star)\.", text)
    assert formatter.processor.tokenizer.decode(own.values[0], skip_special_tokens=True) == text
    for settings, message in (
        (LanguageSettings(json_schema=str(file)), "sentence.lark: .* is not JSON"),
        (LanguageSettings(json_schema=str(file), grammar=str(file)), "drop one"),
    ):
        with pytest.raises(ValueError, match=message):
            LanguageFormatter("zoo:llava", model, settings)


NUMBER: Any = 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar.json_schema('{"type":'), "is not JSON"),
        (lambda: Grammar.json_schema({"type": {1, 2}}), "is not JSON"),
        (lambda: Grammar.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (lambda: Grammar.json_schema(False), "Unsatisfiable"),
        (lambda: Grammar.regex("("), "unclosed group"),
        (lambda: Grammar.regex(NUMBER), "is not a text"),
        (lambda: Grammar.ebnf('root ::= "a" b'), "cannot be read"),
        (lambda: Grammar.ebnf('start: "a" b'), "unknown name"),
    ],
)
def test_bad_grammars_are_refused_when_made(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_grammars_that_do_not_fit_are_refused_before_anything_is_decoded() -> None:
    grammar, made = Grammar.regex("[0-9]+"), fast("coupled")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"grammar": grammar}, "needs the model's tokenizer"),
        ({"grammar": grammar, "tokenizer": 5}, "no tokenizer of transformers"),
        ({"grammar": "[0-9]+"}, "is no Grammar"),
        ({"grammar": [schema_grammar()]}, "1 grammars for 2 rows"),
        (
            {"grammar": grammar, "tokenizer": byte_tokenizer([chr(65 + i) for i in range(280)])},
            "give the tokenizer of this model",
        ),
        (
            {"grammar": Grammar.regex("[^\\s\\S]"), "tokenizer": tokenizer()},
            "allows no token of this vocabulary after ''",
        ),
        (
            {"grammar": grammar, "tokenizer": tokenizer(), "eos_token_id": -1},
            "eos_token_id=-1",
        ),
    ]
    for how, message in cases:
        with pytest.raises(ValueError, match=message):
            made.generate(**request(), **GREEDY, **how)


def test_a_dead_end_is_an_error_only_where_it_is_reached() -> None:
    own = byte_tokenizer(["a", "b", "c"])
    model = tiny_llama(5, seed=4)
    model.generation_config.eos_token_id = own.eos_token_id
    made = mmspec.accelerate(model, "coupled", drafter=tiny_llama(5, 1, seed=4))
    ids = torch.tensor([[0, 1, 2]])
    with pytest.raises(ValueError, match="allows no token of this vocabulary after 'ab'"):
        made.generate(input_ids=ids, max_new_tokens=9, grammar=Grammar.regex("abz", tokenizer=own))


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_trained_heads_and_pictures_keep_a_grammar(how: dict[str, Any]) -> None:
    model, processor = mmspec.zoo.load("llava"), mmspec.zoo.processor("llava")
    sentence = 'start: (" "? ("a" | "the") " " COLOUR " " ("circle" | "star") ".")+\n'
    grammar = Grammar.ebnf(f'{sentence}COLOUR: "red" | "blue"', tokenizer=processor)
    scene = Image.open(mmspec.zoo.bundled_scene()).convert("RGB")
    prompts = [
        processor.apply_chat_template(
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}],
            add_generation_prompt=True,
        )
        for text in ("describe the picture", "how many things are in the picture ?")
    ]
    given = processor(text=prompts, images=[[scene]] * 2, return_tensors="pt", padding=True)
    asked: dict[str, Any] = {**given, **how, "max_new_tokens": 24, "grammar": grammar}
    wanted = mmspec.accelerate(model, "plain").generate(**asked).sequences
    for recipe, drafter in (
        ("eagle-3", "zoo:llava-eagle3"),
        ("medusa", "zoo:llava-medusa"),
        ("coupled", "zoo:llava-feature-head"),
        ("spd-mllm", "zoo:llava-text-drafter"),
    ):
        tree: dict[str, Any] = {"tree": [2, 2, 1]} if recipe == "eagle-3" else {}
        out = mmspec.accelerate(model, recipe, drafter=drafter, **tree).generate(**asked)
        assert torch.equal(out.sequences, wanted)
        assert out.stats.mean_acceptance_length > 1.5


@pytest.mark.parametrize("recipe", ["plain", "coupled", "recursive-rejection"])
def test_settings_that_leave_no_token_are_an_error_only_where_it_is_reached(recipe: str) -> None:
    made, ends = fast(recipe), Grammar.regex("ab", tokenizer=tokenizer())
    for how in (GREEDY, SAMPLED):
        with pytest.raises(ValueError, match=r"after 'ab', .*min_new_tokens"):
            made.generate(**request(), **how, grammar=ends, min_new_tokens=5)
        wide = Grammar.regex("ab([a-y]{9,})?", tokenizer=tokenizer())  # drafts may end early
        given = {**request(), **how, "max_new_tokens": 8, "min_new_tokens": 8, "grammar": wide}
        out = made.generate(**given)
        assert all(re.fullmatch("ab[a-y]{6,}", text) for text in texts(out.sequences))


def test_a_grammar_is_compiled_once() -> None:
    grammars._compile.cache_clear()
    for _ in range(3):
        fast("coupled").generate(
            **{**request(), "max_new_tokens": 3}, **GREEDY, grammar=schema_grammar()
        )
    assert grammars._compile.cache_info().misses == 1


@cache
def large_tokenizer(size: int = 32_000) -> Any:
    """A byte-level tokenizer trained on Python's own library: a vocabulary of usual size."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<eos>", "<pad>"]
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    files = sorted(Path(json.__file__).parents[1].glob("*.py"))
    core.train_from_iterator([one.read_text(errors="ignore") for one in files], trainer)
    build: Any = PreTrainedTokenizerFast
    return build(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["coupled", "dynamic-tree"])
def test_what_masks_cost(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with -s: microseconds per node of a draft, and the share of decoding.

    The smaller the model, the larger the share: here 0.03 B parameters.
    """
    own = large_tokenizer()
    schema = {"type": "array", "items": SCHEMA, "minItems": 4, "maxItems": 4}

    def model(layers: int, seed: int) -> Any:
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=len(own),
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=layers,
            num_attention_heads=8,
            eos_token_id=own.eos_token_id,
            pad_token_id=own.pad_token_id,
            bos_token_id=None,
        )
        return LlamaForCausalLM(config).eval()

    started = process_time()
    grammar = Grammar.json_schema(schema, tokenizer=own)
    grammar.bind([grammar], len(own), frozenset([own.eos_token_id]))
    compiled = process_time() - started
    spent, nodes, process = [0.0], [0], StateTrees.process

    def timed(self: Any, processor: Any, flat: Tensor, prefix: Any, count: int) -> Tensor:
        begun = process_time()
        found = process(self, processor, flat, prefix, count)
        spent[0] += process_time() - begun
        nodes[0] += len(flat)
        return found

    monkeypatch.setattr(StateTrees, "process", timed)
    made = mmspec.accelerate(model(8, 0), recipe, drafter=model(1, 1))
    ids = own(["Give me JSON: "], return_tensors="pt")["input_ids"]
    how: dict[str, Any] = {"input_ids": ids, "max_new_tokens": 128, "grammar": grammar, **GREEDY}
    made.generate(**{**how, "max_new_tokens": 8})
    spent[0], nodes[0] = 0.0, 0
    begun = process_time()
    stats = made.generate(**how).stats
    decoding = process_time() - begun
    sys.stdout.write(
        f"\n{recipe}: vocabulary {len(own)}, tokenizer and grammar {compiled:.2f} s, "
        f"{1e6 * spent[0] / nodes[0]:.0f} us per distribution of {nodes[0]}, "
        f"{spent[0] / decoding:.1%} of {decoding:.2f} s, {stats.target_calls} rounds\n"
    )
    assert spent[0] < decoding / 3
