"""Reconstruction in plain torch, in float64 up to the rounding."""

import torch

from kvrag.native.reconstruction import Points, Rotation


def points_of(points: Points[torch.Tensor]) -> torch.Tensor:
    """Return reconstruction points float64 ``[R, T]``."""
    numbers, shrink, patches = points
    found = numbers.double() - (128 if numbers.dtype == torch.uint8 else 0)
    if shrink is not None:
        found -= found.sign() * shrink.double()[:, None]
    if patches is not None:
        rows, tokens, values = (torch.as_tensor(field) for field in patches)
        found[rows.long(), tokens.long()] = values.double()
    return found


def rotate(channels: torch.Tensor, rotation: Rotation[torch.Tensor] | None) -> torch.Tensor:
    """Return ``[H, n, D]`` in the half-split layout, positions by tables ``[n, P]``."""
    if rotation is None:
        return channels
    cos, sin = rotation
    width = cos.shape[1]
    half = width // 2
    cos, sin = cos[:, :half].double(), sin[:, :half].double()
    first, second = channels[..., :half], channels[..., half:width]
    rotated = [first * cos - second * sin, second * cos + first * sin, channels[..., width:]]
    return torch.cat(rotated, dim=-1)


def transformed(
    points: Points[torch.Tensor],
    basis: torch.Tensor,
    mean: torch.Tensor | None,
    *,
    rotation: Rotation[torch.Tensor] | None = None,
    tokens: slice = slice(None),
) -> torch.Tensor:
    """Return ``[H, n, D]`` float64."""
    found = torch.einsum("rt,hrd->htd", points_of(points)[:, tokens], basis.double())
    if mean is not None:
        found += mean.double()[:, None]
    return rotate(found, rotation)
