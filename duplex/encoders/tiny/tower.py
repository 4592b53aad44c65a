"""The image tower of `tiny`: a residual network for 64 x 64 pixels, registered in timm as `duplex_tiny`."""

from __future__ import annotations

from typing import Any

from duplex.encoders.libraries import timm

CHANNELS = (48, 112, 224, 320)  # of its four blocks, on maps of 16, 8, 4 and 2 cells a side
default_cfgs = timm.models.generate_default_cfgs(
    {"duplex_tiny.none": {"input_size": (3, 64, 64), "pool_size": (2, 2), "first_conv": "conv1.0", "classifier": "fc"}}
)


@timm.models.register_model
def duplex_tiny(pretrained: bool = False, **options: Any) -> Any:
    """Build the network; `options` are those of timm's `create_model`."""
    network = timm.models.resnet.ResNet
    shape: dict[str, Any] = {"layers": (1, 1, 1, 1), "channels": CHANNELS, "stem_type": "deep_tiered", "stem_width": 16}
    block = timm.models.resnet.BasicBlock
    return timm.models.build_model_with_cfg(network, "duplex_tiny", pretrained, block=block, **shape, **options)
