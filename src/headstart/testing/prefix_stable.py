"""An assertion for tests of whatever builds prompts: each request goes on from an earlier one."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any


def assert_prefix_stable(
    requests: Iterable[Any], *, tokenizer: Path | str | None = None, allow: Collection[str] = (), tokens: int = 64
) -> None:
    """Fail where a request loses `tokens` tokens or more that an earlier one of `requests` had, and say by which difference.

    `requests` are bodies (OpenAI, Anthropic) in the order in which they are sent. `tokenizer` is a folder with tokenizer.json
    and a chat template, and makes positions exact; without it they are estimates. `allow` names causes that are no failure
    (docs/causes.md).

    >>> chat = [{"role": "system", "content": "You are brief, and you are right. " * 9}, {"role": "user", "content": "Which?"}]
    >>> assert_prefix_stable([{"messages": chat}, {"messages": [*chat, {"role": "assistant", "content": "This one."}]}])
    """
    from headstart.diagnose.placing import side_of
    from headstart.diagnose.report import report_of
    from headstart.diagnose.requests import conversation_of
    from headstart.diagnose.show import Prices, lines_of
    from headstart.render import Renderer

    renderer = None if tokenizer is None else Renderer.load(Path(tokenizer), light=True)
    begin = None if renderer is None else renderer.begin_id
    sides = [
        side_of(f"request {n}", conversation_of(body, as_sent=renderer is None), renderer)
        for n, body in enumerate(requests, start=1)
    ]
    for n, side in enumerate(sides[1:], start=1):
        reports = [report_of(before, side, begin_id=begin) for before in sides[:n]]
        kept = max(report.kept_tokens for report in reports)
        lost = max(reversed(reports), key=lambda report: sum(report.gains))
        left = [one for one, gain in zip(lost.findings, lost.gains, strict=True) if gain and str(one.cause) not in allow]
        if left and min(sum(lost.gains), side.tokens(len(side.units)) - kept) >= tokens:
            raise AssertionError("\n".join(["a prompt does not go on from an earlier one", "", *lines_of(lost, Prices())]))
