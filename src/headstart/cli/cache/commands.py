"""What each verb of `headstart cache` takes, and what its --help says. What it does is in the files beside this one, which take
long to import."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import click

from headstart.cli.lazy import LazyGroup

SORTS = ("used", "bytes", "tokens", "created")
TIERS = ("disk", "pool", "object")  # that can be moved between
Command = TypeVar("Command", bound=Callable[..., Any])
_PATH = click.Path(path_type=Path)


def _run(file: str, verb: str, said: dict[str, Any]) -> Any:
    return getattr(import_module(f"headstart.cli.cache.{file}"), verb)(**said)


def cache_options(command: Command) -> Command:
    """Add what every verb takes: where the cache lies, and whether to answer in JSON."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="print one JSON object"),
        click.option("--config", "config_file", type=_PATH, help="TOML file with the server's settings"),
        click.option(
            "--directory",
            "directories",
            type=_PATH,
            multiple=True,
            help="where the cache lies; may be given several times  [default: cache.directory]",
        ),
    ):
        command = option(command)
    return command


def pool_option(command: Command) -> Command:
    """Add the choice of a pool instead of the directories of this machine."""
    return click.option("--pool", type=_PATH, help="look at this pool of many machines instead of this machine's directories")(
        command
    )


def _checked_time(_: click.Context, __: click.Parameter, text: str | None) -> str | None:
    """Refuse what is no time also where there is nothing to compare it with."""
    if text is not None:
        from headstart.cli.cache.cached import duration_ms

        duration_ms(text)
    return text


def wanted_options(command: Command) -> Command:
    """Add what chooses among prefixes; `Wanted` reads it."""
    for option in (
        click.option(
            "--older-than", metavar="TIME", callback=_checked_time, help="only prefixes written longer ago than 30m, 12h or 7d"
        ),
        click.option(
            "--representation", metavar="TEXT", help="only prefixes whose representation has this in its name or digest"
        ),
        click.option("--pinned", is_flag=True, help="only pinned prefixes"),
        click.option("--class", "retention", metavar="NAME", help="only prefixes of this retention class"),
        click.option("--tenant", metavar="NAME", help="only prefixes of this tenant"),
    ):
        command = option(command)
    return command


@click.command()
@cache_options
@pool_option
@wanted_options
@click.option("--limit", type=click.IntRange(min=1), help="at most so many lines")
@click.option("--sort", type=click.Choice(SORTS), default="used", help="largest or latest first  [default: used]")
def ls(**said: Any) -> Any:
    """List stored prefixes, each by the longest run of blocks that no other one continues. A prefix's bytes are those of all
    extents that it lies in, so what prefixes share is counted with each of them; `du` counts once. AGE is since it was
    written; USED orders by last use: a number that the cache counts up, the highest was used last."""
    return _run("looking", "ls", said)


@click.command()
@click.argument("key")
@cache_options
@pool_option
@click.option("--representation", metavar="TEXT", help="only in the representation that has this in its name or digest")
def show(**said: Any) -> Any:
    """Tell everything about the prefix that ends with block KEY: its extents and where they lie, what their headers say, its
    promises. Of one that is no longer there, when and why it was removed, where that is still remembered."""
    return _run("looking", "show", said)


@click.command()
@cache_options
@pool_option
def stat(**said: Any) -> Any:
    """Tell how full the cache is, and of what. Capacity and room are judged by the configuration given here: where a server
    has another (a file, flags), give it too. What is counted while it runs (hits, bytes written, and these for each token
    that hit) a server tells at its /metrics."""
    return _run("looking", "stat", said)


@click.command()
@cache_options
@pool_option
@click.option(
    "--by",
    type=click.Choice(["directory", "representation", "class", "tenant"]),
    multiple=True,
    help="only these sums; may be given several times",
)
def du(**said: Any) -> Any:
    """Add up the bytes of stored extents. What prefixes share is counted once."""
    return _run("looking", "du", said)


@click.command()
@cache_options
@pool_option
@click.option("--rate", metavar="SIZE", default="256MiB", help="read at most so much a second  [default: 256MiB]")
@click.option("--no-repair", is_flag=True, help="only tell what is wrong, and write nothing")
def verify(**said: Any) -> Any:
    """Read everything that is stored and check it: headers, keys, token ids, every piece. What is wrong is dropped, so that it
    is computed anew; then books and files are compared. What cannot be read now is left alone: a disk may come back. So is
    what has checks with a key that is not in cache.check_key_file."""
    return _run("verifying", "verify", said)


@click.command()
@click.argument("keys", metavar="[KEY...]", nargs=-1)
@cache_options
@pool_option
@wanted_options
@click.option("--all", "everything", is_flag=True, help="every prefix")
@click.option("--dry-run", is_flag=True, help="only tell what would go")
@click.option("--yes", is_flag=True, help="do not ask back where more than one prefix goes")
def rm(**said: Any) -> Any:
    """Remove the prefixes that go through the blocks KEY, or all that fit the options, with everything that only they need.
    What another prefix needs as well stays; an extent that others need the beginning of is cut behind that. Pinned
    prefixes stay, and so does what somebody reads now."""
    return _run("removing", "rm", said)


@click.command()
@cache_options
@pool_option
@click.option("--to", "target", metavar="SIZE", help="let go until no more than this is taken, the least worthy first")
@click.option("--for", "seconds", type=click.FloatRange(min=0), help="stop joining short runs after so many seconds")
@click.option("--dry-run", is_flag=True, help="only tell what would go")
def gc(**said: Any) -> Any:
    """Let go what is older than its class may grow, give back space, join short runs of one prefix into long ones. With --to,
    let go also what is least worth keeping, in the order in which the cache itself would. In a pool, --to is about what can be
    found: the files go some minutes later, when nobody can be reading them any more, and nothing is joined."""
    return _run("removing", "gc", said)


