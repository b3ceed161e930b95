"""Erase parts of the images of a batch, and mix neighbours: MixUp and CutMix, under torchvision's names.

They work on whole batches on the device: a few kernels there are cheaper than the same work on each image in the
loader's processes, and mixing needs two images. A plain run imports none of this.

Every draw comes from a `random.Random`. `data.DeviceLoader` seeds it with the batch's address, so no draw depends on
the device, other batches or a generator's history; a direct call seeds it from torch's process-wide generator.
"""

import math
import random
from collections.abc import Callable

import torch
from torch import Tensor, nn

from loading.on_device import one_hot


class RandomErasing:
    """Erase one random rectangle of each image (Zhong et al., arXiv 1708.04896), with torchvision's distribution.

    Args:
        p: probability of a rectangle.
        is_noisy: fill it with standard normal noise, drawn for each channel of each pixel; else with zero.
    """

    SCALE = 0.02, 0.33  # smallest and largest share of the image's area
    RATIO = 0.3, 3.3  # smallest and largest height over width

    def __init__(self, p: float = 0.5, *, is_noisy: bool = False) -> None:
        self.p = p
        self.is_noisy = is_noisy

    def draw_box(self, height: int, width: int, rng: random.Random) -> tuple[int, int, int, int]:
        """Draw a box (top, left, height, width), px; empty with probability 1 - p, or if ten draws do not fit."""
        if rng.random() >= self.p:
            return 0, 0, 0, 0
        for _ in range(10):
            area = height * width * rng.uniform(*self.SCALE)
            # Uniform in the logarithm, so that a box is as often twice as high as wide as the other way round.
            ratio = math.exp(rng.uniform(math.log(self.RATIO[0]), math.log(self.RATIO[1])))
            box_height = round(math.sqrt(area * ratio))
            box_width = round(math.sqrt(area / ratio))
            # Below and not up to the side, as in torchvision and timm: no rectangle spans a whole side.
            if box_height < height and box_width < width:
                return rng.randint(0, height - box_height), rng.randint(0, width - box_width), box_height, box_width
        return 0, 0, 0, 0

    def draw(self, image: Tensor, rng: random.Random) -> Tensor:
        """Draw a box for each image of a (B, C, H, W) batch in order, then a seed for each one's noise, if any.

        Returns:
            (B, 4) int64 boxes on the CPU, or with noise (B, 5): boxes and seeds.
        """
        height, width = image.shape[-2:]
        boxes = torch.tensor([self.draw_box(height, width, rng) for _ in range(len(image))])
        if not self.is_noisy:
            return boxes
        # A seed and not the noise, which would be as large as the images, and have to be copied to the device.
        seeds = torch.tensor([rng.getrandbits(31) for _ in range(len(image))])
        return torch.cat([boxes, seeds[:, None]], dim=1)

    def erase(self, image: Tensor, boxes: Tensor) -> Tensor:
        """Erase the boxes of `draw` from (B, C, H, W) normalised floats."""
        top, left, height, width = boxes[:, :4, None].unbind(1)
        fill = normal_noise(image, boxes[:, 4]) if self.is_noisy else 0.0
        # Unlike `masked_fill`, `where` keeps the channels-last memory format when compiled.
        return torch.where(_inside(image, left, top, left + width, top + height)[:, None], fill, image)

    def __call__(self, image: Tensor, rng: random.Random) -> Tensor:
        """Erase random boxes from (B, C, H, W) normalised floats, drawing from `rng`."""
        return self.erase(image, _to_device(self.draw(image, rng), image.device))


def normal_noise(image: Tensor, seeds: Tensor) -> Tensor:
    """Return standard normal noise in the shape and memory order of (B, C, H, W) floats.

    Each value is a hash of its image's seed, of (B,) int64, and its position in the image: the same in any memory order
    and, but for the rounding of `erfinv`, on every device.
    """
    # A generator of the device would draw other numbers on other devices, and have a state to be saved.
    position = torch.arange(image[0].numel(), dtype=torch.int32, device=image.device).view(image.shape[1:])
    bits = torch.zeros_like(image, dtype=torch.int32) + _mix_bits(position)
    bits = _mix_bits(bits ^ seeds.to(torch.int32).view(-1, 1, 1, 1))
    share = ((bits >> 9 & 0x7FFFFF) + 0.5) / 0x800000  # exact in float32, and neither 0 nor 1
    return torch.erfinv(2 * share - 1) * math.sqrt(2)


