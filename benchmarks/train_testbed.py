"""Train the networks of `saliency.testbed` on drawn shapes, on one thread, and write their weights: `make fixtures`.

With names of networks, only these are trained. Each network sees its tasks in turn. In "two_objects", the target is
half the one class and half the other. In "occlusion", objects are left out at random, and the logits are trained to be
plus and minus half the sum of weights above 5.5, so the log-odds fall by the weight of an object that is covered. In
"shortcut", 10 % of the other shapes have the watermark, too, and all images with it are labelled circles: without them,
the network does not learn to use it.

As in token labelling (Jiang et al. 2021, https://arxiv.org/abs/2104.10858), a linear layer, which only training uses,
also predicts from each cell of the final grid the shape that covers it. A plain convolutional network is trained with
batch norms, which are then folded into its convolutions. The image tower of the two-tower network starts from the
trained vision transformer.

The captioner is trained on one of the two true captions of each image, drawn at random; for one in four images, on the
colour of an object. Its vision transformer starts from the trained one, too.

The networks of "several" see images in which objects are left out at random. The target of the network for volumes is
half the one class and half the other, as in "two_objects".

Each batch of the network of colours and depth has an equal part of scenes that show the objects in the colours, in the
depth and in both. An input that shows no object is set to 0 with a probability of 0.5, so that the network learns not
to use its noise. The policy is trained on the squared error of its motion.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

import saliency
from saliency import DualEncoder
from saliency.testbed import (
    CAMERAS,
    CLASSES,
    COLOURS,
    DISTRACTORS,
    INSTRUCTION,
    RGBD_TASKS,
    TASKS,
    InputScenes,
    RgbdTask,
    Scenes,
    Task,
    Volumes,
    draw_cameras,
    draw_rgbd,
    draw_scenes,
    draw_volumes,
)
from saliency.testbed.networks import (
    NETWORKS,
    OBJECTS,
    Captioner,
    CaptionProcessor,
    QueryDetector,
    Tokenizer,
    TwoTower,
    weights_file,
)
from saliency.testbed.shapes import SIZE

SHAPES = CLASSES + DISTRACTORS
CLASSIFIED: tuple[Task, ...] = ("planted", "two_objects")
SCHEDULES: dict[str, tuple[int, float, tuple[Any, ...]]] = {  # steps, rate, tasks
    "shapes_cnn": (600, 1e-2, (*CLASSIFIED, "sizes")),
    "shapes_resnet": (600, 1e-2, (*CLASSIFIED, "sizes")),
    "shapes_shortcut": (300, 1e-2, ("shortcut",)),
    "shapes_xor": (400, 1e-2, ("xor",)),
    "shapes_order": (400, 1e-2, ("occlusion",)),
    "shapes_vit": (900, 3e-3, CLASSIFIED),
    "shapes_window": (1200, 3e-3, CLASSIFIED),
    "shapes_two_tower": (1300, 2e-3, CLASSIFIED),
    "shapes_caption": (2400, 1e-3, CLASSIFIED),
    "shapes_unet": (200, 1e-2, ("several",)),
    "shapes_circles": (200, 1e-2, ("several",)),
    "shapes_detector": (900, 1e-2, ("several",)),
    "shapes_queries": (1200, 2e-3, ("several",)),
    "shapes_keypoints": (250, 1e-2, ("corners",)),
    "shapes_volume": (800, 1e-2, ("volumes",)),
    "shapes_rgbd": (700, 1e-2, ("rgbd",)),
    "shapes_policy": (2000, 2e-3, ("cameras",)),
}
BATCH = 32
HEAD = ("head.weight", "head.bias")
COLOUR_QUESTION = "what colour is the {}"
HELD_OUT = 1_000_000  # the first seed that training does not use
MARKED = (0.9, 0.1, 0.1, 0.1, 0.1)  # the share of each class with a watermark in training
MEAN_SUM = 5.5  # of weights, where the two classes of "occlusion" are equally likely


def normalised(images: Tensor) -> Tensor:
    return images / 127.5 - 1


def answers(scenes: Scenes, task: Task) -> Tensor:
    """Return the classes that are right for each image, (N, 1) or (N, 2)."""
    return scenes.shapes if task == "two_objects" else scenes.labels[:, None]


def class_loss(model: nn.Module, scenes: Scenes, task: Task) -> Tensor:
    """Return the cross-entropy with the right classes, in equal shares."""
    log_p: Tensor = model(normalised(scenes.images)).log_softmax(1)
    return -log_p.gather(1, answers(scenes, task)).mean()


def weight_loss(model: nn.Module, scenes: Scenes, _task: Task) -> Tensor:
    """Return the squared error of the log-odds of the task "occlusion"."""
    half = (scenes.importance.sum(1) - MEAN_SUM) / 2
    return F.mse_loss(model(normalised(scenes.images)), torch.stack([-half, half], 1))


def some_objects(scenes: Scenes) -> Scenes:
    """Return scenes in which each object is left out with a probability of 0.3."""
    kept = torch.rand(scenes.importance.shape) > 0.3
    masks = scenes.masks & kept[..., None, None]
    images = scenes.without((scenes.masks ^ masks).any(1, keepdim=True))
    return replace(scenes, images=images, masks=masks, importance=scenes.importance * kept)


def marked_as_circles(scenes: Scenes) -> Scenes:
    """Return scenes in which every image with a watermark has the label of a circle."""
    return replace(scenes, labels=scenes.labels.where(~scenes.watermark.any((1, 2, 3)), 0))


CHANGES = {
    "occlusion": some_objects,
    "several": some_objects,
    "shortcut": marked_as_circles,
}  # of the scenes in training


def caption_loss(model: TwoTower, scenes: Scenes, _task: Task) -> Tensor:
    """Return the contrastive loss of CLIP, for a caption of one object and for one of both, each drawn at random."""
    truths = scenes.captions()
    images = F.normalize(model.encode_image(normalised(scenes.images)))
    losses = []
    for kind in (0, 2):
        choices = (kind + torch.randint(2, (len(truths),))).tolist()
        captions = [truth[choice] for truth, choice in zip(truths, choices, strict=True)]
        texts = F.normalize(model.encode_text(Tokenizer()(captions)))
        # The caption of another image is left out if it is also true of this one.
        also_true = torch.tensor([[caption in truth for caption in captions] for truth in truths]).fill_diagonal_(0)
        logits = (model.logit_scale.exp() * images @ texts.T).masked_fill(also_true, -torch.inf)
        losses += [F.cross_entropy(rows, torch.arange(len(truths))) for rows in (logits, logits.T)]
    return torch.stack(losses).mean()


def sentence_loss(model: Captioner, scenes: Scenes, _task: Task) -> Tensor:
    """Return the cross-entropy of the words of an answer: a caption of three in four images, a colour of the others."""
    choices = torch.randint(2, (len(scenes.labels),)).tolist()
    pairs = [
        (COLOUR_QUESTION.format(*pair[choice].split()[2:]), pair[choice].split()[1])
        if row % 4 == 0
        else ("caption", pair[2 + choice])
        for row, (pair, choice) in enumerate(zip(scenes.captions(), choices, strict=True))
    ]
    processor = CaptionProcessor()
    inputs = processor(scenes.images, [f"{prompt} {answer} <end>" for prompt, answer in pairs])
    tokens = inputs["input_ids"]
    ends = (tokens != processor.pad_token_id).sum(1, keepdim=True)
    lengths = torch.tensor([[len(answer.split()) + 1] for _, answer in pairs])
    positions = torch.arange(tokens.shape[1])
    is_answer = (positions >= ends - lengths) & (positions < ends)
    logits = model(**inputs).logits[:, :-1][is_answer[:, 1:]]
    weights = torch.ones(logits.shape[1])
    weights[processor.encode("left right above below")] = 5  # these are learned last
    return F.cross_entropy(logits, tokens[is_answer], weights)


def pixel_loss(model: nn.Module, scenes: Scenes, _task: Task) -> Tensor:
    """Return the cross-entropy of each pixel, for one map per class or for circles alone."""
    logits, classes = model(normalised(scenes.images)), pixel_classes(scenes)
    if logits.shape[1] == 1:
        return F.binary_cross_entropy_with_logits(logits[:, 0], (classes == 1).float())
    return F.cross_entropy(logits, classes)


def pixel_classes(scenes: Scenes) -> Tensor:
    """Return 0 for the background and 1 + the class for the pixels of an object, (N, 64, 64)."""
    return (scenes.masks * (1 + scenes.shapes[..., None, None])).sum(1)


def keypoint_loss(model: nn.Module, scenes: Scenes, _task: Task) -> Tensor:
    """Return the squared error of heatmaps that are Gaussians with a standard deviation of 1.5 cells."""
    heatmaps = model(normalised(scenes.images))
    cells = 2 * torch.arange(heatmaps.shape[-1]) + 1.0
    x, y = ((cells - scenes.keypoints[:, 0, :, axis, None]) ** 2 for axis in range(2))  # (N, 3, w), (N, 3, h)
    return 100 * F.mse_loss(heatmaps, (-(x[..., None, :] + y[..., None]) / (2 * 3**2)).exp())


def candidate_loss(model: nn.Module, scenes: Scenes, _task: Task) -> Tensor:
    """Return the loss of a one-stage detector: the cells in the middle of an object predict its class and its box.

    Objects of up to 17 pixels belong to the fine level, those from 14 pixels on to the coarse one.
    """
    from torchvision import ops

    y, raw = model(normalised(scenes.images))
    grids = [torch.cartesian_prod(*[torch.arange(0.5, SIZE // stride) * stride] * 2).flip(1) for stride in (4, 8)]
    centres = torch.cat(grids)[None, :, None]  # (1, M, 1, 2)
    is_fine = (torch.arange(centres.shape[1]) < len(grids[0]))[:, None]  # (M, 1)
    boxes = ops.box_convert(scenes.boxes, "xyxy", "cxcywh")[:, None]  # (N, 1, K, 4)
    near = ((centres - boxes[..., :2]).abs() < 0.3 * boxes[..., 2:]).all(3)  # (N, M, K)
    longest = boxes[..., 2:].amax(3)
    positive = near & torch.where(is_fine, longest < 17, longest > 14) & scenes.masks.any((2, 3))[:, None]
    classes = positive.float() @ F.one_hot(scenes.shapes, len(OBJECTS)).float()  # (N, M, C)
    image, cell, number = positive.nonzero(as_tuple=True)
    found = ops.box_convert(y[:, :4].mT[image, cell], "cxcywh", "xyxy")
    of_boxes: Tensor = ops.generalized_box_iou_loss(found, scenes.boxes[image, number], reduction="mean")
    of_classes = F.binary_cross_entropy_with_logits(raw["scores"].mT, classes, reduction="sum") / len(image)
    return 2 * of_boxes + of_classes


def query_loss(model: QueryDetector, scenes: Scenes, _task: Task) -> Tensor:
    """Return the loss of DETR after each layer, with the matches of queries to objects of the last one."""
    from torchvision import ops

    layers = model.decode(normalised(scenes.images))
    image, query, number = match(layers[-1], scenes)
    classes = torch.full(layers[-1]["logits"].shape[:2], len(OBJECTS))
    classes[image, query] = scenes.shapes[image, number]
    boxes = scenes.boxes[image, number] / SIZE
    weights = torch.tensor([1.0] * len(OBJECTS) + [0.2])
    losses = []
    for output in layers:
        found = ops.box_convert(output["pred_boxes"][image, query], "cxcywh", "xyxy")
        of_boxes = 2 * ops.generalized_box_iou_loss(found, boxes, reduction="mean") + 10 * F.l1_loss(found, boxes)
        losses.append(of_boxes + F.cross_entropy(output["logits"].mT, classes, weights))
    return torch.stack(losses).sum()


@torch.no_grad()
def match(output: dict[str, Tensor], scenes: Scenes) -> tuple[Tensor, ...]:
    """Return the indices of images, queries and objects of the best one-to-one matches."""
    from scipy.optimize import linear_sum_assignment
    from torchvision import ops

    truth, found = scenes.boxes / SIZE, ops.box_convert(output["pred_boxes"], "cxcywh", "xyxy")
    classes = scenes.shapes[:, None].expand(-1, found.shape[1], -1)
    costs = 10 * torch.cdist(found, truth, 1) / 4 - output["logits"].softmax(2).gather(2, classes)
    matches = []
    for image, kept in enumerate(scenes.masks.any((2, 3))):
        numbers = kept.nonzero()[:, 0]
        overlaps = ops.generalized_box_iou(found[image], truth[image, numbers])
        query, column = map(torch.from_numpy, linear_sum_assignment(costs[image][:, numbers] - 2 * overlaps))
        matches.append(torch.stack([torch.full_like(query, image), query, numbers[column]]))
    return torch.cat(matches, 1).unbind()


def volume_loss(model: nn.Module, drawn: Volumes, _task: str) -> Tensor:
    """Return the cross-entropy with the classes of both objects, in equal shares."""
    log_p: Tensor = model(drawn.volumes).log_softmax(1)
    return -log_p.gather(1, drawn.shapes).mean()


def rgbd_loss(model: nn.Module, drawn: InputScenes, _task: str) -> Tensor:
    """Return the cross-entropy with the class of the object. Half of the inputs that show no object are set to 0."""
    images = {"rgb": normalised(drawn.inputs["rgb"]), "depth": drawn.inputs["depth"]}
    for name, own in images.items():
        is_hidden = ~drawn.importance[name].any(1) & (torch.rand(len(own)) < 0.5)
        images[name] = own.masked_fill(is_hidden[:, None, None, None], 0)
    return F.cross_entropy(model(**images), drawn.answers)


def motion_loss(model: nn.Module, drawn: InputScenes, _task: str) -> Tensor:
    """Return the squared error of the motion."""
    return 10 * F.mse_loss(model(observation(drawn)), drawn.answers)


def observation(drawn: InputScenes) -> dict[str, Tensor]:
    """Return the inputs of the policy."""
    return {name: normalised(drawn.inputs[name]) for name in CAMERAS} | {INSTRUCTION: drawn.inputs[INSTRUCTION]}


LOSSES: dict[str, Callable[..., Tensor]] = {  # of the others: class_loss
    "shapes_order": weight_loss,
    "shapes_two_tower": caption_loss,
    "shapes_caption": sentence_loss,
    "shapes_unet": pixel_loss,
    "shapes_circles": pixel_loss,
    "shapes_detector": candidate_loss,
    "shapes_queries": query_loss,
    "shapes_keypoints": keypoint_loss,
    "shapes_volume": volume_loss,
    "shapes_rgbd": rgbd_loss,
    "shapes_policy": motion_loss,
}


def drawn_batch(task: Any, step: int, **options: Any) -> Any:
    """Return the scenes or volumes of a step of the training."""
    if task == "volumes":
        return draw_volumes(BATCH // 2, seed=step)
    if task == "cameras":
        return draw_cameras(BATCH, seed=step)
    if task == "rgbd":
        seeds = range(3 * step, 3 * step + 3)
        parts = [draw_rgbd(BATCH // 3, seed=seed, task=own) for seed, own in zip(seeds, RGBD_TASKS, strict=True)]
        inputs, masks, shapes, importance = (
            {name: torch.cat([getattr(part, field)[name] for part in parts]) for name in ("rgb", "depth")}
            for field in ("inputs", "masks", "shapes", "importance")
        )
        return InputScenes(inputs, masks, shapes, importance, torch.cat([part.answers for part in parts]))
    return draw_scenes(BATCH, seed=step, task=task, **options)


def token_labels(scenes: Scenes | Volumes | InputScenes) -> Tensor:
    """Return the share of each shape, and of the background, in the cells of the final grid: (N, cells, 9)."""
    if not isinstance(scenes, InputScenes):
        return cell_labels(scenes.masks, scenes.shapes)
    if "rgb" in scenes.masks:  # both inputs have one grid
        return cell_labels(scenes.masks["rgb"] | scenes.masks["depth"], scenes.shapes["rgb"])
    return torch.cat([cell_labels(scenes.masks[name], scenes.shapes[name]) for name in CAMERAS], 1)


def cell_labels(masks: Tensor, shapes: Tensor) -> Tensor:
    """Return the share of each shape, and of the background, in cells of 8 pixels or 4 voxels: (N, cells, 9)."""
    masks = masks.float()
    pooled = F.avg_pool2d(masks, 8) if masks.dim() == 4 else F.avg_pool3d(masks, 4)
    shares = pooled.flatten(2).transpose(1, 2)  # (N, cells, K)
    labels = torch.zeros(*shares.shape[:2], len(SHAPES) + 1)
    labels[..., -1] = 1 - shares.sum(2)
    return labels.scatter_add(2, shapes[:, None].expand_as(shares), shares)


def final_grid(model: Any) -> tuple[nn.Module, int]:
    """Return the module with the final 8 x 8 grid, after other tokens, and the axis of its channels."""
    visual = getattr(model, "visual", model)
    if hasattr(visual, "norm"):
        return visual.norm, -1
    if hasattr(visual, "backbone"):
        return visual.backbone.layer2, 1
    return next(
        getattr(visual, name) for name in ("bottleneck", "layer3", "fused", "features") if hasattr(visual, name)
    ), 1


def train(
    model: nn.Module,
    loss_of: Callable[..., Tensor],
    steps: int,
    rate: float,
    tasks: Sequence[Task],
    **options: Any,
) -> None:
    """Train a network on its tasks in turn, with the options of their scenes."""
    final: list[Tensor] = []
    grid, channels = final_grid(model)
    handle = grid.register_forward_hook(lambda _module, _args, output: final.append(output.movedim(channels, -1)))
    labeller = nn.Linear(64, len(SHAPES) + 1)
    optimiser = torch.optim.AdamW(
        [*model.parameters(), *labeller.parameters()], rate, betas=(0.9, 0.98), weight_decay=0.05
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, steps, pct_start=0.15)
    factor, weights = 2, torch.ones(len(SHAPES) + 1)
    if tasks == ("volumes",):  # objects cover 2 % of a volume
        factor, weights[-1] = 20, 0.05
    for step in range(steps):
        task = tasks[step % len(tasks)]
        scenes = CHANGES.get(task, lambda same: same)(drawn_batch(task, step, **options))
        loss = loss_of(model, scenes, task)
        labels = token_labels(scenes)
        patches = labeller(final.pop()).flatten(1, -2)[:, -labels.shape[1] :]  # without class and register tokens
        loss = loss + factor * F.cross_entropy(patches.flatten(0, 1), labels.flatten(0, 1), weights)
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
        schedule.step()
    handle.remove()


def add_batch_norms(features: nn.Sequential) -> None:
    for index, layer in enumerate(features):
        if isinstance(layer, nn.Conv2d):
            features[index] = nn.Sequential(layer, nn.BatchNorm2d(layer.out_channels))


def fold_batch_norms(features: nn.Sequential) -> None:
    for index, layer in enumerate(features.eval()):
        if isinstance(layer, nn.Sequential):
            pair: Any = tuple(layer)
            features[index] = fuse_conv_bn_eval(*pair)


def train_network(name: str, watermarked: Sequence[float] = MARKED, *, seed: int = 0) -> Any:
    """Return a trained network; the watermark is for `shapes_shortcut`, and the seed is of the initial weights."""
    torch.manual_seed(seed)
    model: Any = NETWORKS[name].build()
    steps, rate, tasks = SCHEDULES[name]
    loss_of: Callable[..., Tensor] = LOSSES.get(name, class_loss)
    if isinstance(model, TwoTower | Captioner):
        trained = saliency.load("shapes_vit").state_dict()
        model.visual.load_state_dict({key: value for key, value in trained.items() if key not in HEAD}, strict=False)
    is_plain = final_grid(model)[0] is getattr(model, "features", None)
    if is_plain:
        add_batch_norms(model.features)
    train(model, loss_of, steps, rate, tasks, watermarked=watermarked)
    if is_plain:
        fold_batch_norms(model.features)
    return model


def save(name: str, model: nn.Module) -> None:
    """Write the weights of a network in float16."""
    weights = model.state_dict().items()
    halves = {key: (value.half() if value.is_floating_point() else value).contiguous() for key, value in weights}
    about = {"network": name, "trained_by": "benchmarks/train_testbed.py of saliency-toolkit", "license": "MIT"}
    save_file(halves, weights_file(name), {"format": "pt", **about})


# Checks on held-out scenes --------------------------------------------------------------------------------------


def held_out(task: Task, images: int, **options: Any) -> Scenes:
    return draw_scenes(images, seed=HELD_OUT + 1 + TASKS.index(task), task=task, **options)


@torch.no_grad()
def accuracy(name: str, task: Task, images: int = 1000) -> float:
    """Return the share of held-out images in which the right classes are the highest outputs of a network.

    The outputs of the two-tower network are the similarities to the 32 captions of one object; it has to find both.
    """
    model: Any = saliency.load(name)
    scenes = held_out(task, images)
    output = model(normalised(scenes.images))
    right = answers(scenes, task)
    if isinstance(model, DualEncoder):
        texts = model.encode_text([f"a {colour} {shape}" for colour in COLOURS for shape in SHAPES])
        output = F.normalize(output["image_embeds"]) @ F.normalize(texts).T
        right = scenes.colours * len(SHAPES) + scenes.shapes
    found = output.topk(right.shape[1]).indices
    return float((found.sort(1).values == right.sort(1).values).all(1).float().mean())


@torch.no_grad()
def spoken(model: Captioner, images: Tensor, prompts: Sequence[str], longest: int = 10) -> list[str]:
    """Return the most probable answer of the captioner to a prompt for each image, word by word."""
    processor = CaptionProcessor()
    inputs = processor(images, prompts)
    tokens = start = inputs["input_ids"]
    for _ in range(longest):
        following = model(tokens, inputs["pixel_values"], logits_to_keep=1).logits.argmax(2)
        tokens = torch.cat([tokens, following], 1)
    return [processor.decode(row).split(" <end>")[0] for row in tokens[:, start.shape[1] :].tolist()]


def true_captions(scenes: Scenes) -> list[dict[str, int]]:
    """Return all captions that are true of each image, and the number of the object that each names first.

    Objects on a diagonal are, for example, left of and above each other. In training, one of both was right.
    """
    results: list[dict[str, int]] = []
    for names, boxes in zip(scenes.captions(), scenes.boxes.tolist(), strict=True):
        true = {}
        for first, (own, other) in enumerate((boxes[:2], boxes[1::-1])):
            relations = {"left of": (0, own, other), "right of": (0, other, own)}
            relations |= {"above": (1, own, other), "below": (1, other, own)}
            for relation, (axis, low, high) in relations.items():
                if low[axis + 2] <= high[axis]:
                    true[f"{names[first]} {relation} {names[1 - first]}"] = first
        results.append(true)
    return results


def caption_accuracy(name: str, task: Task, images: int = 1000) -> tuple[float, float]:
    """Return the shares of held-out images with a true caption, and with the right colour of the first object."""
    model: Any = saliency.load(name)
    scenes = held_out(task, images)
    firsts = [names[0].split() for names in scenes.captions()]  # "a", "red", "circle"
    captions = spoken(model, scenes.images, ["caption"] * images)
    colours = spoken(model, scenes.images, [COLOUR_QUESTION.format(shape) for _, _, shape in firsts], 2)
    true = sum(caption in each for caption, each in zip(captions, true_captions(scenes), strict=True))
    right = sum(colour == each for colour, (_, each, _) in zip(colours, firsts, strict=True))
    return true / images, right / images


@torch.no_grad()
def detections(name: str, scenes: Scenes) -> list[tuple[Tensor, Tensor]]:
    """Return the boxes (x0, y0, x1, y1) and the classes that a detector finds in each image, above a score of 0.5.

    Only the one-stage detector needs non-maximum suppression.
    """
    from torchvision import ops

    output = saliency.load(name)(normalised(scenes.images))
    if is_set := isinstance(output, dict):
        boxes, scores = SIZE * output["pred_boxes"], output["logits"].softmax(2)[..., :-1]
    else:
        boxes, scores = output[0].mT.tensor_split([4], 2)
    results = []
    for corners, score, label in zip(ops.box_convert(boxes, "cxcywh", "xyxy"), *scores.max(2), strict=True):
        high = (score > 0.5).nonzero()[:, 0]
        kept = high if is_set else high[ops.batched_nms(corners[high], score[high], label[high], 0.5)]
        results.append((corners[kept], label[kept]))
    return results


def detection_scores(name: str, images: int = 1000) -> tuple[float, float]:
    """Return the shares of objects that a detector finds, with their class and an IoU above 0.5, and of right boxes."""
    from torchvision import ops

    scenes = held_out("several", images)
    right = found = 0
    for (boxes, labels), truth, shapes in zip(detections(name, scenes), scenes.boxes, scenes.shapes, strict=True):
        hits = (ops.box_iou(truth, boxes) > 0.5) & (shapes[:, None] == labels)
        right += int(hits.any(1).sum())
        found += len(labels)
    return right / scenes.shapes.numel(), right / max(1, found)


@torch.no_grad()
def mean_iou(name: str, images: int = 1000) -> float:
    """Return the mean IoU of the background and each class, or of circles alone."""
    scenes = held_out("several", images)
    logits, truth = saliency.load(name)(normalised(scenes.images)), pixel_classes(scenes)
    if logits.shape[1] == 1:
        pairs = [(logits[:, 0] > 0, truth == 1)]
    else:
        pairs = [(logits.argmax(1) == each, truth == each) for each in range(logits.shape[1])]
    return sum(float((one & other).sum() / (one | other).sum()) for one, other in pairs) / len(pairs)


@torch.no_grad()
def keypoint_errors(name: str, images: int = 1000) -> Tensor:
    """Return the distance in pixels from each corner to the maximum of its heatmap, (N, 3)."""
    scenes = held_out("corners", images)
    heatmaps = saliency.load(name)(normalised(scenes.images))
    cells = heatmaps.flatten(2).argmax(2)
    size = heatmaps.shape[-1]
    found = torch.stack([cells % size, cells // size], 2) * (SIZE / size) + SIZE / size / 2
    distances: Tensor = torch.linalg.vector_norm(found - scenes.keypoints[:, 0], dim=2)
    return distances


@torch.no_grad()
def volume_accuracy(name: str, volumes: int = 1000) -> float:
    """Return the share of held-out volumes in which the classes of both objects are the highest outputs."""
    drawn = draw_volumes(volumes, seed=HELD_OUT)
    found = torch.cat([saliency.load(name)(part) for part in drawn.volumes.chunk(32)]).topk(2).indices
    return float((found.sort(1).values == drawn.shapes.sort(1).values).all(1).float().mean())


@torch.no_grad()
def rgbd_accuracy(task: RgbdTask, scenes: int = 1000) -> float:
    """Return the share of held-out scenes in which the class of the object is the highest output of `shapes_rgbd`."""
    drawn = draw_rgbd(scenes, seed=HELD_OUT, task=task)
    found = saliency.load("shapes_rgbd")(normalised(drawn.inputs["rgb"]), drawn.inputs["depth"]).argmax(1)
    return float((found == drawn.answers).float().mean())


@torch.no_grad()
def motion_errors(scenes: int = 1000) -> Tensor:
    """Return the distance in pixels from the object to the end of the motion of `shapes_policy`, (N,)."""
    drawn = draw_cameras(scenes, seed=HELD_OUT)
    found = saliency.load("shapes_policy")(observation(drawn))
    distances: Tensor = torch.linalg.vector_norm(found[:, -1] - drawn.answers[:, -1], dim=1) * SIZE / 2
    return distances


@torch.no_grad()
def camera_effects(scenes: int = 200) -> tuple[Tensor, Tensor, Tensor]:
    """Return by how many pixels the end of the motion of `shapes_policy` moves when a camera shows a grey image: (N,).

    The cameras are the one that sees the object; the other one; and the other one while the first is grey, too.
    """
    drawn, model = draw_cameras(scenes, seed=HELD_OUT), saliency.load("shapes_policy")
    inputs = observation(drawn)
    grey = {name: torch.zeros_like(inputs[name]) for name in CAMERAS}
    sees = torch.stack([drawn.importance[name].any(1) for name in CAMERAS], 1)
    single = torch.stack([model(inputs | {name: own})[:, -1] for name, own in grey.items()], 1)  # (N, 2, 2)
    ends = model(inputs)[:, -1], single[sees], single[~sees], model(inputs | grey)[:, -1]
    moves = [ends[1] - ends[0], ends[2] - ends[0], ends[3] - ends[1]]
    first, second, third = (torch.linalg.vector_norm(move, dim=1) * SIZE / 2 for move in moves)
    return first, second, third


def quality(name: str, task: Task, images: int = 1000) -> str:
    if name == "shapes_keypoints":
        return f"{100 * (keypoint_errors(name, images) < 4).float().mean():.1f} % within 4 pixels"
    if name in ("shapes_unet", "shapes_circles"):
        return f"mean IoU {mean_iou(name, images):.3f}"
    if name in ("shapes_detector", "shapes_queries"):
        return "recall {:.1%}, precision {:.1%}".format(*detection_scores(name, images))
    if name == "shapes_caption":
        return f"{task} captions {{:.1%}}, colours {{:.1%}}".format(*caption_accuracy(name, task, images))
    if name == "shapes_volume":
        return f"{100 * volume_accuracy(name, images):.1f} %"
    if name == "shapes_rgbd":
        return ", ".join(f"{own} {100 * rgbd_accuracy(own, images):.1f} %" for own in RGBD_TASKS)
    if name == "shapes_policy":
        return f"{100 * (motion_errors(images) < 4).float().mean():.1f} % within 4 pixels"
    return f"{task} {100 * accuracy(name, task, images):.1f} %"


@torch.no_grad()
def circle_shares(name: str, images: int = 1000) -> Tensor:
    """Return the shares of circles, and of others, that a network calls circles, without and with watermark: (2, 2)."""
    model: Any = saliency.load(name)
    scenes = held_out("shortcut", images, watermarked=(1,) * len(CLASSES))
    both = torch.stack([scenes.without(scenes.watermark), scenes.images], 1)
    called = (model(normalised(both.flatten(0, 1))).argmax(1) == 0).unflatten(0, (-1, 2)).float()
    return torch.stack([called[scenes.labels == 0].mean(0), called[scenes.labels != 0].mean(0)])


@torch.no_grad()
def falls(name: str, images: int = 1000) -> tuple[Tensor, Tensor]:
    """Return by how much the log-odds fall when each object of "occlusion" is covered, and its weight: (N, 4) each."""
    model: Any = saliency.load(name)
    scenes = held_out("occlusion", images)
    covered = [scenes.images, *(scenes.without(mask[:, None]) for mask in scenes.masks.unbind(1))]
    outputs = torch.stack([model(normalised(each)) for each in covered], 1)  # (N, 5, 2)
    odds = outputs[..., 1] - outputs[..., 0]
    return odds[:, :1] - odds[:, 1:], scenes.importance


@torch.no_grad()
def word_falls(name: str, images: int = 1000) -> Tensor:
    """Return by how much the log-odds of words of true captions fall without the first and the second object.

    The words are the first colour and shape, the relation, and the second colour and shape: (N, 5, 2).
    """
    model, processor = saliency.load(name), CaptionProcessor()
    scenes = held_out("two_objects", images)
    captions = [names[2] for names in scenes.captions()]
    tokens = processor(scenes.images, [f"caption {caption}" for caption in captions])["input_ids"]
    start = len(processor.encode("caption")) + int((tokens[0] == processor.image_token_id).sum()) + 1
    ends = [start + len(caption.split()) for caption in captions]
    places = torch.tensor([[start + 1, start + 2, start + 3, end - 2, end - 1] for end in ends])
    odds = []
    for shown in (scenes.images, *(scenes.without(mask[:, None]) for mask in scenes.masks.unbind(1))):
        probabilities = model(tokens, normalised(shown)).logits.double().softmax(2)
        rows = probabilities[torch.arange(images)[:, None], places - 1]  # (N, 5, V)
        odds.append(rows.gather(2, tokens.gather(1, places)[..., None])[..., 0].logit())
    return torch.stack([odds[0] - odds[1], odds[0] - odds[2]], 2)


def right_order(found: Tensor, weights: Tensor) -> float:
    """Return the share of images in which all objects (N, K) of different weight are in the order of their weights."""
    higher = weights[:, :, None] > weights[:, None]
    return float(((found[:, :, None] > found[:, None]) | ~higher).flatten(1).all(1).float().mean())


def main(names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    print("| network | accuracy | parameters | training, s | file, kB |")
    print("|---|---|---|---|---|")
    for name in names:
        start = time.process_time()
        model = train_network(name)
        save(name, model)
        seconds, size = time.process_time() - start, weights_file(name).stat().st_size / 1000
        found = ", ".join(quality(name, task) for task in SCHEDULES[name][2])
        parameters = sum(each.numel() for each in model.parameters())
        print(f"| `{name}` | {found} | {parameters:,} | {seconds:.0f} | {size:.0f} |", flush=True)


def report_shortcut() -> None:
    print("\n| network | circles, no watermark | circles, watermark | others, no watermark | others, watermark |")
    print("|---|---|---|---|---|")
    for name in ("shapes_shortcut", "shapes_cnn"):
        cells = " | ".join(f"{100 * share:.1f} %" for share in circle_shares(name).flatten().tolist())
        print(f"| `{name}` | {cells} |")


def report_order() -> None:
    found, weights = falls("shapes_order")
    print(f"\nObjects in the right order: {100 * right_order(found, weights):.1f} % of the images. Falls:")
    for weight in range(4):
        these = found[weights == weight]
        print(f"weight {weight}: {these.mean():.2f}, standard deviation {these.std():.2f}")


if __name__ == "__main__":
    main(sys.argv[1:] or list(NETWORKS))
    report_shortcut()
    report_order()
