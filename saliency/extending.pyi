# The public names, in the order of `dir(saliency.extending)`: results, bases, what a method is given, options.
# ruff: isort: skip_file

from .attribution.explanation import BatchAttribution as BatchAttribution
from .attribution.passes import ImageAttribution as ImageAttribution
from .attribution.base import TracedAttribution as TracedAttribution
from .methods.cam import LayerAttribution as LayerAttribution
from .methods.cam import LayerCombination as LayerCombination
from .methods.cam import WeightedCAM as WeightedCAM
from .methods.gradient import RectifiedGradient as RectifiedGradient
from .methods.lrp import RelevancePropagation as RelevancePropagation
from .methods.token_attention import AttentionMap as AttentionMap
from .attribution.passes import MultiPassAttribution as MultiPassAttribution
from .methods.gradient_free_cam import LayerPasses as LayerPasses
from .methods.segments import SegmentAttribution as SegmentAttribution
from .attribution.passes import SampledAttribution as SampledAttribution
from .attribution.passes import TimedAttribution as TimedAttribution
from .attribution.forward import Needs as Needs
from .attribution.forward import TargetGradients as TargetGradients
from .attribution.questions import Questions as Questions
from .attribution.passes import Passes as Passes
from .attribution.estimates import Estimate as Estimate
from .attribution.passes import from_estimate as from_estimate
from .attribution.estimates import generator as generator
from .attribution.options import Option as Option
from .methods.baselines import BaselineOption as BaselineOption
from .methods.baselines import baselines as baselines
from .validation import check_choice as check_choice
from .validation import check_integer as check_integer
from .validation import check_number as check_number
