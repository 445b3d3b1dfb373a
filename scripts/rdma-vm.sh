#!/usr/bin/env bash
# Runs a command as root in a throw-away virtual machine whose kernel has an RDMA device: soft-RoCE (rdma_rxe).
# Usage: rdma-vm.sh [-t SECONDS] [-m MIB] -- COMMAND...
#
# The guest's root is this machine's, so the command finds the interpreter, the virtual environment and the working tree
# that it would find here. What it writes goes to the guest's memory and is forgotten; nothing reaches this machine. HOME
# and TMPDIR are /run, which is empty at first. Its devices: rxe0 (10.99.0.1), which processes in other network
# namespaces see as well. Nothing is installed: a kernel package of the distribution is unpacked into
# ${XDG_CACHE_HOME:-~/.cache}/tierfs once, about 400 MB. RDMA_VM_ACCEL=kvm is faster where KVM is to be had; without
# (tcg) the processor is emulated, and a start takes 5 to 20 s.
#
# The exit code is the command's; 77 where the machine can't be had here, with the reason as the last line on standard
# error; 125 where the guest did not come to the command's end within SECONDS (170); 64 for wrong usage.
set -euo pipefail

seconds=170 mib=1536
accel=${RDMA_VM_ACCEL:-tcg}
cache=${XDG_CACHE_HOME:-$HOME/.cache}/tierfs/rdma-vm
export PATH=$PATH:/usr/sbin:/sbin

usage() {
    echo "usage: rdma-vm.sh [-t SECONDS] [-m MIB] -- COMMAND..." >&2
    exit 64
}

cannot() {
    echo "rdma-vm: $*" >&2
    exit 77
}

while getopts t:m: option; do
    case $option in
    t) seconds=$OPTARG ;;
    m) mib=$OPTARG ;;
    *) usage ;;
    esac
