"""What `kv_connector_extra_config` may say: headstart's own settings by their own names, and two of the connector's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal

from headstart.config import Config, load_config, settings
from headstart.errors import ConfigError

WHERE = "in kv_connector_extra_config"
_OWN = ("mode", "version")
_MODES = ("store", "observe")
_NOT_HERE = {
    "cache.memory": "vLLM's own KV memory is the memory tier; set the size of that",
    "cache.enabled": "leave the connector out instead",
}


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """`config`: with cache.memory off. `mode`: "observe" keeps the books of a cache and stores nothing. `version`: of weights
    that no file tells (dummy ones, or such as are updated while serving); None where the checkpoint's files say it all.
    `read`: reads the configuration anew."""

    config: Config
    mode: Literal["store", "observe"]
    version: str | None
    read: Callable[[], Config]

    @property
    def stores(self) -> bool:
        return self.mode == "store"


def read_settings(extra: Mapping[str, Any]) -> ConnectorSettings:
    """Return the settings; keys are written "cache.directory" or as tables, {"cache": {"directory": …}}. The environment
    (HEADSTART_*, HEADSTART_CONFIG) counts as everywhere. Raises ConfigError, with the nearest right name for a wrong one."""
    given = dict(_flat(extra, ""))
    mode = given.pop("mode", "store")
    if mode not in _MODES:
        raise ConfigError(f'"mode" {WHERE} cannot be {mode!r}; it is one of {", ".join(_MODES)}', key="mode", where=WHERE)
    version = given.pop("version", None)
    if version is not None and not (isinstance(version, str) and version):
        raise ConfigError(f'"version" {WHERE} cannot be {version!r}; write a text', key="version", where=WHERE)
    known = sorted(key for key in settings() if key.startswith("cache.") and key not in _NOT_HERE)
    known += ["models_directory", *_OWN]
    for key in given:
        if key in _NOT_HERE:
            raise ConfigError(f"{key!r} {WHERE} is not for vLLM: {_NOT_HERE[key]}", key=key, where=WHERE)
        if key not in known:
            close = get_close_matches(key, known, n=1, cutoff=0.5) or get_close_matches(f"cache.{key}", known, n=1, cutoff=0.7)
            hint = f"did you mean {close[0]!r}?" if close else "known are " + ", ".join(known)
            raise ConfigError(f"unknown key {key!r} {WHERE}; {hint}", key=key, where=WHERE)
    read = partial(load_config, overrides={**given, "cache.memory": "0"}, overrides_from=WHERE)
    return ConnectorSettings(read(), mode, version, read)


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
