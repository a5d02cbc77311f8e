"""The command line. One file a command, imported when that command runs: `headstart --help` must answer at once.

An error that headstart raises on purpose ends a command with its one sentence on stderr and its exit code: 2 wrong use,
3 something missing on this machine, 4 a medium or network that failed, 130 interrupted, 143 terminated; `cache` has three
more, and `diff`, `lint` and `doctor` one each. Tracebacks are for bugs.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

import click

from headstart import __version__
from headstart.cli.lazy import LazyGroup
from headstart.errors import HeadstartError

# name: (where the command is, its line in --help)
_COMMANDS = {
    "serve": ("headstart.cli.serve:serve", "Serve a model over an OpenAI-compatible API."),
    "run": ("headstart.cli.run:run", "Answer one prompt in the terminal."),
    "pull": ("headstart.cli.pull:pull", "Fetch a model ahead of time."),
    "models": ("headstart.cli.models:models", "List the models that can be served here by name."),
    "warm": ("headstart.cli.warm:warm", "Compute and keep prompts ahead of time, in a running server."),
    "cache": ("headstart.cli.cache:cache", "Look at, keep, remove and carry stored prefixes."),
    "keys": ("headstart.cli.keys:keys", "Make, list and remove API keys."),
    "usage": ("headstart.cli.usage:usage", "Add up what tenants used."),
    "diff": ("headstart.cli.diff:diff", "Tell where two prompts part, why, and what it costs."),
    "why": ("headstart.cli.why:why", "Tell what a running server reused of a request, what not, and why."),
    "lint": ("headstart.cli.lint:lint", "Tell what the prompts of whole logs lose, by what, and what to change first."),
    "record": ("headstart.cli.record:record", "Pass requests on to a server and keep what lint needs of them."),
    "doctor": ("headstart.cli.doctor:doctor", "Tell whether a model's chat template and the cache's disk are fit for a cache."),
    "route": ("headstart.cli.route:route", "Give each request to the worker that answers it soonest."),
    "simulate": ("headstart.cli.simulate:simulate", "Tell what a fleet of engines would make of a trace, by rule of routing."),
    "up": ("headstart.cli.up:up", "Start a cluster: workers, a router and a planner, as a file says."),
    "ps": ("headstart.cli.ps:ps", "List a cluster's workers: roles, queues, hits by tier, speeds."),
    "top": ("headstart.cli.ps:top", "Show a cluster's workers again and again."),
    "down": ("headstart.cli.down:down", "End a cluster."),
    "plan": (
        "headstart.cli.plan:plan",
        "Tell how many workers the targets need, in which roles, and why; move and drain them.",
    ),
    "demo": ("headstart.cli.demo:demo", "Compute a long prompt once, kill the server, answer from disk."),
    "version": ("headstart.cli.version:version", "Tell the versions of headstart and what it stands on."),
}

INTERRUPTED = 130
TERMINATED = 143


@click.group(cls=LazyGroup, lazy=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="headstart")
def cli() -> None:
    """LLM inference that never computes the same prompt twice."""


def main() -> None:
    """Run the command line and exit with its code."""
    signal.signal(signal.SIGTERM, _terminated)  # `serve` has a way of its own
    sys.exit(run_cli(sys.argv[1:]))


def _terminated(number: int, frame: FrameType | None) -> None:
    """End like an interrupt does, so that what was begun is stopped and removed."""
    raise SystemExit(TERMINATED)


def run_cli(arguments: list[str]) -> int:
    """Run one command and return its exit code; what went wrong is told on stderr in one sentence."""
    try:
        return cli.main(arguments, prog_name="headstart", standalone_mode=False) or 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except HeadstartError as error:
        click.echo(f"headstart: {error.message}", err=True)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has gone (`headstart run … | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at its end
        return 0
