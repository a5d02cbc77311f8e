"""`policy check` and `policy explain`: the rules of tiers, before and after they hold."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from headstart.cache.asked import tier_names
from headstart.cli.cache.cached import Cached, looked, require_key
from headstart.cli.settings import chosen_config
from headstart.config import load_config
from headstart.errors import ConfigError, NotThere
from headstart.policy.rule_text import parse_rules
from headstart.policy.tiering import Facts, Policy, Rule, explained
from headstart.tier.base import ExtentInfo
from headstart.tier.surveying import survey_of


def check(file: Path | None, as_json: bool, config_file: Path | None) -> int:
    config = load_config(file or config_file).cache
    tiers = tier_names(config)
    try:
        found = parse_rules(config.tiering.rules)
    except ConfigError as error:
        if as_json:
            click.echo(json.dumps({"rules": [], "error": error.message, **_place(error)}))
        else:
            for line in _pointed_at(error):
                click.echo(line, err=True)
        return ConfigError.exit_code
    idle = dict(found.without_effect(tiers))
    if as_json:
        told = [{"rule": str(rule), "does_nothing": idle.get(n, "")} for n, rule in enumerate(found.rules)]
        click.echo(json.dumps({"rules": told, "tiers": list(tiers), "error": ""}))
        return 0
    for number, rule in enumerate(found.rules):
        note = f"   does nothing: {idle[number]}" if number in idle else ""
        click.echo(f"{number + 1:3}  {rule}{note}")
    rules = "1 rule is" if len(found.rules) == 1 else f"{len(found.rules)} rules are"
    click.echo(f"{rules} right; tiers: {', '.join(tiers) or 'none'}")
    return 0


def _place(error: ConfigError) -> dict[str, Any]:
    return {"rule": error.facts.get("rule"), "at": error.facts.get("at"), "text": error.facts.get("text")}


def _pointed_at(error: ConfigError) -> Iterator[str]:
    yield error.message
    if (text := error.facts.get("text")) and "\n" not in text:
        yield f"    {text}"
        yield f"    {' ' * error.at}^"


def explain(key: str, directories: tuple[Path, ...], config_file: Path | None, as_json: bool, pool: Path | None) -> int:
    require_key(key)
    config = chosen_config(config_file, {}).cache
    found = parse_rules(config.tiering.rules)
    tiers = tier_names(config)
    pool = pool or config.pool
    tiers = tiers if pool is None or "pool" in tiers else (*tiers, "pool")
    there: list[dict[str, Any]] = []
    with ExitStack() as stack:
        for tier, path in [("disk", None), ("pool", pool)]:
            if tier == "pool" and path is None:
                continue
            try:
                cached = stack.enter_context(looked(directories if path is None else (), config_file, pool=path))
                spots = cached.named(key)
            except NotThere:
                continue
            there += [_told(cached, cached.extents[spot.extent], tier, tiers, found) for spot in spots]
    if not there:
        raise NotThere(
            f"no tier that can be looked at from here has a block whose key begins with {key}"
            "; a server with a configuration file keeps its own directory: name the file with --config",
            key=key,
        )
    if as_json:
        click.echo(json.dumps({"key": key, "tiers": list(tiers), "found": there}))
        return 0
    for one in there:
        _tell(one)
    return 0


def _told(cached: Cached, info: ExtentInfo, tier: str, tiers: Sequence[str], policy: Policy) -> dict[str, Any]:
    survey = survey_of([info], tier, now_ms=cached.now_ms)
    decided = policy.decide(survey.facts, tiers)
    number = int(decided.rule[0])
    copies = [copy for copy in decided.copies if copy.which[0]]
    last = number if number >= 0 else len(policy.rules) - 1
    idle = dict(policy.without_effect(tiers))
    return {
        "tier": tier,
        "where": info.where,
        "pinned": info.pinned_until_ms is not None,
        "rule": None if number < 0 else number + 1,
        "copied_by": [copy.rule + 1 for copy in copies],
        "next": _next(policy, number, tier, pinned=info.pinned_until_ms is not None)
        + "".join(f"; it is brought to {copy.tier!r} as well" for copy in copies),
        "rules": [
            _rule(n, rule, survey.facts, tier, tiers) | {"does_nothing": idle.get(n, "")}
            for n, rule in enumerate(policy.rules[: last + 1])
        ],
    }


def _rule(number: int, rule: Rule, facts: Facts, tier: str, tiers: Sequence[str]) -> dict[str, Any]:
    met = [{"text": one.text, "value": one.value, "holds": one.holds} for one in explained(rule.when, facts, 0)]
    about = rule.acts_on(tier, tiers) or rule.action.verb == "write"
    return {
        "number": number + 1,
        "text": str(rule),
        "about_this_tier": about,
        "holds": bool(rule.holds(facts)[0]),
        "conditions": met,
    }


def _next(policy: Policy, number: int, tier: str, *, pinned: bool) -> str:
    if number < 0:
        return f"it stays in {tier!r}: no rule applies"
    action = policy.rules[number].action
    if action.verb == "keep":
        return f"it stays in {tier!r}"
    if pinned:
        return f"it stays in {tier!r} as long as it is pinned"
    if action.verb == "drop":
        return f"it is dropped from {tier!r} within seconds, unless somebody reads it"
    return f"it is moved to {action.tier!r} within seconds, unless somebody reads it"


def _tell(one: dict[str, Any]) -> None:
    click.echo(f"{one['tier']}   {one['where']}")
    for rule in one["rules"]:
        holds = "applies" if rule["number"] == one["rule"] else "holds" if rule["holds"] else "does not hold"
        if rule["does_nothing"]:
            holds = f"does nothing ({rule['does_nothing']})"
        elif not rule["about_this_tier"]:
            holds = f"is not about what lies in {one['tier']!r}"
        click.echo(f"  rule {rule['number']} {holds}: {rule['text']}")
        for met in rule["conditions"]:
            value = f": it is {met['value']}" if met["value"] else ""
            click.echo(f"      {'yes' if met['holds'] else 'no ':3}  {met['text']}{value}")
    click.echo(f"  next: {one['next']}")