done
shift $((OPTIND - 1))
[ $# -gt 0 ] || usage
[[ $seconds =~ ^[1-9][0-9]*$ && $mib =~ ^[1-9][0-9]*$ ]] || usage

[ "$(uname -m)" = x86_64 ] || cannot "only for x86_64, and this is $(uname -m)"
[ "$(id -u)" = 0 ] || cannot "the guest reads this machine's files as this user: only root may read all that it needs"
for tool in qemu-system-x86_64:qemu-system-x86 busybox:busybox-static cpio:cpio depmod:kmod modprobe:kmod ip:iproute2 rdma:iproute2; do
    command -v "${tool%:*}" >/dev/null || cannot "no ${tool%:*} here: install ${tool#*:}"
done
busybox=$(command -v busybox)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$cache"
exec 9>"$cache/lock"
flock -w "$seconds" 9 || cannot "another one prepares $cache, and does not come to an end"

# The generic kernel: the cloud flavour has no rdma_rxe. Whole only once it was moved to its place.
find_kernel() {
    local found=("$cache"/kernel-*)
    [ -d "${found[-1]}" ] && basename "${found[-1]}"
}

fetch_kernel() {
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || cannot "a kernel is taken from Debian's packages, and this is no Debian"
    local package
    package=$(apt-cache depends linux-image-amd64 2>/dev/null | awk '/Depends: linux-image-/ { print $2; exit }')
    [ -n "$package" ] || cannot "apt knows no linux-image-amd64: run apt-get update, on Debian"
    local version=${package#linux-image-} unpacked=$cache/unpacking.$$
    rm -rf "$cache"/unpacking.*
    mkdir "$unpacked"
    # apt's own user may not write here, and says so; it then downloads as root.
    (cd "$work" && apt-get -q download "$package" >apt.log 2>&1) || cannot "$package could not be downloaded: $(tail -n 1 "$work/apt.log")"
    dpkg-deb -x "$work/$package"_*.deb "$unpacked" || cannot "$package could not be unpacked into $cache"
    rm -f "$work/$package"_*.deb
    [ -d "$unpacked/lib/modules" ] || { mkdir -p "$unpacked/lib" && mv "$unpacked/usr/lib/modules" "$unpacked/lib/"; }
    depmod -b "$unpacked" "$version"
    modprobe -d "$unpacked" -S "$version" --show-depends rdma_rxe >/dev/null 2>&1 || cannot "the kernel of $package has no rdma_rxe"
    mv "$unpacked" "$cache/kernel-$version"
}

# What the guest needs until it reaches this machine's root: busybox and the modules of virtio, 9p and overlay.
make_initramfs() {
    local root=$work/initramfs module number=0
    mkdir -p "$root"/{bin,modules,proc,sys,dev,machine,memory,root}
    cp "$busybox" "$root/bin/busybox"
    for module in virtio_pci virtio_rng 9pnet_virtio 9p overlay; do
        modprobe -d "$kernel" -S "$version" --show-depends "$module" | awk '$1 == "insmod" { print $2 }'
    done | awk '!seen[$0]++' >"$work/modules"
    while read -r module; do
        number=$((number + 1))
        cp "$module" "$root/modules/$(printf '%02d' $number)-$(basename "$module")"
    done <"$work/modules"
    cat >"$root/init" <<'INIT'
#!/bin/busybox sh
b=/bin/busybox
$b mount -t proc proc /proc
$b mount -t sysfs sysfs /sys
$b mount -t devtmpfs dev /dev
for module in /modules/*; do $b insmod $module; done
$b mount -t tmpfs memory /memory && $b mkdir /memory/upper /memory/work
if $b mount -t 9p -o trans=virtio,version=9p2000.L,ro,msize=512000,cache=loose root /machine &&
    $b mount -t overlay -o lowerdir=/machine,upperdir=/memory/upper,workdir=/memory/work overlay /root; then
    $b mount -t proc proc /root/proc
    $b mount -t sysfs sysfs /root/sys
    $b mount -t devtmpfs dev /root/dev
    $b mkdir -p /root/dev/shm /root/dev/pts
    $b mount -t tmpfs shm /root/dev/shm
    $b mount -t devpts pts /root/dev/pts
    $b mount -t tmpfs run /root/run
    $b mount -t 9p -o trans=virtio,version=9p2000.L,rw,msize=512000 answer /root/mnt
    # As the first process, so that the kernel's own threads have that root as well, and find modprobe.
    exec $b chroot /root /bin/bash /mnt/guest
fi
$b poweroff -f
INIT
    chmod +x "$root/init"
    (cd "$root" && find . | cpio -o -H newc --quiet | gzip -1) >"$work/initramfs.gz"
    mv "$work/initramfs.gz" "$kernel/initramfs.gz"
}

version=$(find_kernel) || { fetch_kernel && version=$(find_kernel); }
kernel=$cache/$version
version=${version#kernel-}
# An older one was made by another edition of this script.
[ -s "$kernel/initramfs.gz" ] && [ "$kernel/initramfs.gz" -nt "${BASH_SOURCE[0]}" ] || make_initramfs
flock -u 9

mkdir "$work/answer"
{
    printf 'export PATH=%q HOME=/run TMPDIR=/run TIERFS_RDMA_VM=1 TIERFS_RAM_BALLAST=off\n' "$PATH"
    [ -z "${PYTHONPATH:-}" ] || printf 'export PYTHONPATH=%q\n' "$PYTHONPATH"
    # The kernel itself loads modules from there, when they are first needed.
    printf 'mkdir -p /lib/modules && ln -sfn %q /lib/modules/%q\n' "$kernel/lib/modules/$version" "$version"
    cat <<'GUEST'
prepare() {
    ip link set lo up && modprobe -a dummy fuse ib_uverbs rdma_rxe &&
        ip link add dummy0 type dummy && ip address add 10.99.0.1/24 dev dummy0 &&
        ip link set dummy0 mtu 9000 up && rdma link add rxe0 type rxe netdev dummy0
}
GUEST
    printf 'if prepare && cd %q; then\n    touch /mnt/started\n   ' "$PWD"
    printf ' %q' "$@"
    printf '\n    echo $? >/mnt/exit-code\nfi\nsync\n%q poweroff -f\n' "$busybox"
} >"$work/answer/guest"

cpu=max
# Emulated, wide vectors and five levels of page tables cost a quarter of the time more than the oldest processor that
# numpy's wheels run on.
[ "$accel" != tcg ] || { accel=tcg,thread=multi && cpu=Nehalem; }
# No -smp beyond 2: emulated processors wait for each other.
began=$SECONDS
timeout -k 5 "$seconds" qemu-system-x86_64 -M q35 -accel "$accel" -cpu "$cpu" -smp 2 -m "$mib" \
    -nodefaults -no-user-config -no-reboot -display none -serial stdio \
    -kernel "$kernel/boot/vmlinuz-$version" -initrd "$kernel/initramfs.gz" \
    -append "console=ttyS0 quiet panic=-1 mitigations=off nokaslr tsc=reliable random.trust_cpu=on" \
    -fsdev local,id=root,path=/,security_model=none,readonly=on,multidevs=remap \
    -device virtio-9p-pci,fsdev=root,mount_tag=root \
    -fsdev "local,id=answer,path=$work/answer,security_model=none" \
    -device virtio-9p-pci,fsdev=answer,mount_tag=answer \
    -device virtio-rng-pci </dev/null || true

if [ -s "$work/answer/exit-code" ]; then
    exit "$(cat "$work/answer/exit-code")"
elif [ -e "$work/answer/started" ]; then
    echo "rdma-vm: the command did not come to its end; stopped after $((SECONDS - began)) s (-t $seconds)" >&2
else
    echo "rdma-vm: the guest did not come to the command within $((SECONDS - began)) s (-t $seconds)" >&2
fi
exit 125
