"""Inspect a network: record, measure and edit activations and gradients.

    record                    every call of every layer while you run the model, with its gradients
    layer_table               shapes, parameters, multiply-adds and time of each layer
    activation_statistics     moments, zeros, dead channels, the first NaN, over any number of batches
    gradient_statistics       the same for gradients, by layer and by parameter; drawn by saliency.gradient_flow
    edit_gradients            change gradients by the rules of `rules` or any function
    edit_activations          change the outputs of layers
    extract_features          activations of a whole data set, optionally on disk
    vector_jacobian_product   gradient of a weighted output at a layer
    jacobian_vector_product   change of the output along a direction at a layer

The model and its gradients are left unchanged.
"""

from . import rules
from .call_recorder import Call, TensorStatistics
from .edit import Editing, edit_activations, edit_gradients
from .features import Features, extract_features
from .jacobian import jacobian_vector_product, vector_jacobian_product
from .layer_table import LayerRow, LayerTable, layer_table
from .moments import Moments, moments
from .record import Recording, record
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
