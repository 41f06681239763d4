"""How a spectral norm, or a condition number, is wanted."""

from enum import StrEnum
from typing import NamedTuple

import torch

from glassblock.errors import InvalidValue
from glassblock.numerics.layer_grams import DEFAULT_BYTE_BUDGET

DENSE_UP_TO = 1024
DEFAULT_STEPS = 200


class Certificate(StrEnum):
    """Where the upper bound comes from."""

    PROBABLE = "probable"
    FROBENIUS = "frobenius"
    CHOLESKY = "cholesky"
    DENSE = "dense"


class SpectralRequest(NamedTuple):
    """How the spectral norm is wanted.

    Attributes:
        tolerance: How narrow the bracket is to be, relative.
        certificate: Where the upper bound comes from.
        failure_probability: Of a PROBABLE bound, for each token.
        vectors: Whether the top singular vectors are wanted.
        steps: At most so many; never more than d.
        seed: Of the uniform starts; each token has its own, whatever the batches.
        byte_budget: Bytes to work in beside the weights and one token.
    """

    tolerance: float = 1e-2
    certificate: Certificate = Certificate.PROBABLE
    failure_probability: float = 1e-9
    vectors: bool = False
    steps: int = DEFAULT_STEPS
    seed: int = 0
    byte_budget: int = DEFAULT_BYTE_BUDGET

    def check(self, d: int) -> None:
        """Refuse what cannot be met at this width.

        Raises:
            InvalidValue: Naming the field.
        """
        if not 0.0 < self.tolerance < torch.inf:
            raise InvalidValue(
                f"the tolerance is {self.tolerance}", hint="Give a positive finite number.", field="tolerance"
            )
        if not 0.0 < self.failure_probability < 1.0:
            raise InvalidValue(
                f"the failure probability is {self.failure_probability}",
                hint="Give a number between 0 and 1.",
                field="failure_probability",
            )
        if self.steps < 1:
            raise InvalidValue(f"{self.steps} steps are asked for", hint="Ask for one at least.", field="steps")
        if self.certificate is Certificate.DENSE and d > DENSE_UP_TO:
            raise InvalidValue(
                f"a dense decomposition is for widths up to {DENSE_UP_TO}, and this one is {d}",
                hint="Use the certificate 'cholesky'.",
                field="certificate",
            )
