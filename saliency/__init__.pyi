from .attribution import Attribution as Attribution
from .attribution import explain_together as explain_together
from .errors import (
    ExplanationError as ExplanationError,
)
from .errors import (
    ImageError as ImageError,
)
from .errors import (
    LayerError as LayerError,
)
from .errors import (
    MethodError as MethodError,
)
from .errors import (
    ModelError as ModelError,
)
from .errors import (
    NonFiniteError as NonFiniteError,
)
from .errors import (
    NotApplicableError as NotApplicableError,
)
from .errors import (
    RenderError as RenderError,
)
from .errors import (
    SaliencyError as SaliencyError,
)
from .errors import (
    SaliencyWarning as SaliencyWarning,
)
from .errors import (
    TargetError as TargetError,
)
from .explanation import Explanation as Explanation
from .methods import METHODS as METHODS
from .methods.cam import (
    CAM as CAM,
)
from .methods.cam import (
    EigenCAM as EigenCAM,
)
from .methods.cam import (
    EigenGradCAM as EigenGradCAM,
)
from .methods.cam import (
    GradCAM as GradCAM,
)
from .methods.cam import (
    GradCAMPlusPlus as GradCAMPlusPlus,
)
from .methods.cam import (
    HiResCAM as HiResCAM,
)
from .methods.cam import (
    LayerCAM as LayerCAM,
)
from .methods.cam import (
    XGradCAM as XGradCAM,
)
from .methods.combined import FusedCAM as FusedCAM
from .methods.combined import GuidedGradCAM as GuidedGradCAM
from .methods.eigen import EigenCAM as EigenCAM
from .methods.eigen import EigenGradCAM as EigenGradCAM
from .methods.gradient import (
    DeconvNet as DeconvNet,
)
from .methods.gradient import (
    GuidedBackprop as GuidedBackprop,
)
from .methods.gradient import (
    InputXGradient as InputXGradient,
)
from .methods.gradient import (
    RectGrad as RectGrad,
)
from .methods.gradient import (
    VanillaGradient as VanillaGradient,
)
from .targets import contrast as contrast
from .targets import probability as probability
from .targets import region as region
from .targets import value as value
from .zoo import load as load
