"""A hosted demo of saliency: choose a photo, a class and a method, and see the pixels that drive the prediction."""

from __future__ import annotations

import gradio as gr
from PIL import Image

import saliency

METHODS = ("GradCAM", "LayerCAM", "HiResCAM", "GuidedBackprop", "InputXGradient", "IntegratedGradients", "LRP")
TOP = "the most likely class"

model = saliency.load("efficientnet_lite0")


def explain(image: Image.Image | None, target: str, method: str) -> tuple[Image.Image, str]:
    """Return the photo with its map, and the explained class with its probability."""
    if image is None:
        raise gr.Error("Choose a photo first.")
    try:
        explanation = getattr(saliency, method)(model).attribute(image, None if target == TOP else target)
    except saliency.errors.SaliencyError as error:
        raise gr.Error(str(error)) from error
    text = explanation.target_names[0]
    if explanation.probabilities is not None:
        text += f", {float(explanation.probabilities[0]):.1%}"
    return saliency.overlay(explanation, size=800), text


demo = gr.Interface(
    explain,
    inputs=[
        gr.Image(type="pil", label="Photo"),
        gr.Dropdown([TOP, *model.categories], value=TOP, label="Class"),
        gr.Radio(METHODS, value="GradCAM", label="Method"),
    ],
    outputs=[gr.Image(label="Pixels that drive the prediction"), gr.Textbox(label="Explained class")],
    title="Which pixels drive the prediction?",
    description="Attribution of EfficientNet-Lite0 by saliency. On your own computer, `saliency serve` does more.",
    flagging_mode="never",
)

if __name__ == "__main__":
    demo.launch()
