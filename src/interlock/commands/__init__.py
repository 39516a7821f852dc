"""The subcommands of `interlock`, one file each. The engine is imported only when a command runs."""

import typer

from interlock.commands.bench import bench
from interlock.commands.generate import generate
from interlock.commands.pd import pd

app = typer.Typer(
    name="interlock",
    help="An LLM inference runtime whose steps never read KV-cache blocks that have not landed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate")(generate)
app.command("pd")(pd)
app.command("bench")(bench)
