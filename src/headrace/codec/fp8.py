"""The codec `fp8`: e4m3 with one scale a token and tap.

In: states [T, L, H]. Out: a payload of float32 [T, L] scales, then e4m3 [T, L*H]; features are the states themselves,
rounded. Format: OCP FP8 E4M3 without infinities, largest number 448.
"""

import numpy as np
import torch

from headrace.codec.base import OfTaps, check_finite, check_length

_LARGEST = 448.0


class Fp8Codec(OfTaps):
    """A rounding of the raw states; folds as raw does."""

    def encode(self, states_TLH: torch.Tensor) -> bytes:
        """Encode one token span. Raises: CodecError for another shape or dtype, NaN, infinity."""
        check_finite(states_TLH, self.spec)
        scale_TL = states_TLH.float().abs().amax(-1) / _LARGEST
        divisor = torch.where(scale_TL == 0, torch.ones_like(scale_TL), scale_TL)[..., None]
        codes = (states_TLH.float() / divisor).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
        scales = scale_TL.cpu().numpy().astype("<f4").tobytes()
        return scales + codes.cpu().contiguous().view(torch.uint8).numpy().tobytes()

    def features(self, payload: bytes | memoryview, num_tokens: int) -> torch.Tensor:
        """Decode to states bfloat16 [T, L*H]. Raises: CodecError for a payload of another length."""
        check_length(payload, num_tokens, self.spec)
        shape = (num_tokens, self.spec.num_taps)
        scale_TL = torch.from_numpy(np.frombuffer(payload, "<f4", num_tokens * shape[1]).copy()).view(shape)
        codes = torch.from_numpy(np.frombuffer(payload, "u1", offset=scale_TL.nbytes).copy())
        states = codes.view(torch.float8_e4m3fn).float().view(*shape, self.spec.hidden_size)
        return (states * scale_TL[..., None]).bfloat16().flatten(1)
