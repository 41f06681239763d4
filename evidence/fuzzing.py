"""Schemathesis over the whole OpenAPI document: no defect, and every answer within its schema."""

import re
import sys
import tempfile
from pathlib import Path

from record import ROOT, Promise, publish

sys.path.insert(0, str(ROOT / "tests"))
from fuzz.walk import CHECKS, WITHOUT_END, walk

EXAMPLES = 150
SEEDS = (7, 8)


def main() -> int:
    promises: list[Promise] = []
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            said = walk(examples=EXAMPLES, seed=seed, folder=Path(folder))
        cases = re.search(r"(\d+) generated.*", said.stdout)
        operations = re.search(r"Tested: (\d+)", said.stdout)
        if said.returncode:
            sys.stderr.write(said.stdout + said.stderr)
        measured = f"{operations[1] if operations else '?'} operations, {cases[0] if cases else 'no count'}"
        promises.append(
            Promise(
                f"no 5xx but 503 with Retry-After, every answer within its schema; seed {seed}",
                measured,
                not said.returncode,
            )
        )
    says = (
        f"Valid and invalid data, {EXAMPLES} examples for each operation besides the boundary cases, against a service"
        f" over loopback; half of the names are of a checkpoint that is there. Checks: {', '.join(CHECKS)}."
        f" The stream {WITHOUT_END} is left out."
    )
    return publish("Fuzzing the schema", says, promises, [])


if __name__ == "__main__":
    sys.exit(main())
