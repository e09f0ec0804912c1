"""The notebook gallery: pages that teach, from the first hook to the last heatmap.

Each page is a script NN_name.py that jupytext reads, and beside it NN_name.ipynb, the same with its outputs.
`python -m notebooks` runs the scripts and writes the notebooks anew; whatever is called NN_name.py is a page.

    pages    what pages there are, run and written
    checks   what must hold of a page
"""
