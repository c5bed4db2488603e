"""Rows of a data set by Ray Data: the answers of `generate`, errors apart, a lost actor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmspec import zoo
from mmspec.ray import Generate
from mmspec.serving.chat import Part, Turn
from mmspec.zoo import bundled_scene

PROMPTS = [f"what is there, {number}" for number in range(12)]
SETTINGS = {"max_new_tokens": 6}


def batch_of(prompts: list[str], **columns: Any) -> dict[str, Any]:
    made = {"id": np.arange(len(prompts)), "prompt": np.array(prompts, dtype=object)}
    return {**made, **{name: np.array(one, dtype=object) for name, one in columns.items()}}


@pytest.fixture(scope="module")
def generate() -> Iterator[Generate]:
    worker = Generate("zoo:llava", settings=SETTINGS)
    yield worker
    worker.engine.close()


def test_rows_have_the_answers_of_generate(generate: Generate) -> None:
    data = bundled_scene().read_bytes()
    images = [str(bundled_scene()), data, None]
    found = generate(batch_of(PROMPTS[:3], image=images))
    assert list(found["error"]) == [None] * 3
    assert found["text"][0] != found["text"][2]
    with_path = generate(batch_of(PROMPTS[1:2], image=[str(bundled_scene())]))
    assert with_path["text"][0] == found["text"][1]  # bytes and paths are the same picture
    assert list(found["id"]) == [0, 1, 2]
    model, chat = zoo.load("llava"), generate.chat
    turn = Turn("user", (Part("text", PROMPTS[2]),))
    out = model.generate(**chat.make_inputs([turn]), **SETTINGS, do_sample=False)[0]
    new = out[-found["num_tokens"][2] :]
    assert chat.tokenizer.decode(new, skip_special_tokens=True) == found["text"][2]


def test_a_row_that_fails_leaves_the_others_alone(generate: Generate, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"no picture")
    images = [str(tmp_path / "absent.png"), str(tmp_path / "bad.png"), None]
    found = generate(batch_of(PROMPTS[:3], image=images))
    assert "absent.png" in found["error"][0]
    assert found["error"][1].startswith("ValueError")
    assert found["error"][2] is None
    assert list(found["text"][:2]) == ["", ""]
    assert found["text"][2]


def test_noise_depends_on_the_row_alone(generate: Generate) -> None:
    generate.settings |= {"do_sample": True, "temperature": 1.5, "top_k": 0}
    try:
        whole = generate(batch_of(PROMPTS[:4]))
        last = {name: column[3:] for name, column in batch_of(PROMPTS[:4]).items()}
        assert generate(last)["text"][0] == whole["text"][3]
        generate.seed = 1
        assert list(generate(batch_of(PROMPTS[:4]))["text"]) != list(whole["text"])
    finally:
        generate.seed = 0
        generate.settings = {**SETTINGS}


def test_what_it_cannot_run_is_refused(generate: Generate) -> None:
    with pytest.raises(ValueError, match=r"no column 'prompt', but id; give prompt= one"):
        generate({"id": np.arange(2)})
    with pytest.raises(ValueError, match="write no text"):
        Generate("zoo:mar")


class Dying(Generate):
    """Ends its process at the first batch that any worker sees."""

    def __init__(self, marker: str, **options: Any) -> None:
        super().__init__("zoo:llava", **options)
        self.marker = marker

    def __call__(self, batch: Any) -> Any:
        try:
            os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return super().__call__(batch)
        os._exit(1)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_two_workers_answer_all_rows_once_though_one_is_lost(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    from ray import data

    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    ray.init(
        num_cpus=3,  # two for the actors, one for reading
        object_store_memory=100 << 20,
        include_dashboard=False,
        runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}},
    )
    try:
        items = [{"id": n, "prompt": text} for n, text in enumerate(PROMPTS)]
        rows = data.from_items(items, override_num_blocks=4)
        options = {"settings": SETTINGS, "threads": 1}
        found = rows.map_batches(
            Dying,
            fn_constructor_args=(str(tmp_path / "died"),),
            fn_constructor_kwargs=options,
            concurrency=2,
            batch_size=3,
        )
        answers = sorted(found.take_all(), key=lambda row: row["id"])
    finally:
        ray.shutdown()
    assert (tmp_path / "died").exists()
    assert [row["id"] for row in answers] == list(range(len(PROMPTS)))
    alone = Generate("zoo:llava", settings=SETTINGS)
    expected = alone(batch_of(PROMPTS))
    assert [row["text"] for row in answers] == list(expected["text"])
    alone.engine.close()
