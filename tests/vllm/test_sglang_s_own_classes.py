"""SGLang's own cache controller, host pools and storage factory, unpacked from its wheel, drive our backend; no GPU, no server.

`sglang_controller.py` is the engine's side, a program of its own: writing is one process, reading another. What a router
follows is told by `sglang_events.py`."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sglang_events import OTHER, PROMPT

from asking import eventually
from headstart.block.keys import chain_keys
from headstart.gateway.following import Change, Follower, Following
from headstart.gateway.translating import Translator
from headstart.policy.routing.holders import DISK, MEMORY, keys_of

SGLANG = Path(os.environ.get("SGLANG_WHEEL", Path(__file__).parents[2] / "build" / "sglang-0.5.23"))
DRIVER = Path(__file__).parent / "sglang_controller.py"
POOLS = {"mha": "MHATokenToKVPoolHost", "mha-v0": "MHATokenToKVPoolHost", "mla": "MLATokenToKVPoolHost"}


def driven(model: Path, store: Path, act: str, kind: str) -> Any:
    command = [sys.executable, str(DRIVER), str(SGLANG), str(model), str(store), act, kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(
    not (SGLANG / "sglang").is_dir(), reason=f"SGLang's wheel is not unpacked at {SGLANG}: its own classes were NOT run"
)
@pytest.mark.parametrize("kind", POOLS)
def test_what_sglang_s_controller_writes_another_process_fetches_bit_for_bit(
    kind: str, tiny_model_folder: Any, tmp_path: Path
) -> None:
    model, store = tiny_model_folder("llama", hidden_size=256, head_dim=64), tmp_path / "kv"
    written = driven(model, store, "write", kind)
    assert written == {"backend": "HeadstartHiCache", "pool": POOLS[kind], "written": 8 * 64}
    read = driven(model, store, "read", kind)
    assert (read["hit"], read["fetched"], read["same"]) == (6 * 64, 6 * 64, [True] * 6)


@pytest.mark.skipif(
    not (SGLANG / "sglang").is_dir(), reason=f"SGLang's wheel is not unpacked at {SGLANG}: its own classes were NOT run"
)
def test_what_sglang_s_own_tree_tells_a_router_knows_by_our_names(tmp_path: Path) -> None:
    live, replay = (f"ipc://{tmp_path}/{name}" for name in ("live", "replay"))
    held: dict[int, set[int]] = {MEMORY: set(), DISK: set()}

    taken: list[Change] = []

    def took(change: Change) -> None:
        taken.append(change)
        if change.forget:
            for plane in held.values():
                plane.clear()
        for came, plane, keys in change.changes:
            held[plane] = held[plane] | set(keys.tolist()) if came else held[plane] - set(keys.tolist())

    command = [sys.executable, str(DRIVER.with_name("sglang_events.py")), str(SGLANG), live, replay]
    root = bytes(32)
    right = {key for tokens in (PROMPT, OTHER) for key in keys_of(chain_keys(tokens, root=root)).tolist()}

    async def follow(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        assert process.stdin is not None
        follower = Follower(asyncio.get_running_loop())
        try:
            # The first batch is there before anybody follows, so it is asked for; the others come live.
            for batches, expected in enumerate((right, right, set()), 1):
                assert (await asyncio.to_thread(process.stdout.readline)).strip() == str(batches)
                if batches == 1:
                    translator = Translator(lambda adapter: root, most=1000)
                    follower.follow(Following("sglang", live, replay, translator, took))
                await asyncio.to_thread(eventually, lambda batches=batches: len(taken) == batches)
                assert held[MEMORY] == expected, batches
                process.stdin.write("\n")
                process.stdin.flush()
        finally:
            await asyncio.to_thread(follower.close)

    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            asyncio.run(follow(process))
        finally:
            process.kill()
    assert not held[DISK]
