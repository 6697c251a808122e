"""All commands of `paceline`, and its own options."""

from typing import Annotated

import typer

from paceline import __version__
from paceline.cli import trace
from paceline.cli.bench import bench
from paceline.cli.chat import chat
from paceline.cli.plan import plan
from paceline.cli.profile import profile
from paceline.cli.serve import serve
from paceline.cli.simulate import simulate

app = typer.Typer(
    help="Many language models on a few devices, each inside its latency goal, behind one OpenAI-compatible port.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(serve)
app.command()(plan)
app.command()(simulate)
app.command()(bench)
app.add_typer(trace.app, name="trace")
app.command()(profile)
app.command()(chat)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def options(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False) -> None:
    pass
