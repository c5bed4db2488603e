"""JSON modes of chat completions, with the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mmspec.cli.models import load_models
from mmspec.cli.serve import ServerOptions, make_served
from tests.serving.test_server import TOKEN, Server
from tests.toys.tokenizers import byte_tokenizer

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")
openai = pytest.importorskip("openai")

SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "maximum": 99, "minimum": 10},
        "k": {"enum": ["a", "b"]},
    },
    "required": ["n", "k"],
    "additionalProperties": False,
}
STRICT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
MESSAGES: Any = [{"role": "user", "content": "Give me JSON"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, own = tmp_path_factory.mktemp("model"), byte_tokenizer()
    config = LlamaConfig(
        vocab_size=272,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        eos_token_id=own.eos_token_id,
        pad_token_id=own.pad_token_id,
        bos_token_id=None,
        initializer_range=0.4,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    own.save_pretrained(folder)
    loaded = load_models(str(folder), "vlm", None, ["prompt-lookup"])
    usual: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "token": TOKEN, "max_requests": 4}
    usual |= {"max_slots": None, "max_queue": 8, "max_new_tokens": 64, "timeout_s": 60.0}
    made = Server(make_served(loaded, ServerOptions(**usual, allow_urls=False)))
    yield made
    made.close()


def ask(server: Server, **given: Any) -> Any:
    model = server.client.models.list().data[0].id
    return server.client.chat.completions.create(
        model=model, messages=MESSAGES, **{"max_tokens": 500, **given}
    )


def test_a_schema_is_kept_by_responses_streams_and_choices(server: Server) -> None:
    for how in ({"temperature": 0}, {"temperature": 1.5, "seed": 3, "n": 3}):
        reply = ask(server, response_format=STRICT, **how)
        for choice in reply.choices:
            found = json.loads(choice.message.content)
            assert list(found) == ["n", "k"]
            assert 10 <= found["n"] <= 99
            assert found["k"] in ("a", "b")
            assert choice.finish_reason == "stop"
    whole = ask(server, response_format=STRICT, temperature=0).choices[0].message.content
    parts = ask(server, response_format=STRICT, temperature=0, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole


def test_json_objects_begin_with_a_brace_and_plain_text_does_not(server: Server) -> None:
    made = ask(server, response_format={"type": "json_object"}, temperature=0, max_tokens=20)
    text = made.choices[0].message.content
    assert text.lstrip().startswith("{")
    if made.choices[0].finish_reason == "stop":
        json.loads(text)
    free = ask(server, response_format={"type": "text"}, temperature=0, max_tokens=20)
    assert not free.choices[0].message.content.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"type": "grammar"}, "is not known"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "is not known"),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nope"}}},
            "Invalid type: nope",
        ),
        (
            {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}},
            },
            "uniqueItems",
        ),
    ],
)
def test_formats_that_cannot_be_kept_are_bad_requests(
    server: Server, given: Any, message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        ask(server, response_format=given)
