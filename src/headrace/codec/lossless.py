"""The codec `lossless`: the same bits back, exponents coded apart from the rest.

In: states [T, L, H] in bfloat16 or float32. Out: a zstd frame of exponents, one dimension after the other, less each
dimension's usual exponent; then the other bits as they are, for they hold no redundancy. Payload, little-endian: uint32
length of the frame, uint8 [L*H] usual exponents, the frame, the rest [T, L*H].
"""

import numpy as np
import numpy.typing as npt
import torch
import zstandard

from headrace.codec.base import TORCH_DTYPES, OfTaps, check_finite
from headrace.codec.spec import CodecSpec
from headrace.errors import CodecError

_LEVEL = 3
_REST_BITS = {"bfloat16": 7, "float32": 23}  # of the mantissa; the sign goes with them


class LosslessCodec(OfTaps):
    """Bit-exact; features are the raw states."""

    def __init__(self, spec: CodecSpec) -> None:
        """Raises: CodecError for float16, whose exponents are too few to be worth it."""
        if spec.dtype not in _REST_BITS:
            raise CodecError(f"states in {' or '.join(_REST_BITS)}", spec.dtype, "choose raw or fp8")
        super().__init__(spec)
        self._bits = _REST_BITS[spec.dtype]

    def encode(self, states_TLH: torch.Tensor) -> bytes:
        """Encode one token span. Raises: CodecError for another shape or dtype, NaN, infinity."""
        check_finite(states_TLH, self.spec)
        words_TW = _words(states_TLH)
        exponents_WT = ((words_TW >> self._bits) & 0xFF).astype(np.uint8).T
        usual_W = (
            np.median(exponents_WT, axis=1).astype(np.uint8) if exponents_WT.size else np.zeros(len(exponents_WT), "u1")
        )
        frame = zstandard.ZstdCompressor(_LEVEL).compress(
            np.ascontiguousarray(exponents_WT - usual_W[:, None]).tobytes()
        )
        sign = words_TW >> (self._bits + 8)
        rest = (words_TW & ((1 << self._bits) - 1)) | (sign << self._bits)
        return (
            len(frame).to_bytes(4, "little")
            + usual_W.tobytes()
            + frame
            + _planes(rest.astype(np.uint32), self._rest_bytes)
        )

    def features(self, payload: bytes | memoryview, num_tokens: int) -> torch.Tensor:
        """The states' own bits [T, L*H] in their dtype. Raises: CodecError for a payload that cannot be decoded."""
        width, rest_bytes = self.spec.width, self._rest_bytes
        size = int.from_bytes(payload[:4], "little")
        start = 4 + width + size
        expected = start + num_tokens * width * rest_bytes
        if len(payload) < 4 + width or len(payload) != expected:
            raise CodecError(f"{expected} bytes for {num_tokens} tokens", str(len(payload)), "re-capture the record")
        usual_W = np.frombuffer(payload, "u1", width, 4)
        try:
            plain = zstandard.ZstdDecompressor().decompress(
                payload[4 + width : start], max_output_size=num_tokens * width
            )
            coded_WT = np.frombuffer(plain, "u1").reshape(width, num_tokens)
        except (zstandard.ZstdError, ValueError) as exc:
            raise CodecError("a zstd frame of exponents", str(exc), "re-capture the record") from exc
        exponents_TW = (coded_WT + usual_W[:, None]).T.astype(self._word)
        rest = _from_planes(payload[start:], rest_bytes).reshape(num_tokens, width)
        words = (
            (rest & ((1 << self._bits) - 1)) | (exponents_TW << self._bits) | ((rest >> self._bits) << (self._bits + 8))
        )
        dtype = TORCH_DTYPES[self.spec.dtype]
        return torch.from_numpy(np.ascontiguousarray(words.astype(self._word))).view(dtype)

    @property
    def _rest_bytes(self) -> int:
        return (self._bits + 1) // 8

    @property
    def _word(self) -> str:
        return "<u2" if self.spec.dtype == "bfloat16" else "<u4"


def _words(states_TLH: torch.Tensor) -> npt.NDArray[np.uint32]:
    """The bits of states, [T, L*H]."""
    bits = states_TLH.detach().cpu().contiguous().flatten(1)
    kind = torch.uint16 if bits.dtype == torch.bfloat16 else torch.uint32
    return bits.view(kind).numpy().astype(np.uint32)


def _planes(values: npt.NDArray[np.uint32], num_bytes: int) -> bytes:
    """Byte planes, lowest first."""
    return b"".join(((values >> (8 * i)) & 0xFF).astype(np.uint8).tobytes() for i in range(num_bytes))


def _from_planes(content: bytes | memoryview, num_bytes: int) -> npt.NDArray[np.uint32]:
    planes = np.frombuffer(content, "u1").reshape(num_bytes, -1).astype(np.uint32)
    found = np.zeros(planes.shape[1], np.uint32)
    for i, plane in enumerate(planes):
        found |= plane << np.uint32(8 * i)
    return found
