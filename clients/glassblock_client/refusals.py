"""What pydantic refuses, told as the error that the service would answer with."""

import re
from typing import cast

from glassblock.errors import InvalidValue
from pydantic import ValidationError


def refusal(fault: ValidationError) -> InvalidValue:
    """The error for the first field at fault, with the values it takes where they are a closed set."""
    faults = fault.errors(include_url=False, include_input=False)
    first = faults[0]
    # Of the alternatives of one field, the one that got furthest is the one that was meant.
    meant = max(
        (other for other in faults if other["loc"][:1] == first["loc"][:1]), key=lambda other: len(other["loc"])
    )
    # pydantic puts the alternative it tried (`list[int]`) into the path; a caller never wrote that.
    field = ".".join(str(step) for step in meant["loc"] if isinstance(step, int) or step.isidentifier())
    message = meant["msg"][:1].lower() + meant["msg"][1:]
    expected = cast("str", meant.get("ctx", {}).get("expected", ""))
    known = tuple(re.findall(r"'([^']*)'", expected))
    others = f" (and {len(faults) - 1} more)" if len(faults) > 1 and meant is first else ""
    return InvalidValue(f"{field or 'the message'}: {message}{others}", field=field, known=known)
