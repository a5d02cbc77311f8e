"""Every configuration key as a flag, made from the configuration's own declarations so that none can be forgotten."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

import click

from headstart.config import Config, Setting, load_config, settings
from headstart.errors import ConfigError

Command = TypeVar("Command", bound=Callable[..., Any])


def config_options(*sections: str, without: Collection[str] = ()) -> Callable[[Command], Command]:
    """Add --config and the flags of the given sections ("" for keys without one). `chosen_config` reads them back."""
    wanted = [setting for key, setting in settings().items() if key.rpartition(".")[0] in sections and key not in without]

    def add(command: Command) -> Command:
        for setting in reversed(wanted):
            command = _option(setting)(command)
        path = click.Path(dir_okay=False, path_type=Path)
        return click.option("--config", "config_file", type=path, help="TOML file with any of these settings")(command)

    return add


def chosen_config(config_file: Path | None, flags: dict[str, Any], *, model: str | None = None) -> Config:
    """Return the configuration with whatever was given on the command line on top. Raises ConfigError."""
    overrides = {name.replace("__", "."): value for name, value in flags.items() if value is not None}
    if model is not None:
        overrides["model"] = model
    config = load_config(config_file, overrides=overrides)
    require_rules(config)
    return config


def require_rules(config: Config) -> None:
    """Raise ConfigError where a rule of tiers is none: before anything is opened or loaded for it."""
    if config.cache.tiering.rules:
        from headstart.policy.rule_text import parse_rules

        try:
            parse_rules(config.cache.tiering.rules)
        except ConfigError as error:
            raise ConfigError(f"cache.tiering.rules: {error.message}", **error.facts) from error


def _option(setting: Setting) -> Callable[[Command], Command]:
    name = setting.key.replace(".", "__")
    if setting.switches_off:
        return click.option(setting.flag, name, flag_value=False, type=bool, default=None, help=f"do not {setting.help}")
    if setting.switches_on:
        return click.option(setting.flag, name, flag_value=True, type=bool, default=None, help=setting.help)
    default = "" if setting.default in (None, "", ()) else f"  [default: {setting.default}]"
    return click.option(setting.flag, name, metavar=setting.metavar, help=setting.help + default)
