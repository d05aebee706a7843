"""The codecs `rotated` and `latent`: a fixed linear map, then a few bits a coordinate.

In: states [T, L, H]. Out: a payload of escapes, scales and packed codes; features z [T, F], which the trainer reads as
they are. z = P S h with S one over each tap's RMS and P a rotation of each tap or a fitted basis; a trained fc of z
folds to fc P S of the raw taps. Payload, little-endian: uint32 number of escapes E, uint32 [E] their tokens, float16
[E, F] their z; float16 [T, G] scales; uint8 [T, bytes] codes, group by group.
"""

import numpy as np
import torch

from headrace.codec.base import check_finite
from headrace.codec.basis import Basis
from headrace.codec.pack import pack, unpack
from headrace.codec.quantise import dequantise, quantise
from headrace.codec.rotation import Rotation
from headrace.codec.spec import SCALE_BYTES, CodecSpec, packed_bytes
from headrace.errors import CodecError

_LARGEST_HALF = 65504.0


class QuantisedCodec:
    """`rotated` (basis optional) or `latent` (basis needed)."""

    def __init__(self, spec: CodecSpec, basis: Basis | None) -> None:
        """Raises: CodecError for a latent without basis, and for a basis of other sizes than the spec's."""
        self.spec, self.basis = spec, basis
        self._groups = spec.groups
        self._code_bytes = [packed_bytes(size, bits) for size, bits in self._groups]
        self._rotation = Rotation(spec.hidden_size, int(spec.parameters["seed"])) if spec.name == "rotated" else None
        if self._rotation is None and (basis is None or basis.projection_RW is None):
            raise CodecError("a fitted basis for the codec latent", "none", "run headrace codec fit")
        if sum(size for size, _ in self._groups) != self.num_features:
            raise CodecError(f"groups of {self.num_features} coordinates", str(self._groups), "fit the codec again")
        if basis is not None:
            self._check(basis)

    @property
    def num_features(self) -> int:
        """F."""
        return self.spec.num_features

    @property
    def num_scales(self) -> int:
        """Runs of features that share a fixed scale: the taps of a rotation, all of a latent together."""
        return self.spec.num_taps if self._rotation is not None else 1

    def coordinates(self, states_TLH: torch.Tensor) -> torch.Tensor:
        """z float32 [T, F] of states, unquantised."""
        if self._rotation is not None:
            return self._rotation.forward(states_TLH).flatten(1)
        assert self.basis is not None
        assert self.basis.projection_RW is not None
        return self._scaled(states_TLH).flatten(1) @ self.basis.projection_RW.T.to(states_TLH.device)

    def encode(self, states_TLH: torch.Tensor) -> bytes:
        """Encode one token span, where the states are. Raises: CodecError for another shape or dtype, NaN, infinity."""
        check_finite(states_TLH, self.spec)
        z_TF = self.coordinates(states_TLH)
        escaped_T = self.escaped(states_TLH)
        tokens_E = escaped_T.nonzero()[:, 0]
        kept_EF = z_TF[tokens_E].clamp(-_LARGEST_HALF, _LARGEST_HALF).half()
        if self.basis is not None:
            z_TF = z_TF - self.basis.offset_F.to(z_TF.device)
        z_TF = z_TF.masked_fill(escaped_T[:, None], 0.0)
        scales, codes = [], []
        for z_TN, (_, bits) in zip(torch.split(z_TF, [n for n, _ in self._groups], 1), self._groups, strict=True):
            code_TN, scale_T = quantise(z_TN, bits)
            scales.append(scale_T)
            codes.append(pack(code_TN, bits))
        head = np.array([len(tokens_E), *tokens_E.tolist()], dtype="<u4").tobytes()
        parts = (kept_EF, torch.stack(scales, 1), torch.cat(codes, 1))
        return head + b"".join(_bytes(part) for part in parts)

    def features(self, payload: bytes | memoryview, num_tokens: int) -> torch.Tensor:
        """Decode to z bfloat16 [T, F]. Raises: CodecError for a payload of another length."""
        num_escapes = int(np.frombuffer(payload, "<u4", 1)[0]) if len(payload) >= 4 else -1
        self._check_length(payload, num_tokens, num_escapes)
        tokens_E = torch.from_numpy(np.frombuffer(payload, "<u4", num_escapes, 4).astype(np.int64))
        if num_escapes and int(tokens_E.max()) >= num_tokens:
            raise CodecError(f"escapes among {num_tokens} tokens", str(int(tokens_E.max())), "re-capture the record")
        place = 4 + 4 * num_escapes
        kept = np.frombuffer(payload, "<f2", num_escapes * self.num_features, place)
        place += kept.nbytes
        scales = np.frombuffer(payload, "<f2", num_tokens * len(self._groups), place)
        place += scales.nbytes
        codes = np.frombuffer(payload, "u1", num_tokens * sum(self._code_bytes), place)
        scale_TG = torch.from_numpy(scales.copy()).view(num_tokens, len(self._groups))
        code_TB = torch.from_numpy(codes.copy()).view(num_tokens, sum(self._code_bytes))
        parts = [
            dequantise(unpack(packed, bits, size), scale_TG[:, g], bits)
            for g, (packed, (size, bits)) in enumerate(
                zip(torch.split(code_TB, self._code_bytes, 1), self._groups, strict=True)
            )
        ]
        z_TF = torch.cat(parts, 1)
        if self.basis is not None:
            z_TF += self.basis.offset_F
        z_TF[tokens_E] = torch.from_numpy(kept.astype(np.float32)).view(num_escapes, self.num_features)
        return z_TF.bfloat16()

    def fold(self, fc_HF: torch.Tensor) -> torch.Tensor:
        """fc P S: float32 [H, F] to float32 [H, L*H]."""
        if self._rotation is not None:
            taps = fc_HF.float().view(len(fc_HF), self.spec.num_taps, self.spec.hidden_size)
            return self._rotation.inverse(taps).flatten(1)
        assert self.basis is not None
        assert self.basis.projection_RW is not None
        scale_W = self.basis.inverse_rms_L.repeat_interleave(self.spec.hidden_size)
        return (fc_HF.float() @ self.basis.projection_RW) * scale_W

    def reconstruct(self, features_TF: torch.Tensor) -> torch.Tensor:
        """The states [T, L, H] nearest to what z says of them, float32; exact up to quantising for a rotation."""
        shape = (len(features_TF), self.spec.num_taps, self.spec.hidden_size)
        if self._rotation is not None:
            return self._rotation.inverse(features_TF.view(shape))
        assert self.basis is not None
        assert self.basis.projection_RW is not None
        scaled = (features_TF.float() @ self.basis.projection_RW).view(shape)
        return scaled / self.basis.inverse_rms_L[:, None]

    def escaped(self, states_TLH: torch.Tensor) -> torch.Tensor:
        """Tokens kept in 16 bits, bool [T]."""
        if self.basis is None or self.basis.escape_norm is None:
            return torch.zeros(len(states_TLH), dtype=torch.bool, device=states_TLH.device)
        return scaled_norm(states_TLH, self.basis.inverse_rms_L) > self.basis.escape_norm

    def _scaled(self, states_TLH: torch.Tensor) -> torch.Tensor:
        assert self.basis is not None
        return states_TLH.float() * self.basis.inverse_rms_L.to(states_TLH.device)[:, None]

    def _check(self, basis: Basis) -> None:
        width = None if basis.projection_RW is None else tuple(basis.projection_RW.shape)
        wanted = None if self._rotation is not None else (self.num_features, self.spec.width)
        found = (width, tuple(basis.offset_F.shape), tuple(basis.inverse_rms_L.shape))
        if found != (wanted, (self.num_features,), (self.spec.num_taps,)):
            raise CodecError(
                f"a basis {wanted} with {self.num_features} offsets and {self.spec.num_taps} taps",
                str(found),
                "fit the codec for these taps",
            )

    def _check_length(self, payload: bytes | memoryview, num_tokens: int, num_escapes: int) -> None:
        expected = 4 + num_escapes * (4 + 2 * self.num_features)
        expected += num_tokens * (SCALE_BYTES * len(self._groups) + sum(self._code_bytes))
        if num_escapes < 0 or num_escapes > num_tokens or len(payload) != expected:
            raise CodecError(
                f"{expected} bytes for {num_tokens} tokens with {num_escapes} escapes",
                str(len(payload)),
                "re-capture the record",
            )


def scaled_norm(states_TLH: torch.Tensor, inverse_rms_L: torch.Tensor) -> torch.Tensor:
    """RMS of a token's states, each tap divided by its own: [T], about 1 for an ordinary token.

    The largest tap counts, so that a sink in one tap is not averaged away.
    """
    rms_TL = states_TLH.float().square().mean(-1).sqrt() * inverse_rms_L.to(states_TLH.device)
    return rms_TL.amax(1)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().numpy().tobytes()
