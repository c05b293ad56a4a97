#!/usr/bin/env bash
# Compiles the library with CUDA 12, for sm_70 too, which CUDA 13 no longer knows:
#
#   tools/cuda12_build.sh [TOOLKIT]     into build/cuda12
#
# TOOLKIT is the folder of a CUDA 12 toolkit. Without it one is put together in build/cuda12-toolkit: PyPI has the
# headers and the static runtime of CUDA 12, but no nvcc. That comes from Debian 13's package nvidia-cuda-toolkit,
# which is unpacked and not installed, through the mirror that apt uses here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=python3
[[ ! -x .venv/bin/python ]] || python=$PWD/.venv/bin/python

# The newest runtime wheel alone has the static library; the headers are those of this nvcc.
HEADERS=(nvidia-cuda-nvcc-cu12==12.4.131 nvidia-cuda-runtime-cu12==12.4.127 nvidia-cuda-cccl-cu12==12.4.127.post1)
STATIC_RUNTIME=nvidia-cuda-runtime-cu12==12.9.79

fetch_nvcc() {  # FOLDER: Debian's package, unpacked there
  local mirror state=$PWD/build/cuda12-apt
  mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' | grep -v security | head -n 1)
  mkdir -p "$state"/{lists,cache/archives}/partial
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie non-free" >"$state/sources.list"
  cat >"$state/apt.conf" <<END
Dir::State::Lists "$state/lists";
Dir::Cache "$state/cache";
Dir::Etc::SourceList "$state/sources.list";
Dir::Etc::SourceParts "/nonexistent";
END
  APT_CONFIG=$state/apt.conf apt-get update -qq
  (cd "$state" && APT_CONFIG=$state/apt.conf apt-get download -qq nvidia-cuda-toolkit)
  dpkg-deb -x "$state"/nvidia-cuda-toolkit_*.deb "$1"
}

make_toolkit() {  # FOLDER
  local scratch
  scratch=$(mktemp -d)
  mkdir -p "$1"/{bin,include,lib64,nvvm/bin}
  fetch_nvcc "$scratch/debian"
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$scratch/headers" "${HEADERS[@]}"
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$scratch/static" "$STATIC_RUNTIME"
  local part debian=$scratch/debian/usr
  for part in "$scratch"/headers/nvidia/*/include; do cp -r "$part"/. "$1/include/"; done
  cp "$scratch"/static/nvidia/cuda_runtime/lib/libcudart_static.a "$1/lib64/"
  cp -r "$debian"/lib/nvidia-cuda-toolkit/bin/{nvcc,crt} "$debian"/bin/{bin2c,cudafe++,fatbinary,nvlink,ptxas} "$1/bin/"
  cp "$debian"/lib/nvidia-cuda-toolkit/bin/cicc "$1/nvvm/bin/"
  cp -r "$debian"/lib/nvidia-cuda-toolkit/libdevice "$1/nvvm/"
  cat >"$1/bin/nvcc.profile" <<'END'
NVVMIR_LIBRARY_DIR = $(_HERE_)/../nvvm/libdevice
PATH              += $(_HERE_)/../nvvm/bin:$(_HERE_):
INCLUDES          += "-I$(_HERE_)/../include" $(_SPACE_)
LIBRARIES         =+ $(_SPACE_) "-L$(_HERE_)/../lib64"
END
  rm -rf "$scratch"
}

toolkit=${1-$PWD/build/cuda12-toolkit}
[[ -x $toolkit/bin/nvcc ]] || make_toolkit "$toolkit"
export PATH=$toolkit/bin:$PATH
nvcc --version | grep release
start=$SECONDS
cmake -S . -B build/cuda12 -G Ninja -DCUFLASH_CUDA=ON -DCUFLASH_TESTS=OFF -DCUDAToolkit_ROOT="$toolkit" \
  "-DCMAKE_CUDA_ARCHITECTURES=70-real;75-real;80-real;90a-real;80-virtual"
cmake --build build/cuda12 --target cuflash
python3 tests/abi/check_symbols.py build/cuda12/lib/libcuflash.so.0 bindings/cuflash.json
echo "built in $((SECONDS - start)) s"
