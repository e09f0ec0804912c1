"""Relevance propagation: a walk of the autograd graph of one call, its rules, and composites of rules."""

from .rules import COMPOSITES as COMPOSITES
from .rules import AlphaBeta as AlphaBeta
from .rules import Composite as Composite
from .rules import ContrastiveRule as ContrastiveRule
from .rules import Epsilon as Epsilon
from .rules import Excitation as Excitation
from .rules import Flat as Flat
from .rules import Gamma as Gamma
from .rules import LinearOperation as LinearOperation
from .rules import NonlinearOperation as NonlinearOperation
from .rules import NonlinearRule as NonlinearRule
from .rules import Pass as Pass
from .rules import Rule as Rule
from .rules import WSquare as WSquare
from .rules import ZBox as ZBox
from .rules import ZPlus as ZPlus