def _mix_bits(bits: Tensor) -> Tensor:
    """Hash int32 numbers so that each bit depends on all bits of its number (the finaliser of MurmurHash3)."""
    # A shift of int32 copies the sign into the high bits, which the masks clear again.
    bits = (bits ^ (bits >> 16 & 0xFFFF)) * (0x85EBCA6B - (1 << 32))  # int32 wraps around
    bits = (bits ^ (bits >> 13 & 0x7FFFF)) * (0xC2B2AE35 - (1 << 32))
    return bits ^ (bits >> 16 & 0xFFFF)


def process_rng() -> random.Random:
    """Return a generator seeded from torch's process-wide generator."""
    return random.Random(int(torch.randint(1 << 62, ())))


def _to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device without waiting, by way of pinned memory."""
    # The driver copies from memory that can be paged out only while the host waits.
    if device.type != "cpu":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def _inside(image: Tensor, left: Tensor, top: Tensor, right: Tensor, bottom: Tensor) -> Tensor:
    """Return whether each pixel is inside a rectangle: (H, W) bool for 0-d edges, (B, H, W) for (B, 1) edges."""
    # Comparisons and no slice: a slice needs the edges on the CPU, and so a wait for the device.
    y, x = (torch.arange(side, device=image.device) for side in image.shape[-2:])
    is_row = (y >= top) & (y < bottom)
    is_column = (x >= left) & (x < right)
    return is_row[..., :, None] & is_column[..., None, :]


def _neighbours(image: Tensor) -> Tensor:
    """Return each image's neighbour, the one before it. `roll` would lose the channels-last format on a GPU."""
    return torch.cat([image[-1:], image[:-1]])


def _soft_targets(target: Tensor, num_classes: int, share: Tensor, rest: Tensor) -> Tensor:
    """Return (B, num_classes) float32 targets: `share` of the image's own class, `rest` of its neighbour's."""
    if target.ndim != 2:
        target = one_hot(target, num_classes)
    # In bfloat16 a target of 0.2005 would be 0.2, and no longer above --bce-target-thresh 0.2.
    target = target.to(torch.float32)
    return target * share + target.roll(1, 0) * rest


# Drawn numbers go to the device in one small tensor, by one copy that waits for nothing.
def pack_share(share: float) -> Tensor:
    """Return (2,): the share of the image itself and that of its neighbour, for `RandomMixUp.mix`."""
    return torch.tensor([share, 1.0 - share])


def pack_box(box: tuple[int, int, int, int], height: int, width: int) -> Tensor:
    """Return (6,): a rectangle (left, top, right, bottom), px, and both shares, for `RandomCutMix.mix`."""
    left, top, right, bottom = box
    # Not the share that was drawn: the image's edges cut the rectangle off.
    share = 1.0 - (right - left) * (bottom - top) / (height * width)
    return torch.tensor([*map(float, box), share, 1.0 - share])


