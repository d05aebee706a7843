"""An orthogonal rotation of any width, made of small parts, that spreads what a few coordinates hold over many.

In: numbers [..., H] and a seed. Out: the same in rotated coordinates, and back. H = 2**k * m: signs drawn at random,
then a Hadamard matrix over the 2**k and a random orthogonal one over the odd m (QuaRot, arXiv 2404.00456, section 3,
for widths that are no powers of two).
"""

import torch

from headrace.errors import CodecError

_LARGEST_ODD = 2048


class Rotation:
    """R of width H; `forward` applies R, `inverse` its transpose."""

    def __init__(self, width: int, seed: int) -> None:
        """Raises: CodecError for an odd factor too large to be drawn."""
        power = width & -width
        odd = width // power
        if odd > _LARGEST_ODD:
            raise CodecError(
                f"a width whose odd factor is at most {_LARGEST_ODD}", f"{width} = {power} x {odd}", "use latent"
            )
        random = torch.Generator().manual_seed(seed)
        self.width = width
        self._signs = torch.randint(0, 2, (width,), generator=random).float() * 2 - 1
        self._hadamard = _hadamard(power)
        self._odd = torch.linalg.qr(torch.randn(odd, odd, generator=random, dtype=torch.float64))[0].float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] to rotated [..., H], float32."""
        shape, power, odd = x.shape, len(self._hadamard), len(self._odd)
        parts = (x.float() * self._signs.to(x.device)).reshape(*shape[:-1], power, odd)
        out: torch.Tensor = (self._hadamard.to(x.device) @ (parts @ self._odd.T.to(x.device))).reshape(shape)
        return out

    def inverse(self, y: torch.Tensor) -> torch.Tensor:
        """Rotated [..., H] back to [..., H], float32."""
        shape, power, odd = y.shape, len(self._hadamard), len(self._odd)
        parts = y.float().reshape(*shape[:-1], power, odd)
        out: torch.Tensor = (self._hadamard.T.to(y.device) @ (parts @ self._odd.to(y.device))).reshape(shape)
        return out * self._signs.to(y.device)


def _hadamard(size: int) -> torch.Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    scaled: torch.Tensor = matrix * size**-0.5
    return scaled
