#!/usr/bin/env bash
# Slurm's Prolog (slurm.conf: Prolog=/etc/slurm/prolog.d/…, PrologFlags=Alloc), as root on each node before a job: sees to it
# that tierfs is mounted, and brings the steps that the job will load into the node's RAM meanwhile.
#
# It fails, and Slurm drains the node and queues the job again, only where there is no mount: the job would write to the
# node's disk. docs/deploy-slurm.md has the settings.
set -u
here=$(dirname "$(readlink -f "$0")")
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$here/common.sh"

if ! is_mounted; then
    if [ -d /run/systemd/system ]; then
        timeout 180 systemctl start "tierfs@$INSTANCE"
    else
        timeout 180 tierfs mount "$MOUNTPOINT" -o "name=$INSTANCE"
    fi
    if ! is_mounted; then
        say "tierfs can't be mounted on $MOUNTPOINT; see \`tierfs doctor\`"
        exit 1
    fi
fi
# An epilog, or a notice that did not come true, may have told it to drain. Alone (2) it never drains.
tierfs drain --stop "$INSTANCE" >/dev/null 2>&1

[ "$PREFETCH" = yes ] || exit 0

# This node's number among the job's; scontrol only unfolds the list here, and asks nobody.
node_number() {
    local number
    number=$(scontrol show hostnames "${SLURM_JOB_NODELIST:-}" 2>/dev/null | grep -n -x -F "${SLURMD_NODENAME:-$(hostname -s)}")
    [ -n "$number" ] && echo $((${number%%:*} - 1))
}

job_namespaces | while read -r each; do
    step=$MOUNTPOINT/${each%:*}/latest
    [ -e "$step" ] || continue
    files=()
    if [[ $each == *:* ]] && number=$(node_number); then
        ranks=${each##*:}
        files+=(--files .metadata)
        for ((rank = number * ranks; rank < (number + 1) * ranks; rank++)); do
            files+=(--files "__${rank}_*")
        done
    fi
    # In the background, and not as a child of slurmd's script: the job begins meanwhile, and its reads come first.
    setsid --fork timeout "$PREFETCH_TIMEOUT" tierfs prefetch "$step" ${files[@]+"${files[@]}"} </dev/null >/dev/null 2>&1
    say "bringing $step"
done
exit 0
