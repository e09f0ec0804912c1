"""The explorer, over a socket and on one core: time to the first picture and the first map, and of a cancellation."""

from __future__ import annotations

import io
import json
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
import uvicorn
from PIL import Image

from benchmarks.timing import interleaved, ratio
from saliency import METHODS
from saliency.attribution.passes import MultiPassAttribution
from saliency.batch.options import NetworkOptions
from saliency.explorer.server import Explorer
from saliency.explorer.session import Session

MODEL, PHOTOS, SIZE = "efficientnet_lite0", 20, (4000, 3000)
ASSETS = Path(__file__).parent.parent / "assets"
PICTURE, FIRST_MAP, MORE = 1.0, 2.0, 1.05  # seconds, seconds, share of CPU time


def photos() -> list[bytes]:
    """Return JPEG files of 12 megapixels: parts of the photos of the repository."""
    sources = [Image.open(path).convert("RGB") for path in sorted(ASSETS.glob("*.jpg"))]
    found = []
    for number in range(PHOTOS):
        source, cut = sources[number % len(sources)], 4 * (number // len(sources))
        part = source.crop((cut, cut, source.width - cut, source.height - cut)).resize(SIZE, Image.Resampling.BICUBIC)
        file = io.BytesIO()
        part.save(file, "JPEG", quality=90)
        found.append(file.getvalue())
    return found


@contextmanager
def served(session: Session) -> Iterator[httpx.Client]:
    """Serve a session in a thread, and return a client."""
    with socket.create_server(("127.0.0.1", 0)) as listening, closing(Explorer(session)) as explorer:
        config = uvicorn.Config(explorer.app("token", "127.0.0.1"), http="h11", lifespan="off", log_level="error")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        address = f"http://127.0.0.1:{listening.getsockname()[1]}/token/"
        with httpx.Client(base_url=address, headers={"x-page": "page"}, timeout=300) as client:
            yield client
        server.should_exit = True
        thread.join()


def first_picture(client: httpx.Client, photo: bytes) -> float:
    """Return the seconds from the drop of a photo to its first map."""
    began = time.perf_counter()
    image = client.post("image", content=photo).json()["image"]
    client.get(f"image/{image}")
    answer = client.post("explain", json={"image": image, "methods": ["grad_cam"]})
    assert json.loads(answer.text)["done"]
    return time.perf_counter() - began


def first_map(client: httpx.Client, image: str, method: str) -> tuple[float, float, str]:
    """Return the seconds to the first map, the seconds until a newer question is answered, and how the map came."""
    began = time.perf_counter()
    with client.stream("POST", "explain", json={"image": image, "methods": [method]}) as answer:
        for line in answer.iter_lines():
            row: dict[str, Any] = json.loads(line)
            if "map" in row or "error" in row.get("row", {}):
                break
        seconds = time.perf_counter() - began
        if "error" in row["row"]:
            return seconds, 0.0, row["row"]["error_kind"]
        how = "complete" if row["done"] else f"{row['progress']:.0%} of the passes" if row["progress"] else "draft"
        began = time.perf_counter()
        client.post("image/0")
        return seconds, time.perf_counter() - began, how


def more_time(session: Session) -> float:
    """Return the share of CPU time of a streamed explanation over the plain call."""
    image = session.open(0)["image"]
    options: dict[str, Any] = {"progress": False}
    held = session._held[image]
    plain = METHODS["smooth_grad"](session.model, **options)

    def streamed() -> None:
        held.results.clear()
        session.explain({"image": image, "methods": ["smooth_grad"]}, lambda answer: None, lambda: None)

    timings = interleaved({"plain": lambda: plain.attribute(held.image), "streamed": streamed}, 15)
    return ratio(timings["streamed"], timings["plain"])


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    session = Session(NetworkOptions(model=MODEL))
    with served(session) as client:
        images = photos()
        first_picture(client, images[0])
        times = sorted(first_picture(client, image) for image in images)
        worst = times[round(0.95 * (PHOTOS - 1))]
        print(f"\nFirst picture after the drop: {PHOTOS} photos of 12 MP, {MODEL}, one core. Goal: {PICTURE:g} s.\n")
        print(f"median {statistics.median(times):.2f} s, 95th percentile {worst:.2f} s, largest {times[-1]:.2f} s")
        idle = min(_seconds(client) for _ in range(5))
        print(f"\nFirst map of each method of many passes (goal {FIRST_MAP:g} s), and the delay of a newer question\n")
        print("| method | first map, s | from | cancelled after, s |\n|---|---|---|---|")
        for name in (name for name, cls in METHODS.items() if issubclass(cls, MultiPassAttribution)):
            image = client.post("image/0").json()["image"]  # the session keeps only the images that were opened last
            seconds, cancelled, how = first_map(client, image, name)
            mark = "**" * (seconds > FIRST_MAP)
            print(f"| {name} | {mark}{seconds:.2f}{mark} | {how} | {max(0, cancelled - idle):.2f} |")
    print(f"\nStreamed SmoothGrad over the plain call, CPU time: {more_time(session):.3f} (goal {MORE})")


def _seconds(client: httpx.Client) -> float:
    began = time.perf_counter()
    client.post("image/0")
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
