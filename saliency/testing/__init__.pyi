from .case import images as images
from .case import tiny_model as tiny_model
from .case import tiny_model_for as tiny_model_for
from .case import tiny_transformer as tiny_transformer
from .guarantees import check_method as check_method
from .guarantees import checks as checks
from .saved import assert_same_explanation as assert_same_explanation
from .unchanged import Snapshot as Snapshot
