from __future__ import annotations

import skimage.data
import torch

from tests.faces import face_input, p_net


def test_a_real_detector_finds_the_face_of_the_astronaut() -> None:
    image = torch.from_numpy(skimage.data.astronaut()).movedim(2, 0)
    with torch.no_grad():
        boxes, scores = p_net()(face_input(image))
    face = scores[0, 1]
    row, column = divmod(int(face.argmax()), face.shape[1])
    centre = torch.tensor([2 * column + 6, 2 * row + 6]) / 0.12
    assert boxes.shape == (1, 4, *face.shape)
    assert face.max() > 0.99
    assert (centre - torch.tensor([216.0, 116.0])).abs().max() < 10
    assert (face > 0.9).float().mean() < 0.02
