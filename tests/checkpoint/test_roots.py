"""Names under the roots, and links: nothing outside is opened, whatever a name, a link or a file says."""

import errno
import os
import tempfile
from pathlib import Path

import pytest
from glassblock.checkpoint.opened import open_checkpoint
from glassblock.checkpoint.roots import MAX_DEPTH, MAX_NAME_BYTES, Roots, checked_file
from glassblock.errors import AccessRefused, GlassblockError, InvalidValue, TooLarge, UnknownCheckpoint
from makers import tiny_checkpoint


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with two checkpoints, a bare file, and beside it a checkpoint that is none of its business."""
    root = tmp_path / "root"
    tiny_checkpoint("llama", root / "org" / "small")
    tiny_checkpoint("gpt2", root / "other", shards=2)
    tiny_checkpoint("qwen3", root / "bare")
    (root / "bare" / "config.json").unlink()
    tiny_checkpoint("llama", root / ".hidden" / "secret")
    tiny_checkpoint("llama", tmp_path / "outside")
    (root / "empty").mkdir()
    return root


def test_names_are_paths_under_a_root(root: Path) -> None:
    roots = Roots([root])
    assert roots.list().names == ("bare/model.safetensors", "org/small", "other")
    for name in roots.list().names:
        path = roots.resolve(name)
        assert path == root / name
        assert open_checkpoint(path, roots=roots).faults == ()


def test_a_root_that_is_a_checkpoint_is_called_dot(root: Path) -> None:
    roots = Roots([root / "other"])
    assert roots.list().names == (".",)
    assert roots.resolve(".") == root / "other"


def test_several_roots_are_tried_in_order(root: Path, tmp_path: Path) -> None:
    second = tmp_path / "second"
    tiny_checkpoint("llama", second / "other")
    tiny_checkpoint("llama", second / "new")
    roots = Roots([root, second])
    assert roots.resolve("other") == root / "other"
    assert roots.resolve("new") == second / "new"
    assert roots.list().names == ("bare/model.safetensors", "new", "org/small", "other")


REFUSED: list[tuple[str, type[GlassblockError], str]] = [
    ("../outside", AccessRefused, "leads out of the configured roots"),
    ("org/../../outside", AccessRefused, "leads out of the configured roots"),
    ("org/..", AccessRefused, "leads out of the configured roots"),
    ("/etc", AccessRefused, "leads out of the configured roots"),
    ("//etc/passwd", AccessRefused, "leads out of the configured roots"),
    ("", InvalidValue, "is empty"),
    ("org//small", InvalidValue, "has a part"),
    ("org/./small", InvalidValue, "has a part"),
    ("org/small/", InvalidValue, "has a part"),
    ("org\\small", InvalidValue, "has a part"),
    ("org/small\0", InvalidValue, "has a part"),
    ("x" * 256, InvalidValue, "has a part"),
    ("x/" * MAX_NAME_BYTES, InvalidValue, "2048 bytes"),
    ("\ud800", InvalidValue, "no Unicode text"),
    ("org/smal", UnknownCheckpoint, "there is no checkpoint"),
    ("org/small/model.safetensors/x", UnknownCheckpoint, "there is no checkpoint"),
]


@pytest.mark.parametrize(("name", "error", "words"), REFUSED)
def test_other_names_are_refused(root: Path, name: str, error: type[GlassblockError], words: str) -> None:
    with pytest.raises(error, match=words) as refusal:
        Roots([root]).resolve(name)
    assert refusal.value.field == "checkpoint"
    assert refusal.value.hint
    assert len(refusal.value.message) < 300


def test_near_names_are_told(root: Path) -> None:
    with pytest.raises(UnknownCheckpoint) as error:
        Roots([root]).resolve("org/smal")
    assert error.value.hint == "Near: org/small."


def test_links_that_leave_the_roots_are_refused(root: Path, tmp_path: Path) -> None:
    (root / "away").symlink_to(tmp_path / "outside")
    (root / "passwd.safetensors").symlink_to("/etc/passwd")
    (root / "dangling").symlink_to(tmp_path / "nowhere")
    roots = Roots([root])
    for name in ("away", "passwd.safetensors", "dangling", "away/model.safetensors"):
        with pytest.raises(AccessRefused, match="through a link"):
            roots.resolve(name)
    assert "away" not in roots.list().names


def test_a_refused_link_does_not_hide_the_same_name_in_another_root(root: Path, tmp_path: Path) -> None:
    second = tmp_path / "second"
    tiny_checkpoint("llama", second / "away")
    (root / "away").symlink_to(tmp_path / "outside")
    for paths in ([root, second], [second, root]):
        assert Roots(paths).resolve("away") == second / "away"
    with pytest.raises(AccessRefused, match="through a link"):
        Roots([root, tmp_path / "empty"]).resolve("away")


@pytest.mark.parametrize("target", ["nowhere", "model.safetensors"])
def test_a_weight_file_that_is_a_link_to_nowhere_is_damage(root: Path, target: str) -> None:
    path = root / "bare" / "model.safetensors"
    path.unlink()
    path.symlink_to(target)
    found = Roots([root]).resolve("bare/model.safetensors")
    assert found == path
    assert "leads nowhere" in open_checkpoint(found, roots=Roots([root])).faults[0].message


def test_links_inside_the_roots_are_followed(root: Path, tmp_path: Path) -> None:
    (root / "latest").symlink_to(root / "org" / "small")
    roots = Roots([root, tmp_path / "outside"])
    (root / "away").symlink_to(tmp_path / "outside")
    assert roots.resolve("latest") == root / "org" / "small"
    assert roots.resolve("away") == tmp_path / "outside"
    assert {"latest", "away", "org/small"} <= set(roots.list().names)


def test_a_root_may_be_a_link_itself(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    roots = Roots([tmp_path / "link"])
    assert roots.resolve("other") == root / "other"


@pytest.mark.timeout(20)
def test_links_in_a_circle_end(root: Path) -> None:
    (root / "org" / "up").symlink_to(root)
    (root / "self").symlink_to(root / "self")
    deep = root
    for number in range(MAX_DEPTH + 2):
        deep = deep / f"d{number}"
    tiny_checkpoint("llama", deep)
    assert Roots([root]).list().names == ("bare/model.safetensors", "org/small", "other")
    with pytest.raises(GlassblockError):
        Roots([root]).resolve("self")


def test_listing_does_not_stop_at_what_it_may_not_read(root: Path) -> None:
    os.mkfifo(root / "fifo.safetensors")
    (root / "folder.safetensors").mkdir()
    assert Roots([root, root / "gone"]).list().names == ("bare/model.safetensors", "org/small", "other")


@pytest.mark.parametrize(
    ("constant", "most", "stopped"),
    [
        ("MAX_LISTED", 2, "2 checkpoints"),
        ("MAX_LISTED", 3, None),
        ("MAX_FOLDERS", 3, "3 folders"),
        ("MAX_FOLDERS", 6, None),  # the root, bare, empty, org, other, org/small
    ],
)
def test_a_listing_that_stops_says_so(
    root: Path, monkeypatch: pytest.MonkeyPatch, constant: str, most: int, stopped: str | None
) -> None:
    monkeypatch.setattr(f"glassblock.checkpoint.roots.{constant}", most)
    found = Roots([root]).list()
    assert found.stopped == stopped
    assert (len(found.names) == 3) is (stopped is None)


def test_a_directory_of_more_files_than_are_looked_at_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = root / "other"
    count = len(list(other.iterdir()))
    monkeypatch.setattr("glassblock.checkpoint.contents.MAX_FILES", count)
    assert open_checkpoint(other).faults == ()
    (other / "notes.txt").touch()
    for path in (other, next(other.glob("*.safetensors"))):
        with pytest.raises(TooLarge, match=f"more than {count} files") as refused:
            open_checkpoint(path)
        assert refused.value.field == "checkpoint"


# --- files of a checkpoint --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_that_is_a_link_to_elsewhere_is_refused(root: Path, tmp_path: Path, name: str) -> None:
    home = root / "org" / "small"
    (home / name).unlink()
    (home / name).symlink_to("/etc/passwd")
    for roots in (Roots([root]), None):
        with pytest.raises(AccessRefused, match="is a link that leads out") as error:
            open_checkpoint(home, roots=roots)
        assert error.value.file == name


def test_an_index_that_is_a_link_to_elsewhere_is_refused(root: Path, tmp_path: Path) -> None:
    name = "model.safetensors.index.json"
    (root / "other" / name).rename(tmp_path / "index.json")
    (root / "other" / name).symlink_to(tmp_path / "index.json")
    with pytest.raises(AccessRefused, match="is a link that leads out"):
        open_checkpoint(root / "other", roots=Roots([root]))


def test_a_shard_may_link_into_a_root_only(root: Path, tmp_path: Path) -> None:
    home = root / "org" / "small"
    (home / "model.safetensors").rename(root / "store")
    (home / "model.safetensors").symlink_to(root / "store")
    assert open_checkpoint(home, roots=Roots([root])).faults == ()
    with pytest.raises(AccessRefused):
        open_checkpoint(home, roots=Roots([home]))
    with pytest.raises(AccessRefused):
        open_checkpoint(home)


def cached(cache: Path, repository: str) -> Path:
    """A snapshot as huggingface_hub stores it: links into the blobs of its own repository."""
    snapshot = cache / repository / "snapshots" / "0123abcd"
    blobs = cache / repository / "blobs"
    blobs.mkdir(parents=True)
    tiny_checkpoint("llama", snapshot, shards=2)
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / f"sha{number}")
        file.symlink_to(Path("..") / ".." / "blobs" / f"sha{number}")
    return snapshot


def test_a_hugging_face_snapshot_is_followed_into_its_own_blobs(tmp_path: Path) -> None:
    snapshot = cached(tmp_path / "hub", "models--org--name")
    for roots in (None, Roots([tmp_path / "hub"]), Roots([snapshot])):
        checkpoint = open_checkpoint(snapshot, roots=roots)
        assert checkpoint.faults == ()
        assert checkpoint.layers == 2
    roots = Roots([tmp_path / "hub"])
    (name,) = (name for name in roots.list().names if "snapshots" in name)
    assert roots.resolve(name) == snapshot
    shard = roots.resolve(f"{name}/model-00001-of-00002.safetensors")
    assert shard.name == "model-00001-of-00002.safetensors"
    assert open_checkpoint(shard, roots=roots).config is not None


def test_a_snapshot_is_not_followed_into_another_repository(tmp_path: Path) -> None:
    snapshot = cached(tmp_path / "hub", "models--org--name")
    other = cached(tmp_path / "hub", "models--org--other")
    victim = snapshot / "model-00001-of-00002.safetensors"
    victim.unlink()
    victim.symlink_to(other.parent.parent / "blobs" / "sha1")
    with pytest.raises(AccessRefused):
        open_checkpoint(snapshot, roots=Roots([snapshot]))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(("mode", "closed"), [(0, "folder"), (0o444, "folder/checkpoint"), (0, "folder/checkpoint")])
def test_a_folder_that_is_closed_is_refused(mode: int, closed: str) -> None:
    with tempfile.TemporaryDirectory() as root:
        Path(root).chmod(0o755)
        tiny_checkpoint("llama", Path(root) / "folder" / "checkpoint")
        (Path(root) / closed).chmod(mode)
        os.seteuid(65534)
        try:
            with pytest.raises(AccessRefused, match="may not be read: Permission denied"):
                open_checkpoint(Roots([root]).resolve("folder/checkpoint"))
        finally:
            os.seteuid(0)


def test_a_closed_folder_hides_no_checkpoint_of_another_root(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(path: Path) -> bool:
        if path.is_relative_to(root / "org"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return os.path.isdir(path)  # noqa: PTH112

    second = root.parent / "second"
    tiny_checkpoint("llama", second / "org" / "small")
    monkeypatch.setattr(Path, "is_dir", closed)
    assert Roots([root, second]).resolve("org/small") == second / "org" / "small"
    with pytest.raises(AccessRefused, match="may not be read") as error:
        Roots([root]).resolve("org/small")
    assert error.value.field == "checkpoint"


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "", "..", "a/b", "a\0"])
def test_a_file_is_named_plainly(tmp_path: Path, name: str) -> None:
    with pytest.raises(AccessRefused, match="no plain file name"):
        checked_file(tmp_path, name, None)
