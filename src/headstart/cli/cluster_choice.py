"""Which cluster a command means: of a file, of the default directory, or whichever a router's address names."""

from __future__ import annotations

from pathlib import Path

from headstart.gateway.cluster_file import ClusterFile, read_cluster


def folder_of(file: Path | None) -> Path:
    """Return where the cluster of a file, or else of the default directory, is written down."""
    return (ClusterFile() if file is None else read_cluster(file)).folder


def router_of(file: Path | None, router: str | None) -> str:
    """Return the address of the cluster's router. Raises NotThere where there is none, ConfigError for what is no address."""
    from headstart.cli.asking import require_address
    from headstart.errors import NotThere
    from headstart.gateway.cluster import read_state

    if router is not None:
        return require_address(router, "--router")
    folder = folder_of(file)
    state = read_state(folder)
    if not state.router:
        raise NotThere(f"the router of the cluster in {folder} does not listen yet; its log is in {folder / 'logs'}")
    return state.router
