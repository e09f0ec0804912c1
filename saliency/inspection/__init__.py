"""Inspect a network: record, measure and edit activations and gradients.

    record                    record every call of every layer while you run the model, with its gradients
    layer_table               list shapes, parameters, multiply-adds and time of each layer
    activation_statistics     measure moments, zeros, dead channels and the first NaN, over any number of batches
    gradient_statistics       measure gradients by layer or parameter; saliency.figure draws the result
    edit_gradients            change gradients of layers, parameters and tensors with `edit_rules` or any function
    edit_activations          change the outputs of layers
    activations               return the activations of layers for a data set

The model and the `.grad` of its parameters are left unchanged. The names load on first use.
"""

from .. import lazy
from ..aliases import public_hint

__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__, public_hint)
