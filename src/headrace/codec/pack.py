"""Codes of a few bits, packed into bytes.

In: unsigned codes [T, n] of b bits. Out: bytes uint8 [T, ceil(n b / 8)], first code in the lowest bits, each token on
whole bytes; and back. Eight codes of b bits are b bytes, made as one 64-bit word. The same torch operations on every
device, so the bytes are the same.
"""

import torch

_PER_BYTE = {8: 1, 4: 2, 2: 4}


def pack(codes_TN: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes uint8 [T, n], each below 2**bits, to uint8 [T, ceil(n * bits / 8)]."""
    if bits == 8:
        return codes_TN
    per_byte = _PER_BYTE.get(bits)
    if per_byte is not None:
        padded = torch.nn.functional.pad(codes_TN, (0, -codes_TN.shape[1] % per_byte))
        parts = padded.view(len(padded), padded.shape[1] // per_byte, per_byte)
        out = parts[..., 0].clone()
        for i in range(1, per_byte):
            out |= parts[..., i] << (bits * i)
        return out
    size = codes_TN.shape[1]
    padded = torch.nn.functional.pad(codes_TN, (0, -size % 8))
    eights = padded.view(len(padded), padded.shape[1] // 8, 8).long()
    words = eights[..., 0].clone()
    for i in range(1, 8):
        words |= eights[..., i] << (bits * i)
    parts_TWB = torch.stack([(words >> (8 * j)) & 0xFF for j in range(bits)], -1)
    return parts_TWB.to(torch.uint8).flatten(1)[:, : -(-size * bits // 8)]


def unpack(packed_TB: torch.Tensor, bits: int, size: int) -> torch.Tensor:
    """Unpack uint8 [T, ceil(size * bits / 8)] to codes uint8 [T, size]."""
    if bits == 8:
        return packed_TB
    if bits in _PER_BYTE:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed_TB.device)
        parts: torch.Tensor = (packed_TB[..., None] >> shifts) & (2**bits - 1)
        return parts.flatten(1)[:, :size]
    padded = torch.nn.functional.pad(packed_TB, (0, -packed_TB.shape[1] % bits))
    parts = padded.view(len(padded), padded.shape[1] // bits, bits).long()
    words = parts[..., 0].clone()
    for j in range(1, bits):
        words |= parts[..., j] << (8 * j)
    codes_TWE = torch.stack([(words >> (bits * i)) & (2**bits - 1) for i in range(8)], -1)
    return codes_TWE.to(torch.uint8).flatten(1)[:, :size]
