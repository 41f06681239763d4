"""A sketch adds up over the parts of a tensor, in files or in pieces, and survives being written down."""

import json

import pytest
import torch
from glassblock.audit.tensor_sketch import SKETCH_VERSION, TensorSketch, dumped, loaded
from torch import Tensor

NUMBERS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def sketch_of(tensor: Tensor, *, step: int = 1 << 20) -> TensorSketch:
    sketch = TensorSketch()
    for piece in tensor.flatten().split(step):
        sketch = sketch.and_then(piece)
    return sketch


def some(dtype: torch.dtype) -> Tensor:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    tensor[::7] = 0
    tensor[3::50] = torch.finfo(dtype).smallest_normal / 2
    return tensor


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("cut", [0, 1, 7, 500, 999, 1000])
def test_parts_add_up_to_the_whole(cut: int, dtype: torch.dtype) -> None:
    tensor = some(dtype)
    tensor[800] = float("nan")
    whole = sketch_of(tensor)
    joined = sketch_of(tensor[:cut]).joined(sketch_of(tensor[cut:]))
    assert joined.grain == whole.grain
    for name in ("elements", "non_finite", "first_non_finite", "zeros", "subnormal", "least", "most"):
        assert getattr(joined.values, name) == getattr(whole.values, name), name
    assert whole.values.zeros == int((tensor == 0).sum())
    assert whole.values.subnormal == 20
    one, other = sketch_of(some(dtype)), sketch_of(some(dtype), step=7)
    # Sums of 1000 float32 numbers in another order.
    assert other.values.square_sum == pytest.approx(one.values.square_sum, rel=1e-6)


def test_codes_of_two_files_lie_on_the_grids_of_both() -> None:
    small, large = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([16.0, 9.0])
    assert sketch_of(small).joined(sketch_of(large)) == sketch_of(torch.cat([small, large]))


def test_zeros_lie_on_every_grid_and_are_no_narrow_float32_unless_they_are_float32() -> None:
    assert sketch_of(torch.zeros(10)).grain.narrow
    assert not sketch_of(torch.zeros(10, dtype=torch.bfloat16)).grain.narrow
    assert len(sketch_of(torch.zeros(10)).grain.grids) == 5


@pytest.mark.parametrize("dtype", [*NUMBERS, torch.float8_e4m3fn, torch.int32], ids=str)
def test_what_is_written_down_is_read_back(dtype: torch.dtype) -> None:
    tensor = torch.randn(100, generator=torch.Generator().manual_seed(0)).mul(10).to(dtype)
    for sketch in (TensorSketch(), sketch_of(tensor), sketch_of(tensor[:1])):
        assert loaded(dumped(sketch)) == sketch


def test_what_is_not_finite_is_read_back() -> None:
    sketch = sketch_of(torch.tensor([1.0, float("inf"), float("nan")]))
    told = loaded(dumped(sketch))
    assert told is not None
    assert repr(told) == repr(sketch)  # NaN equals nothing
    json.loads(dumped(sketch), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


VERSION = f'"version": {SKETCH_VERSION}'


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", f"{{{VERSION}}}", f'{{{VERSION}, "values": {{"x": 1}}}}'])
def test_another_text_is_no_sketch(text: str) -> None:
    assert loaded(text) is None


def test_another_version_is_no_sketch() -> None:
    text = json.loads(dumped(TensorSketch()))
    assert loaded(json.dumps(text | {"version": SKETCH_VERSION + 1})) is None
