#!/usr/bin/env bash
# Installs the system packages that tierfs and its tests need, if any is missing, and sees to it that /dev/fuse is there.
# Debian 12, Ubuntu 22.04 and 24.04. Needs root or sudo only where something has to be done.
set -euo pipefail

packages=(
    python3 python3-venv python3-dev gcc libc6-dev pkg-config  # the virtual environment; pyfuse3 and the channel are compiled
    libfuse3-dev fuse3                                         # libfuse and fusermount3
    attr acl rsync tar coreutils util-linux procps             # tools that the tests run on the mount
    iproute2 nftables kmod                                     # network namespaces of the cluster tests; modprobe
    etcd-server etcd-client openssl                            # the tests run clusters with an etcd of their own
    systemd systemd-container                                  # the tests run the unit in a container
)

as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        echo "this needs root or sudo: $*" >&2
        return 1
    fi
}

keep_etcd_stopped() {
    if [ -d /run/systemd/system ]; then
        as_root systemctl disable --now etcd || true
    elif [ -x /etc/init.d/etcd ]; then
        as_root /etc/init.d/etcd stop || true
        as_root update-rc.d etcd disable || true
    fi
}

is_installed() {
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

if ! command -v dpkg-query >/dev/null; then
    echo "Not a Debian or Ubuntu: please see to it that what these packages hold is there: ${packages[*]}" >&2
else
    missing=()
    for package in "${packages[@]}"; do
        is_installed "$package" || missing+=("$package")
    done
    if [ "${#missing[@]}" -gt 0 ]; then
        echo "installing: ${missing[*]}"
        as_root apt-get -q -o DPkg::Lock::Timeout=120 update
        as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends \
            -o DPkg::Lock::Timeout=120 install "${missing[@]}"
        # The package also starts a service. The tests start etcd themselves, so leave this machine as it was.
        case " ${missing[*]} " in *" etcd-server "*) keep_etcd_stopped ;; esac
    fi
fi

if [ ! -e /dev/fuse ]; then
    as_root modprobe fuse 2>/dev/null || true
    # A container has no modprobe and often no udev: 10,229 is the device's fixed number (Documentation/admin-guide/devices.txt).
    [ -e /dev/fuse ] || as_root mknod -m 666 /dev/fuse c 10 229 || echo "no /dev/fuse: nothing can be mounted here" >&2
fi

# fusermount3 keeps to /etc/mtab, which a root made by debootstrap alone does not have.
[ -e /etc/mtab ] || as_root ln -s ../proc/self/mounts /etc/mtab
