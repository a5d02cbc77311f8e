"""What a server's `why` found, for people. Pure; imports nothing that takes time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headstart.diagnose.around import Around
from headstart.diagnose.show import marked, when, wrapped


def why_lines(told: Mapping[str, Any]) -> Iterator[str]:
    """Yield what `why_json` gave, for people. Lines are those of a server, which may be of another version."""
    about = "" if told["exact"] else "about "
    reused = told["reused"]
    yield f"{told['id']}: {told['prompt_tokens']:,} tokens"
    if (before := told["compared_with"]) is None:
        yield "compared with no earlier prompt"
    else:
        yield f"compared with {before['id']} of {when(before['asked'])}: {about}{told['common_tokens']:,} tokens in common"
    yield ""
    if "untold" in reused:
        yield f"reused    {reused['untold']:,} tokens, from memory or disk"
    else:
        yield f"reused    {reused['memory']:,} tokens from memory, {reused['disk']:,} from disk"
    for lost in told["lost"]:
        first = "" if lost["first_token"] is None else f" from token {lost['first_token']:,} on"
        yield f"lost      {lost['tokens']:,} tokens{first}"
        yield from wrapped("  cause   ", f"{lost['cause']}: {lost['evidence']}")
        yield from wrapped("  fix     ", lost["fix"])
    if (parted := told["parted"]) is not None:
        where = parted["path"] or "between messages, in the template's own text"
        behind = "" if parted["alike_tokens"] is None else f"; {parted['alike_tokens']:,} tokens behind it are the same"
        yield f"parted    at token {about}{parted['token']:,}: {where}{behind}"
        for side in ("a", "b"):
            if parted[side] is not None:
                yield f"  {side.upper()}  {marked(Around(**parted[side]))}"
        yield from wrapped("  cause   ", f"{parted['cause']}: {parted['evidence']}")
        yield from wrapped("  fix     ", parted["fix"])
    yield f"new       {told['new_tokens']:,} tokens that no earlier prompt had, or that had to be computed with them"
    for note in told["notes"]:
        yield from wrapped("note      ", note)
