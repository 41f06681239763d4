"""Exit statuses of `glassblock audit` with the service in the same process, as a pipeline sees them."""

import subprocess
import sys
from pathlib import Path

import pytest
from makers import tiny_checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("exit")
    swapped = folder / "swapped"
    planter = [sys.executable, str(EXAMPLES / "plant_swap.py"), str(EXAMPLES / "tiny-llama"), str(swapped)]
    subprocess.run([*planter, "--layers", "1"], check=True, capture_output=True)
    truncated = tiny_checkpoint("llama", folder / "truncated")
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    return {
        "healthy": EXAMPLES / "tiny-llama",
        "swapped": swapped,
        "untrained": tiny_checkpoint("llama", folder / "untrained"),
        "truncated": truncated,
        "absent": folder / "absent",
    }


@pytest.mark.parametrize(
    ("name", "options", "status", "words"),
    [
        ("healthy", (), 0, "PASS"),
        ("swapped", (), 1, "ffn/gate-up-swapped"),
        ("swapped", ("--fail-on", "never"), 0, "FAIL"),
        ("untrained", (), 3, "INCONCLUSIVE"),
        ("untrained", ("--allow-inconclusive",), 0, "INCONCLUSIVE"),
        ("truncated", (), 1, "container/truncated"),
        ("absent", (), 2, "there is no"),
    ],
)
def test_exit_status(
    checkpoints: dict[str, Path], name: str, options: tuple[str, ...], status: int, words: str
) -> None:
    command = [sys.executable, "-m", "glassblock_client", "audit", str(checkpoints[name]), *options]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert ended.returncode == status, ended.stdout + ended.stderr
    assert words in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
