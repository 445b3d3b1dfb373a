#!/usr/bin/env bash
# Builds rdma-core's libraries and the pyverbs that fits them, both of one release. Usage: build-rdma.sh PREFIX [PYTHON]
#
# PREFIX gets lib/ (libibverbs, librdmacm, libefa, libmlx5), lib/libibverbs/ and etc/libibverbs.d/ (the drivers, which
# libibverbs looks for in these places and no others) and python/pyverbs, for the given Python. Some 4 minutes of CPU;
# needed are gcc, cmake, ninja, pkg-config, libnl-3-dev and libnl-route-3-dev, and the index that pip uses.
set -euo pipefail

prefix=${1:?"usage: build-rdma.sh PREFIX [PYTHON]"}
python=${2:-python3}
# The release of both. docs/rdma.md says which Cython each can be built with.
release=59.0
cython='cython>=3.0.12,<3.2'
# EFA, RoCE and InfiniBand; rxe and siw are the kernel's own software devices.
drivers=(efa mlx5 rxe siw)

fail() {
    tail -n 30 "$1" >&2
    exit 1
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

# The package on PyPI is the whole of rdma-core's source. pip asks it for its metadata, for which it wants its build
# requirements.
"$python" -m venv tools
tools/bin/python -m pip install -q --upgrade 'pip>=25.3' "$cython"
echo "$cython" >constraints.txt
tools/bin/python -m pip download -q --no-deps --no-binary pyverbs --build-constraint constraints.txt "pyverbs==$release"
tar -xzf "pyverbs-$release.tar.gz"
source=$work/pyverbs-$release/rdma-core

# pyverbs is built where the Python that CMake is given has Cython.
cmake -G Ninja -S "$source" -B build -DCMAKE_BUILD_TYPE=Release -DNO_MAN_PAGES=1 \
    -DCMAKE_INSTALL_PREFIX="$prefix" -DCMAKE_INSTALL_LIBDIR=lib -DCMAKE_INSTALL_SYSCONFDIR="$prefix/etc" \
    -DPYTHON_EXECUTABLE="$work/tools/bin/python" >cmake.log 2>&1 || fail cmake.log

# Without the part of pyverbs that is mlx5's alone: it takes most of the time, and tierfs uses none of it.
mapfile -t modules < <(ninja -C build -t targets all | sed -n 's/^\(python\/pyverbs[^:]*\):.*/\1/p' | grep -v mlx5)
targets=("${drivers[@]/#/providers/}")
[ "${#modules[@]}" -gt 0 ] || fail cmake.log
ninja -C build libibverbs/all librdmacm/all "${targets[@]/%//all}" "${modules[@]}" >ninja.log 2>&1 || fail ninja.log

mkdir -p "$prefix"/lib/libibverbs "$prefix/etc/libibverbs.d" "$prefix/python"
cp -a build/lib/lib*.so.* "$prefix/lib/"
for driver in "${drivers[@]}"; do
    built=$(echo "build/lib/lib$driver-rdmav"*.so)
    if [ -L "$built" ]; then
        # It is a library of its own as well, and must be loaded once: the one tells devices by what the other made.
        ln -sfn "../$(basename "$(readlink -f "$built")")" "$prefix/lib/libibverbs/$(basename "$built")"
    else
        cp "$built" "$prefix/lib/libibverbs/"
    fi
    # Not those of build/etc, which name the drivers in the build's own place.
    cp "build/providers/$driver/$driver.driver" "$prefix/etc/libibverbs.d/"
done
# Its modules of Python are links into the source, and not all of them are there.
cp -rL build/python/pyverbs "$prefix/python/"
(cd "$source/pyverbs" && find . -name '*.py' -exec cp --parents -t "$prefix/python/pyverbs" {} +)
rm -rf "$prefix/python/pyverbs/providers/mlx5"

LD_LIBRARY_PATH=$prefix/lib PYTHONPATH=$prefix/python "$python" -c 'import pyverbs.device, pyverbs.providers.efa.efadv'
