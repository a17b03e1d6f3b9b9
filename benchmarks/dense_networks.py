"""Networks that answer for each pixel or box, in PyTorch, for :mod:`benchmarks.low_batch`.

    python -m benchmarks.low_batch --network dense --batch 1 4 --json dense.json --markdown dense.md

Each function makes one, with random weights and with the size of its images in ``default_cfg``. They are
written for this comparison after the papers that their first lines name; no engine was tuned by them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


def _sized(module: nn.Module, *size: int) -> nn.Module:
    """Says the shape of an image where :func:`cnn_engine.export.images_shape` looks for it."""
    module.default_cfg = {"input_size": size}
    return module


def _conv(
    inputs: int, outputs: int, kernel: int = 3, stride: int = 1, act: type = nn.ReLU
) -> nn.Module:
    """Returns a convolution, batch norm and an activation."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
        act(),
    )


def _pair(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(_conv(inputs, outputs), _conv(outputs, outputs))


class _UNet(nn.Module):
    def __init__(self, widths: Sequence[int], transposed: bool, classes: int) -> None:
        super().__init__()
        steps = [*itertools.pairwise(widths)]
        self.down = nn.ModuleList([_pair(3, widths[0]), *(_pair(a, b) for a, b in steps)])
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(b, a, 2, 2)
            if transposed
            else nn.Upsample(scale_factor=2, mode="bilinear")
            for a, b in reversed(steps)
        )
        self.join = nn.ModuleList(
            _pair(2 * a if transposed else a + b, a) for a, b in reversed(steps)
        )
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for down in self.down:
            x = down(functional.max_pool2d(x, 2) if kept else x)
            kept.append(x)
        kept.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([kept.pop(), up(x)], 1))
        return self.head(x)


def unet_transposed() -> nn.Module:
    """U-Net (Ronneberger et al., 2015), 32 to 512 channels, transposed convolutions, 48 GMAC."""
    return _sized(_UNet((32, 64, 128, 256, 512), True, 2), 3, 512, 512)


def unet_bilinear() -> nn.Module:
    """U-Net with bilinear upsampling, four levels of 24 to 192 channels."""
    return _sized(_UNet((24, 48, 96, 192), False, 5), 3, 384, 384)


class _Split(nn.Module):
    """A cross-stage block of YOLOv8: half of the channels go through bottlenecks, and all are joined."""

    def __init__(self, inputs: int, outputs: int, count: int, residual: bool) -> None:
        super().__init__()
        half = outputs // 2
        self.residual = residual
        self.first = _conv(inputs, outputs, 1, act=nn.SiLU)
        self.blocks = nn.ModuleList(
            nn.Sequential(_conv(half, half, act=nn.SiLU), _conv(half, half, act=nn.SiLU))
            for _ in range(count)
        )
        self.last = _conv((2 + count) * half, outputs, 1, act=nn.SiLU)

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.first(x).chunk(2, 1))
        for block in self.blocks:
            found = block(parts[-1])
            parts.append(parts[-1] + found if self.residual else found)
        return self.last(torch.cat(parts, 1))


