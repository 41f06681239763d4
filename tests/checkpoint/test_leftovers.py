"""What interrupted writers leave behind: found by its exact name, and a journal read as warily as any file."""

from pathlib import Path

import pytest
from glassblock.checkpoint.in_place import JOURNAL, undo_interrupted
from glassblock.checkpoint.writing import DRAFT_MARK, remove_abandoned
from glassblock.errors import DamagedCheckpoint


def test_a_name_with_brackets_finds_its_own_drafts_and_no_others(tmp_path: Path) -> None:
    own, others = tmp_path / f".model[1].0a{DRAFT_MARK}", tmp_path / f".model1.0a{DRAFT_MARK}"
    own.mkdir()
    others.mkdir()
    assert remove_abandoned(tmp_path / "model[1]") == (own.name,)
    assert [path.name for path in tmp_path.iterdir()] == [others.name]


@pytest.mark.parametrize("journal", ["[" * 100_000, "not JSON", "[]", '{"a": 1, "a": 2}'])
def test_a_journal_that_is_none_is_told(tmp_path: Path, journal: str) -> None:
    (tmp_path / JOURNAL).write_text(journal)
    with pytest.raises(DamagedCheckpoint, match="cannot be read"):
        undo_interrupted(tmp_path)
