"""Commands of `tools/`: what an interpreter lacks is said, and how to come to one that has it."""

import subprocess
import sys

from deploy.dockerfile import ROOT


def test_an_interpreter_without_torch_is_told_what_to_do() -> None:
    # Without its site-packages this interpreter has the standard library alone.
    bare = [sys.executable, "-I", "-S", str(ROOT / "tools" / "smollm2.py")]
    ended = subprocess.run(bare, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "has no torch" in ended.stderr
    assert "make smollm2" in ended.stderr
    assert "Traceback" not in ended.stderr
