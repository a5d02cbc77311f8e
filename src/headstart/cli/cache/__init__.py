"""`headstart cache`: one file a group of verbs, and `commands` with what they take. Beside a running server or
on a directory at rest it is the same: every command is one more process on the same directory, and what one writes the others
see at once."""

from __future__ import annotations

import click

from headstart.cli.lazy import LazyGroup

INCOMPLETE = 5  # something that was asked for was left out: leased, pinned, or it did not fit
REPAIRED = 6  # `verify` found something wrong, and it is gone
DAMAGED = 7  # `verify` found something wrong, and it is still there

_HERE = "headstart.cli.cache.commands"
COMMANDS = {
    "ls": (f"{_HERE}:ls", "List stored prefixes."),
    "show": (f"{_HERE}:show", "Tell everything about one prefix, also about one that is no longer there."),
    "stat": (f"{_HERE}:stat", "Tell how full the cache is, and of what."),
    "du": (f"{_HERE}:du", "Add up bytes by directory, representation, class and tenant."),
    "verify": (f"{_HERE}:verify", "Read and check everything; drop what is wrong."),
    "gc": (f"{_HERE}:gc", "Let go what has expired, give back space, join short runs."),
    "pin": (f"{_HERE}:pin", "Keep prefixes from being evicted until a time."),
    "unpin": (f"{_HERE}:unpin", "Let pinned prefixes go their way again."),
    "rm": (f"{_HERE}:rm", "Remove prefixes, and all that only they need."),
    "move": (f"{_HERE}:move", "Move prefixes from one cache directory to another, or between tiers."),
    "policy": (f"{_HERE}:policy", "Check the rules of tiers; explain what they make of a block."),
    "devices": (f"{_HERE}:devices", "Tell which devices the cache lies on; add, drain or remove one."),
    "export": (f"{_HERE}:export", "Write prefixes into one file."),
    "import": (f"{_HERE}:import_", "Take in prefixes that `export` wrote."),
}


@click.group(cls=LazyGroup, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def cache() -> None:
    """Look at, keep, remove and carry stored prefixes, beside a running server or on a directory at rest."""