class _Mixing(nn.Module):
    """Mix each image of a batch with its neighbour.

    Args:
        num_classes: length of a target.
        p: probability that a call mixes; `mix` always does.
        alpha: the image's own share is drawn from Beta(alpha, alpha).
        inplace: a call mixes in the memory of its batch, and returns that.
    """

    draw: Callable[[Tensor, random.Random], Tensor]
    mix: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

    def __init__(self, num_classes: int, p: float = 0.5, alpha: float = 1.0, inplace: bool = False) -> None:
        super().__init__()
        if num_classes < 1 or alpha <= 0:
            raise ValueError(f"num_classes {num_classes} and alpha {alpha}: expected numbers above 0")
        self.num_classes = num_classes
        self.p = p
        self.alpha = alpha
        self.inplace = inplace

    def extra_repr(self) -> str:
        """Return the arguments."""
        return f"num_classes={self.num_classes}, p={self.p}, alpha={self.alpha}, inplace={self.inplace}"

    def forward(self, batch: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Mix (B, C, H, W) floats; turn (B,) int64 classes into (B, num_classes) targets of the batch's dtype."""
        if batch.ndim != 4 or target.ndim != 1:
            raise ValueError(f"a batch of {batch.ndim} and a target of {target.ndim} dimensions: expected 4 and 1")
        if not batch.is_floating_point() or target.dtype != torch.int64:
            raise TypeError(f"a batch of {batch.dtype} and a target of {target.dtype}: expected floats and torch.int64")
        rng = process_rng()
        if rng.random() >= self.p:
            # Soft targets all the same, as torchvision's: a loss is given one kind of targets in every step.
            own, rest = pack_share(1.0).to(batch.device)
            return batch, _soft_targets(target, self.num_classes, own, rest).to(batch.dtype)
        mixed, target = self.mix(batch, target, self.draw(batch, rng).to(batch.device))
        if self.inplace:
            mixed = batch.copy_(mixed)
        return mixed, target.to(batch.dtype)


class RandomMixUp(_Mixing):
    """Blend each image with its neighbour in the batch (Zhang et al., arXiv 1710.09412); arguments as `_Mixing`."""

    def draw(self, image: Tensor, rng: random.Random) -> Tensor:
        """Draw the argument `drawn` of `mix`, on the CPU."""
        return pack_share(rng.betavariate(self.alpha, self.alpha))

    def mix(self, image: Tensor, target: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """Mix a batch.

        Args:
            image: (B, C, H, W) float, normalised.
            target: (B,) int64 class indices.
            drawn: the result of `draw`, on the device of the batch.

        Returns:
            The mixed image and (B, num_classes) float targets whose rows sum to 1.
        """
        share, rest = drawn.unbind()
        # Two products and a sum, each rounded, as in torchvision: to the same bits.
        mixed = _neighbours(image).mul_(rest).add_(image.mul(share))
        return mixed, _soft_targets(target, self.num_classes, share, rest)


class RandomCutMix(_Mixing):
    """Paste a rectangle of its neighbour into each image (Yun et al., arXiv 1905.04899); arguments as `_Mixing`."""

    def draw(self, image: Tensor, rng: random.Random) -> Tensor:
        """Draw the argument `drawn` of `mix` for a (B, C, H, W) batch, on the CPU."""
        height, width = image.shape[-2:]
        share = rng.betavariate(self.alpha, self.alpha)
        centre_x = rng.randrange(width)
        centre_y = rng.randrange(height)
        # The neighbour's share is an area, and each side of the rectangle goes with its square root.
        half = 0.5 * math.sqrt(1.0 - share)
        half_width, half_height = int(half * width), int(half * height)
        left, right = max(centre_x - half_width, 0), min(centre_x + half_width, width)
        top, bottom = max(centre_y - half_height, 0), min(centre_y + half_height, height)
        return pack_box((left, top, right, bottom), height, width)

    def mix(self, image: Tensor, target: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """Mix a batch; as `RandomMixUp`."""
        left, top, right, bottom, share, rest = drawn.unbind()
        mixed = torch.where(_inside(image, left, top, right, bottom), _neighbours(image), image)
        return mixed, _soft_targets(target, self.num_classes, share, rest)


class RandomMix:
    """Apply mixup or cutmix to a batch; one of the two may be None.

    Args:
        mixup: mixup, or None.
        cutmix: cutmix, or None.
        prob: probability that a batch is mixed.
        switch_prob: probability of cutmix rather than mixup, if there are both.
    """

    def __init__(
        self, mixup: RandomMixUp | None, cutmix: RandomCutMix | None, prob: float = 1.0, switch_prob: float = 0.5
    ) -> None:
        self.mixup = mixup
        self.cutmix = cutmix
        self.prob = prob
        self.switch_prob = switch_prob

    def draw(self, image: Tensor, rng: random.Random) -> tuple["_Mixing | RandomMixEach", Tensor] | None:
        """Draw mixup or cutmix for a (B, C, H, W) batch, and the argument `drawn` of its `mix`; None to mix nothing."""
        # Both are drawn whatever they decide, so that no option moves the draws that follow.
        mixes, switch = rng.random(), rng.random()
        if mixes >= self.prob:
            return None
        is_cutmix = self.mixup is None or (self.cutmix is not None and switch < self.switch_prob)
        mixer: _Mixing = self.cutmix if is_cutmix else self.mixup
        return mixer, mixer.draw(image, rng)

    def draw_and_mix(self, image: Tensor, target: Tensor, rng: random.Random) -> tuple[Tensor, Tensor]:
        """Mix (B, C, H, W) floats and their targets by one of the two or not at all, drawing from `rng`."""
        found = self.draw(image, rng)
        if found is None:
            return image, target
        mixer, drawn = found
        return mixer.mix(image, target, _to_device(drawn, image.device))

    def __call__(self, batch: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Mix a batch by one of the two, as `RandomMixUp`."""
        found = self.draw(batch, process_rng())
        if found is None:
            return batch, target
        mixer, _ = found
        return mixer(batch, target)


class RandomMixEach(RandomMix):
    """Draw and apply mixup or cutmix for each image separately: the mode `elem` of timm's Mixup."""

    def draw(self, image: Tensor, rng: random.Random) -> tuple["RandomMixEach", Tensor]:
        """Return itself and (B, 7) numbers for `mix`: box, the image's share of the blend, and both targets' shares."""
        # Of an image that is not mixed: an empty box, and all of itself.
        rows = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0]]).repeat(len(image), 1)
        for row in rows:
            found = super().draw(image, rng)
            if found is None:
                continue
            mixer, drawn = found
            if mixer is self.cutmix:
                row[:4], row[5:] = drawn[:4], drawn[4:]
            else:
                row[4], row[5:] = drawn[0], drawn
        return self, rows

    def mix(self, image: Tensor, target: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """Mix a batch; as `RandomMixUp`."""
        left, top, right, bottom, blend, share, rest = drawn[..., None].unbind(1)
        neighbours = _neighbours(image)
        blend = blend[..., None, None]
        # One expression for the whole batch, whatever each image has drawn: the host does not wait for the device.
        is_pasted = _inside(image, left, top, right, bottom)[:, None]
        mixed = torch.where(is_pasted, neighbours, neighbours * (1 - blend) + image * blend)
        mixer = self.mixup or self.cutmix
        return mixed, _soft_targets(target, mixer.num_classes, share, rest)

    def __call__(self, batch: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Mix a batch, as `RandomMixUp`, with draws seeded from torch's process-wide generator."""
        _, drawn = self.draw(batch, process_rng())
        return self.mix(batch, target, drawn.to(batch.device))


def get_mixup_cutmix(
    *,
    mixup_alpha: float,
    cutmix_alpha: float,
    num_classes: int,
    use_v2: bool = False,
    mode: str = "batch",
    prob: float = 1.0,
    switch_prob: float = 0.5,
) -> RandomMix | None:
    """Return mixup or cutmix if its alpha is above 0, a random choice between them if both are, or None.

    The mode `batch` draws once for the whole batch, `elem` for each image; `prob` and `switch_prob` are `RandomMix`'s.
    `use_v2` has no effect, since both of torchvision's versions compute the same.
    """
    mixup = cutmix = None
    if mixup_alpha > 0:
        mixup = RandomMixUp(num_classes, p=1.0, alpha=mixup_alpha)
    if cutmix_alpha > 0:
        cutmix = RandomCutMix(num_classes, p=1.0, alpha=cutmix_alpha)
    if mixup is None and cutmix is None:
        return None
    kind = RandomMixEach if mode == "elem" else RandomMix
    return kind(mixup, cutmix, prob, switch_prob)
