"""The web site: pages from docs/, the registry, docstrings and notebooks, in build/site for Zensical or MkDocs."""
