#!/usr/bin/env bash
# Slurm's Epilog, as root on each node after a job: what the job saved is made durable before the node is given to others.
#
# With EPILOG=flush it sends the job's namespaces to the object tier, for EPILOG_TIMEOUT at most; what is not there then goes on
# in the background. With EPILOG=drain it hands all that only this node holds to other nodes, and fails when that is not
# all done: Slurm then drains the node, so that nobody powers it off with the only copy.
set -u
here=$(dirname "$(readlink -f "$0")")
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$here/common.sh"

is_mounted || exit 0
case $EPILOG in
flush)
    paths=()
    while read -r each; do
        # `latest` is the step to go on from; older ones that policy wants are owed anyway.
        [ ! -e "$MOUNTPOINT/${each%:*}/latest" ] || paths+=("$MOUNTPOINT/${each%:*}/latest")
    done < <(job_namespaces)
    [ ${#paths[@]} -gt 0 ] || exit 0
    if said=$(tierfs flush "${paths[@]}" --wait --timeout "$EPILOG_TIMEOUT" 2>&1); then
        say "in the object tier: ${paths[*]}"
    else
        say "not in the object tier yet: ${said:0:500}"
    fi
    ;;
drain)
    if ! said=$(tierfs drain "$INSTANCE" --timeout "$EPILOG_TIMEOUT" 2>&1); then
        say "this node still holds what no other has: ${said:0:500}"
        exit 1
    fi
    ;;
none) ;;
*) say "EPILOG=$EPILOG in $settings: flush, drain or none" ;;
esac
exit 0