class _Pyramid(nn.Module):
    """Spatial pyramid pooling by three pools in a row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = _conv(width, width // 2, 1, act=nn.SiLU)
        self.last = _conv(2 * width, width, 1, act=nn.SiLU)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.first(x)]
        for _ in range(3):
            parts.append(functional.max_pool2d(parts[-1], 5, 1, 2))
        return self.last(torch.cat(parts, 1))


class _Yolo(nn.Module):
    BINS, CLASSES = 16, 80

    def __init__(self) -> None:
        super().__init__()
        act = nn.SiLU
        self.stem = nn.Sequential(
            _conv(3, 16, 3, 2, act), _conv(16, 32, 3, 2, act), _Split(32, 32, 1, True)
        )
        self.c3 = nn.Sequential(_conv(32, 64, 3, 2, act), _Split(64, 64, 2, True))
        self.c4 = nn.Sequential(_conv(64, 128, 3, 2, act), _Split(128, 128, 2, True))
        self.c5 = nn.Sequential(
            _conv(128, 256, 3, 2, act), _Split(256, 256, 1, True), _Pyramid(256)
        )
        self.up4, self.up3 = _Split(384, 128, 1, False), _Split(192, 64, 1, False)
        self.down3, self.down4 = _conv(64, 64, 3, 2, act), _conv(128, 128, 3, 2, act)
        self.out4, self.out5 = _Split(192, 128, 1, False), _Split(384, 256, 1, False)
        self.boxes = nn.ModuleList(self._head(width, 64, 4 * self.BINS) for width in (64, 128, 256))
        self.scores = nn.ModuleList(self._head(width, 80, self.CLASSES) for width in (64, 128, 256))

    @staticmethod
    def _head(inputs: int, width: int, outputs: int) -> nn.Module:
        first, second = _conv(inputs, width, act=nn.SiLU), _conv(width, width, act=nn.SiLU)
        return nn.Sequential(first, second, nn.Conv2d(width, outputs, 1))

    def forward(self, x: Tensor) -> Tensor:
        c3 = self.c3(self.stem(x))
        c4 = self.c4(c3)
        c5 = self.c5(c4)
        p4 = self.up4(torch.cat([functional.interpolate(c5, scale_factor=2.0), c4], 1))
        p3 = self.up3(torch.cat([functional.interpolate(p4, scale_factor=2.0), c3], 1))
        p4 = self.out4(torch.cat([self.down3(p3), p4], 1))
        p5 = self.out5(torch.cat([self.down4(p4), c5], 1))
        levels = (p3, p4, p5)
        boxes = torch.cat(
            [head(p).flatten(2) for head, p in zip(self.boxes, levels, strict=True)], 2
        )
        scores = torch.cat(
            [head(p).flatten(2) for head, p in zip(self.scores, levels, strict=True)], 2
        )
        bins = boxes.unflatten(1, (4, self.BINS)).softmax(2)
        at = torch.arange(self.BINS, dtype=bins.dtype, device=bins.device).reshape(1, 1, -1, 1)
        return torch.cat([(bins * at).sum(2), scores.sigmoid()], 1)


def yolo_n() -> nn.Module:
    """A detector in the shape of YOLOv8n (Ultralytics, 2023): 8,400 boxes of 80 classes."""
    return _sized(_Yolo(), 3, 640, 640)


class _First(nn.Module):
    """The output of a network of torchvision, out of its dictionary."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)["out"]


def deeplabv3() -> nn.Module:
    """torchvision's DeepLabV3 (Chen et al., 2017) on ResNet-50."""
    from torchvision.models.segmentation import deeplabv3_resnet50

    made = deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=21)
    return _sized(_First(made), 3, 520, 520)


def lraspp() -> nn.Module:
    """torchvision's LR-ASPP on MobileNetV3-L (Howard et al., 2019)."""
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    made = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=21)
    return _sized(_First(made), 3, 520, 520)


class _Residual(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.layers(x))


def dilated_groups() -> nn.Module:
    """A residual tower of dilated convolutions in groups of 9 channels, on images of 375 x 500."""
    width = 72

    def block(rate: int) -> nn.Module:
        conv = nn.Conv2d(width, width, 3, padding=rate, dilation=rate, groups=8, bias=False)
        return _Residual(conv, nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 1))

    rates = (1, 2, 4, 8, 16, 6, 12, 36)
    tower = nn.Sequential(
        _conv(3, width, 3, 2), *(block(rate) for rate in rates), nn.Conv2d(width, 3, 1)
    )
    return _sized(tower, 3, 375, 500)


