"""Codes of a few bits, packed into bytes.

In: unsigned codes [T, n] of b bits. Out: bytes uint8 [T, ceil(n b / 8)], first code in the lowest bits, each token on
whole bytes; and back. The same torch operations on every device, so the bytes are the same.
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
    shifts = torch.arange(bits, dtype=torch.uint8, device=codes_TN.device)
    flat = ((codes_TN[..., None] >> shifts) & 1).flatten(1)
    flat = torch.nn.functional.pad(flat, (0, -flat.shape[1] % 8))
    flat = flat.view(len(flat), flat.shape[1] // 8, 8)
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=codes_TN.device)
    packed: torch.Tensor = (flat * weights).sum(-1, dtype=torch.uint8)
    return packed


def unpack(packed_TB: torch.Tensor, bits: int, size: int) -> torch.Tensor:
    """Unpack uint8 [T, ceil(size * bits / 8)] to codes uint8 [T, size]."""
    if bits == 8:
        return packed_TB
    if bits in _PER_BYTE:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed_TB.device)
        parts: torch.Tensor = (packed_TB[..., None] >> shifts) & (2**bits - 1)
        return parts.flatten(1)[:, :size]
    shifts = torch.arange(8, dtype=torch.uint8, device=packed_TB.device)
    flat = ((packed_TB[..., None] >> shifts) & 1).flatten(1)[:, : size * bits].reshape(len(packed_TB), size, bits)
    weights = 2 ** torch.arange(bits, dtype=torch.uint8, device=packed_TB.device)
    codes: torch.Tensor = (flat * weights).sum(-1, dtype=torch.uint8)
    return codes
