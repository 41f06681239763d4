"""Jacobian norms on the GPU are those of the CPU: exact ones, brackets, parts that couple tokens."""

from typing import Any

import numpy as np
import pytest
from glassblock.wire.jacobians import JacobiansAnswer
from glassblock_client import Client, Reply
from makers import Tiny

from gpu.conftest import Both

pytestmark = pytest.mark.gpu

# Float64 sums of 48 and 112 products in two orders, magnified by up to a hundred where terms cancel.
FLOAT64 = 1e-11
ROWS = np.random.default_rng(3).standard_normal((6, Tiny().hidden))


def asked(client: Client, family: str, **request: Any) -> Reply[JacobiansAnswer]:
    return client.jacobians(family, [1], x=ROWS, tolerance=1e-6, **request)


@pytest.mark.parametrize("part", ["norm", "ffn", "branch", "block"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "olmo2", "gpt2"])
def test_every_token_has_the_numbers_of_the_cpu(both: Both, family: str, part: Any) -> None:
    (ours,), (theirs,) = (asked(client, family, part=part).answer.layers for client in (both.gpu, both.cpu))
    for here, there in zip(ours.tokens, theirs.tokens, strict=True):
        assert here.frobenius == pytest.approx(there.frobenius, rel=FLOAT64)
        assert there.frobenius is not None
        assert here.trace == pytest.approx(there.trace, abs=FLOAT64 * there.frobenius)
        assert here.radial_gain == pytest.approx(there.radial_gain, abs=FLOAT64 * there.frobenius)
        assert here.spectral is not None
        assert there.spectral is not None
        assert here.spectral.converged
        assert here.spectral.lower <= there.spectral.upper
        assert there.spectral.lower <= here.spectral.upper
    assert ours.self_check is not None
    assert ours.self_check.relative_difference < 1e-7


@pytest.mark.parametrize("part", ["attention", "layer"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_coupled_parts_have_the_numbers_of_the_cpu(both: Both, family: str, part: Any) -> None:
    (ours,), (theirs,) = (asked(client, family, part=part).answer.layers for client in (both.gpu, both.cpu))
    assert ours.whole is not None
    assert theirs.whole is not None
    assert ours.whole.frobenius is not None
    assert theirs.whole.frobenius is not None
    # The same probes, from the seed alone.
    assert ours.whole.frobenius.frobenius == pytest.approx(theirs.whole.frobenius.frobenius, rel=FLOAT64)
    assert ours.whole.spectral is not None
    assert theirs.whole.spectral is not None
    assert ours.whole.spectral.lower == pytest.approx(theirs.whole.spectral.lower, rel=1e-6)
    assert ours.self_check is not None
    assert ours.self_check.relative_difference < 1e-7


def test_the_depth_of_layers_is_that_of_the_cpu(both: Both) -> None:
    ours, theirs = (
        client.jacobians("llama", [0, 1], part="layer", x=ROWS, depth=True, norms=["frobenius"]).answer.depth
        for client in (both.gpu, both.cpu)
    )
    assert ours is not None
    assert theirs is not None
    np.testing.assert_allclose(ours.residual_rms, theirs.residual_rms, rtol=FLOAT64)
    np.testing.assert_allclose(ours.to_end.frobenius, theirs.to_end.frobenius, rtol=FLOAT64)
