"""The walk without rules as a method."""

from __future__ import annotations

from saliency.attribution.base import TracedAttribution
from saliency.attribution.explanation import BatchAttribution
from saliency.attribution.forward import Needs, TargetGradients
from saliency.hooks.operations import SavedValues
from saliency.relevance.walk import Visit, Walk


class PlainWalk(TracedAttribution):
    """Input times gradient, computed by the walk without rules."""

    needs = Needs(values=SavedValues.CONSTANTS)

    def explain_gradients(self, grads: TargetGradients, layers: tuple[str, ...]) -> BatchAttribution:
        """Walk the graph of the forward."""
        return BatchAttribution(Walk(grads, Visit.plain).run().balance().relevance, grads.scores)
