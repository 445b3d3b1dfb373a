#!/usr/bin/env bash
# Runs the tests of RDMA in a virtual machine that has a device (rdma-vm.sh). Usage: test-verbs.sh VENV [TESTS...], or
# test-verbs.sh VENV --bench for bench/transport_verbs.py.
#
# Without TESTS, those of vm-tests.txt. What is missing is installed on Debian, as root. Exits 0 with a line SKIPPED and the
# reason where the machine can't be had. One run is ended after VM_SECONDS (170), and tried once more: an emulated
# processor on a busy machine may be too slow, and then its tests are SKIPPED, too. All tests of a cluster take longer:
# `VM_SECONDS=600 make test-verbs TESTS=tests/rdma/test_cluster_verbs.py`.
set -uo pipefail

cd "$(dirname "$0")/.."
venv=$1
shift
[ "${1:-}" != --bench ] || is_bench=yes
packages=(qemu-system-x86 busybox-static cpio kmod iproute2 python3-pyverbs ibverbs-providers rdma-core)
[ -z "${is_bench:-}" ] || packages+=(perftest)
log=$(mktemp -d)
trap 'rm -rf "$log"' EXIT

skip() {
    echo "SKIPPED tests of RDMA: $*"
    exit 0
}

is_installed() {
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

command -v dpkg-query >/dev/null || skip "the virtual machine is made of Debian's packages, and this is no Debian"
missing=()
for package in "${packages[@]}"; do
    is_installed "$package" || missing+=("$package")
done
if [ "${#missing[@]}" -gt 0 ]; then
    [ "$(id -u)" = 0 ] || skip "not installed, and not root to do it: ${missing[*]}"
    echo "installing: ${missing[*]}"
    { apt-get -q -o DPkg::Lock::Timeout=120 update &&
        DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends -o DPkg::Lock::Timeout=120 \
            install "${missing[@]}"; } >"$log/apt" 2>&1 ||
        skip "apt-get can't install ${missing[*]}: $(grep -m 1 '^E:' "$log/apt")"
fi

# The distribution's pyverbs alone, for this run alone: the rest of its packages must not hide the virtual environment's.
mkdir "$log/path"
ln -s /usr/lib/python3/dist-packages/pyverbs "$log/path/pyverbs"
export PYTHONPATH=$log/path
"$venv/bin/python" -c 'import pyverbs.device' 2>"$log/import" ||
    skip "the distribution's pyverbs is not for $("$venv/bin/python" -V): $(tail -n 1 "$log/import")"

# Compiled here once: an emulated processor would take seconds for it, in each process.
PYTHONDONTWRITEBYTECODE='' "$venv/bin/python" -m compileall -q tierfs mount dcp_compat tests

if [ -n "${is_bench:-}" ]; then
    export PYTHONPATH=$log/path:$PWD/tests:$PWD
    scripts/rdma-vm.sh -m 2048 -t "${VM_SECONDS:-900}" -- "$venv/bin/python" bench/transport_verbs.py
    exit
fi

run_once() {
    scripts/rdma-vm.sh -m 2048 -t "${VM_SECONDS:-170}" -- \
        env PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 "$venv/bin/python" -m pytest -c scripts/vm-pytest.ini "$@" 2>"$log/vm"
    code=$?
    cat "$log/vm" >&2
    [ "$code" != 77 ] || skip "$(tail -n 1 "$log/vm")"
    return $code
}

run() {
    run_once "$@" && return
    echo "tests of RDMA ended with $code: once more"
    run_once "$@" && return
    [ "$code" != 125 ] || skip "the virtual machine did not come to their end, twice: a busy machine, or a hang: ${*: -1}"
    exit $code
}

if [ $# -gt 0 ]; then
    run -p pytest_trio.plugin -o trio_mode=true "$@"
else
    while read -r line <&3; do
        read -r -a tests <<<"${line%%#*}"
        [ "${#tests[@]}" = 0 ] || run "${tests[@]}"
    done 3<scripts/vm-tests.txt
fi
