"""A pytest plugin: a checkpoint is audited in a test, and its report is what the test fails with.

    def test_what_we_ship(assert_checkpoint_ok):
        assert_checkpoint_ok("models/my-model", baseline="known.json")

pytest loads this module in every run, so the client is imported by the first audit.
"""

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

if TYPE_CHECKING:
    from glassblock.wire.audits import Report

    from glassblock_client.client import Client

FailOn = Literal["error", "warning", "never"]
COLUMNS = 100


def assert_checkpoint_ok(
    path: str | os.PathLike[str],
    *,
    fail_on: FailOn = "error",
    baseline: str | os.PathLike[str] | None = None,
    rules: Sequence[str] | None = None,
    family: str | None = None,
    family_file: str | os.PathLike[str] | None = None,
    allow_inconclusive: bool = False,
) -> "Report":
    """Audit a checkpoint as `glassblock audit` does, and fail with the report where that would not exit with 0.

    With GLASSBLOCK_URL in the environment the service there is asked, with the key in GLASSBLOCK_KEY, and `path` is a
    checkpoint's name; otherwise one starts in this process, on the device that GLASSBLOCK_DEVICE names.

    Args:
        path: A folder with a config.json, or one safetensors file.
        fail_on: Lowest level of a finding that fails.
        baseline: A JSON report, or a file that `--write-baseline` made: what is in there does not fail.
        rules: Names of rules; all of them when left out.
        family: Row of the family table, where no config names one.
        family_file: A row of your own, as .json or .toml, instead of one.
        allow_inconclusive: Whether a question that stayed open is let pass.

    Returns:
        The report, with known findings marked.

    Raises:
        AssertionError: A finding that is not known, or an open question. The message is the report as text.
        InvalidValue: `fail_on` is no level, or the baseline or the family's file is none.
        GlassblockError: No report was possible.
    """
    __tracebackhide__ = True
    from glassblock.errors import InvalidValue  # noqa: PLC0415  see the top
    from glassblock.reports import REPORTS  # noqa: PLC0415
    from glassblock.reports.baseline import compared, read_baseline  # noqa: PLC0415

    from glassblock_client.cli.audit import FAILING, arguments_of_fix, exit_status  # noqa: PLC0415
    from glassblock_client.cli.family import read_family_row  # noqa: PLC0415
    from glassblock_client.cli.files import read_json_object  # noqa: PLC0415

    if fail_on not in FAILING:
        raise InvalidValue(f"fail_on is {fail_on!r}", field="fail_on", known=tuple(FAILING))
    known = None
    if baseline is not None:
        known = read_baseline(read_json_object(Path(baseline), option="baseline"), name=f"baseline: {baseline}")
    own_family = None if family_file is None else Path(family_file)
    row = read_family_row(family, own_family)
    with _service_of(os.fspath(path)) as (client, name):
        chosen = None if rules is None else list(rules)
        report = client.audit_checkpoint(name, family=family, family_row=row, rules=chosen)
    if known is not None:
        report = compared(report, known, name=str(baseline))
    if exit_status(report, fail_on=fail_on, allow_inconclusive=allow_inconclusive) != 0:
        url = os.environ.get("GLASSBLOCK_URL")
        options = ("--family", family), ("--family-file", own_family), ("--url", url)
        asked = arguments_of_fix(os.fspath(path), *options)
        raise AssertionError(f"{path}\n\n{REPORTS['text'].render(report, width=COLUMNS, asked=asked)}")
    return report


@contextmanager
def _service_of(path: str) -> "Generator[tuple[Client, str]]":
    """A client, and what its service calls the checkpoint at `path`."""
    from glassblock_client.cli.connection import REMOTE_SECONDS, door, name_there, root_and_name  # noqa: PLC0415
    from glassblock_client.client import Client  # noqa: PLC0415

    url = os.environ.get("GLASSBLOCK_URL")
    if url:
        with Client(url, api_key=os.environ.get("GLASSBLOCK_KEY"), timeout=REMOTE_SECONDS) as client:
            yield client, name_there(path)
        return
    root, name = root_and_name(path)
    device = os.environ.get("GLASSBLOCK_DEVICE") or "auto"
    with (
        door().connect(roots=(root,), device=device) as transport,
        Client("http://in-process", timeout=None, transport=transport) as client,
    ):
        yield client, name


@pytest.fixture(name="assert_checkpoint_ok", scope="session")
def _assert_checkpoint_ok() -> "Callable[..., Report]":
    """`assert_checkpoint_ok(path, *, fail_on, baseline, rules, family, family_file, allow_inconclusive)`."""
    return assert_checkpoint_ok
