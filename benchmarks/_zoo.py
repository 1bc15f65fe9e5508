"""Models of the published throughput table, rebuilt on the meta device so that their work can be counted.

torchvision's and timm's models come by name; the others are rebuilt here to the shapes that their sources
state.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Step = Callable[[], Any]
SQUAD_LENGTH = 384
# Half of the tokens of MLPerf's packed Wikipedia sequences of 512 are padding, which its entries leave out.
PACKED_LENGTH = 256
MASKED = 0.156  # 20 of 128 tokens, 80 of 512


WORDS = 267735  # of WikiText-103


class TransformerXL(nn.Module):
    """Transformer-XL: relative attention over a segment and its memory; softmax adaptive, or full where
    `divide` is None."""

    def __init__(self, layers: int, width: int, heads: int, inner: int, divide: float | None) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "attention": nn.Linear(width, 3 * width, bias=False),
                    "position": nn.Linear(width, width, bias=False),
                    "output": nn.Linear(width, width, bias=False),
                    "first": nn.Linear(width, inner),
                    "second": nn.Linear(inner, width),
                    "norm_a": nn.LayerNorm(width),
                    "norm_b": nn.LayerNorm(width),
                }
            )
            for _ in range(layers)
        )
        self.head = (
            nn.Linear(width, WORDS)
            if divide is None
            else nn.AdaptiveLogSoftmaxWithLoss(width, WORDS, [19997, 39997, 199997], div_value=divide)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Loss of a batch of segments, shape (batch, length); the memory is as long as the segment."""
        hidden = functional.dropout(self.embedding(tokens), 0.1)
        places = hidden.new_zeros(2 * hidden.shape[1], hidden.shape[2])
        for block in self.blocks:
            attended = functional.dropout(self._attend(block, hidden, places), 0.1)
            hidden = block["norm_a"](hidden + attended)
            inner = functional.dropout(block["first"](hidden).relu(), 0.1)
            hidden = block["norm_b"](hidden + functional.dropout(block["second"](inner), 0.1))
        head, flat = self.head, hidden.reshape(-1, hidden.shape[2])
        if isinstance(head, nn.Linear):
            return functional.cross_entropy(head(flat), tokens.flatten())
        loss = head.head(flat).log_softmax(-1).sum()
        shares = (0.1, 0.1, 0.02)  # of the rows that reach the rarer words
        for share, cluster in zip(shares, head.tail, strict=True):
            loss = loss + cluster(flat[: int(len(flat) * share) + 1]).log_softmax(-1).sum()
        return loss

    def _attend(self, block: nn.ModuleDict, hidden: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Relative attention; the published code projects queries of the memory too, and drops them."""
        batch, length, width = hidden.shape
        both = block["attention"](torch.cat([hidden.detach(), hidden], 1))
        query, key, value = both.view(batch, 2 * length, 3 * self.heads, -1).transpose(1, 2).chunk(3, 1)
        query = query[:, :, length:]
        position = block["position"](places).view(2 * length, self.heads, -1).permute(1, 2, 0)
        moved = functional.pad((query + 1) @ position, (1, 0))[..., 1:]
        scores = ((query + 1) @ key.transpose(2, 3) + moved) * 0.125
        weights = scores.masked_fill(scores.isnan(), 0.0).softmax(-1)
        return block["output"]((weights @ value).transpose(1, 2).reshape(batch, length, width))


class SSD(nn.Module):
    """SSD at 300 px on a ResNet cut after its third stage, that stage unstrided; six feature maps."""

    def __init__(self, backbone: str) -> None:
        super().__init__()
        import torchvision

        whole = getattr(torchvision.models, backbone)()
        block = whole.layer3[0]
        for layer in (block.conv1, block.conv2, block.downsample[0]):
            layer.stride = (1, 1)
        self.backbone = nn.Sequential(*list(whole.children())[:7])
        channels = [1024 if backbone == "resnet50" else 256, 512, 512, 256, 256, 256]
        self.extra = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(a, m, 1, bias=False), nn.BatchNorm2d(m), nn.ReLU(True),
                nn.Conv2d(m, b, 3, s, p, bias=False), nn.BatchNorm2d(b), nn.ReLU(True),
            )
            for (a, b), m, s, p in zip(
                itertools.pairwise(channels),
                (256, 256, 128, 128, 128),
                (2, 2, 2, 1, 1),
                (1, 1, 1, 0, 0),
                strict=True,
            )
        )  # fmt: skip
        self.heads = nn.ModuleList(
            nn.Conv2d(c, n * 85, 3, padding=1) for c, n in zip(channels, (4, 6, 6, 6, 4, 4), strict=True)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Sum of the heads' outputs, as a loss would reach all of them."""
        feature, total = self.backbone(images), torch.zeros((), device=images.device)
        for number, head in enumerate(self.heads):
            feature = self.extra[number - 1](feature) if number else feature
            total = total + functional.smooth_l1_loss(*(head(feature),) * 2).sum()
        return total


class RetinaNet(nn.Module):
    """MLPerf's RetinaNet at 800 px: ResNeXt-50 with frozen norms, its stem and first stage too, a pyramid of
    five maps, 264 classes. A norm and the focal loss are one operator each, as NVIDIA's kernels fuse them."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
        from torchvision.models.detection.retinanet import RetinaNetHead
        from torchvision.ops.feature_pyramid_network import LastLevelP6P7

        self.backbone = resnet_fpn_backbone(
            backbone_name="resnext50_32x4d",
            weights=None,
            norm_layer=nn.BatchNorm2d,
            trainable_layers=3,
            returned_layers=[2, 3, 4],
            extra_blocks=LastLevelP6P7(2048, 256),
        )
        for norm in self.backbone.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.requires_grad_(False)
        self.head = RetinaNetHead(256, 9, 264)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Loss of all anchors' classes and boxes."""
        for norm in self.backbone.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.eval()
        found = self.head(list(self.backbone(images).values()))
        classes, boxes = found["cls_logits"], found["bbox_regression"]
        classes = functional.binary_cross_entropy_with_logits(classes, torch.empty_like(classes))
        return classes + functional.l1_loss(boxes, torch.empty_like(boxes))


class UNet(nn.Module):
    """U-Net in two or three dimensions: two convolutions a level, pooling or strides down, transposed up."""

    def __init__(self, dims: int, channels: list[int], inputs: int, outputs: int, norm: bool = True) -> None:
        super().__init__()
        conv = nn.Conv2d if dims == 2 else nn.Conv3d
        transposed = nn.ConvTranspose2d if dims == 2 else nn.ConvTranspose3d
        instance = (
            (nn.InstanceNorm2d if dims == 2 else nn.InstanceNorm3d)
            if norm
            else (lambda *_, **__: nn.Identity())
        )

        def pair(a: int, b: int, stride: int = 1) -> nn.Sequential:
            return nn.Sequential(
                conv(a, b, 3, stride, 1), instance(b, affine=True), nn.LeakyReLU(0.01, True),
                conv(b, b, 3, 1, 1), instance(b, affine=True), nn.LeakyReLU(0.01, True),
            )  # fmt: skip

        self.down = nn.ModuleList(
            pair(a, b, 1 if n == 0 else 2)
            for n, (a, b) in enumerate(zip([inputs, *channels], channels, strict=False))
        )
        self.up = nn.ModuleList(transposed(b, a, 2, 2) for a, b in itertools.pairwise(channels))
        self.join = nn.ModuleList(pair(2 * a, a) for a in channels[:-1])
        self.head = conv(channels[0], outputs, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Mean of the class scores' logarithms."""
        kept = []
        for level in self.down:
            images = level(images)
            kept.append(images)
        for number in reversed(range(len(self.up))):
            images = self.join[number](torch.cat([self.up[number](images), kept[number]], 1))
        return self.head(images).log_softmax(1).mean()


def _pretraining_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """BERT's two losses; words are predicted at masked places alone, as in NVIDIA's and MLPerf's code."""
    hidden, pooled = model.bert(tokens, return_dict=False)
    masked = round(MASKED * tokens.shape[1])
    words, order = model.cls(hidden[:, :masked], pooled)
    loss = functional.cross_entropy(words.flatten(0, 1), tokens[:, :masked].flatten())
    return loss + functional.cross_entropy(order, tokens[:, 0])


def _text(kind: str, length: int, **settings: int) -> Callable[..., tuple[nn.Module, Step]]:
    def build(batch: int, attention: str = "eager") -> tuple[nn.Module, Step]:
        import transformers
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        # Under a name of its own no mask is made for it, which would look at numbers.
        transformers.AttentionInterface.register("fused", sdpa_attention_forward)
        config = getattr(transformers, f"{kind.partition('For')[0].removesuffix('LMHeadModel')}Config")(
            **settings
        )
        config._attn_implementation = attention
        for name in (
            "hidden_dropout_prob",
            "attention_probs_dropout_prob",
            "resid_pdrop",
            "attn_pdrop",
            "embd_pdrop",
        ):
            if hasattr(config, name):
                setattr(config, name, 0.1)
        model = getattr(transformers, kind)(config).train()
        tokens = torch.zeros(batch, length, dtype=torch.long)
        if "QuestionAnswering" in kind:
            ends = torch.zeros(batch, dtype=torch.long)
            return model, lambda: model(tokens, start_positions=ends, end_positions=ends).loss
        if "PreTraining" in kind:
            return model, lambda: _pretraining_loss(model, tokens)
        masked = "GPT2" in kind and attention == "eager"
        extra = {"attention_mask": torch.zeros(batch, 1, length, length)} if masked else {}
        return model, lambda: model(tokens, labels=tokens, use_cache=False, **extra).loss

    return build


def _module(
    make: Callable[[], nn.Module], *shape: int, tokens: bool = False
) -> Callable[[int], tuple[nn.Module, Step]]:
    def build(batch: int) -> tuple[nn.Module, Step]:
        model = make().train()
        inputs = torch.zeros(batch, *shape, dtype=torch.long) if tokens else torch.zeros(batch, *shape)
        return model, lambda: model(inputs)

    return build


LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
OWN: dict[str, Callable[..., tuple[nn.Module, Step]]] = {
    **{
        f"bert_base_{name}": _text(f"BertFor{head}", length)
        for name, head, length in (("squad", "QuestionAnswering", 384), ("128", "PreTraining", 128))
    },
    **{
        f"bert_large_{name}": _text(f"BertFor{head}", length, **LARGE)
        for name, head, length in (
            ("squad", "QuestionAnswering", SQUAD_LENGTH),
            ("128", "PreTraining", 128),
            ("512", "PreTraining", 512),
            ("packed", "PreTraining", PACKED_LENGTH),
        )
    },
    "gpt2_large": _text("GPT2LMHeadModel", 1024, n_embd=1280, n_layer=36, n_head=20),
    "gpt3_xl": _text("GPT2LMHeadModel", 2048, n_embd=2048, n_layer=24, n_head=16, n_positions=2048),
    "gpt3_27": _text("GPT2LMHeadModel", 2048, n_embd=2560, n_layer=32, n_head=32, n_positions=2048),
    "opt_13": _text(
        "OPTForCausalLM", 2048, hidden_size=2048, num_hidden_layers=24, ffn_dim=8192, num_attention_heads=32
    ),
    # Lambda's logs were run without --adaptive; their large model reads segments of 256.
    "transformerxlbase_full": _module(lambda: TransformerXL(16, 512, 8, 2048, None), 192, tokens=True),
    "transformerxllarge_full": _module(lambda: TransformerXL(18, 1024, 16, 4096, None), 256, tokens=True),
    "transformerxlbase": _module(lambda: TransformerXL(16, 512, 8, 2048, 1.0), 192, tokens=True),
    "transformerxllarge": _module(lambda: TransformerXL(18, 1024, 16, 4096, 4.0), 384, tokens=True),
    "ssd_resnet50": _module(lambda: SSD("resnet50"), 3, 300, 300),
    "ssd_resnet34": _module(lambda: SSD("resnet34"), 3, 300, 300),
    "retinanet": _module(RetinaNet, 3, 800, 800),
    "unet3d": _module(lambda: UNet(3, [32, 64, 128, 256, 320, 320], 1, 3), 1, 128, 128, 128),
    "nnunet3d": _module(lambda: UNet(3, [32, 64, 128, 256, 320, 320], 5, 4), 5, 128, 128, 128),
    "unet_medical": _module(lambda: UNet(2, [64, 128, 256, 512, 1024], 1, 2, norm=False), 1, 560, 560),
}


def build(name: str, pixels: int, batch: int) -> tuple[nn.Module, Step]:
    """The model of a key such as ``timm:resnet50``, ``torchvision:vgg16`` or ``own:bert_base_squad`` on the
    meta device, and its forward pass to a loss; ``fused:`` is one of timm's or our own with the fused
    attention of today's PyTorch. Raises KeyError where the library does not know it."""
    library, _, short = name.partition(":")
    warnings.simplefilter("ignore")
    with torch.device("meta"):
        if library == "fused" and short in OWN:
            return OWN[short](batch, "fused")
        if library == "own":
            return OWN[short](batch)
        model = _image_model(library, short, pixels).train()
        images, labels = torch.zeros(batch, 3, pixels, pixels), torch.zeros(batch, dtype=torch.long)

    def loss() -> torch.Tensor:
        output = model(images)
        return functional.cross_entropy(output[0] if isinstance(output, tuple | list) else output, labels)

    return model, loss


def forward(name: str, pixels: int) -> tuple[nn.Module, Callable[[int], Step]]:
    """A timm network in evaluation on the meta device, with the fused attention of today's PyTorch, and its
    forward pass at a batch size. Raises RuntimeError where timm does not know it."""
    import timm
    import timm.layers

    timm.layers.set_fused_attn(True)
    with torch.device("meta"):
        model = timm.create_model(name).eval()
        try:
            model(torch.zeros(2, 3, pixels, pixels))
        except Exception:
            model = timm.create_model(name, img_size=pixels).eval()
    return model, lambda batch: lambda: model(torch.zeros(batch, 3, pixels, pixels, device="meta"))


def _of_timm(name: str) -> nn.Module:
    """A network as its figures were published: today's timm makes a narrow one of three wide ones, and leaves
    the classifier out of some.
    """
    import timm
    from timm.models.resnet import Bottleneck, ResNet

    if wide := re.fullmatch(r"ig_resnext101_32x(16|32|48)d", name):
        return ResNet(Bottleneck, (3, 4, 23, 3), cardinality=32, base_width=int(wide[1]))
    model: nn.Module = timm.create_model(name)
    return timm.create_model(name, num_classes=1000) if getattr(model, "num_classes", 1000) == 0 else model


def _image_model(library: str, name: str, pixels: int) -> nn.Module:
    if library == "torchvision":
        import torchvision

        settings = {"init_weights": False} if re.search(r"vgg|googlenet|inception", name) else {}
        return getattr(torchvision.models, name)(**settings)
    import timm
    import timm.layers

    timm.layers.set_fused_attn(library == "fused")  # the published figures are older than fused attention
    if not timm.models.is_model(name) and not timm.list_models(name):
        raise KeyError(name)
    model = _of_timm(name)
    for module in model.modules():
        if isinstance(module, (nn.SiLU, nn.Hardswish)):
            module.inplace = False  # as then; in place, autograd copies its input
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(2, 3, pixels, pixels))
    except Exception:
        model = timm.create_model(name, img_size=pixels)
    return model
