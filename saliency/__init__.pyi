# The public names, in the order of `dir(saliency)`: by importance, the other methods last.
# ruff: isort: skip_file

# First: what most scripts use.
from .zoo import load as load
from .methods.cam import GradCAM as GradCAM
from .methods.cam import LayerCAM as LayerCAM
from .methods.gradient import GuidedBackprop as GuidedBackprop
from .methods.lrp import LRP as LRP
from .methods.lrp import AttnLRP as AttnLRP
from .methods.integrated_gradients import IntegratedGradients as IntegratedGradients
from .methods.smoothing import SmoothGrad as SmoothGrad
from .methods.occlusion import Occlusion as Occlusion
from .methods.cam import ODAM as ODAM
from .render.overlay import overlay as overlay
from .render.results import figure as figure
from .attribution.explanation import heatmap as heatmap
from .targets.boxes import box as box
from .targets.regions import region as region
from .targets.words import words as words
from .evaluation.comparison import compare as compare
from .evaluation.trust import trust as trust
from .methods import METHODS as METHODS

# Targets.
from .targets.classes import contrast as contrast
from .targets.classes import probability as probability
from .targets.classes import value as value
from .targets.classes import neuron as neuron
from .targets.regions import keypoint as keypoint
from .targets.similarity import text as text
from .targets.similarity import similarity as similarity
from .targets.similarity import max_sim as max_sim
from .targets.candidates import Candidates as Candidates

# Drawing.
from .render.overlay import cutout as cutout
from .render.sheet import contact_sheet as contact_sheet
from .render.figure import slices as slices
from .render.figure import montage as montage
from .render.figure import word_sheet as word_sheet
from .render.scaling import shared_limit as shared_limit

# Functions.
from .attribution.base import Together as Together
from .model.inputs import Views as Views
from .methods.pairs import pair as pair
from .methods.pairs import matches as matches
from .methods.pairs import token_importance as token_importance
from .methods.pairs import word_similarity as word_similarity
from .model.answer import generate as generate
from .inspection.attention_record import attention as attention
from .attribution.features import features as features
from .evaluation.ledger import ledger_table as ledger_table
from .attribution.explanation import significance as significance
from .attribution.explanation import standard_error as standard_error
from .batch.folder_evaluation import evaluate as evaluate
from .program.export import export as export
from .explorer.server import serve as serve
from .explorer.widget import explore as explore
from .attribution.allocator import keep_memory as keep_memory

# Types of arguments and results.
from .attribution.explanation import Explanation as Explanation
from .attribution.inputs import InputExplanations as InputExplanations
from .attribution.base import Attribution as Attribution
from .io.preprocess import Preprocess as Preprocess
from .attribution.options import PerImage as PerImage
from .attribution.tiles import Tiled as Tiled
from .model.answer import Answer as Answer
from .model.answer import Canvas as Canvas
from .model.answer import ImageTokens as ImageTokens
from .model.dual_encoder import DualEncoder as DualEncoder
from .model.dual_encoder import LateInteraction as LateInteraction
from .attribution.explanation import Matches as Matches
from .attribution.features import Features as Features
from .inspection.attention_record import LayerAttention as LayerAttention
from .methods.pairs import TextExplanation as TextExplanation
from .evaluation.ledger import LedgerRow as LedgerRow
from .evaluation.comparison import Comparison as Comparison
from .evaluation.trust import TrustCard as TrustCard

# Modules.
from . import batch as batch
from . import errors as errors
from . import extending as extending
from . import inspection as inspection
from . import metrics as metrics
from . import relevance as relevance
from . import testbed as testbed
from . import testing as testing
from . import zoo as zoo
from ._version import __version__ as __version__

# The other methods; the first one explains answers only, and has no name in METHODS.
from .methods.token_activation import TAM as TAM
from .methods.cam import CAM as CAM
from .methods.cam import EigenCAM as EigenCAM
from .methods.cam import EigenGradCAM as EigenGradCAM
from .methods.cam import GradCAMPlusPlus as GradCAMPlusPlus
from .methods.cam import HiResCAM as HiResCAM
from .methods.cam import XGradCAM as XGradCAM
from .methods.combined_cam import FinerCAM as FinerCAM
from .methods.combined_cam import FusedCAM as FusedCAM
from .methods.combined_cam import GuidedGradCAM as GuidedGradCAM
from .methods.combined_cam import RefineCAM as RefineCAM
from .methods.combined_cam import ShapleyCAM as ShapleyCAM
from .methods.combined_cam import SmoothGradCAMPlusPlus as SmoothGradCAMPlusPlus
from .methods.deep_lift import DeepLIFT as DeepLIFT
from .methods.deep_lift import DeepSHAP as DeepSHAP
from .methods.extremal_perturbation import ExtremalPerturbation as ExtremalPerturbation
from .methods.full_grad import FullGrad as FullGrad
from .methods.gradient import DeconvNet as DeconvNet
from .methods.gradient import InputXGradient as InputXGradient
from .methods.gradient import RectGrad as RectGrad
from .methods.gradient import VanillaGradient as VanillaGradient
from .methods.gradient_free_cam import AblationCAM as AblationCAM
from .methods.gradient_free_cam import ReciproCAM as ReciproCAM
from .methods.gradient_free_cam import ScoreCAM as ScoreCAM
from .methods.gradient_free_cam import ViTCX as ViTCX
from .methods.integrated_gradients import IDGI as IDGI
from .methods.integrated_gradients import XRAI as XRAI
from .methods.integrated_gradients import BlurIG as BlurIG
from .methods.integrated_gradients import ExpectedGradients as ExpectedGradients
from .methods.integrated_gradients import GuidedIG as GuidedIG
from .methods.lime_shap import LIME as LIME
from .methods.lime_shap import KernelSHAP as KernelSHAP
from .methods.lime_shap import ShapleySampling as ShapleySampling
from .methods.lrp import CPLRP as CPLRP
from .methods.lrp import ExcitationBackprop as ExcitationBackprop
from .methods.occlusion import FeatureAblation as FeatureAblation
from .methods.rise import DRISE as DRISE
from .methods.rise import RISE as RISE
from .methods.rise import VXCODE as VXCODE
from .methods.smoothing import Augmented as Augmented
from .methods.smoothing import SmoothGradSquared as SmoothGradSquared
from .methods.smoothing import VarGrad as VarGrad
from .methods.sobol import Sobol as Sobol
from .methods.token_attention import AGCAM as AGCAM
from .methods.token_attention import AttentionRollout as AttentionRollout
from .methods.token_attention import CheferAttention as CheferAttention
from .methods.token_attention import GradECLIP as GradECLIP
from .methods.token_attention import GradientRollout as GradientRollout
from .methods.token_attention import LeGrad as LeGrad
from .methods.token_attention import CheferLRP as CheferLRP
