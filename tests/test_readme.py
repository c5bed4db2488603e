"""What the README shows is what the package does."""

from __future__ import annotations

import re
from pathlib import Path

from typer.testing import CliRunner

from mmspec.cli.app import app

README = Path(__file__).parents[1] / "README.md"


def between(name: str) -> str:
    text = README.read_text(encoding="utf-8")
    found = re.search(rf"<!-- {name}:start -->\n(.*?)<!-- {name}:end -->", text, re.DOTALL)
    assert found is not None, f"the README has no {name} section"
    return found.group(1).strip()


def test_the_recipe_table_is_generated_from_the_folder() -> None:
    printed = CliRunner().invoke(app, ["recipes", "--markdown"])
    assert printed.exit_code == 0
    assert between("recipes") == printed.stdout.strip(), (
        "run `mmspec recipes --markdown` and put its table between the markers in README.md"
    )


def test_the_measured_table_names_its_command() -> None:
    assert "mmspec bench" in between("bench")


def test_the_example_of_the_readme_runs() -> None:
    import mmspec
    from mmspec import zoo
    from mmspec.zoo import language

    model, processor = zoo.load("llava"), zoo.processor("llava")
    example = language.examples(1, split="held-out")[0]
    prompt = language.format_prompt(processor, example.prompt)
    inputs = processor(images=example.image, text=prompt, return_tensors="pt")
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    names = {"mmspec": mmspec, "model": model, "inputs": inputs, "processor": processor}
    exec(code, names)  # the README's own lines
    assert len(names["text"][0]) > 10
    assert names["stats"].exact
