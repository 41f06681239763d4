"""Every endpoint, asked what its schema allows and what it does not: no defect, and every answer within its schema."""

import re
from pathlib import Path

import pytest

from fuzz.walk import walk


@pytest.mark.real
@pytest.mark.timeout(400)
def test_no_request_finds_a_defect_or_an_answer_outside_its_schema(tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    said = walk(examples=15, seed=1, folder=tmp_path)
    assert said.returncode == 0, said.stdout[-6000:] + said.stderr[-2000:]
    (cases,) = re.findall(r"(\d+) generated, \1 passed", said.stdout)
    assert int(cases) > 1000
    assert "Traceback" not in (tmp_path / "service.log").read_text()
