"""All commands of `paceline`, and its own options."""

from typing import Annotated, Any

import typer

from paceline import __version__
from paceline.cli import trace
from paceline.cli.bench import bench
from paceline.cli.chat import chat
from paceline.cli.plan import plan
from paceline.cli.profile import profile
from paceline.cli.serve import serve
from paceline.cli.simulate import simulate

UsageError: Any = typer.BadParameter.__base__  # Typer has its own Click, or not, by its version
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


def run() -> int | None:
    """Does what the command line says; gives an exit code, None for 0. Raises ValueError for what cannot be."""
    try:
        return app(standalone_mode=False)
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # older ones of Click do without
            error.show()
            return 2
        raise ValueError(" ".join(error.format_message().split())) from error