@click.command()
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@cache_options
@pool_option
@click.option("--for", "duration", metavar="TIME", help="so long from now: 30m, 12h, 7d")
@click.option("--until", metavar="DATE", help="until then: 2030-01-31 or 2030-01-31T18:00+01:00")
def pin(**said: Any) -> Any:
    """Keep the prefixes that end with the blocks KEY from being evicted, with all that they run on from; until they are
    unpinned where no time is given."""
    return _run("keeping", "pin", said)


@click.command()
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@cache_options
@pool_option
def unpin(**said: Any) -> Any:
    """Let the prefixes that end with the blocks KEY be evicted again. What another pinned prefix runs on from stays pinned."""
    return _run("keeping", "unpin", said)


@click.command()
@click.argument("source", type=_PATH, required=False)
@click.argument("destination", type=_PATH, required=False)
@click.option("--from", "from_tier", type=click.Choice(TIERS), help="the tier to move out of, instead of SOURCE")
@click.option("--to", "to_tier", type=click.Choice(TIERS), help="the tier to move to, instead of DESTINATION")
@click.option("--where", metavar="CONDITION", help="with --from: what to move, as in rules: 'class = \"agent\" and idle > 6h'")
@click.option("--limit", metavar="RATE", help="with --from: most bytes a second, such as 100MB/s")
@click.option("--directory", "directories", type=_PATH, multiple=True, help="with --from: where the disk tier lies")
@click.option("--pool", type=_PATH, help="with --from: where the pool lies  [default: cache.pool]")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
@click.option("--config", "config_file", type=_PATH, help="TOML file with the server's settings")
@wanted_options
@click.option("--capacity", metavar="SIZE", help="that the destination may have  [default: cache.capacity]")
@click.option("--dry-run", is_flag=True, help="only tell what would be moved")
def move(**said: Any) -> Any:
    """Move the prefixes in the cache directory SOURCE, all or those that fit the options, to DESTINATION, with class, tenant,
    pins and order of use. Each is verified, written, and only then removed from SOURCE; what others there need stays as well.
    A server must know both directories, or it will not find them any more; where they are devices of one cache and all of
    SOURCE moves, nothing new goes to it from then on.

    With --from and --to, move between tiers what --where selects, or everything. Given again after it was interrupted, it goes
    on where it was."""
    return _run("moving", "move", said)


_POLICY = {
    "check": (f"{__name__}:check", "Check the rules of tiers in a configuration file."),
    "explain": (f"{__name__}:explain", "Tell which rule applies to a block where it lies, and why."),
}


@click.group(cls=LazyGroup, lazy=_POLICY, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def policy() -> None:
    """The rules by which what is stored moves between tiers (cache.tiering)."""


@click.command()
@click.argument("file", type=_PATH, required=False)
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
@click.option("--config", "config_file", type=_PATH, help="the same as FILE")
def check(**said: Any) -> Any:
    """Read the rules in the configuration FILE (default: $HEADSTART_CONFIG), and tell what is wrong with them and what does
    nothing. What is right a running server takes up by itself, within seconds of the file being saved."""
    return _run("policy", "check", said)


@click.command()
@click.argument("key")
@cache_options
@pool_option
def explain(**said: Any) -> Any:
    """Tell for the block KEY, in each tier where it lies (this machine's directories, and the pool of the configuration or of
    --pool): which rule applies, what every rule before it met, and what happens next."""
    return _run("policy", "explain", said)


@click.command()
@click.argument("directory", type=_PATH, required=False)
@click.option("--add", "added", type=_PATH, metavar="PATH", help="let this directory be one more device; made where missing")
@click.option(
    "--drain", "drained", type=_PATH, metavar="PATH", help="let nothing new go there, and carry over what is worth it"
)
@click.option("--remove", "removed", type=_PATH, metavar="PATH", help="take a drained or dead device out; its files stay")
@click.option("--force", is_flag=True, help="remove it though it is not drained: what only it has is a miss from then on")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
@click.option("--config", "config_file", type=_PATH, help="TOML file with the server's settings")
def devices(**said: Any) -> Any:
    """Tell which devices the cache in DIRECTORY (any one of them; default: cache.directory) lies on, after adding, draining or
    removing one. A running server follows within seconds, and does the carrying over when it has nothing else to do."""
    return _run("devices", "devices", said)


@click.command()
@click.argument("keys", metavar="[KEY...]", nargs=-1)
@click.argument("file", type=_PATH)
@cache_options
@pool_option
@wanted_options
@click.option("--all", "everything", is_flag=True, help="every prefix")
def export(**said: Any) -> Any:
    """Write the prefixes that end with the blocks KEY, or all that fit the options, into FILE, which must not be there yet. It
    holds token ids and so is as confidential as the prompts."""
    return _run("carrying", "export", said)


@click.command("import")
@click.argument("file", type=_PATH)
@cache_options
@click.option("--tenant", metavar="NAME", default="", help="whose the prefixes are from now on  [default: nobody's]")
@click.option("--capacity", metavar="SIZE", help="that the cache may have  [default: cache.capacity]")
@click.option("--any-representation", is_flag=True, help="also one that nothing in the cache has")
@click.option("--dry-run", is_flag=True, help="only verify the file, and tell what is in it")
def import_(**said: Any) -> Any:
    """Take in the prefixes that `export` wrote into FILE. Everything in it is verified before anything is written. What does
    not fit beside what is there is left out: make room first with `gc --to`."""
    return _run("carrying", "import_", said)
