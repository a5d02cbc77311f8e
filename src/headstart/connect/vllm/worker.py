"""The side that moves bytes: one in each of vLLM's ranks, between its KV memory and the cache."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from headstart.cache.open import open_cache
from headstart.cache.prefix_cache import PrefixCache
from headstart.cache.rule_follower import follow
from headstart.connect.vllm.identity import identity_for
from headstart.connect.vllm.layout import NotStored, layout_of
from headstart.connect.vllm.loading import Loader
from headstart.connect.vllm.messages import Handshake, Orders, Rank, SaveOrder
from headstart.connect.vllm.saving import Keeper
from headstart.connect.vllm.settings import ConnectorSettings
from headstart.connect.vllm.statistics import Statistics, Taking

_PATIENCE_S = 5.0  # of lookups, which only this side's own threads wait for: what was found must not be missed for haste
_log = logging.getLogger(__name__)


class Worker:
    """`register` once, then `load`, `save` and `finished` with every step, all from the thread that computes."""

    def __init__(self, settings: ConnectorSettings, vllm_config: Any, kv_cache_config: Any) -> None:
        self._settings = settings
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._taking = Taking()
        self._cache: PrefixCache | None = None
        self._loader: Loader | None = None
        self._keeper: Keeper | None = None
        self._sent: set[str] = set()
        self._short: dict[str, int] = {}
        self.handshake: Handshake | None = None

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take what vLLM allocated, find out what it means and how it lies, open the cache. What cannot be stored is said in
        the handshake and the log, and vLLM serves as without the connector. A second time takes the place of the first."""
        self.close()
        rank = _rank()
        nothing = Handshake(rank, socket.gethostname(), None, None)
        try:
            layout, memory = layout_of(self._vllm_config, self._kv_cache_config, kv_caches, tensor_rank=rank[1])
            identity = identity_for(self._vllm_config, self._settings)
        except NotStored as error:
            _log.warning("headstart stores nothing of this model and finds nothing: %s", error)
            self.handshake = replace(nothing, reason=str(error))
            return
        representation = layout.representation
        self.handshake = replace(nothing, identity=identity, representation=representation.encode())
        if not self._settings.stores:
            return
        config = self._settings.config.cache
        first = rank == (0, 0)
        if not first:
            config = replace(config, kv_events="")  # all ranks store the same tokens; one of them tells of it
        self._cache = open_cache(config, identity=identity, representation=representation, match_timeout_s=_PATIENCE_S)
        follow(self._settings.read, config.tiering.rules, self._cache)
        self._loader = Loader(self._cache, layout, memory, timeout_s=config.load_timeout_s, taking=self._taking, counts=first)
        self._keeper = Keeper(self._cache, layout, memory, taking=self._taking)

    def obey(self, orders: Orders) -> None:
        """Start the loads. Behind the computing of a step, or before: either is right."""
        if orders.loads and self._loader is not None:
            self._loader.start(orders.loads)

    def save(self, saves: Sequence[SaveOrder]) -> None:
        """Copy out what is to be saved, at once: no block is read after this returns. Called when the step is computed."""
        for order in saves:
            if self._keeper is not None:
                self._keeper.keep(order)
            if order.last:
                self._sent.add(order.request)

    def finished(self, ended: set[str]) -> tuple[set[str], set[str], set[str], set[int]]:
        """Return requests whose blocks are copied, whose load has ended, of the latter those that failed as a whole, and the
        blocks that lack what they should hold. `ended`: requests that are over; their loads are given up."""
        sent, self._sent = self._sent, set()
        if self._loader is None:
            return sent, set(), set(), set()
        arrived = self._loader.ended(over=ended, now=time.monotonic())
        received = {load.request for load in arrived}
        bad: set[int] = set()
        failed: set[str] = set()
        for load in arrived:
            if load.lacking is None:
                continue
            self._short[load.request] = load.tokens
            if len(self._kv_cache_config.kv_cache_groups) == 1:
                bad.update(load.lacking)
            else:
                failed.add(load.request)
        return sent, received, failed, bad

    def short(self) -> dict[str, int]:
        """Return, once, how many tokens are there of each request whose load brought less than was found."""
        short, self._short = self._short, {}
        return short

    def statistics(self) -> Statistics | None:
        return self._taking.take()

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()
        if self._keeper is not None:
            self._keeper.close()
        if self._cache is not None:
            self._cache.close()
        self._loader = self._keeper = self._cache = None


def _rank() -> Rank:
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return get_pp_group().rank_in_group, get_tp_group().rank_in_group
