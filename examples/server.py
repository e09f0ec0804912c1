"""A web server that answers an image with its heatmap, by a .pt2 file of `saliency.export`.

python examples/server.py model.pt2
curl --data-binary @photo.jpg localhost:8000 > heatmap.png

It needs PyTorch, Pillow, NumPy, Starlette and uvicorn, and not this package.
"""

import io
import json
import sys

import numpy as np
import torch
import uvicorn
from PIL import Image, UnidentifiedImageError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route


def create(file: str) -> Starlette:
    """Return the server of a program."""
    extra = {"metadata.json": ""}
    program = torch.export.load(file, extra_files=extra).module()
    metadata = json.loads(extra["metadata.json"])
    names, prepare = (json.loads(metadata[name]) for name in ("classes", "preprocess"))
    mean, std = (torch.tensor(prepare[name]).view(-1, 1, 1) for name in ("mean", "std"))

    def explain(content: bytes) -> Response:
        photo = Image.open(io.BytesIO(content)).convert("RGB")
        pixels = torch.from_numpy(np.array(photo.resize(prepare["size"][::-1]))).permute(2, 0, 1) / 255
        with torch.no_grad():
            _, (index,), (heatmap,) = program(((pixels - mean) / std)[None])
        heatmap = heatmap.clamp(min=0) / heatmap.abs().max().clamp(min=1e-12)
        opacity = Image.fromarray((200 * heatmap).byte().numpy()).resize(photo.size)
        Image.composite(Image.new("RGB", photo.size, "red"), photo, opacity).save(answer := io.BytesIO(), "PNG")
        headers = {"class": str(names[index] if names else int(index))}
        return Response(answer.getvalue(), media_type="image/png", headers=headers)

    async def answer(request: Request) -> Response:
        try:
            return await run_in_threadpool(explain, await request.body())
        except UnidentifiedImageError:
            return PlainTextResponse("expected the bytes of an image", 400)

    return Starlette(routes=[Route("/", answer, methods=["POST"])])


if __name__ == "__main__":
    uvicorn.run(create(sys.argv[1]))
