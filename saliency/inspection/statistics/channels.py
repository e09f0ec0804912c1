"""Along which axis of a layer's output its channels lie."""

from __future__ import annotations

from torch import nn

from ...layers.layout import Grid, layout_from

POOLING = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)
_FIRST = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.LocalResponseNorm, nn.PReLU),
    *(nn.Upsample, nn.PixelShuffle, nn.PixelUnshuffle, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *POOLING,
)
_LAST = (nn.Linear, nn.Bilinear, nn.Embedding, nn.MultiheadAttention, nn.RNNBase)
# Derived classes permute their axes, as LayerNorm2d of torchvision and timm does.
_LAST_THEMSELVES = (nn.LayerNorm, nn.RMSNorm)


class ChannelAxes:
    """Which axis of an output holds the channels.

    Convolutions, their norms and pooling have them first, after the images; linear layers, attention and
    `nn.LayerNorm` last, by their definition. Whatever else has the shape of one of these outputs is taken to lie like
    it. Else: (N, K) has its channels second and (N, T, C) last; of four axes those two are the places whose proportions
    are the input's, so that Swin's (N, h, w, K) is told from (N, K, h, w); where neither fits, they come second, as
    they do where there are more axes. An output of fewer than two axes has no channels.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], int] = {}

    def of(self, module: nn.Module, shape: tuple[int, ...], images: int, size: Grid | None) -> int | None:
        """The axis of an output.

        Args:
            module: The layer.
            shape: Of its output.
            images: How many images there are in the batch.
            size: (H, W) of the input; None where it is no picture.
        """
        if len(shape) < 2:
            return None
        axis = _by_definition(module, len(shape))
        if axis is not None:
            self._known.setdefault(shape[1:], axis)
            return axis
        return self._known.get(shape[1:], _by_shape(shape, images, size))


def _by_definition(module: nn.Module, axes: int) -> int | None:
    if isinstance(module, _FIRST):
        return 1
    if isinstance(module, _LAST) or type(module) in _LAST_THEMSELVES:
        return axes - 1
    return None


def _by_shape(shape: tuple[int, ...], images: int, size: Grid | None) -> int:
    if len(shape) == 3:
        return 2
    if len(shape) == 4 and size is not None:
        layout = layout_from(shape, images, size, ())
        return 3 if layout is not None and layout.kind == "NHWC" else 1
    return 1
