"""What the experiments share: models, modes, processes, clocks, results.

The scripts put the root of the repository at the end of ``sys.path`` before they import
this package, so that an installed ``opacus`` (or one on ``PYTHONPATH``) is measured first.
"""
