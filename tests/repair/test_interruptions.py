"""A repair broken off at any call to the system: the original as it was, the output whole or absent."""

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from glassblock.checkpoint.changes import Add
from glassblock.checkpoint.in_place import JOURNAL, interrupted, undo_interrupted, write_in_place
from glassblock.checkpoint.opened import open_checkpoint
from glassblock.checkpoint.patches import Alter, Declare, Draft, Rename, drafted
from glassblock.checkpoint.writing import BACKUP_MARK, DRAFT_MARK, remove_abandoned, write_checkpoint
from glassblock.errors import GlassblockError, InvalidValue
from plants import SINGLE, healthy_checkpoint

CALLS = ("write", "copy_file_range", "fsync", "rename", "replace", "unlink", "open", "mkdir", "rmdir")
GATE, UP = (f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up"))
EXCHANGED = Rename({GATE: UP, UP: GATE})
EPS = Declare("rms_norm_eps", 1e-6)

Tree = dict[str, bytes]


def tree(directory: Path) -> Tree:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def silent(*_: object) -> None: ...


@contextmanager
def at_call(number: int, what: Callable[[], object]) -> Iterator[list[str]]:
    """Do something before the call of that number, counted from 0; the calls made so far."""
    made: list[str] = []
    real = {name: getattr(os, name) for name in CALLS}

    def counted(name: str) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            made.append(name)
            if len(made) - 1 == number:
                what()
            return real[name](*given, **named)

        return call

    for name in CALLS:
        setattr(os, name, counted(name))
    try:
        yield made
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def no_room() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def interrupt() -> None:
    raise KeyboardInterrupt


def killed_at(number: int, work: Callable[[], object]) -> bool:
    """Whether a process that does the work was killed before its call of that number."""
    child = os.fork()
    if child == 0:
        with suppress(BaseException), at_call(number, lambda: os.kill(os.getpid(), signal.SIGKILL)):
            work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.fixture
def original(tmp_path: Path) -> Path:
    directory = tmp_path / "original"
    healthy_checkpoint("llama", directory, shards=1)
    (directory / "tokenizer.json").write_text("{}")
    (directory / "extra").mkdir()
    (directory / "extra" / "notes.txt").write_text("kept")
    return directory


def moving(directory: Path) -> Draft:
    """A draft that copies bytes, computes some and rewrites the config."""
    return drafted(open_checkpoint(directory), (Alter("model.norm.weight", (Add(1.0),)), EPS, EXCHANGED))


def in_headers(directory: Path) -> Draft:
    return drafted(open_checkpoint(directory), (EPS, EXCHANGED))


def calls_of(work: Callable[[], object]) -> int:
    with at_call(-1, lambda: None) as made:
        work()
    return len(made)


def written(original: Path, output: Path) -> Tree:
    write_checkpoint(moving(original), output, tick=silent)
    return tree(output)


@pytest.mark.parametrize("fault", [no_room, interrupt], ids=["disk full", "Ctrl-C"])
def test_an_output_that_cannot_be_finished_leaves_nothing(
    fault: Callable[[], object], original: Path, tmp_path: Path
) -> None:
    before, output = tree(original), tmp_path / "out"
    whole = written(original, tmp_path / "whole")
    draft = moving(original)
    count = calls_of(lambda: write_checkpoint(draft, tmp_path / "counted", tick=silent))
    assert count > 20
    refused = 0
    for number in range(count):
        draft = moving(original)
        try:
            with at_call(number, fault):
                write_checkpoint(draft, output, tick=silent)
        except (GlassblockError, KeyboardInterrupt):
            refused += 1
        assert tree(original) == before
        assert [path.name for path in tmp_path.iterdir() if DRAFT_MARK in path.name] == []
        if output.exists():
            assert tree(output) == whole
            for path in sorted(output.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            output.rmdir()
    assert refused > 20


def test_a_process_killed_at_any_call_leaves_the_output_whole_or_absent(original: Path, tmp_path: Path) -> None:
    before, whole = tree(original), written(original, tmp_path / "whole")
    draft = moving(original)
    count = calls_of(lambda: write_checkpoint(draft, tmp_path / "counted", tick=silent))
    kills = 0
    for number in range(count):
        output, draft = tmp_path / f"out{number}", moving(original)
        kills += killed_at(number, lambda draft=draft, output=output: write_checkpoint(draft, output, tick=silent))
        assert tree(original) == before
        assert not output.exists() or tree(output) == whole
        if not output.exists():
            # The next attempt removes what was left and succeeds.
            write_checkpoint(moving(original), output, tick=silent)
            assert tree(output) == whole
            assert list(tmp_path.glob(f".{output.name}.*")) == []
    assert kills > 20


@pytest.mark.parametrize("fault", [no_room, interrupt], ids=["disk full", "Ctrl-C"])
def test_a_change_in_place_that_cannot_be_finished_is_undone(fault: Callable[[], object], original: Path) -> None:
    before, draft = tree(original), in_headers(original)
    with at_call(-1, lambda: None) as made:
        write_in_place(draft)
    changed = tree(original)
    assert made
    restore(original, before)
    for number in range(len(made)):
        draft = in_headers(original)
        with at_call(number, fault), pytest.raises((GlassblockError, KeyboardInterrupt)):
            write_in_place(draft)
        assert tree(original) == before
    write_in_place(in_headers(original))
    assert tree(original) == changed


def refuse_writing(patch: pytest.MonkeyPatch, after: int) -> None:
    """From the call of that number on, every one that would write finds a file system that is read-only."""
    calls = 0

    def refusing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            nonlocal calls
            if real is os_open and not given[1] & (os.O_WRONLY | os.O_CREAT):
                return real(*given, **named)
            calls += 1
            if calls > after:
                raise OSError(errno.EROFS, "Read-only file system")
            return real(*given, **named)

        return call

    os_open = os.open
    for name in ("open", "write", "replace", "rename", "unlink", "fsync"):
        patch.setattr(os, name, refusing(getattr(os, name)))


def test_a_disk_that_turns_read_only_leaves_all_as_it_was_or_what_brings_it_back(
    original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree(original)
    write_in_place(in_headers(original))
    changed = tree(original)
    restore(original, before)
    after = 0
    for after in range(30):
        draft = in_headers(original)
        with monkeypatch.context() as patch:
            refuse_writing(patch, after)
            try:
                write_in_place(draft)
            except GlassblockError as error:
                told = error.message
            else:
                break
        if "stands whole" in told:
            assert tree(original) == changed
            restore(original, before)
            continue
        assert interrupted(original) == ("broken off" in told)
        undo_interrupted(original)
        for name in tree(original).keys() - before.keys():
            (original / name).unlink()  # copies made before anything was changed are in nobody's way
        assert tree(original) == before
    assert after > 10


def test_a_folder_that_may_not_be_written_is_told_first(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, draft = tree(original), in_headers(original)

    def denied(*_: object) -> bool:
        return False

    monkeypatch.setattr(os, "access", denied)
    with pytest.raises(InvalidValue, match="original may not be written"):
        write_in_place(draft)
    assert tree(original) == before


def test_a_process_killed_in_place_is_undone_by_the_next(original: Path) -> None:
    before, draft = tree(original), in_headers(original)
    count = calls_of(lambda: write_in_place(draft))
    changed = tree(original)
    restore(original, before)
    states: set[str] = set()
    for number in range(count):
        draft = in_headers(original)
        assert killed_at(number, lambda draft=draft: write_in_place(draft))
        broken_off = interrupted(original)
        undo_interrupted(original)
        left = {name: raw for name, raw in tree(original).items() if not is_beside(name)}
        done = left == {name: raw for name, raw in changed.items() if not is_beside(name)}
        assert done or left == before
        assert not (done and broken_off)
        states.add(f"{broken_off} {done}")
        if not done:
            write_in_place(in_headers(original))
            assert tree(original) == changed
        restore(original, before)
    assert states == {"False False", "True False", "False True"}


def test_an_undo_that_is_killed_itself_is_done_by_the_next(original: Path) -> None:
    before = tree(original)
    draft = in_headers(original)
    last = calls_of(lambda: write_in_place(draft)) - 3
    restore(original, before)
    for number in range(100):
        draft = in_headers(original)
        assert killed_at(last, lambda draft=draft: write_in_place(draft))
        assert interrupted(original)
        killed = killed_at(number, lambda: undo_interrupted(original))
        undo_interrupted(original)
        assert {name: raw for name, raw in tree(original).items() if not is_beside(name)} == before
        restore(original, before)
        if not killed:
            break
    else:
        pytest.fail("the undo never came to its end")


def is_beside(name: str) -> bool:
    return name.endswith((BACKUP_MARK, ".part")) or name == JOURNAL


def restore(directory: Path, before: Tree) -> None:
    for name in tree(directory):
        if name not in before:
            (directory / name).unlink()
    for name, raw in before.items():
        (directory / name).write_bytes(raw)


def test_too_little_room_is_told_before_anything_is_written(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs

    class Full:
        f_bavail, f_frsize = 10, 4096

    monkeypatch.setattr(os, "statvfs", lambda path: Full() if real(path) else None)
    with pytest.raises(InvalidValue, match=r"out needs [\d,]+ bytes, and 40,960 are free"):
        write_checkpoint(moving(original), tmp_path / "out", tick=silent)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["original"]


def test_an_output_that_is_there_stays(original: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").write_text("mine")
    with pytest.raises(InvalidValue, match="out is there already"):
        write_checkpoint(moving(original), tmp_path / "out", tick=silent)
    assert tree(tmp_path / "out") == {"file": b"mine"}


def test_a_draft_that_another_process_writes_is_left_to_it(original: Path, tmp_path: Path) -> None:
    output, seen = tmp_path / "out", list[str]()

    def meanwhile(_done: int, _total: int, what: str) -> None:
        if what == SINGLE:
            (folder,) = tmp_path.glob(f".out.*{DRAFT_MARK}")
            assert remove_abandoned(output) == ()
            assert folder.exists()
            seen.append(folder.name)

    write_checkpoint(moving(original), output, tick=meanwhile)
    assert seen
    assert "config.json" in tree(output)


def test_an_output_that_appears_meanwhile_is_not_replaced(original: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"

    def meanwhile(_done: int, _total: int, _what: str) -> None:
        output.mkdir(exist_ok=True)
        (output / "file").write_text("mine")

    with pytest.raises(InvalidValue, match="out cannot be written"):
        write_checkpoint(moving(original), output, tick=meanwhile)
    assert tree(output) == {"file": b"mine"}
