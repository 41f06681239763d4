"""The JSON schema of a report. Committed as `docs/report.schema.json`; a test guards it.

python -m glassblock.reports.schema > docs/report.schema.json
"""

import json
import sys
from typing import Any

from glassblock.wire.audits import Report
from glassblock.wire.values import SCHEMA_VERSION

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def report_schema() -> dict[str, Any]:
    """Draft 2020-12. What older reports of this `schema_version` lack is not required.

    A reader should let fields pass that it does not know: a newer version may add some without a new
    `schema_version`.
    """
    schema = Report.model_json_schema(mode="validation")
    metrics = schema["$defs"]["LayerMetrics"]["properties"]["metrics"]
    metrics["description"] = "a number that is none is one of the strings NaN, Infinity and -Infinity"
    schema["properties"]["schema_version"] = {"const": SCHEMA_VERSION}
    schema["required"] = ["schema_version", *schema["required"]]
    return {"$schema": DIALECT} | schema


if __name__ == "__main__":
    sys.stdout.write(json.dumps(report_schema(), indent=2) + "\n")
