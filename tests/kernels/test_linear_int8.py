"""linear_int8: the kernel under the interpreter against the torch reference, and the quantiser."""

import pytest
import torch

from minispec.kernels.linear_int8 import linear_int8_ref, linear_int8_triton, quantize_int8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 64, 48), (3, 200, 33), (17, 576, 64), (65, 128, 20), (0, 8, 8)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_int8(rows, inputs, outputs, bias, dtype):
    weight, scale = quantize_int8(torch.randn(outputs, inputs))
    x = torch.randn(rows, inputs + 3).to(dtype)[:, :inputs]
    offset = torch.randn(outputs).to(dtype) if bias else None
    actual = linear_int8_triton(x, weight, scale, offset)
    expected = linear_int8_ref(x, weight, scale, offset)
    torch.testing.assert_close(actual, expected, atol=2e-2 if dtype == torch.float16 else 1e-4, rtol=1e-3)


def test_a_row_s_result_does_not_depend_on_its_neighbours():
    weight, scale = quantize_int8(torch.randn(32, 256))
    x = torch.randn(16, 256)
    assert torch.equal(linear_int8_triton(x[5:6], weight, scale), linear_int8_triton(x, weight, scale)[5:6])


def test_quantiser():
    weight = torch.randn(7, 130).to(torch.bfloat16)
    weight[3] = 0
    q, scale = quantize_int8(weight)
    assert q.dtype == torch.int8 and q.abs().amax(-1).tolist() == [127, 127, 127, 0, 127, 127, 127]
    error = (q.float() * scale[:, None] - weight.float()).abs()
    assert (error <= scale[:, None] * 0.5 + 1e-6).all()
