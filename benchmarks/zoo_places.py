"""Check methods on boxes, regions and joints of detectors and segmenters.

python -m benchmarks.zoo_places                   check all, and write benchmarks/results/zoo_places.md; resumes
python -m benchmarks.zoo_places retinanet rise    check some networks or methods, and print the table
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import monai
import monai.networks.nets
import segmentation_models_pytorch as smp
import torch
import torchvision
import transformers
from torch import Tensor, nn

import saliency
from benchmarks.zoo_cells import Case, Table

hf: Any = transformers
networks: Any = monai.networks.nets

# One method of each family, with few passes.
METHODS: dict[str, dict[str, Any]] = {
    "grad_cam": {},
    "layer_cam": {},
    "eigen_cam": {},
    "score_cam": {"channels": 4},
    "input_x_gradient": {},
    "guided_backprop": {},
    "full_grad": {},
    "integrated_gradients": {"steps": 2},
    "smooth_grad": {"passes": 2},
    "deep_lift": {},
    "lrp": {},
    "rise": {"passes": 4},
    "d_rise": {"passes": 4},
    "vx_code": {"segments": (2, 2)},
    "odam": {},
    "occlusion": {"window": 48, "stride": 48},
    "kernel_shap": {"segments": (2, 2), "passes": 6},
    "chefer_attention": {},
}


def image(height: int = 64, width: int = 96) -> Tensor:
    """Return noise of 0 to 1, (1, 3, H, W)."""
    return torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(1))


def torchvision_detector(name: str, target: Callable[..., Any] = saliency.box, **options: Any) -> Callable[[], Case]:
    """Return a builder of a detector of torchvision, which resizes images to 64 pixels."""

    def build() -> Case:
        size = {} if name.startswith("ssd") else {"min_size": 64, "max_size": 96}
        sized = {"weights": None, "weights_backbone": None, **size, **options}
        model = getattr(torchvision.models.detection, name)(**sized)
        if name.startswith("retinanet"):  # its probabilities start at 1 %
            nn.init.zeros_(model.head.classification_head.cls_logits.bias)
        return Case(model, image(), target())

    return build


RESNET: dict[str, Any] = {
    "embedding_size": 8,
    "hidden_sizes": [8, 8, 16, 16],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
}
LAYERS: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
}
TEXT: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
SWIN: dict[str, Any] = {
    "embed_dim": 8,
    "depths": [1, 1, 1, 1],
    "num_heads": [1, 1, 2, 2],
    "window_size": 2,
    "image_size": 64,
}


def detr() -> Case:
    """Return DETR."""
    backbone = hf.ResNetConfig(**RESNET, out_features=["stage4"])
    config = hf.DetrConfig(
        use_timm_backbone=False, backbone_config=backbone, backbone=None, num_labels=3, num_queries=5, **LAYERS
    )
    return Case(hf.DetrForObjectDetection(config), image(), saliency.box())


def rt_detr() -> Case:
    """Return RT-DETR."""
    backbone = hf.RTDetrResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )
    config = hf.RTDetrConfig(
        backbone_config=backbone,
        encoder_in_channels=[8, 16, 16],
        encoder_hidden_dim=32,
        encoder_ffn_dim=16,
        num_queries=5,
        num_labels=3,
        decoder_in_channels=[32, 32, 32],
        decoder_n_points=2,
        num_denoising=0,
        anchor_image_size=None,
        **{name: value for name, value in LAYERS.items() if not name.startswith("encoder_ffn")},
    )
    return Case(hf.RTDetrForObjectDetection(config), image(64, 64), saliency.box())


class WithTexts(nn.Module):
    """Model of images and texts, with the same texts for each image."""

    def __init__(self, model: nn.Module, input_ids: Tensor) -> None:
        super().__init__()
        self.model, self.input_ids = model, input_ids

    def forward(self, x: Tensor) -> Any:
        """Return the output for images (N, C, H, W)."""
        ids = self.input_ids.repeat(len(x), 1)
        return self.model(pixel_values=x, input_ids=ids, attention_mask=torch.ones_like(ids))


def owlv2() -> Case:
    """Return OWLv2 with two texts of three tokens."""
    text = hf.Owlv2TextConfig(**TEXT, vocab_size=50, max_position_embeddings=8).to_dict()
    vision = hf.Owlv2VisionConfig(**TEXT, image_size=64, patch_size=16).to_dict()
    model = hf.Owlv2ForObjectDetection(hf.Owlv2Config(text_config=text, vision_config=vision, projection_dim=16))
    return Case(WithTexts(model, torch.tensor([[3, 4, 49], [5, 6, 49]])), image(64, 64), saliency.box())


def grounding_dino() -> Case:
    """Return Grounding DINO with two phrases."""
    backbone = hf.SwinConfig(**SWIN, out_features=["stage2", "stage3", "stage4"])
    config = hf.GroundingDinoConfig(
        backbone_config=backbone,
        text_config=hf.BertConfig(**TEXT, vocab_size=1100).to_dict(),
        num_queries=5,
        num_feature_levels=3,
        max_text_len=8,
        **{**LAYERS, "decoder_layers": 2},
    )
    tokens = {"input_ids": torch.tensor([[101, 7, 8, 1012, 9, 1012, 102]])}
    return Case(hf.GroundingDinoForObjectDetection(config), image(64, 64), saliency.box(), tokens)


def segformer() -> Case:
    """Return SegFormer."""
    config = hf.SegformerConfig(
        hidden_sizes=[8, 8, 8, 8],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 1, 1],
        decoder_hidden_size=8,
        num_labels=3,
    )
    return Case(hf.SegformerForSemanticSegmentation(config), image(), saliency.region(1, (8, 8, 40, 40)))


def mask2former() -> Case:
    """Return Mask2Former."""
    config = hf.Mask2FormerConfig(
        backbone_config=hf.SwinConfig(**SWIN, out_features=["stage1", "stage2", "stage3", "stage4"]),
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=16,
        dim_feedforward=16,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        num_queries=5,
        num_labels=3,
    )
    model = hf.Mask2FormerForUniversalSegmentation(config)
    return Case(model, image(64, 64), saliency.region(1, (8, 8, 40, 40)))


def sam() -> Case:
    """Return SAM with a point as the prompt."""
    config = hf.SamConfig(
        vision_config={
            "hidden_size": 16,
            "output_channels": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 64,
            "patch_size": 8,
            "mlp_dim": 16,
            "global_attn_indexes": [1],
            "window_size": 4,
            "num_pos_feats": 8,
        },
        prompt_encoder_config={"hidden_size": 16, "image_size": 64, "patch_size": 8, "mask_input_channels": 4},
        mask_decoder_config={
            "hidden_size": 16,
            "mlp_dim": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "iou_head_hidden_dim": 16,
        },
    )
    points = {"input_points": torch.tensor([[[[20.0, 20.0]]]])}
    return Case(hf.SamModel(config), image(64, 64), saliency.region(0, (8, 8, 40, 40)), points)


def maps_of(model: Callable[[], nn.Module]) -> Callable[[], Case]:
    """Return a builder of a network of maps."""
    return lambda: Case(model(), image(64, 64), saliency.region(1, (8, 8, 40, 40)))


def drawn(name: str) -> Callable[[], Case]:
    """Return a builder of a bundled network with a drawn scene."""

    def build() -> Case:
        scenes = saliency.testbed.draw_scenes(1, seed=1_000_003, task="corners")
        targets = {"shapes_unet": saliency.region("triangle"), "shapes_circles": saliency.region(0, "border")}
        targets["shapes_keypoints"] = saliency.keypoint("top")
        return Case(saliency.load(name), scenes.images / 127.5 - 1, targets.get(name, saliency.box()))

    return build


KINDS: dict[str, Callable[[], Case]] = {
    "torchvision Faster R-CNN": torchvision_detector("fasterrcnn_mobilenet_v3_large_320_fpn", num_classes=4),
    "torchvision Mask R-CNN": torchvision_detector("maskrcnn_resnet50_fpn", num_classes=4),
    "torchvision Keypoint R-CNN": torchvision_detector("keypointrcnn_resnet50_fpn", lambda: saliency.keypoint("nose")),
    "torchvision RetinaNet": torchvision_detector("retinanet_resnet50_fpn", num_classes=4, score_thresh=0.0),
    "torchvision FCOS": torchvision_detector("fcos_resnet50_fpn", num_classes=4, score_thresh=0.0),
    "torchvision SSD": torchvision_detector("ssdlite320_mobilenet_v3_large", num_classes=4),
    "shapes_detector, as Ultralytics": drawn("shapes_detector"),
    "shapes_queries, as DETR": drawn("shapes_queries"),
    "transformers DETR": detr,
    "transformers RT-DETR": rt_detr,
    "transformers OWLv2": owlv2,
    "transformers Grounding DINO": grounding_dino,
    "transformers SegFormer": segformer,
    "transformers Mask2Former": mask2former,
    "transformers SAM": sam,
    "segmentation_models_pytorch Unet": maps_of(lambda: smp.Unet("mobilenet_v2", encoder_weights=None, classes=3)),
    "MONAI BasicUNet": maps_of(lambda: networks.BasicUNet(2, 3, 3, (4, 4, 8, 8, 8, 4))),
    "shapes_unet": drawn("shapes_unet"),
    "shapes_circles, its border": drawn("shapes_circles"),
    "shapes_keypoints": drawn("shapes_keypoints"),
}


PLAIN = ("torchvision Mask R-CNN", "torchvision Keypoint R-CNN", "torchvision RetinaNet")  # find nothing with noise
LIBRARIES = ("torchvision", "transformers", "segmentation_models_pytorch", "monai")
PLACES = Table("zoo_places", "Methods on boxes, regions and joints", LIBRARIES, KINDS, METHODS, PLAIN)

if __name__ == "__main__":
    PLACES.main()