class _Noise(nn.Module):
    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        first = [nn.Conv2d(1, width, 3, padding=1), nn.ReLU()]
        inner = [_conv(width, width) for _ in range(depth - 2)]
        self.noise = nn.Sequential(*first, *inner, nn.Conv2d(width, 1, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return x - self.noise(x)


def dncnn() -> nn.Module:
    """DnCNN (Zhang et al., 2017): 17 layers of 64 channels on grey images."""
    return _sized(_Noise(17, 64), 1, 256, 256)


def espcn() -> nn.Module:
    """ESPCN (Shi et al., 2016): twice the size by a pixel shuffle."""
    layers = [nn.Conv2d(1, 64, 5, padding=2), nn.Tanh(), nn.Conv2d(64, 32, 3, padding=1), nn.Tanh()]
    return _sized(
        nn.Sequential(*layers, nn.Conv2d(32, 4, 3, padding=1), nn.PixelShuffle(2)), 1, 256, 256
    )


class _RetinaNet(nn.Module):
    ANCHORS, CLASSES, WIDTH = 9, 20, 128

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models import resnet18

        body = resnet18(weights=None)
        self.stem = nn.Sequential(body.conv1, body.bn1, body.relu, body.maxpool, body.layer1)
        self.stages = nn.ModuleList([body.layer2, body.layer3, body.layer4])
        self.inner = nn.ModuleList(nn.Conv2d(width, self.WIDTH, 1) for width in (128, 256, 512))
        self.outer = nn.ModuleList(
            nn.Conv2d(self.WIDTH, self.WIDTH, 3, padding=1) for _ in range(3)
        )
        self.p6 = nn.Conv2d(512, self.WIDTH, 3, 2, 1)
        self.p7 = nn.Conv2d(self.WIDTH, self.WIDTH, 3, 2, 1)
        self.scores, self.boxes = self._head(self.CLASSES), self._head(4)

    def _head(self, each: int) -> nn.Module:
        made: list[nn.Module] = []
        for _ in range(4):
            made += [nn.Conv2d(self.WIDTH, self.WIDTH, 3, padding=1), nn.ReLU()]
        return nn.Sequential(*made, nn.Conv2d(self.WIDTH, self.ANCHORS * each, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        x, stages = self.stem(x), []
        for stage in self.stages:
            x = stage(x)
            stages.append(x)
        merged = [self.inner[2](stages[2])]
        for level in (1, 0):
            upper = functional.interpolate(merged[0], scale_factor=2.0, mode="nearest")
            merged.insert(0, self.inner[level](stages[level]) + upper)
        levels = [outer(m) for outer, m in zip(self.outer, merged, strict=True)]
        levels.append(self.p6(stages[2]))
        levels.append(self.p7(functional.relu(levels[-1])))
        found = []
        for level in levels:
            both = []
            for head, each in ((self.boxes, 4), (self.scores, self.CLASSES)):
                rows = head(level).unflatten(1, (self.ANCHORS, each)).flatten(3)
                both.append(rows.permute(0, 3, 1, 2).flatten(1, 2))
            found.append(torch.cat(both, 2))
        return torch.cat(found, 1)


def retinanet() -> nn.Module:
    """A RetinaNet (Lin et al., 2017) on ResNet-18 with a feature pyramid of 128 channels, five levels."""
    return _sized(_RetinaNet(), 3, 512, 512)


class _MlpHead(nn.Module):
    """Features of four strides, each through a 1x1 convolution, upsampled, joined and mixed."""

    def __init__(self, widths: Sequence[int], width: int, classes: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList()
        inputs, stride = 3, 4
        for outputs in widths:
            patch = nn.Conv2d(
                inputs, outputs, stride + 3 if stride == 4 else 3, stride, 3 if stride == 4 else 1
            )
            mixer = nn.Conv2d(outputs, outputs, 3, padding=1, groups=outputs)
            mlp = [
                nn.Conv2d(outputs, 4 * outputs, 1),
                nn.GELU(),
                nn.Conv2d(4 * outputs, outputs, 1),
            ]
            self.stages.append(
                nn.Sequential(patch, nn.BatchNorm2d(outputs), _Residual(mixer, *mlp))
            )
            inputs, stride = outputs, 2
        self.project = nn.ModuleList(nn.Conv2d(outputs, width, 1) for outputs in widths)
        self.mix, self.head = _conv(len(widths) * width, width, 1), nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        for stage, project in zip(self.stages, self.project, strict=True):
            x = stage(x)
            found.append(project(x))
        size = found[0].shape[2:]
        found = [found[0], *(functional.interpolate(f, size, mode="bilinear") for f in found[1:])]
        return self.head(self.mix(torch.cat(found, 1)))


def mlp_head() -> nn.Module:
    """The all-MLP head of SegFormer-B0 (Xie et al., 2021) on four convolutional stages of its widths."""
    return _sized(_MlpHead((32, 64, 160, 256), 256, 150), 3, 512, 512)


class _Branches(nn.Module):
    """Images of several resolutions side by side, each a residual block, and all exchanged."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            _Residual(_conv(w, w), nn.Conv2d(w, w, 3, padding=1, bias=False), nn.BatchNorm2d(w))
            for w in widths
        )
        self.links = nn.ModuleList(
            nn.ModuleList(self._link(widths, source, target) for source in range(len(widths)))
            for target in range(len(widths))
        )

    @staticmethod
    def _link(widths: Sequence[int], source: int, target: int) -> nn.Module:
        if source == target:
            return nn.Identity()
        if source > target:
            up = nn.Upsample(scale_factor=float(2 ** (source - target)), mode="nearest")
            return nn.Sequential(_conv(widths[source], widths[target], 1, act=nn.Identity), up)
        steps = [_conv(widths[source], widths[source], 3, 2) for _ in range(target - source - 1)]
        return nn.Sequential(*steps, _conv(widths[source], widths[target], 3, 2, nn.Identity))

    def forward(self, images: list[Tensor]) -> list[Tensor]:
        images = [block(x) for block, x in zip(self.blocks, images, strict=True)]
        found = []
        for links in self.links:
            total = links[0](images[0])
            for link, image in zip(links[1:], images[1:], strict=True):
                total = total + link(image)
            found.append(functional.relu(total))
        return found


class _HighResolution(nn.Module):
    def __init__(self, widths: Sequence[int], depth: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv(3, 64, 3, 2), _conv(64, widths[0], 3, 2))
        self.down = nn.ModuleList(_conv(a, b, 3, 2) for a, b in itertools.pairwise(widths))
        self.stages = nn.ModuleList(_Branches(widths) for _ in range(depth))
        total = sum(widths)
        self.head = nn.Sequential(_conv(total, total, 1), nn.Conv2d(total, classes, 1))

    def forward(self, x: Tensor) -> Tensor:
        images = [self.stem(x)]
        for down in self.down:
            images.append(down(images[-1]))
        for stage in self.stages:
            images = stage(images)
        size = images[0].shape[2:]
        upper = [functional.interpolate(image, size, mode="bilinear") for image in images[1:]]
        return self.head(torch.cat([images[0], *upper], 1))


def hrnet_w18() -> nn.Module:
    """HRNet-W18 (Wang et al., 2020) for segmentation, cut to four exchanges between four resolutions."""
    return _sized(_HighResolution((18, 36, 72, 144), 4, 19), 3, 512, 512)


class _SuperResolver(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.Sequential(
            *(_Residual(nn.Conv2d(width, width, 3, padding=1), nn.PReLU(),
                        nn.Conv2d(width, width, 3, padding=1)) for _ in range(depth))
        )  # fmt: skip
        up = [nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2), nn.PReLU()]
        again = [nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2), nn.PReLU()]
        self.up = nn.Sequential(*up, *again, nn.Conv2d(width, 3, 9, padding=4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.up(x + self.body(x))


def super_resolver() -> nn.Module:
    """A residual network for four times the size, after SRResNet (Ledig et al., 2017), eight blocks of 48."""
    return _sized(_SuperResolver(48, 8), 3, 128, 128)


NETWORKS: tuple[Callable[[], nn.Module], ...] = (
    unet_transposed, unet_bilinear, yolo_n, deeplabv3, lraspp, dilated_groups, dncnn, espcn, retinanet,
    mlp_head, hrnet_w18, super_resolver,
)  # fmt: skip

#: Their names for ``--network``.
NAMES = tuple(f"{__name__}:{make.__name__}" for make in NETWORKS)
