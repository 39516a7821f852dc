"""The subcommands of `interlock`, one file each. The engine is imported only when a command runs."""

from importlib.metadata import version as version_of
from typing import Annotated

import typer

from interlock.commands.bench import bench
from interlock.commands.generate import generate
from interlock.commands.pd import pd

app = typer.Typer(
    name="interlock",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate")(generate)
app.command("pd")(pd)
app.command("bench")(bench)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"interlock {version_of('interlock')}")
        raise typer.Exit


@app.callback()
def _interlock(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    """An LLM inference runtime whose steps never read KV-cache blocks that have not landed."""
