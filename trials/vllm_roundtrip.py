"""The trial connector under the real vLLM: one prompt cold, everything killed, the same prompt from disk, and once damaged.

    python trials/vllm_roundtrip.py --model models/smollm2-135m

Each phase is a process group of its own (API, scheduler and worker processes), so that nothing survives but the directory:
`plain` (no connector), `cold` (saves, then its local prefix cache is emptied and the prompt asked again; ended by SIGKILL),
`hit` (all from disk) and `damaged` (one byte in the middle of every segment flipped). Prints one JSON object; exits 1 when
the greedy tokens of any phase differ from `plain`, or a hit is not what it should be.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROMPT_TOKENS = 1100  # eight pages of 128 and a remainder
SAVED_TOKENS = 1024
ANSWER = 16
TIMEOUT_S = 300.0
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "OMP_NUM_THREADS": "2",
}


def run(phase: str, *, model: Path, directory: Path, report: Path) -> dict[str, Any]:
    """Start vLLM, ask once (`cold`: twice), return tokens and times."""
    from vllm import LLM, SamplingParams

    transfer = None
    if phase != "plain":
        transfer = {
            "kv_connector": "HeadstartTrialConnector",
            "kv_connector_module_path": "vllm_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"directory": str(directory), "report": str(report)},
        }
    llm = LLM(
        model=str(model),
        dtype="float32",
        max_model_len=2048,
        max_num_batched_tokens=512,
        max_num_seqs=4,
        enforce_eager=True,
        kv_transfer_config=transfer,
    )
    text = (HERE.parent / "LICENSE").read_text()
    prompt = {"prompt_token_ids": llm.get_tokenizer()(text)["input_ids"][:PROMPT_TOKENS]}

    def ask() -> dict[str, Any]:
        began = time.perf_counter()
        answer = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=ANSWER), use_tqdm=False)[0]
        return {
            "seconds": round(time.perf_counter() - began, 3),
            "cached_tokens": answer.num_cached_tokens,
            "tokens": list(answer.outputs[0].token_ids),
        }

    result = ask()
    if phase == "cold":
        result["events"] = _wait_for(report, "saved")
        llm.reset_prefix_cache()
        result["again"] = ask()
    return result


def _wait_for(report: Path, event: str) -> list[dict[str, Any]]:
    """Return all events once `event` is among them. Raises TimeoutError."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        events = _events(report)
        if any(e["event"] == event for e in events):
            return events
        time.sleep(0.1)
    raise TimeoutError(f"no {event!r} in {report} within 60 s: {_events(report)}")


def _events(report: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []


def _damage(directory: Path) -> list[str]:
    """Flip one byte in the middle of every large file: in a piece of a middle layer, not in a header."""
    files = [f for f in directory.rglob("*") if f.is_file() and f.stat().st_size > 1 << 20]
    for path in files:
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 0xFF]))
    return [str(path.relative_to(directory)) for path in files]


def _child(phase: str, *, model: Path, directory: Path, report: Path) -> dict[str, Any]:
    """Run one phase as a process group; return what it printed. The group is always killed, `cold` before it can close."""
    report.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--model", str(model), "--phase", phase]
    command += ["--directory", str(directory), "--report", str(report)]
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": path}
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, start_new_session=True
        ) as process,
    ):
        assert process.stdout is not None
        line = ""
        try:
            for line in process.stdout:
                if line.startswith('{"phase"'):
                    break
            else:
                line = ""
            if phase != "cold":
                process.wait(timeout=60)
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended with all its children
                os.killpg(process.pid, signal.SIGKILL)
        if not line:
            log.seek(0)
            print(log.read()[-6000:], file=sys.stderr)
            return {"phase": phase, "tokens": None, "events": _events(report)}
    return json.loads(line) | {"events": _events(report)}


def _usable(phase: dict[str, Any]) -> list[int]:
    return [e["usable_tokens"] for e in phase["events"] if e["event"] == "loaded"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder in float32")
    parser.add_argument("--directory", type=Path, help="cache directory; default: a temporary one")
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--phase", choices=("plain", "cold", "hit", "damaged"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    model = arguments.model.resolve()
    if arguments.phase is not None:
        result = run(arguments.phase, model=model, directory=arguments.directory, report=arguments.report)
        print(json.dumps({"phase": arguments.phase} | result), flush=True)
        if arguments.phase == "cold":
            time.sleep(TIMEOUT_S)  # until killed
        return 0

    with tempfile.TemporaryDirectory() as temporary:
        directory = (arguments.directory or Path(temporary) / "kv").resolve()
        report = Path(temporary) / "events.jsonl"
        phases = {name: _child(name, model=model, directory=directory, report=report) for name in ("plain", "cold", "hit")}
        damaged_files = _damage(directory)
        phases["damaged"] = _child("damaged", model=model, directory=directory, report=report)
    want = phases["plain"]["tokens"]
    again = phases["cold"].get("again", {})
    damaged = _usable(phases["damaged"])
    verdict = {
        "answered": want is not None,
        "same_tokens": all(phase.get("tokens") == want for phase in (*phases.values(), again)),
        "hit_after_restart": _usable(phases["hit"]) == [SAVED_TOKENS],
        "hit_in_the_same_run": _usable(phases["cold"]) == [SAVED_TOKENS],  # the scheduler saw what the worker had written
        "damage_was_noticed": bool(damaged_files) and bool(damaged) and max(damaged) < SAVED_TOKENS,
    }
    print(json.dumps({"verdict": verdict, "phases": phases}, indent=2))
    return 0 if all(verdict.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
