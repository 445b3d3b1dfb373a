"""The journal of an upload: what a daemon's successor finds, whatever stopped the daemon."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tierfs.checksum import FileChecksum
from tierfs.objects.client import PartJournal, SentFile
from tierfs.objects.store import SentPart
from tierfs.persist.upload_journal import StepJournal, all_journals
from tierfs.steps.manifest import FileEntry

ENTRY = FileEntry(100, 5, 11)
DONE = SentFile("e", FileChecksum(100, 7, (7,)))


def journal_file(meta: Path) -> Path:
    return next(meta.rglob("*.jsonl"))


def test_a_successor_finds_parts_and_whole_files(tmp_path: Path) -> None:
    journal = StepJournal.open(tmp_path, "team/run", "step_1")
    file: PartJournal = journal.of_file("a/b", ENTRY)
    file.started("u1")
    file.sent(SentPart(1, 60, "e1", 3), (3,))
    file.sent(SentPart(2, 40, "e2", 4), (4, 5))
    journal.of_file("whole", ENTRY).finished(DONE)
    found = StepJournal.open(tmp_path, "team/run", "step_1")
    again = found.of_file("a/b", ENTRY)
    assert (again.upload_id, again.parts, again.chunks) == ("u1", file.parts, {1: (3,), 2: (4, 5)})
    assert found.of_file("whole", ENTRY).done == DONE
    assert found.uploads() == [("a/b", "u1")]
    assert [(each.namespace, each.step) for each in all_journals(tmp_path)] == [("team/run", "step_1")]
    found.drop()
    assert list(all_journals(tmp_path)) == []


def test_a_file_that_changed_begins_anew_and_its_upload_is_abandoned(tmp_path: Path) -> None:
    journal = StepJournal.open(tmp_path, "run", "step_1")
    journal.of_file("a", ENTRY).started("u1")
    changed = StepJournal.open(tmp_path, "run", "step_1")
    again = changed.of_file("a", FileEntry(100, 6, 11))
    assert (again.upload_id, again.parts, changed.abandoned) == ("", {}, [("a", "u1")])
    again.started("u2")
    after_that = StepJournal.open(tmp_path, "run", "step_1")
    assert set(after_that.uploads()) == {("a", "u1"), ("a", "u2")}


def test_an_upload_that_the_store_lost_is_forgotten(tmp_path: Path) -> None:
    journal = StepJournal.open(tmp_path, "run", "step_1")
    file = journal.of_file("a", ENTRY)
    file.started("u1")
    file.sent(SentPart(1, 60, "e1", 3), (3,))
    file.forget()
    file.started("u2")
    again = StepJournal.open(tmp_path, "run", "step_1").of_file("a", ENTRY)
    assert (again.upload_id, again.parts) == ("u2", {})


@given(cut=st.integers(0, 400), more=st.binary(max_size=30))
def test_a_torn_or_damaged_journal_costs_only_what_it_lost(tmp_path_factory: object, cut: int, more: bytes) -> None:
    meta = Path(tmp_path_factory.mktemp("meta"))  # type: ignore[attr-defined]
    journal = StepJournal.open(meta, "run", "step_1")
    for name in ("a", "b", "c"):
        journal.of_file(name, ENTRY).finished(DONE)
    journal.close()
    data = journal_file(meta).read_bytes()
    journal_file(meta).write_bytes(data[:cut] + more)
    found = StepJournal.open(meta, "run", "step_1")
    known = [name for name in ("a", "b", "c") if found.of_file(name, ENTRY).done == DONE]
    assert all(found.of_file(name, ENTRY).done in (None, DONE) for name in ("a", "b", "c"))
    found.of_file("d", ENTRY).finished(DONE)
    found.close()
    if cut > 50:  # with its head
        again = StepJournal.open(meta, "run", "step_1")
        assert [name for name in ("a", "b", "c") if again.of_file(name, ENTRY).done == DONE] == known
        assert again.of_file("d", ENTRY).done == DONE
