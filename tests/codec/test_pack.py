"""Packed codes come back, and lie where the layout says."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.codec.pack import pack, unpack
from headrace.codec.spec import BITS, packed_bytes


@given(st.sampled_from(BITS), st.integers(0, 5), st.integers(1, 40), st.integers(0, 99))
def test_codes_come_back(bits: int, num_tokens: int, size: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (num_tokens, size), generator=random, dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (num_tokens, packed_bytes(size, bits))
    assert torch.equal(unpack(packed, bits, size), codes)


@pytest.mark.parametrize(("bits", "expected"), [(4, [0x21, 0x03]), (2, [0b00111001]), (3, [0b11010001, 0])])
def test_the_first_code_lies_in_the_lowest_bits(bits: int, expected: list[int]) -> None:
    assert pack(torch.tensor([[1, 2, 3]], dtype=torch.uint8), bits).tolist() == [expected]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("bits", BITS)
def test_bytes_are_the_same_on_a_gpu(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (50, 77), dtype=torch.uint8)
    assert torch.equal(pack(codes.cuda(), bits).cpu(), pack(codes, bits))
    assert torch.equal(unpack(pack(codes, bits).cuda(), bits, 77).cpu(), codes)
