"""The third seam: a codec, a fixed map between states and bytes; and `raw`, the one that changes nothing.

In: states [T, L, H] where they are made. Out: payload bytes; features [T, F] on the trainer's device; and, for export,
the trained `fc` folded back to the raw taps. The trainer never needs `reconstruct`; checks and conversions do.
"""

from typing import Protocol

import torch

from headrace.codec.spec import CodecSpec
from headrace.errors import CodecError
from headrace.record import Record

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Codec(Protocol):
    """Encodes where states are made, decodes to features where they are used."""

    spec: CodecSpec

    @property
    def num_features(self) -> int:
        """F, the width of `features`."""
        ...

    @property
    def num_scales(self) -> int:
        """Runs of features, equally long, that share one fixed scale in the trainer."""
        ...

    def encode(self, states_TLH: torch.Tensor) -> bytes:
        """Encode one token span. Raises: CodecError for a shape, dtype or value the codec cannot hold."""
        ...

    def features(self, payload: bytes | memoryview, num_tokens: int) -> torch.Tensor:
        """Decode to features [T, F] in the codec's own coordinates."""
        ...

    def fold(self, fc_HF: torch.Tensor) -> torch.Tensor:
        """Fold the codec's linear map into a trained fc: float32 [H, F] to float32 [H, L*H]."""
        ...

    def reconstruct(self, features_TF: torch.Tensor) -> torch.Tensor:
        """Features back to states [T, L, H], for checks and conversions."""
        ...


class OfTaps:
    """What codecs share whose features are the raw taps themselves, however they are stored."""

    def __init__(self, spec: CodecSpec) -> None:
        self.spec = spec

    @property
    def num_features(self) -> int:
        """L*H."""
        return self.spec.width

    @property
    def num_scales(self) -> int:
        """One for each tap."""
        return self.spec.num_taps

    def fold(self, fc_HF: torch.Tensor) -> torch.Tensor:
        """The identity."""
        return fc_HF.float()

    def reconstruct(self, features_TF: torch.Tensor) -> torch.Tensor:
        """Split the taps apart again."""
        return features_TF.view(len(features_TF), self.spec.num_taps, self.spec.hidden_size)


class RawCodec(OfTaps):
    """The states themselves: little-endian, token-major [T, L, H]; features are the concatenated taps."""

    def __init__(self, spec: CodecSpec) -> None:
        if spec.name != "raw" or spec.dtype not in TORCH_DTYPES:
            raise CodecError("a raw codec", f"{spec.name} in {spec.dtype}", "open it with the codec the manifest names")
        super().__init__(spec)
        self._dtype = TORCH_DTYPES[spec.dtype]

    def encode(self, states_TLH: torch.Tensor) -> bytes:
        """Copy the bytes of [T, L, H]."""
        check_states_shape(states_TLH, self.spec)
        return states_TLH.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()

    def features(self, payload: bytes | memoryview, num_tokens: int) -> torch.Tensor:
        """View the bytes as [T, L*H]; a payload that was read is not copied."""
        check_length(payload, num_tokens, self.spec)
        if num_tokens == 0:
            return torch.zeros(0, self.num_features, dtype=self._dtype)
        content = payload if isinstance(payload, memoryview) and not payload.readonly else bytearray(payload)
        return torch.frombuffer(content, dtype=self._dtype).view(num_tokens, self.num_features)


def record_features(record: Record, codec: Codec) -> torch.Tensor:
    """Features [T, F] of a whole record."""
    parts = [codec.features(segment.payload, segment.num_tokens) for segment in record.segments]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def record_states(record: Record, codec: Codec) -> torch.Tensor:
    """States [T, L, H] of a whole record, in the dtype the codec was made for."""
    return codec.reconstruct(record_features(record, codec)).to(TORCH_DTYPES[codec.spec.dtype])


def check_states_shape(states_TLH: torch.Tensor, spec: CodecSpec) -> None:
    """Raise CodecError for states of another shape or dtype than a spec's."""
    expected = (spec.num_taps, spec.hidden_size)
    if states_TLH.shape[1:] != expected or states_TLH.dtype != TORCH_DTYPES[spec.dtype]:
        raise CodecError(
            f"states [T, {expected[0]}, {expected[1]}] in {spec.dtype}",
            f"{list(states_TLH.shape)} in {states_TLH.dtype}",
            "capture with the taps and dtype of the manifest",
        )


def check_finite(states_TLH: torch.Tensor, spec: CodecSpec) -> None:
    """Raise CodecError for another shape or dtype, and for a NaN or infinity, naming token and tap."""
    check_states_shape(states_TLH, spec)
    bad_TL = ~torch.isfinite(states_TLH).all(-1)
    if bool(bad_TL.any()):
        token, tap = bad_TL.nonzero()[0].tolist()
        raise CodecError("finite states", f"NaN or infinity at token {token}, tap {tap}", "capture the sample again")


def check_length(payload: bytes | memoryview, num_tokens: int, spec: CodecSpec) -> None:
    """Raise CodecError for a payload of another length than a codec of fixed size gives."""
    expected = int(num_tokens * spec.bytes_per_token())
    if len(payload) != expected:
        raise CodecError(f"{expected} bytes for {num_tokens} tokens", str(len(payload)), "re-capture the record")
