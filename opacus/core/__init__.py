"""The core: per-sample norms, clipping, noise and what they mean on each mesh axis.

Everything here imports torch only. The public packages of ``opacus`` are thin
shells over it: ``spec`` and ``rules`` say what a layer's gradient is,
``recorder`` watches a model run, ``strategy`` turns what was seen into clipped
gradients, ``layout`` says how ranks share them, ``noise`` hides them, and
``state`` holds the privacy parameters.
"""
