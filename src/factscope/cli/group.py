"""Commands with a default: `factscope stats --layer 5` is `factscope stats collect --layer 5`."""

from typing import Any

from typer.core import TyperGroup

__all__ = ["DefaultGroup"]


class DefaultGroup(TyperGroup):
    """A group whose first command is meant where the first word names none.

    Its help lists that command's flags beside the commands.
    """

    _helping = False

    @property
    def default(self) -> str:
        """The command that was added first."""
        return next(iter(self.commands))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default command in front where no command is named."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The group's help, with the flags of the default command."""
        self._helping = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._helping = False

    def get_params(self, ctx: Any) -> list[Any]:
        """The group's own parameters; in its help, those of the default command as well."""
        params = list(super().get_params(ctx))
        return [*self.commands[self.default].params, *params] if self._helping else params
