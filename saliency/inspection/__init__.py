"""Look through the hooks: what each layer gives, what comes back to it, and what happens when either is changed.

    record                    every call of every layer while you run the model, forth and back
    layer_table               what a model consists of: shapes, parameters, multiply-adds, time
    activation_statistics     moments, zeros, dead channels, the first NaN, over any number of batches
    gradient_statistics       the same for gradients, by layer and by parameter; drawn by saliency.gradient_flow
    edit_gradients            change gradients on their way back, by the rules of `rules` or any function
    edit_activations          change what layers give
    extract_features          activations of a whole data set, onto disk when asked
    vector_jacobian_product   a vector through the layers behind one, backwards
    jacobian_vector_product   a direction at a layer, forwards to the output

The model is left as it was found, and so are its gradients.
"""

from . import edit_rules as rules
from .activation_statistics import ActivationStatistics, LayerActivations, activation_statistics
from .call_recorder import Call
from .edit import Editing, edit_activations, edit_gradients
from .feature_store import Features
from .features import extract_features
from .gradient_statistics import GradientStatistics, LayerGradients, ParameterGradients, gradient_statistics
from .jacobian import jacobian_vector_product, vector_jacobian_product
from .layer_table import LayerRow, LayerTable, layer_table
from .moments import Moments, moments
from .record import Recording, record
from .retention import TensorStatistics
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
