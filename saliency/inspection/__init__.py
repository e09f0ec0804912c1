"""Inspect a network: record, measure and edit activations and gradients.

    record                    record every call of every layer while you run the model, with its gradients
    layer_table               list shapes, parameters, multiply-adds and time of each layer
    activation_statistics     measure moments, zeros, dead channels and the first NaN, over any number of batches
    gradient_statistics       measure gradients by layer and by parameter; saliency.gradient_flow draws the result
    edit_gradients            change gradients with the rules of `rules` or any function
    edit_activations          change the outputs of layers
    extract_features          extract the activations of a data set, optionally to disk
    vector_jacobian_product   compute the gradient of a weighted output at a layer
    jacobian_vector_product   compute the change of the output along a direction at a layer

The model and the `.grad` of its parameters are left unchanged.
"""

from . import rules
from .edit import Editing, edit_activations, edit_gradients
from .features import Features, extract_features
from .jacobian import jacobian_vector_product, vector_jacobian_product
from .layer_table import LayerRow, LayerTable, layer_table
from .moments import Moments, TensorStatistics, moments
from .record import Call, Recording, record
from .statistics import (
    ActivationStatistics,
    GradientStatistics,
    LayerActivations,
    LayerGradients,
    ParameterGradients,
    activation_statistics,
    gradient_statistics,
)
from .tables import Column, Table

__all__ = [
    "ActivationStatistics",
    "Call",
    "Column",
    "Editing",
    "Features",
    "GradientStatistics",
    "LayerActivations",
    "LayerGradients",
    "LayerRow",
    "LayerTable",
    "Moments",
    "ParameterGradients",
    "Recording",
    "Table",
    "TensorStatistics",
    "activation_statistics",
    "edit_activations",
    "edit_gradients",
    "extract_features",
    "gradient_statistics",
    "jacobian_vector_product",
    "layer_table",
    "moments",
    "record",
    "rules",
    "vector_jacobian_product",
]
