"""Train the networks of `saliency.testbed` on drawn shapes, on one thread, and write their weights: `make fixtures`.

In half of the batches, one of the two objects of an image is of a class; in the other half both are, and the target of
a classifier is half the one and half the other. As in token labelling (Jiang et al. 2021,
https://arxiv.org/abs/2104.10858), a linear layer, which only training uses, also predicts from each final patch token
the shape that covers it. The image tower of the two-tower network starts from the trained vision transformer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saliency
from saliency import DualEncoder
from saliency.testbed import CLASSES, COLOURS, DISTRACTORS, Scenes, draw_scenes
from saliency.testbed.networks import NETWORKS, Tokenizer, TwoTower, weights_file

SHAPES = CLASSES + DISTRACTORS
SCHEDULES = {"shapes_vit": (900, 3e-3), "shapes_window": (1200, 3e-3), "shapes_two_tower": (1300, 2e-3)}  # steps, rate
BATCH = 32
HEAD = ("head.weight", "head.bias")
HELD_OUT = 1_000_000  # the first seed that training does not use


def normalised(scenes: Scenes) -> Tensor:
    return scenes.images / 127.5 - 1


def class_loss(model: nn.Module, scenes: Scenes, targets: int) -> Tensor:
    """Return the cross-entropy with the first objects, in equal shares."""
    log_p: Tensor = model(normalised(scenes)).log_softmax(1)
    return -log_p.gather(1, scenes.shapes[:, :targets]).mean()


def caption_loss(model: TwoTower, scenes: Scenes, _targets: int) -> Tensor:
    """Return the contrastive loss of CLIP, for a caption of one object and for one of both, each drawn at random."""
    truths = scenes.captions()
    images = F.normalize(model.encode_image(normalised(scenes)))
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


def token_labels(scenes: Scenes) -> Tensor:
    """Return the share of each shape, and of the background, in the 8 x 8 patches of each image: (N, 64, 9)."""
    shares = F.avg_pool2d(scenes.masks.float(), 8).flatten(2).transpose(1, 2)  # (N, 64, 2)
    labels = torch.zeros(*shares.shape[:2], len(SHAPES) + 1)
    labels[..., -1] = 1 - shares.sum(2)
    return labels.scatter(2, scenes.shapes[:, None].expand_as(shares), shares)


def train(model: nn.Module, loss_of: Callable[..., Tensor], steps: int, rate: float) -> None:
    final_tokens: list[Tensor] = []
    visual: Any = getattr(model, "visual", model)
    handle = visual.norm.register_forward_hook(lambda _module, _args, output: final_tokens.append(output))
    labeller = nn.Linear(visual.norm.weight.numel(), len(SHAPES) + 1)
    optimiser = torch.optim.AdamW(
        [*model.parameters(), *labeller.parameters()], rate, betas=(0.9, 0.98), weight_decay=0.05
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, steps, pct_start=0.15)
    for step in range(steps):
        targets = 1 + step % 2
        scenes = draw_scenes(BATCH, seed=step, task="two_objects" if targets == 2 else "planted")
        loss = loss_of(model, scenes, targets)
        patches = labeller(final_tokens.pop()).flatten(1, -2)[:, -64:]  # without class and register tokens
        loss = loss + 2 * F.cross_entropy(patches.flatten(0, 1), token_labels(scenes).flatten(0, 1))
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
        schedule.step()
    handle.remove()


@torch.no_grad()
def accuracy(name: str, objects: int, images: int = 1000) -> float:
    """Return the share of held-out images in which the objects of a class are the highest outputs of a network.

    The outputs of the two-tower network are the similarities to the 32 captions of one object; it has to find both.
    """
    model: Any = saliency.load(name)
    scenes = draw_scenes(images, seed=HELD_OUT + objects, task="two_objects" if objects == 2 else "planted")
    output = model(normalised(scenes))
    objects_ = scenes.shapes[:, :objects]
    if isinstance(model, DualEncoder):
        texts = model.encode_text([f"a {colour} {shape}" for colour in COLOURS for shape in SHAPES])
        output = F.normalize(output["image_embeds"]) @ F.normalize(texts).T
        objects_ = scenes.colours * len(SHAPES) + scenes.shapes
    found = output.topk(objects_.shape[1]).indices
    return float((found.sort(1).values == objects_.sort(1).values).all(1).float().mean())


def train_network(name: str) -> None:
    """Train a network and write its weights in float16."""
    torch.manual_seed(0)
    model = NETWORKS[name]()
    if isinstance(model, TwoTower):
        trained = saliency.load("shapes_vit").state_dict()
        model.visual.load_state_dict({**trained, **{key: model.visual.state_dict()[key] for key in HEAD}})
    train(model, caption_loss if isinstance(model, TwoTower) else class_loss, *SCHEDULES[name])
    weights = model.state_dict().items()
    torch.save(
        {key: value.half() if value.is_floating_point() else value for key, value in weights}, weights_file(name)
    )


def main() -> None:
    torch.set_num_threads(1)
    print("| network | named object of one class | both objects of two classes | training, s | file, kB |")
    print("|---|---|---|---|---|")
    for name in NETWORKS:
        start = time.process_time()
        train_network(name)
        seconds, size = time.process_time() - start, weights_file(name).stat().st_size / 1000
        one, two = (f"{100 * accuracy(name, objects):.1f} %" for objects in (1, 2))
        print(f"| `{name}` | {one} | {two} | {seconds:.0f} | {size:.0f} |", flush=True)


if __name__ == "__main__":
    main()
