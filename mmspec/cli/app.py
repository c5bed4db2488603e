"""All commands together; each imports what it needs when it runs."""

from __future__ import annotations

import typer

from mmspec.cli import bench, bench_sweep, certify, doctor, generate, recipes, show, train, zoo

app = typer.Typer(
    name="mmspec",
    help="Speculative decoding for multimodal Hugging Face models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("generate")(generate.generate)
app.command("recipes")(recipes.recipes)
app.command("show")(show.show)
app.command("doctor")(doctor.doctor)
app.command("certify")(certify.certify)
bench.app.command("sweep")(bench_sweep.sweep)
app.add_typer(bench.app, name="bench")
app.add_typer(train.app, name="train")
app.add_typer(zoo.app, name="zoo")


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    """Speculative decoding for multimodal Hugging Face models."""
    if version:
        import mmspec

        typer.echo(mmspec.__version__)
