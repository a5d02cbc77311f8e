"""SGLang's own cache controller, host pools and storage factory, unpacked from its wheel, drive our backend; no GPU, no server.

`sglang_controller.py` is the engine's side, a program of its own: writing is one process, reading another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
