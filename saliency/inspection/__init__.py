"""Inspect a network: record, measure and edit activations and gradients.

    record                    record every call of every layer while you run the model, with its gradients
    layer_table               list shapes, parameters, multiply-adds and time of each layer
    activation_statistics     measure moments, zeros, dead channels and the first NaN, over any number of batches
    gradient_statistics       measure gradients by layer or parameter; saliency.figure draws the result
    edit_gradients            change gradients of layers, parameters and tensors with `edit_rules` or any function
    edit_activations          change the outputs of layers
    activations               return the activations of layers for a data set

The model and the `.grad` of its parameters are left unchanged.
"""

from typing import TYPE_CHECKING, NoReturn

from ..aliases import answer_all, public_hint
from . import edit_rules as edit_rules
from .activations import activations as activations
from .edit import Editing as Editing
from .edit import edit_activations as edit_activations
from .edit import edit_gradients as edit_gradients
from .layer_table import LayerRow as LayerRow
from .layer_table import LayerTable as LayerTable
from .layer_table import layer_table as layer_table
from .moments import Moments as Moments
from .moments import TensorStatistics as TensorStatistics
from .moments import moments as moments
from .record import ModuleCall as ModuleCall
from .record import Recording as Recording
from .record import record as record
from .statistics import ActivationStatistics as ActivationStatistics
from .statistics import GradientStatistics as GradientStatistics
from .statistics import LayerActivations as LayerActivations
from .statistics import LayerGradients as LayerGradients
from .statistics import activation_statistics as activation_statistics
from .statistics import gradient_statistics as gradient_statistics

answer_all(__name__)

if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        """Raise AttributeError with the name that is meant."""
        raise AttributeError(f'saliency.inspection has no "{name}"{public_hint(name, globals())}', name=name, obj=None)
