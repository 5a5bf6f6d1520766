"""The core: everything that decides about privacy. It imports torch only.

Rooms in the order of the data; each imports only from those above it here, and
``tests/test_imports.py`` checks it::

    platform   torch and the machine
    kernels    pure computations, a reference beside each
    rules      (spec, activations, backprops) -> per-row quantities
    privacy    what is promised: parameters, clipping, noise
    record     a model's run -> records
    norms      records -> squared norms
    sums       records and clipping factors -> the clipped sum
    ranks      who holds what, and how ranks add up
    isolation  whether a unit's gradient is its own: a check before a step
    step       modes, losses, and what goes on around a step

A step::

    model(x) --record--> Record --rules, kernels--> norms --privacy--> factors
                            |                                             |
                            +------------------- sums <-------------------+
                                                  |
                           p.grad <--privacy: noise-- ranks: reduction

``rules`` and ``privacy`` stand beside each other: neither imports the other.
"""
