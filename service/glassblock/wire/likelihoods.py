"""`POST /v1/likelihoods`: how likely a model finds a text, token by token."""

from typing import Annotated

from pydantic import Field

from glassblock.wire.values import (
    Answer,
    BytesRead,
    ComputeDtype,
    FamilyName,
    FamilyRow,
    Nested,
    Request,
    Text,
    TokenIds,
)


class LikelihoodRequest(Request):
    """The log-likelihood of a text, or of several of one length, under a checkpoint."""

    checkpoint: Annotated[str, Field(min_length=1, max_length=4096, description="path under a root")]
    family: FamilyName = None
    family_row: FamilyRow = None
    token_ids: TokenIds = None
    text: Text = None
    dtype: Annotated[
        ComputeDtype | None, Field(description="run every step in this type, as an engine would; else float32 at least")
    ] = None


class LikelihoodAnswer(Answer):
    """Natural logarithms, token by token."""

    checkpoint: str
    family: str
    verified: Annotated[str, Field(description="how far the family's row was checked against the real model")]
    device: str
    compute_dtype: str
    token_ids: Nested
    pieces: Annotated[
        tuple[str, ...] | tuple[tuple[str, ...], ...] | None,
        Field(description="the piece of text that each token is, where the checkpoint has a tokenizer.json"),
    ] = None
    log_likelihoods: Annotated[
        Nested, Field(description="ln p of every token but the first, given those before it: one fewer than tokens")
    ]
    mean: Annotated[float, Field(description="over all of them, in float64; exp(-mean) is the perplexity")]
    read: BytesRead
    notes: tuple[str, ...] = ()
