# shellcheck shell=bash disable=SC2034  # what is set here is used by those who source it
# What prolog and epilog share: the settings of /etc/tierfs/slurm.conf, and what a job says of its checkpoints.
#
# A job names the namespaces that it loads from and saves to in its comment, with the ranks of a node where each rank loads
# its own files only (DCP's __RANK_N.distcp):
#
#   sbatch --comment="tierfs=run1:8" …        or tierfs=run1,shared/base and other words around it

PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin${TIERFS_SLURM_PATH:+:$TIERFS_SLURM_PATH}

INSTANCE=ckpt
MOUNTPOINT=/ckpt
PREFETCH=yes          # bring latest of the job's namespaces into this node's RAM, in the background
PREFETCH_TIMEOUT=1h
EPILOG=flush          # flush: the job's namespaces to the object tier; drain: all that only this node holds; none
EPILOG_TIMEOUT=10min
settings=${TIERFS_SLURM_CONF:-/etc/tierfs/slurm.conf}
# shellcheck source=/dev/null
[ ! -r "$settings" ] || . "$settings"

say() {
    logger -t "tierfs-${0##*/}" -- "job ${SLURM_JOB_ID:-?}: $*" 2>/dev/null || echo "tierfs: job ${SLURM_JOB_ID:-?}: $*" >&2
}

# Asks in a process of its own, with a bound: an answer of a file system may never come.
is_mounted() {
    [ "$(timeout 30 findmnt --noheadings --first-only --output FSTYPE --mountpoint "$MOUNTPOINT" 2>/dev/null)" = fuse.tierfs ] &&
        timeout 30 stat --file-system "$MOUNTPOINT" >/dev/null 2>&1
}

# The job's namespaces, one a line: NAME, or NAME:RANKS. Only those that are there and belong to the job's user: anybody can
# write anything into a comment, and this runs as root.
job_namespaces() {
    local - said list word name
    set -f  # what a job says is split into words, and no more
    for said in ${SLURM_JOB_COMMENT:-}; do
        [[ $said == tierfs=* ]] || continue
        list=${said#tierfs=}
        for word in ${list//,/ }; do
            name=${word%:*}
            if [[ ! $word =~ ^[A-Za-z0-9._/-]+(:[1-9][0-9]{0,3})?$ || $name == *..* || $name == /* ]]; then
                say "no namespace: $word"
            elif [ ! -d "$MOUNTPOINT/$name" ]; then
                say "$name is not there yet"
            elif [ "$(stat -c %u "$MOUNTPOINT/$name")" != "${SLURM_JOB_UID:-0}" ]; then
                say "$name is not of this job's user"
            else
                echo "$word"
            fi
        done
    done
}
