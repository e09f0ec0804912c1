"""The notebook gallery: tutorials from hooks to heatmaps.

Each page consists of a jupytext script NN_name.py and the notebook NN_name.ipynb, which also contains the outputs.
`python -m notebooks` runs the scripts and rewrites the notebooks. Every file with a name such as 01_name.py is a page.

    pages    find, run and write the pages
    checks   check the outputs of a page
"""
