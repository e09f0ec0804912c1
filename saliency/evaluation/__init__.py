"""Evaluate maps: metrics, trust cards, comparisons of methods, and the ledger of a score.

metrics               compare a map with maps that ignore the prediction
trust                 one card per map: which of its properties are clear
comparison            several methods by several metrics over many images
ledger                the parts that sum to a score
"""
