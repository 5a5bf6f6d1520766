"""The core: everything that decides about privacy. It imports torch only.

Rooms in the order of the data; each imports only from those above it here, and
``tests/test_imports.py`` checks it::

    platform   torch and the machine
    kernels    pure computations, a reference beside each
    rules      (spec, activations, backprops) -> per-row quantities
    privacy    the guarantee: parameters, clipping, keys, noise
    record     a run of the model -> records
    norms      records -> squared norms
    sums       records and clipping factors -> the clipped sum
    ranks      meshes, reductions, agreement between ranks
    isolation  checks that a unit's gradient depends on that unit alone
    step       the private step in one file; modes, losses, loss scale

A step::

    model(x) --record--> Record --rules, kernels--> norms --privacy--> factors
                            |                                             |
                            +------------------- sums <-------------------+
                                                  |
                           p.grad <--privacy: noise-- ranks: reduction

``rules`` and ``privacy`` stand beside each other: neither imports the other.

Words with two meanings elsewhere: a *unit* is a unit of privacy. A module that FSDP2 gathers at
once is a *part* of the model, or by FSDP2's own name an "FSDP2 unit". A *shard* is what a rank has
of a parameter; samples that differ between ranks are a data layout (``data_layout="sharded"``). How
a step is spread over ranks is its *parallelism*.
"""
