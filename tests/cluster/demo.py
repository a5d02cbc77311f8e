"""`make demo-cluster`: two servers, one pool. A computes a long prompt, B hits it within a second of A's acknowledged save; A
is killed, and B, and a third one with nothing of its own, go on.

The pool lies on a real MooseFS, which two clients mount in network namespaces of their own; where this machine forbids that,
on a plain directory, and that is said.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))  # it is run as a script, and `benchmarks` is not installed

from benchmarks import moosefs

from headstart.cli.demo import FIRST_QUESTION, QUESTIONS, messages_for
from headstart.cli.server_process import Answer, ServerProcess

MAX_TOKENS = 16
SEEN_S = 60.0


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--json", action="store_true", help="one JSON object at the end, and nothing else")
    options.add_argument("--plain", action="store_true", help="on a plain directory, without a MooseFS")
    given = options.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # or the cluster would outlive it

    def say(line: str) -> None:
        if not given.json:
            print(line, flush=True)

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headstart-cluster-")))
        pools, file_system = _pools(stack, folder, plain=given.plain, say=say)
        result = run(given.model, pools, folder, say) | {"file_system": file_system}
    if given.json:
        print(json.dumps(result))
    assert result["same_text"], "B answered with another text than A"
    assert result["hit_tokens_b"] >= result["prompt_tokens"] - 300, "B did not hit what A had computed"
    assert result["hit_tokens_c"] >= result["prompt_tokens"] - 300, "C did not hit what the dead A had computed"


def run(model: str, pools: list[Path], folder: Path, say: moosefs.Say) -> dict[str, object]:
    servers = {
        name: ServerProcess(
            [
                model,
                "--cache-directory",
                str(folder / name),
                "--cache-capacity",
                "2GiB",
                "--pool",
                str(pool),
                "--pool-capacity",
                "2GiB",
            ],
            log=folder / f"{name}.log",
        )
        for name, pool in zip("abc", (*pools, pools[1]), strict=True)
    }
    try:
        for name in "ab":
            say(f"starting server {name.upper()}")
            servers[name].start()
        cold = servers["a"].ask(messages_for(FIRST_QUESTION), max_tokens=MAX_TOKENS)
        prompt_tokens = int(cold.usage["prompt_tokens"])
        say(f"A computed {prompt_tokens:,} tokens, first token after {cold.first_token_s:.2f} s")
        acknowledged = _wait_until_saved(servers["a"])
        seen_s = _wait_until_seen(servers["b"], pool_extents(servers["a"])) - acknowledged
        say(f"B sees it {max(0.0, seen_s):.2f} s after A's save was acknowledged")
        hit = servers["b"].ask(messages_for(FIRST_QUESTION), max_tokens=MAX_TOKENS)
        say(f"B answers the same, {_hits(hit):,} tokens from the pool, first token after {hit.first_token_s:.2f} s")
        say("SIGKILL for A; its disk stays where it is")
        servers["a"].kill()
        _wait_until_saved(servers["b"])
        after = servers["b"].ask(messages_for(QUESTIONS[0]), max_tokens=MAX_TOKENS)
        say(f"B goes on: {_hits(after):,} tokens hit, first token after {after.first_token_s:.2f} s")
        servers["b"].stop()
        servers["c"].start()
        third = servers["c"].ask(messages_for(QUESTIONS[1]), max_tokens=MAX_TOKENS)
        say(f"C, new and with an empty disk: {_hits(third):,} tokens hit, first token after {third.first_token_s:.2f} s")
    finally:
        for server in servers.values():
            server.stop()
    return {
        "prompt_tokens": prompt_tokens,
        "cold_ttft_s": cold.first_token_s,
        "seen_s": max(0.0, seen_s),
        "hit_tokens_b": _hits(hit),
        "hit_ttft_s": hit.first_token_s,
        "hit_tokens_b_after": _hits(after),
        "hit_tokens_c": _hits(third),
        "same_text": hit.text == cold.text,
    }


def pool_extents(server: ServerProcess) -> int:
    """How many extents a server knows of in the pool."""
    return int(server.metric("headstart_tier_extents", tier="pool"))


def _hits(answer: Answer) -> int:
    return int(answer.usage["prompt_cache_hit_tokens"])


def _wait_until_saved(server: ServerProcess) -> float:
    """Return when all saves were acknowledged: written to every tier, the pool last."""
    while server.metric("headstart_saves_pending"):
        time.sleep(0.01)
    return time.monotonic()


def _wait_until_seen(server: ServerProcess, extents: int) -> float:
    deadline = time.monotonic() + SEEN_S
    while pool_extents(server) < extents:
        assert time.monotonic() < deadline, f"B does not see what A saved after {SEEN_S:.0f} s"
        time.sleep(0.01)
    return time.monotonic()


def _pools(stack: ExitStack, folder: Path, *, plain: bool, say: moosefs.Say) -> tuple[list[Path], str]:
    """Return two machines' views of one empty directory, and what it lies on."""
    if not plain:
        try:
            say("starting a MooseFS: a master, three chunk servers, two clients")
            cluster = stack.enter_context(moosefs.cluster(say=say))
            clients = [cluster.mount() for _ in range(2)]
        except moosefs.Forbidden as why:
            say(f"NO REAL CLUSTER: {why}; on a plain directory instead")
        else:
            (clients[0].path / "kv").mkdir()
            return [client.path / "kv" for client in clients], "MooseFS"
    pool = folder / "pool"
    pool.mkdir()
    return [pool, pool], "a plain directory"


if __name__ == "__main__":
    main()
