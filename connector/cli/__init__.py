"""``turnlock``, the command line. One module per subject; nothing but click is imported until a command runs."""

from __future__ import annotations

from typing import Any

import click

from connector import __version__
from connector.cli.apps import COMMANDS as APPS
from connector.cli.configure import COMMANDS as CONFIGURE
from connector.cli.erasing import COMMANDS as ERASING
from connector.cli.fairness import COMMANDS as FAIRNESS
from connector.cli.inspect import COMMANDS as INSPECT
from connector.cli.operate import COMMANDS as OPERATE
from connector.cli.parked import COMMANDS as PARKED
from connector.cli.returns import COMMANDS as RETURNS
from connector.cli.serving import COMMANDS as SERVING
from connector.cli.tenants import COMMANDS as TENANTS
from connector.cli.trying import COMMANDS as TRYING

_LAZY = {"demo": ("connector.demo", "Everything at once on this machine, with a sandbox CRM.")}


class Root(click.Group):
    """The commands in the order in which they are added; errors that a person can mend become one text, exit code 1."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In order of subject, not of the alphabet."""
        return [*self.commands, *_LAZY]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A command by name; for a lazy one only its name and short help, so that listing imports nothing."""
        if cmd_name in _LAZY:
            return click.Command(cmd_name, short_help=_LAZY[cmd_name][1])
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that is to run: here a lazy one is imported."""
        name, command, rest = super().resolve_command(ctx, args)
        if name in _LAZY:
            from importlib import import_module

            command = getattr(import_module(_LAZY[name][0]), name)
        return name, command, rest

    def invoke(self, ctx: click.Context) -> Any:
        """Run. What goes wrong is told in a text that names the fix: never a traceback, never a secret."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except Exception as error:  # noqa: BLE001 - the end of every command: what no one foresaw is told, too
            from connector.cli.failures import text_of

            raise click.ClickException(text_of(error)) from None


@click.group(cls=Root, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="turnlock")
def cli() -> None:
    """Turnlock gives every new lead in your CRM exactly one agent, in fair turn, and can say why.

    Settings come from the environment: TURNLOCK_DATABASE_URL, TURNLOCK_PUBLIC_URL, TURNLOCK_SECRET_KEYS ...

    Example: turnlock demo
    """


_COMMANDS = (
    *(*SERVING, *TENANTS, *CONFIGURE, *INSPECT, *FAIRNESS, *TRYING),
    *(*OPERATE, *RETURNS, *PARKED, *APPS, *ERASING),
)
for command in _COMMANDS:
    cli.add_command(command)


def main() -> None:
    """The console script."""
    cli(prog_name="turnlock")
