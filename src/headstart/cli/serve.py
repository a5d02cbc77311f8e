"""`headstart serve`: a model over an OpenAI-compatible API. What it does is in `serving`, which takes long to import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from headstart.cli.settings import chosen_config, config_options
from headstart.config import config_file_of, hand_on


@click.command()
@click.argument("model", required=False)
@click.option("--model", "named", metavar="MODEL", help="the same as the argument")
@config_options("server", "cache", "cache.tiering", "engine", "handoff", "", without=["model"])
def serve(model: str | None, named: str | None, config_file: Path | None, **flags: Any) -> int:
    """Serve MODEL: an alias (smollm2-135m, the default), a GGUF file, a Hugging Face directory, a hub name, or a name that
    `headstart models` lists."""
    if model is not None and named is not None and model != named:
        raise click.UsageError(f"two models are named, {model} and --model {named}; give one")
    named_model = named if model is None else model
    config = chosen_config(config_file, flags, model=named_model)
    from headstart.cache.rule_follower import RuleFollower
    from headstart.cli import serving

    rules = None
    if (file := config_file_of(config_file)) is not None:
        if config.engine.engine == "vllm":
            hand_on(file)  # its connector follows the same one
        rules = RuleFollower(file, lambda: chosen_config(config_file, flags, model=named_model), config.cache.tiering.rules)
    return serving.serve(config, rules)
