"""The object tier of a user without root: no passthrough, and stubs are marked in another attribute."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tests.conftest import needs_root
from tests.mount.keeper_rig import AS_USER, in_namespace

SCRIPT = """
mkdir $D/store && chown 65534:65534 $D/store
tierfs() { as_user $PY -m mount.cli.main "$@"; }
mounted() { tierfs mount $D/ckpt -o name=$N,size=128MiB,object=file://$D/store,persist.settle_s=0; }
sums() { as_user bash -c "cd $D/ckpt/run/step_5 && sha256sum *"; }
save() {
    as_user $PY - $D/ckpt/run/step_5 << 'END'
import json, os, pathlib, sys
step = pathlib.Path(sys.argv[1])
step.mkdir(parents=True, exist_ok=True)
(step / "model.safetensors").write_bytes(os.urandom(20 << 20))
index = {"metadata": {}, "weight_map": {"w": "model.safetensors"}}
(step / "model.safetensors.index.json").write_text(json.dumps(index))
END
}
set -e
trap 'tierfs umount --no-flush $D/ckpt; tierfs umount --discard $N || true' EXIT
mounted
save; sums > $D/first
tierfs wait $D/ckpt/run/step_5 --timeout 20
as_user chmod 400 $D/ckpt/run/step_5/model.safetensors
tierfs evict $D/ckpt/run/step_5
tierfs stat $D/ckpt/run/step_5/model.safetensors --json > $D/stub.json
sums | cmp - $D/first
tierfs evict $D/ckpt/run/step_5
as_user chmod 600 $D/ckpt/run/step_5/model.safetensors
save; sums > $D/second
tierfs wait $D/ckpt/run/step_5 --timeout 20
tierfs umount $D/ckpt
tierfs umount --discard $N
mounted
sums | cmp - $D/second
if sums | cmp -s - $D/first; then exit 1; fi
tierfs evict $D/ckpt/run/step_5
kill -9 $(tierfs status $D/ckpt --json | $PY -c 'import json, sys; print(json.load(sys.stdin)["daemon_pid"])')
for attempt in {1..100}; do  # the mount is made anew, and what was a stub is one again
    sums 2> /dev/null | cmp -s - $D/second && exit
    sleep 0.1
done
exit 1
"""


def test_a_user_without_root_persists_evicts_and_loads() -> None:
    needs_root()
    with tempfile.TemporaryDirectory(prefix="tierfs-test-") as name:
        directory = Path(name)
        (directory / "ckpt").mkdir()
        in_namespace(AS_USER + SCRIPT, directory, N=f"user-{directory.name}")
        assert json.loads((directory / "stub.json").read_text())["tier"] == "object"
